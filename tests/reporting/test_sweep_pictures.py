"""Pictures of a sweep: what they draw, in the page and as files that stand by themselves."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quantkit.reporting import write_report
from quantkit.reporting.collect import Found, Run
from quantkit.reporting.pictures import DARK, LIGHT, pictures, slug, text_width
from quantkit.reporting.sweep_charts import recipe_charts, sweep_charts
from quantkit.results import Sweep, read_json, write_json
from tests.reporting.planted_sweep import planted

FIXTURES = Path(__file__).parent.parent / "results" / "fixtures"
STYLE = Path(__file__).parents[2] / "quantkit" / "reporting" / "templates" / "style.css"
HOSTILE = "</style></svg><script>alert(1)</script>\"'&|`*x*`](x)\x1b[31m\nnext 注意"
SVG = "{http://www.w3.org/2000/svg}"


def run_of(sweep: Sweep) -> Run:
    return Run(sweeps=(Found(place="run/sweep.json", result=sweep),))


def written(sweep: Sweep, folder: Path) -> tuple[str, str, dict[str, str]]:
    """Page, twin and pictures of a report, by name."""
    write_json(folder / "sweep.json", sweep)
    page, twin, *_ = write_report([folder], folder / "out")
    files = {path.name: path.read_text("utf-8") for path in (folder / "out").glob("*.svg")}
    return page.read_text("utf-8"), twin.read_text("utf-8"), files


def hostile(sweep: Sweep) -> Sweep:
    """Every name that a file may hold is foreign."""
    return dataclasses.replace(
        sweep,
        models=[dataclasses.replace(model, name=HOSTILE) for model in sweep.models],
        cells=[
            dataclasses.replace(
                c, model=HOSTILE + c.model, group=HOSTILE + c.group, task=HOSTILE + c.task,
                metric=HOSTILE + c.metric, recipe=c.recipe if "logits" in c.recipe else HOSTILE,
                details={HOSTILE: 1.0},
            )
            for c in sweep.cells
        ],
        deltas=[
            dataclasses.replace(d, model=HOSTILE, against_model=HOSTILE, task=HOSTILE)
            for d in sweep.deltas
        ],
        spreads=[dataclasses.replace(s, group=HOSTILE, task=HOSTILE) for s in sweep.spreads],
        attention_mass=[
            dataclasses.replace(m, model=HOSTILE, task=HOSTILE, kind=HOSTILE)
            for m in sweep.attention_mass
        ],
        tasks=[
            dataclasses.replace(
                t, name=HOSTILE + t.name, unit=HOSTILE, metrics=[HOSTILE + m for m in t.metrics],
                data=dataclasses.replace(t.data, source=HOSTILE, warnings=[HOSTILE]),
            )
            for t in sweep.tasks
        ],
        kept=[HOSTILE],
        notes=[HOSTILE],
        headline=HOSTILE,
    )  # fmt: skip


# charts


def test_a_line_a_model_and_granularity_at_the_files_values() -> None:
    sweep = planted(seeds=1)
    perplexity, accuracy, needles = sweep_charts(run_of(sweep))
    assert (perplexity.title, accuracy.title) == (
        "perplexity against bits of the attention logits",
        "multiple-choice acc_norm against bits of the attention logits",
    )
    assert needles.title.startswith("needles:needles=4 exact_match")
    for chart, metric in ((perplexity, "perplexity"), (accuracy, "acc_norm")):
        assert [tick.text for tick in chart.x_ticks] == ["16", "8", "6", "4"]
        for name in ("diff-s0", "base-s0"):
            (line,) = [s for s in chart.series if s.name == f"{name}, tensor"]
            values = [
                next(c.value for c in sweep.cells if (c.model, c.recipe, c.metric) ==
                     (name, recipe, metric))
                for recipe in ("none", "logits8", "logits6", "logits4")
            ]  # fmt: skip
            order = sorted(range(4), key=lambda i: values[i])
            heights = [line.marks[i].y for i in order]
            assert heights == sorted(heights, reverse=True)
            assert all(m.low is not None and m.high < m.y < m.low for m in line.marks)
            assert line.area == ""
    assert ", level with float" in perplexity.series[0].marks[1].title
    assert ", at chance" in needles.series[0].marks[0].title


def test_colour_tells_the_model_and_dash_or_marker_the_grid() -> None:
    chart = sweep_charts(run_of(planted(seeds=1)))[0]
    looks = {series.name: (series.colour, series.style, series.hollow) for series in chart.series}
    assert len(set(looks.values())) == len(looks) == 8
    for name, (colour, style, hollow) in looks.items():
        model, scale = name.split(", ")
        assert colour == ("diff" not in model)
        assert hollow == ("static" in scale)
        assert hollow or style == ("tensor", "head", "row").index(scale)


def test_seeds_share_a_line_with_a_band_from_the_lowest_to_the_highest() -> None:
    chart = sweep_charts(run_of(planted()))[0]
    assert len(chart.series) == 8
    series = next(s for s in chart.series if s.name == "diff (3 seeds), tensor")
    ys = [float(y) for y in re.findall(r" (-?[0-9.]+)", series.area)]
    assert len(ys) == 8
    upper, lower = ys[:4], ys[4:][::-1]
    assert all(a < m.y < b for a, m, b in zip(upper, series.marks, lower, strict=True))
    assert "seeds from 17.10 to 17.44" in series.marks[0].title
    assert "bands along lines go from the lowest seed to the highest" in chart.note
    assert sweep_charts(run_of(planted(seeds=1)))[0].note == "Bars are 95 % intervals."


def test_chance_is_a_line_where_it_has_a_meaning() -> None:
    perplexity, accuracy, _ = sweep_charts(run_of(planted(seeds=1)))
    assert perplexity.rules == ()
    (rule,) = accuracy.rules
    assert rule.text == "chance"
    ticks = {tick.text: tick.at for tick in accuracy.y_ticks}
    assert ticks["0.3"] < rule.at < ticks["0.2"]


def test_dots_are_the_other_recipes_behind_float() -> None:
    chart = recipe_charts(run_of(planted(seeds=1)))[0]
    rows = [tick.text for tick in chart.y_ticks]
    assert rows == ["float", "w8a8:token", "nf4", "qk8", "probs8", "kv8"]
    for series in chart.series:
        xs = [mark.x for mark in series.marks]
        assert xs == sorted(xs) and len(xs) == 6
        assert all(mark.low < mark.x < mark.high for mark in series.marks)
    diff, base = chart.series
    assert all(a.y < b.y and a.x < b.x for a, b in zip(diff.marks, base.marks, strict=True))


def test_one_other_recipe_is_no_chart() -> None:
    sweep = planted(seeds=1)
    few = [c for c in sweep.cells if c.recipe in ("none", "nf4")]
    assert recipe_charts(run_of(dataclasses.replace(sweep, cells=few))) == ()
    assert pictures(run_of(dataclasses.replace(sweep, cells=few))) == ()


# files of their own


def places(element: ElementTree.Element, dx: float = 0.0, dy: float = 0.0) -> list[
    tuple[str, float, float]
]:  # fmt: skip
    """Every point that is drawn, with the element's name; texts by both ends."""
    moved = re.match(r"translate\(([-0-9.]+) ([-0-9.]+)\)", element.get("transform", ""))
    turned = "rotate" in element.get("transform", "")
    if moved:
        dx, dy = dx + float(moved[1]), dy + float(moved[2])
    name = element.tag.removeprefix(SVG)
    found: list[tuple[str, float, float]] = []

    def number(attribute: str) -> float:
        return float(element.get(attribute, "0"))

    if name == "circle":
        reach = number("r")
        found += [(name, number("cx") + s * reach, number("cy") + s * reach) for s in (-1, 1)]
    elif name == "line":
        found += [(name, number(f"x{i}"), number(f"y{i}")) for i in (1, 2)]
    elif name == "rect":
        found += [
            (name, number("x"), number("y")),
            (name, number("x") + number("width"), number("y") + number("height")),
        ]
    elif name == "path":
        ends = re.findall(r"(-?[0-9.]+) (-?[0-9.]+)", element.get("d", ""))
        assert ends
        found += [(name, float(x), float(y)) for x, y in ends]
    elif name == "text":
        wide = text_width(element.text or "") * 0.95
        start = {"middle": wide / 2, "end": wide}.get(element.get("text-anchor", ""), 0.0)
        ends = (number("x") - start, number("x") - start + wide)
        for end in ends:
            found.append((name, 0.0, -end) if turned else (name, end, number("y")))
    inside = [(n, x + dx, y + dy) for n, x, y in found]
    for child in element:
        inside += places(child, dx, dy)
    return inside


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("names", ["usual", "hostile"])
def test_pictures_stand_by_themselves(names: str, seeds: int, tmp_path: Path) -> None:
    sweep = planted(seeds=seeds)
    _, _, files = written(hostile(sweep) if names == "hostile" else sweep, tmp_path)
    assert files
    for text in files.values():
        assert text.startswith('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480')
        root = ElementTree.fromstring(text)
        tags = {element.tag.removeprefix(SVG) for element in root.iter()}
        assert tags <= {"svg", "title", "desc", "style", "rect", "text", "g", "path", "line",
                        "circle"}  # fmt: skip
        attributes = [name for element in root.iter() for name in element.attrib]
        assert not [n for n in attributes if n.startswith("on") or "href" in n or n == "style"]
        style = root.findtext(f"{SVG}style") or ""
        assert "prefers-color-scheme: dark" in style
        assert not re.search(r"url\(|@import|https?:|var\(", style)
        assert "\x1b" not in text
        ids = [element.get("id") for element in root.iter() if element.get("id")]
        assert (root.get("aria-labelledby") or "").split() == ids == ["title", "words"]
        assert root.findtext(f"{SVG}title")


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("names", ["usual", "hostile"])
def test_every_mark_and_word_is_inside(names: str, seeds: int, tmp_path: Path) -> None:
    sweep = planted(seeds=seeds)
    _, _, files = written(hostile(sweep) if names == "hostile" else sweep, tmp_path)
    for file, text in files.items():
        root = ElementTree.fromstring(text)
        _, _, width, height = (float(end) for end in root.get("viewBox", "").split())
        found = places(root)
        assert len(found) > 50
        outside = [p for p in found if not (0 <= p[1] <= width and 0 <= p[2] <= height)]
        assert not outside, file


