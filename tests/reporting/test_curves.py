"""Training curves: the file is read strictly, and the report draws it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quantkit.errors import InputError
from quantkit.reporting import write_report
from quantkit.reporting.collect import collect
from quantkit.reporting.curves import (
    heat_maps,
    line_charts,
    names,
    step_axis,
    steps_table,
    summary_table,
)
from quantkit.results import (
    CurvesHeader,
    CurveStep,
    HiddenCurve,
    LogitCurve,
    append_curves,
    read_curves,
)
from tests.reporting.drawn import axis, layers, marks, names_of, rows

V1 = Path(__file__).parent.parent / "results" / "fixtures" / "v1"
FIXTURE = V1.parent / "v1-curves" / "curves.jsonl"


def header(name: str, maps: int = 1) -> CurvesHeader:
    return CurvesHeader(
        name=name,
        architecture="LlamaForCausalLM",
        parameters=1234,
        layers=3,
        maps=maps,
        every=50,
        ranks=1,
        versions={"torch": "2.13.0"},
    )


def step(number: int, *, maps: int = 1, scale: float = 1.0, loss: float = math.nan) -> CurveStep:
    """Layer 2 and the last map are the largest, and grow with the step."""
    return CurveStep(
        step=number,
        loss=loss,
        lr=1e-3,
        forwards=1,
        sequences=4,
        tokens=64,
        logits=[
            LogitCurve(
                layer=layer,
                map=map_,
                max=scale * (layer + 1) * map_ * (1 + number / 100) / 2,
                min=-scale * (layer + 1) * map_ * (1 + number / 100),
                abs_max=scale * (layer + 1) * map_ * (1 + number / 100),
                head=1,
                nan=0,
            )
            for layer in range(3)
            for map_ in range(1, maps + 1)
        ],
        hidden=[
            HiddenCurve(
                layer=layer,
                abs_max=8.0 + layer,
                inf_norm_mean=7.0 + layer,
                kurtosis=3.0 + layer + number,
                nan=0,
            )
            for layer in range(3)
        ],
    )


def write(
    folder: Path, name: str, steps: range, *, maps: int = 1, scale: float = 1.0, loss: bool = False
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "curves.jsonl"
    path.unlink(missing_ok=True)
    lines = [
        step(n, maps=maps, scale=scale, loss=5.0 - n / 1000 if loss else math.nan) for n in steps
    ]
    append_curves(path, header(name, maps), *lines)
    return path


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path, "ü", range(0, 150, 50), maps=2, loss=True)
    curves = read_curves(path)
    assert curves.header == header("ü", 2)
    assert curves.steps == tuple(step(n, maps=2, loss=5.0 - n / 1000) for n in (0, 50, 100))


def test_version_1_is_read_for_good() -> None:
    curves = read_curves(FIXTURE)
    assert curves.header.architecture == "DiffLlamaForCausalLM"
    assert [s.step for s in curves.steps] == [0, 50, 100]
    assert curves.steps[1].logits[3].abs_max == math.inf
    assert math.isnan(curves.steps[2].logits[3].max)
    assert curves.steps[2].logits[3].nan == 12


def test_the_later_line_of_a_step_counts_and_steps_are_sorted(tmp_path: Path) -> None:
    path = write(tmp_path, "a", range(0, 200, 50))
    append_curves(path, step(100, scale=9.0), step(20))
    steps = read_curves(path).steps
    assert [s.step for s in steps] == [0, 20, 50, 100, 150]
    assert steps[3] == step(100, scale=9.0)


def test_a_last_line_without_a_line_end_counts_where_it_is_whole(tmp_path: Path) -> None:
    path = write(tmp_path, "a", range(0, 100, 50))
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert len(read_curves(path).steps) == 2


def planted(path: Path, line: int, text: str) -> None:
    lines = path.read_text("utf-8").splitlines()
    lines[line - 1] = text
    path.write_text("\n".join(lines) + "\n", "utf-8")


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "a", range(0, 200, 50))
    whole = path.read_text("utf-8")
    line = whole.splitlines()[2]
    for text, said in (
        (line[:50], r"curves\.jsonl, line 3: not a whole JSON record"),
        ("", r"line 3: not a whole JSON record"),
        (line.replace('"tokens"', '"token"'), r"line 3: unknown field `token`\. Did you mean"),
        (line.replace('"sequences":4,', ""), r"line 3: missing field `sequences`"),
        (line.replace('"step":50', '"step":"50"'), r"line 3: field `step`: expected a whole"),
        (line.replace('"head":1', '"head":null', 1), r"line 3: field `logits\[0\]\.head`"),
    ):
        path.write_text(whole, "utf-8")
        planted(path, 3, text)
        with pytest.raises(InputError, match=said):
            read_curves(path)


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "a", range(1))
    first = json.loads(path.read_text("utf-8").splitlines()[0])
    planted(path, 1, json.dumps({**first, "schema": "quantkit.curves/2"}))
    with pytest.raises(InputError, match=r"version '2' of quantkit\.curves.*reads version '1'"):
        read_curves(path)
    with pytest.raises(InputError, match="no such file"):
        read_curves(tmp_path / "none.jsonl")


def page_of(folders: list[Path], out: Path) -> tuple[str, str]:
    page, twin, *_ = write_report(folders, out)
    return page.read_text("utf-8"), twin.read_text("utf-8")


def test_a_report_without_curves_is_as_before(tmp_path: Path) -> None:
    page, twin = page_of([V1], tmp_path)
    assert 'id="training"' not in page
    assert "## Training" not in twin
    assert "training curves" not in twin


def test_two_trainings_are_drawn_in_one_figure(tmp_path: Path) -> None:
    write(tmp_path / "base", "baseline", range(0, 1001, 50), loss=True)
    write(tmp_path / "diff", "diff", range(0, 801, 50), maps=2, loss=True)
    page, twin = page_of([tmp_path], tmp_path / "out")

    assert page.index('id="training"') < page.index('id="definitions"')
    section = page[page.index('id="training"') : page.index('id="definitions"')]
    pictures = re.findall(r"<figcaption>(.*?) <a ", section)
    assert pictures == [
        "Largest |attention logit| over the training",
        "Largest inf-norm of the hidden states over the training",
        "Largest kurtosis of the hidden states over the training",
        "Loss over the training",
        "Largest |attention logit| by layer and step: baseline",
        "Largest |attention logit| by layer and step: diff, map 1",
        "Largest |attention logit| by layer and step: diff, map 2",
    ]
    for svg in re.findall(r"<svg .*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)
    ends = '<span>1.000</span><span class="bar" aria-hidden="true"></span><span>54.00</span>'
    assert section.count(ends) == 3
    shown = re.sub(r"<script>.*</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"\bnan\b|\bNone\b", shown)
    assert "| diff, map 2 | " in twin
    assert "## Training" in twin
    assert "step 800, layer 2, head 1" in twin
    assert '<h1>quantkit report</h1>\n<p class="models">baseline, diff</p>' in page


def test_the_tables_hold_the_largest_over_layers(tmp_path: Path) -> None:
    write(tmp_path / "diff", "diff", range(0, 101, 50), maps=2)
    run = collect([tmp_path])
    rows = {row[0]: row for row in summary_table(run).rows}
    assert rows["diff, map 1"][2:] == (
        "step 100, layer 2, head 1", "3", "100", "3.000", "6.000", "6.000", "9.000", "9.000",
        "105.0", "105.0", "0",
    )  # fmt: skip
    assert rows["diff, map 2"][5:8] == ("6.000", "12.00", "12.00")
    last = steps_table(run).rows[-1]
    assert last == ("diff", "100", "n/a", "0.001000", "6.000", "12.00", "10.00", "9.000", "105.0")


def test_lines_are_straight_and_ticks_are_where_the_steps_are(tmp_path: Path) -> None:
    write(tmp_path / "a", "a", range(0, 1001, 50))
    (chart, *_) = line_charts(collect([tmp_path]))
    (panel,) = chart.panels
    ticks = {words: at for at, words in enumerate(names_of(panel)) if words}
    assert list(ticks) == ["0", "200", "400", "600", "800", "1,000"]
    assert axis(panel, "x")["axis"]["values"] == list(ticks.values())
    found = {int(re.findall(r"step (\d+)", row["tip"])[0]): row["x"] for row in marks(panel)}
    for number in (0, 200, 1000):
        assert found[number] == ticks[f"{number:,}"]
    assert found[100] == (ticks["0"] + ticks["200"]) / 2
    low, high = axis(panel, "x")["scale"]["domain"]
    assert all(low < x < high for x in found.values())


@pytest.mark.parametrize(
    ("first", "last"), [(0, 0), (7, 7), (0, 1), (0, 7), (950, 1050), (0, 3_000_000), (123, 99_999)]
)
def test_every_step_lies_on_the_axis(first: int, last: int) -> None:
    unit, start, slots = step_axis(first, last)
    assert start <= first and (last - start) * 10 / unit <= slots - 1
    assert 0 < (slots - 1) // 10 + 1 <= 9


def test_a_long_training_is_thinned_and_keeps_its_spike(tmp_path: Path) -> None:
    path = write(tmp_path / "a", "a", range(0, 50_000, 10))
    append_curves(path, step(33_330, scale=50.0))
    run = collect([tmp_path])
    chart = line_charts(run)[0]
    (panel,) = chart.panels
    (line,) = [layer for layer in layers(panel) if layer["mark"]["type"] == "line"]
    assert len(rows(line)) <= 200 and len(marks(panel)) <= 25
    spike = max(curve.abs_max for curve in step(33_330, scale=50.0).logits)
    assert max(row["y"] for row in rows(line)) == spike
    (heat,) = heat_maps(run)
    cells = marks(heat.panels[0])
    assert len(cells) == 60 * 3
    assert max(cells, key=lambda cell: cell["o"])["tip"].startswith("a, layer 2, step 33330")
    page, _ = page_of([tmp_path], tmp_path / "out")
    assert len(page) < 200_000


def test_nan_is_counted_and_not_drawn(tmp_path: Path) -> None:
    path = write(tmp_path / "a", "a", range(0, 200, 50))
    bad = step(100)
    logits = [replace(c, max=math.nan, min=math.nan, abs_max=math.nan, nan=5) for c in bad.logits]
    append_curves(path, replace(bad, logits=logits, loss=math.inf))
    run = collect([tmp_path])
    assert summary_table(run).rows[0][-1] == "1"
    chart = line_charts(run)[0]
    assert chart.note == "1 values are not finite and not drawn."
    page, _ = page_of([tmp_path], tmp_path / "out")
    assert not re.search(r"\bnan\b", page)


def test_a_file_without_a_step_is_told(tmp_path: Path) -> None:
    write(tmp_path / "a", "a", range(0))
    page, twin = page_of([tmp_path], tmp_path / "out")
    assert 'id="training"' in page
    assert "/curves.jsonl | n/a | 0 | n/a |" in twin
    assert "<figure" not in page


def test_trainings_of_one_name_are_told_apart_by_place(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write(tmp_path / folder, "<i>same|", range(0, 100, 50))
    run = collect([tmp_path])
    place = f"{tmp_path.name}/"
    assert names(run) == [
        f"<i>same| ({place}one/curves.jsonl)", f"<i>same| ({place}two/curves.jsonl)"
    ]  # fmt: skip
    page, twin = page_of([tmp_path], tmp_path / "out")
    assert "<i>same" not in page
    assert "<i>same" not in twin
