"""The pictures of a calibration: what they draw is where the file says it is."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from quantkit.reporting import write_report
from quantkit.reporting.calibration_charts import histogram_charts, stability_charts
from quantkit.reporting.collect import Found, Run
from quantkit.reporting.drawing import SMALL_WIDTH, Panel, page_svg
from quantkit.results import Calibration, write_json
from tests.reporting.drawn import SVG, axis, layers, marks, place, rows, series, symbols


def rendered(folder: Path, result: Calibration) -> str:
    write_json(folder / "run" / "calibration.json", result)
    page, *_ = write_report([folder / "run"], folder / "out")
    return page.read_text("utf-8")


def histograms(*results: Calibration) -> tuple[Panel, ...]:
    (chart,) = histogram_charts(run_of(*results))
    return chart.panels


def run_of(*results: Calibration) -> Run:
    return Run(calibrations=tuple(Found(place="run", result=result) for result in results))


def value_of(text: str) -> float:
    return float(text.replace(",", ""))


def bars(panel: Panel) -> list[dict[str, Any]]:
    return [row for row in marks(panel) if "n" in row]


def lanes(panel: Panel) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(row, mark) of each method's interval."""
    found = [x for x in layers(panel) if x["mark"]["type"] == "rule" and "y" in x["encoding"]]
    return [(rows(layer)[0], layer["mark"]) for layer in found]


def test_a_histogram_counts_every_element(calibration: Calibration) -> None:
    drawn = histograms(calibration)
    assert [panel.title for panel in drawn] == [t.name for t in calibration.tensors[:9]]
    for panel, tensor in zip(drawn, calibration.tensors, strict=False):
        found = bars(panel)
        assert len(found) <= 72
        assert sum(row["n"] for row in found) == tensor.count
        for row in found:
            match = re.fullmatch(r"(\S+) to (\S+): ([\d,]+) elements", row["tip"])
            assert match is not None and value_of(match[3]) == row["n"]
            assert value_of(match[1]) == pytest.approx(row["lo"], rel=1e-3)
        assert found[0]["lo"] == pytest.approx(tensor.min, rel=1e-3)
        assert found[-1]["hi"] == pytest.approx(tensor.max, rel=1e-3)


def test_marks_stand_at_the_ends_of_each_methods_range(calibration: Calibration) -> None:
    for panel, tensor in zip(histograms(calibration), calibration.tensors, strict=False):
        drawn = lanes(panel)
        assert len(drawn) == len(tensor.methods)
        for (row, mark), method in zip(drawn, tensor.methods, strict=True):
            assert (row["lo"], row["hi"]) == (method.lo, method.hi)
            assert row["tip"].startswith(f"{method.method}: ")
            assert (mark["strokeWidth"] > 2) == (method.method == tensor.chosen)
        assert len({row["lane"] for row, _ in drawn}) == len(drawn)  # also where two are one
        low, high = axis(panel, "x")["scale"]["domain"]
        assert all(low < row["lo"] <= row["hi"] < high for row, _ in drawn)


def test_what_vega_draws_is_where_the_file_says(calibration: Calibration) -> None:
    panel = histograms(calibration)[0]
    tensor = calibration.tensors[0]
    svg = page_svg(panel, "histogram")
    low, high = axis(panel, "x")["scale"]["domain"]
    lines = {words: e for words, e in symbols(svg) if e.tag.endswith("line")}
    for method in tensor.methods:
        (line,) = (e for words, e in lines.items() if words.startswith(f"{method.method}: "))
        left, _ = place(line)
        wide = float(line.get("x2", ""))
        scale = SMALL_WIDTH / (high - low)
        assert left == pytest.approx((method.lo - low) * scale, abs=0.02)
        assert wide == pytest.approx((method.hi - method.lo) * scale, abs=0.02)


def test_a_reader_who_sees_no_picture_is_told(calibration: Calibration, tmp_path: Path) -> None:
    page = rendered(tmp_path, calibration)
    pictures = re.findall(r"<svg [^>]*role=\"group\".*?</svg>", page, re.DOTALL)
    assert len(pictures) == 9 + 1
    for text in pictures:
        svg = ElementTree.fromstring(text)
        assert svg.get("aria-label")
        assert len(svg.findtext(f"{SVG}desc") or "") > 30
    description = ElementTree.fromstring(pictures[0]).findtext(f"{SVG}desc") or ""
    assert all(method.method in description for method in calibration.tensors[0].methods)


def test_lanes_differ_without_colour(calibration: Calibration) -> None:
    panel = histograms(calibration)[0]
    names = [row["lane"] for row, _ in lanes(panel)]
    assert len(set(names)) == len(names) == len(calibration.tensors[0].methods)
    domains = [x["encoding"]["y"].get("scale", {}).get("domain") for x in layers(panel)[-3:]]
    assert names in domains  # the axis beside them has the words


def test_stability_is_drawn_from_the_file(calibration: Calibration) -> None:
    (chart,) = stability_charts(run_of(calibration))
    line = series(chart.panels[0])[0]
    expected = [100 * point.moved_max_frac for point in calibration.stability]
    assert [row["y"] for row in line.marks] == pytest.approx(expected)
    for point, row in zip(calibration.stability, line.marks, strict=True):
        words = f"all tensors: most, {point.samples} samples: moved "
        assert row["tip"].startswith(f"{words}{100 * point.moved_max_frac:#.3g}")
    moved = sorted(
        (t for t in calibration.tensors if t.stability), key=lambda t: -t.stability[-1][1]
    )
    assert moved[0].name in [key.name for key in chart.keys]
    assert "ranges that did not move" in chart.note


def test_tensors_without_anything_to_draw_are_named(
    calibration: Calibration, tmp_path: Path
) -> None:
    seen, unseen = calibration.tensors[0], calibration.tensors[-1]
    point = dataclasses.replace(
        seen,
        name="constant",
        histogram=dataclasses.replace(seen.histogram, edges=[2.0, 2.0], counts=[seen.count]),
        methods=[dataclasses.replace(m, lo=2.0, hi=2.0) for m in seen.methods],
        span_lo=2.0,
        span_hi=2.0,
        bits_wasted=math.nan,
    )
    result = dataclasses.replace(calibration, tensors=[point, unseen])
    page = rendered(tmp_path, result)
    (panel,) = histograms(result)
    assert panel.title == "constant"
    assert [row["tip"] for row in bars(panel)] == [f"2.000 to 2.000: {seen.count:,} elements"]
    assert f"Without a histogram: {unseen.name}." in page
    only = rendered(tmp_path / "b", dataclasses.replace(calibration, tensors=[unseen]))
    assert "Histograms and ranges" not in only