def ticks_and_title(svg: ElementTree.Element) -> tuple[list[float], float] | None:
    """Left ends of the ticks beside the axis, and the right end of its upright title's box."""
    texts = [e for e in svg.iter() if e.tag.split("}")[-1] == "text"]
    upright = [e for e in texts if "rotate(-90)" in e.get("transform", "")]
    if not upright:
        return None
    (title,) = upright
    baseline = float(re.findall(r"translate\(([0-9.]+) ", title.get("transform", ""))[0])
    ends = [
        float(e.get("x", "")) - text_width(e.text or "")
        for e in texts
        if (e.get("class"), e.get("text-anchor")) == ("tick", "end")
    ]
    return ends, baseline + 12 * 0.3  # what hangs below the baseline


@pytest.mark.parametrize("factor", [1.0, 2800.0, 3e-5], ids=["usual", "50,750", "0.0005"])
def test_no_tick_reaches_the_title_of_its_axis(factor: float, tmp_path: Path) -> None:
    sweep = planted(seeds=1)
    cells = [
        dataclasses.replace(
            c, value=c.value * factor, ci_low=c.ci_low * factor, ci_high=c.ci_high * factor
        )
        if c.metric == "perplexity"
        else c
        for c in sweep.cells
    ]
    page, _, files = written(dataclasses.replace(sweep, cells=cells), tmp_path)
    inline = re.findall(r"<svg .*?</svg>", page, re.DOTALL)
    drawn = [ticks_and_title(ElementTree.fromstring(text)) for text in [*files.values(), *inline]]
    known = [pair for pair in drawn if pair is not None]
    assert len(known) == 2 * 3  # each line chart as a file and in the page
    for ends, title in known:
        assert len(ends) > 2 and min(ends) > title
    (chart, *_) = sweep_charts(run_of(dataclasses.replace(sweep, cells=cells)))
    assert (chart.left > 58) == (max(len(tick.text) for tick in chart.y_ticks) > 4)
    assert all(chart.left < mark.x < chart.right for s in chart.series for mark in s.marks)


