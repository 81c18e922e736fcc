"""Pictures of a sweep: what they draw, in the page and as files that stand by themselves."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quantkit.reporting import write_report
from quantkit.reporting.collect import Found, Run
from quantkit.reporting.drawing import Chart, slug
from quantkit.reporting.sweep_charts import recipe_charts, sweep_charts
from quantkit.results import Sweep, read_json, write_json
from tests.reporting.drawn import SVG, axis, layers, marks, names_of, rows, series, symbols
from tests.reporting.planted_sweep import planted

FIXTURES = Path(__file__).parent.parent / "results" / "fixtures"
HOSTILE = "</style></svg><script>alert(1)</script>\"'&|`*x*`](x)\x1b[31m\nnext 注意"


def run_of(sweep: Sweep) -> Run:
    return Run(sweeps=(Found(place="run/sweep.json", result=sweep),))


def written(sweep: Sweep, folder: Path) -> tuple[str, str, dict[str, str]]:
    """Page, twin and pictures of a report, by name."""
    write_json(folder / "sweep.json", sweep)
    page, twin, *_ = write_report([folder], folder / "out")
    files = {
        path.name: path.read_text("utf-8") for path in (folder / "out" / "figures").glob("*.svg")
    }
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
    cells = {(c.model, c.recipe, c.metric): c for c in sweep.cells}
    for chart, metric in ((perplexity, "perplexity"), (accuracy, "acc_norm")):
        (panel,) = chart.panels
        assert names_of(panel) == ["16", "8", "6", "4"]
        drawn = dict(zip((key.name for key in chart.keys), series(panel), strict=True))
        for name in ("diff-s0", "base-s0"):
            line = drawn[f"{name}, tensor"]
            own = [cells[name, r, metric] for r in ("none", "logits8", "logits6", "logits4")]
            assert [row["y"] for row in line.marks] == [cell.value for cell in own]
            assert [round(row["x"]) for row in line.marks] == [0, 1, 2, 3]
            assert [(row["y"], row["y2"]) for row in line.spans] == [
                (cell.ci_low, cell.ci_high) for cell in own
            ]
            assert line.band == []
        low, high = axis(panel, "y")["scale"]["domain"]
        assert low < min(row["y"] for row in marks(panel))
        assert high > max(row["y2"] for line in drawn.values() for row in line.spans)
    assert ", level with float" in series(perplexity.panels[0])[0].marks[1]["tip"]
    assert ", at chance" in series(needles.panels[0])[0].marks[0]["tip"]


def test_colour_tells_the_model_and_dash_or_marker_the_grid() -> None:
    chart = sweep_charts(run_of(planted(seeds=1)))[0]
    looks = {key.name: (key.colour, key.style, key.hollow) for key in chart.keys}
    assert len(set(looks.values())) == len(looks) == 8
    for name, (colour, style, hollow) in looks.items():
        model, scale = name.split(", ")
        assert colour == ("diff" not in model)
        assert hollow == ("static" in scale)
        assert hollow or style == ("tensor", "head", "row").index(scale)
    drawn = series(chart.panels[0])
    assert len({(one.colour, one.shape, one.hollow) for one in drawn}) == len(drawn) == 8


def test_seeds_share_a_line_with_a_band_from_the_lowest_to_the_highest() -> None:
    chart = sweep_charts(run_of(planted()))[0]
    drawn = dict(zip((key.name for key in chart.keys), series(chart.panels[0]), strict=True))
    assert len(drawn) == 8
    line = drawn["diff (3 seeds), tensor"]
    assert len(line.band) == 4
    for band, mark in zip(line.band, line.marks, strict=True):
        assert band["y"] < mark["y"] < band["y2"]
    assert "seeds from 17.10 to 17.44" in line.marks[0]["tip"]
    assert "bands along lines go from the lowest seed to the highest" in chart.note
    assert sweep_charts(run_of(planted(seeds=1)))[0].note == "Bars are 95 % intervals."


def test_chance_is_a_line_where_it_has_a_meaning() -> None:
    def rules(chart: Chart) -> list[dict[str, object]]:
        found = [layer for layer in layers(chart.panels[0]) if layer["mark"]["type"] == "text"]
        return [row for layer in found for row in rows(layer)]

    perplexity, accuracy, _ = sweep_charts(run_of(planted(seeds=1)))
    assert rules(perplexity) == []
    (rule,) = rules(accuracy)
    assert (rule["words"], rule["y"]) == ("chance", 0.25)
    low, high = axis(accuracy.panels[0], "y")["scale"]["domain"]
    assert low < 0.25 < high


def test_dots_are_the_other_recipes_behind_float() -> None:
    chart = recipe_charts(run_of(planted(seeds=1)))[0]
    (panel,) = chart.panels
    assert names_of(panel, "y") == ["float", "w8a8:token", "nf4", "qk8", "probs8", "kv8"]
    for line in series(panel):
        xs = [mark["x"] for mark in line.marks]
        assert xs == sorted(xs) and len(xs) == 6
        for span, mark in zip(line.spans, line.marks, strict=True):
            assert span["x"] < mark["x"] < span["x2"] and span["y"] == mark["y"]
    diff, base = series(panel)
    for one, other in zip(diff.marks, base.marks, strict=True):
        assert one["y"] < other["y"] and one["x"] < other["x"]
        assert int(one["y"]) == int(other["y"])  # in one row


def test_one_other_recipe_is_no_chart() -> None:
    sweep = planted(seeds=1)
    few = [c for c in sweep.cells if c.recipe in ("none", "nf4")]
    assert recipe_charts(run_of(dataclasses.replace(sweep, cells=few))) == ()
    assert sweep_charts(run_of(dataclasses.replace(sweep, cells=few))) == ()


# files of their own


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("names", ["usual", "hostile"])
def test_pictures_stand_by_themselves(names: str, seeds: int, tmp_path: Path) -> None:
    sweep = planted(seeds=seeds)
    _, _, files = written(hostile(sweep) if names == "hostile" else sweep, tmp_path)
    assert files
    for text in files.values():
        root = ElementTree.fromstring(text)
        tags = {element.tag.removeprefix(SVG) for element in root.iter()}
        assert tags <= {"svg", "desc", "style", "rect", "text", "g", "path", "line", "tspan"}
        attributes = [name for element in root.iter() for name in element.attrib]
        assert not [n for n in attributes if n.startswith("on") or "href" in n or n == "style"]
        style = root.findtext(f"{SVG}style") or ""
        assert "prefers-color-scheme: dark" in style
        assert not re.search(r"url\(|@import|https?:|var\(", style)
        assert "\x1b" not in text and "url(" not in text
        assert not [element for element in root.iter() if element.get("id")]
        assert root.get("aria-label") and root.findtext(f"{SVG}desc")
        assert len(symbols(text)) > 3


@pytest.mark.parametrize("factor", [1.0, 2800.0, 3e-5], ids=["usual", "50,750", "0.0005"])
def test_values_of_any_size_are_on_the_axis(factor: float) -> None:
    sweep = planted(seeds=1)
    cells = [
        dataclasses.replace(
            c, value=c.value * factor, ci_low=c.ci_low * factor, ci_high=c.ci_high * factor
        )
        if c.metric == "perplexity"
        else c
        for c in sweep.cells
    ]
    (chart, *_) = sweep_charts(run_of(dataclasses.replace(sweep, cells=cells)))
    scale = axis(chart.panels[0], "y")["scale"]
    ticks = axis(chart.panels[0], "y")["axis"]["values"]
    low, high = scale["domain"]
    assert scale["type"] == "log" and len([tick for tick in ticks if low <= tick <= high]) >= 3
    assert all(low < row["y"] < high for row in marks(chart.panels[0]))


def test_the_markdown_shows_every_picture(tmp_path: Path) -> None:
    page, twin, files = written(planted(), tmp_path)
    assert set(files) == {
        "sweep-perplexity.svg", "sweep-multiple-choice.svg", "sweep-needles-needles-4.svg",
        "sweep-perplexity-recipes.svg", "sweep-multiple-choice-recipes.svg",
        "sweep-needles-needles-4-recipes.svg",
    }  # fmt: skip
    links = re.findall(r"!\[([^\]]*(?:\\\][^\]]*)*)\]\(([^)]*)\)", twin)
    assert {name for _, name in links} == {f"figures/{name}" for name in files}
    wanted = ("perplexity against bits of the attention logits", "figures/sweep-perplexity.svg")
    assert wanted in links
    assert "figures/" not in page  # it has its own
    again = written(planted(), tmp_path / "again")
    assert again[2] == files


def test_a_run_without_a_sweep_has_no_pictures_of_one(tmp_path: Path) -> None:
    write_report([FIXTURES / "v3" / "base" / "stats.json"], tmp_path)
    assert not list((tmp_path / "figures").glob("sweep-*"))


def test_every_file_that_was_written_is_returned(tmp_path: Path) -> None:
    write_json(tmp_path / "sweep.json", planted())
    found = write_report([tmp_path], tmp_path / "out")
    assert [path.name for path in found[:2]] == ["report.html", "report.md"]
    assert len(found) == 8
    assert set(found) == {path for path in (tmp_path / "out").rglob("*") if path.is_file()}


def test_pictures_that_no_longer_belong_go_and_others_stay(tmp_path: Path) -> None:
    out = tmp_path / "out"
    figures = out / "figures"
    _, _, before = written(planted(), tmp_path)
    edited = figures / "sweep-needles-needles-4.svg"
    edited.write_text(edited.read_text("utf-8").replace("<desc>", "<desc>mine "), "utf-8")
    drawn = before["sweep-perplexity.svg"]
    others = {
        "sweep-mine.svg": drawn[: drawn.index("<!--")],  # the mark is missing
        "sweep-moved.svg": "<?xml version='1.0'?>\n" + drawn,
        "sweep-empty.svg": "",
        "sweep-perplexity.txt": drawn,
    }
    for name, text in others.items():
        (figures / name).write_text(text, "utf-8")
    (figures / "sweep-folder.svg").mkdir()
    (figures / "sweep-link.svg").symlink_to(figures / "sweep-multiple-choice-recipes.svg")
    (out / "sweep-old.svg").write_text(drawn, "utf-8")  # where earlier versions wrote
    (out / "picture.svg").write_text(drawn, "utf-8")
    sweep = planted()
    cells = [cell for cell in sweep.cells if cell.task == "perplexity"]
    write_json(tmp_path / "sweep.json", dataclasses.replace(sweep, cells=cells))
    twin = write_report([tmp_path / "sweep.json"], out)[1].read_text("utf-8")
    names = {path.name for path in figures.iterdir()}
    assert names == {
        "sweep-perplexity.svg", "sweep-perplexity-recipes.svg",
        edited.name, "sweep-folder.svg", "sweep-link.svg", *others,
    }  # fmt: skip
    assert {path.name for path in out.iterdir()} == {
        "figures", "report.html", "report.md", "picture.svg",
    }  # fmt: skip
    assert edited.name not in twin


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
    assert all(f"(figures/{name})" in twin for name in files)


# the page


def test_the_page_has_charts_tables_notes_and_definitions(tmp_path: Path) -> None:
    page, twin, _ = written(planted(), tmp_path)
    assert page.count("<figure ") == 6 + 1  # one on the first screen, too
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
    for words in ("is level with", "attention mass", "Seeds of one model", "Quantizers that fired"):
        assert words not in page and words not in twin


def test_hostile_names_stay_text_in_every_new_field(tmp_path: Path) -> None:
    page, twin, _ = written(hostile(planted()), tmp_path)
    assert page.count("<script") == 1 and "\x1b" not in page
    assert not re.search(r"(?<!\\)<script", twin) and "\x1b" not in twin
    headers = [line for line in twin.splitlines() if line.startswith("| ")]
    assert len(headers) > 100
    assert not re.search(r"!\[[^\n]*[^\\]\](?!\(figures/sweep-[a-z0-9-]+\.svg\))", twin)