def test_what_is_inside_would_notice_a_clipped_word() -> None:
    text = ElementTree.fromstring(
        f'<svg xmlns="{SVG[1:-1]}"><g transform="translate(2 3)">'
        '<text x="4" y="5" text-anchor="end">words</text><circle cx="1" cy="2" r="5"/></g></svg>'
    )
    (_, left, top), (_, right, _), (_, low, _), _ = places(text)
    assert left < 0 < right == pytest.approx(6) and top == 8
    assert low == -2


def test_the_markdown_shows_every_picture(tmp_path: Path) -> None:
    page, twin, files = written(planted(), tmp_path)
    assert set(files) == {
        "sweep-perplexity.svg", "sweep-multiple-choice.svg", "sweep-needles-needles-4.svg",
        "sweep-perplexity-recipes.svg", "sweep-multiple-choice-recipes.svg",
        "sweep-needles-needles-4-recipes.svg",
    }  # fmt: skip
    links = re.findall(r"!\[([^\]]*(?:\\\][^\]]*)*)\]\(([^)]*)\)", twin)
    assert {name for _, name in links} == set(files)
    assert ("perplexity against bits of the attention logits", "sweep-perplexity.svg") in links
    assert ".svg" not in page  # it has its own
    again = written(planted(), tmp_path / "again")
    assert again[2] == files


def test_a_run_without_a_sweep_has_no_pictures(tmp_path: Path) -> None:
    write_report([FIXTURES / "v3" / "base" / "stats.json"], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.md"]


def test_every_file_that_was_written_is_returned(tmp_path: Path) -> None:
    write_json(tmp_path / "sweep.json", planted())
    found = write_report([tmp_path], tmp_path / "out")
    assert [path.name for path in found[:2]] == ["report.html", "report.md"]
    assert len(found) == 8 and set(found) == set((tmp_path / "out").iterdir())


def test_pictures_that_no_longer_belong_go_and_others_stay(tmp_path: Path) -> None:
    out = tmp_path / "out"
    _, _, before = written(planted(), tmp_path)
    edited = out / "sweep-needles-needles-4.svg"
    edited.write_text(edited.read_text("utf-8").replace('rx="6"', 'rx="9"'), "utf-8")
    drawn = before["sweep-perplexity.svg"]
    others = {
        "sweep-mine.svg": drawn[: drawn.index("<!--")],  # the mark is missing
        "sweep-moved.svg": "<?xml version='1.0'?>\n" + drawn,
        "sweep-empty.svg": "",
        "picture.svg": drawn,
        "sweep-perplexity.txt": drawn,
    }
    for name, text in others.items():
        (out / name).write_text(text, "utf-8")
    (out / "sweep-folder.svg").mkdir()
    (out / "sweep-link.svg").symlink_to(out / "sweep-multiple-choice-recipes.svg")
    sweep = planted()
    cells = [cell for cell in sweep.cells if cell.task == "perplexity"]
    write_json(tmp_path / "sweep.json", dataclasses.replace(sweep, cells=cells))
    twin = write_report([tmp_path / "sweep.json"], out)[1].read_text("utf-8")
    names = {path.name for path in out.iterdir()}
    assert names == {
        "report.html", "report.md", "sweep-perplexity.svg", "sweep-perplexity-recipes.svg",
        edited.name, "sweep-folder.svg", "sweep-link.svg", *others,
    }  # fmt: skip
    assert edited.name not in twin
    write_report([FIXTURES / "v3" / "base" / "stats.json"], out)  # and none without a sweep
    assert {path.name for path in out.iterdir()} == names - {
        "sweep-perplexity.svg", "sweep-perplexity-recipes.svg",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("perplexity", "perplexity"),
        ("needles:needles=6:queries=2", "needles-needles-6-queries-2"),
        ("multiple-choice=/data/sets/Social IQa.jsonl", "multiple-choice-social-iqa"),
        ("lm-eval=C:\\tasks\\arc.yaml", "lm-eval-arc"),
        ("image-classification=photos/birds/", "image-classification-birds"),
        ("../../etc/passwd", "etc-passwd"),
        ("注意", "task"),
        ("x" * 200, "x" * 60),
    ],
)
def test_names_of_files(name: str, file: str) -> None:
    assert slug(name) == file


def test_names_that_meet_are_told_apart(tmp_path: Path) -> None:
    sweep = planted(("base",), 1)
    perplexity = [c for c in sweep.cells if c.metric == "perplexity"]
    cells = [dataclasses.replace(c, task=task) for task in ("a b", "a-b") for c in perplexity]
    _, twin, files = written(dataclasses.replace(sweep, cells=cells, tasks=[]), tmp_path)
    assert {"sweep-a-b.svg", "sweep-a-b-2.svg"} <= set(files)
    assert all(f"({name})" in twin for name in files)


def test_colours_are_the_pages() -> None:
    light, dark = STYLE.read_text().split("@media (prefers-color-scheme: dark)")[:2]
    for shades, part in ((LIGHT, light), (DARK, dark)):
        for name, shade in shades.items():
            if isinstance(shade, str):
                assert f"--{name}: {shade};" in part
            else:
                assert all(f"--c{i}: {hue};" in part for i, hue in enumerate(shade))


# the page


def test_the_page_has_charts_tables_notes_and_definitions(tmp_path: Path) -> None:
    page, twin, _ = written(planted(), tmp_path)
    assert page.count("<figure>") == 6
    for text in (page, twin.replace("\\", "")):
        for words in (
            "diff-s0 at 4 bits per row is level with base-s0 at 8 bits per row.",
            "every model is at chance", "Attention mass by depth", "Each seed. Sweep: perplexity",
            "spread of seeds", "bits per byte", "level with", "Quantizers that fired", "Tasks",
            "17.28 [16.27, 18.30] (+0.07 %) =",
        ):  # fmt: skip
            assert words in text, words
    for svg in re.findall(r"<svg .*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)


def test_older_files_have_no_words_of_newer_ones(tmp_path: Path) -> None:
    page, twin, files = written(read_json(FIXTURES / "v2" / "sweep.json", Sweep), tmp_path)
    assert set(files) == {"sweep-perplexity.svg"}
    for words in ("level with", "attention mass", "Seeds of one model", "Quantizers that fired"):
        assert words not in page and words not in twin


def test_hostile_names_stay_text_in_every_new_field(tmp_path: Path) -> None:
    page, twin, _ = written(hostile(planted()), tmp_path)
    assert "<script" not in page and "\x1b" not in page
    assert not re.search(r"(?<!\\)<script", twin) and "\x1b" not in twin
    headers = [line for line in twin.splitlines() if line.startswith("| ")]
    assert len(headers) > 100
    assert not re.search(r"!\[[^\n]*[^\\]\](?!\(sweep-[a-z0-9-]+\.svg\))", twin)
