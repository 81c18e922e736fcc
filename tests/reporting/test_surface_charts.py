"""The picture of |x| by token and channel, read back from its SVG."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from pathlib import Path
from statistics import median_low
from typing import Any
from xml.etree import ElementTree

import pytest

from quantkit.reporting.collect import Found, Run
from quantkit.reporting.drawing import Chart, page_svg
from quantkit.reporting.picture_files import file_svg
from quantkit.reporting.surface_charts import surface_charts
from quantkit.reporting.text import number
from quantkit.results import MagnitudeSurface, Stats, read_json

FIXTURES = Path(__file__).parent.parent / "results" / "fixtures"
HOSTILE = "</title></svg><script>alert(1)</script>\"'&|`\x1b[31m\n"
SVG = "{http://www.w3.org/2000/svg}"
BINS = (64, 96)


def stats_of(name: str = "base", version: str = "v4") -> Stats:
    return read_json(FIXTURES / version / name / "stats.json", Stats)


def with_surface(stats: Stats, **changes: Any) -> Stats:
    surface = dataclasses.replace(stats.surfaces["hidden_state"], **changes)
    return dataclasses.replace(stats, surfaces={"hidden_state": surface})


def run_of(*stats: Stats) -> Run:
    return Run(stats=tuple(Found(place=s.model.name, result=s) for s in stats))


def large() -> Stats:
    """64 x 96 bins of 8 tokens by 6 channels; three tokens and channels are alone."""
    rows, columns = BINS
    values = [[0.5 + ((7 * r + 3 * c) % 11) for c in range(columns)] for r in range(rows)]
    for row, column, value in ((0, 40, 5000.0), (20, 41, 800.0), (50, 7, 300.0)):
        values[row][column] = value
    alone_rows, alone_columns = (0, 20, 50), (40, 41, 7)
    positions, channels = (
        list(itertools.accumulate((1 if i in alone else w for i in range(n - 1)), initial=0))
        for n, w, alone in ((rows, 8, alone_rows), (columns, 6, alone_columns))
    )
    return with_surface(
        stats_of(), positions=positions, last_position=positions[-1] + 7,
        largest_positions=[p if i in alone_rows else p + 1 for i, p in enumerate(positions)],
        tokens=[f"t{i}" for i in range(rows)], channels=channels,
        channel_count=channels[-1] + 6, abs_max=values,
    )  # fmt: skip


def parsed(chart: Chart) -> ElementTree.Element:
    (panel,) = chart.panels
    return ElementTree.fromstring(page_svg(panel, chart.title))


def groups(svg: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    """The groups of marks of one kind, in the order of their layers."""
    return [g for g in svg.iter(f"{SVG}g") if f"mark-{kind} role-mark" in g.get("class", "")]


def texts(svg: ElementTree.Element) -> list[str]:
    return [t.text or "" for t in svg.iter(f"{SVG}text")]


def opacities(svg: ElementTree.Element, wide: int, tall: int) -> dict[tuple[int, int], float]:
    """The opacity of each bin that is filled, from the shapes' rectangles."""
    found: dict[tuple[int, int], float] = {}
    for shape in groups(svg, "symbol")[0]:
        for part in shape.get("d", "").split("M")[1:]:
            numbers = [float(n) for n in re.findall(r"-?[\d.]+", part)]
            xs, ys = numbers[0::2], numbers[1::2]
            for column in range(round(min(xs)) // wide, round(max(xs)) // wide):
                row = round(min(ys)) // tall
                assert max(ys) - min(ys) == tall and (row, column) not in found
                found[row, column] = float(shape.get("fill-opacity", "nan"))
    return found


def tips(svg: ElementTree.Element, kind: str, layer: int) -> list[str]:
    return [mark.get("aria-label", "") for mark in groups(svg, kind)[layer]]


def check_shades(values: list[list[float]], shades: dict[tuple[int, int], float]) -> None:
    """Half of the bins are as faint as can be, the largest is full, and none is out of order."""
    size = {(r, c): v for r, row in enumerate(values) for c, v in enumerate(row) if v > 0}
    assert shades.keys() == size.keys()
    order = sorted(size, key=lambda at: size[at])
    assert all(shades[a] <= shades[b] for a, b in itertools.pairwise(order))
    faint, full = min(shades.values()), max(shades.values())
    assert (faint, full) == (0.06, 1.0)
    low, high = median_low(size.values()), max(size.values())
    assert all(shades[at] == faint for at, value in size.items() if value <= low)
    for at, value in size.items():  # an even share of the logarithm a step
        share = math.log(max(value, low) / low) / math.log(high / low)
        assert (shades[at] - faint) / (full - faint) == pytest.approx(share, abs=1 / 15)


def test_a_small_surface_is_drawn_bin_by_bin() -> None:
    stats = stats_of()
    values = stats.surfaces["hidden_state"].abs_max
    (chart,) = surface_charts(run_of(stats))
    svg = parsed(chart)
    check_shades(values, opacities(svg, 28, 28))
    blocks = tips(svg, "rect", 0)
    tokens = stats.surfaces["hidden_state"].tokens
    assert blocks == [
        f"{number(value)} at position {row} {tokens[row]!r}, channel {column}"
        for row, line in enumerate(values)
        for column, value in enumerate(line)
    ]
    assert tips(svg, "symbol", 1)[0] == "4,000 at position 0 ']', channel 5"
    assert {"5", "0 ']'", "channel", "token position"} <= set(texts(svg))
    assert chart.title == "Largest |hidden state| by token and channel: base, layer 0"
    assert chart.name == "surface-hidden-state-base"
    assert "Largest channels: 5 (4,000), 1 (7.004)" in chart.note
    assert chart.panels[0].rows == 72 and "Sequence 0" in chart.panels[0].words


def test_a_large_one_tells_the_largest_of_each_block() -> None:
    stats = large()
    surface = stats.surfaces["hidden_state"]
    (chart,) = surface_charts(run_of(stats))
    text = page_svg(chart.panels[0], chart.title)
    assert len(text) < 200_000
    svg = ElementTree.fromstring(text)
    check_shades(surface.abs_max, opacities(svg, 4, 4))
    blocks = tips(svg, "rect", 0)
    assert len(blocks) == 16 * 24
    for index, tip in enumerate(blocks):
        top, left = 4 * (index // 24), 4 * (index % 24)
        inside = [surface.abs_max[top + r][left + c] for r in range(4) for c in range(4)]
        assert tip.startswith(f"up to {number(max(inside))} at position")
    assert "up to 5,000 at position 0 't0', channel 235" in blocks
    assert "up to 800.0 at position 153 't20', channel 236" in blocks
    spread = next(tip for tip in blocks if "positions" in tip)
    assert re.fullmatch(
        r"up to [\d.]+ at positions (\d+) to \d+ \(largest \d+ 't\d+'\), channels (\d+) to \d+",
        spread,
    )
    assert tips(svg, "symbol", 1) == [
        "5,000 at position 0 't0', channel 235",
        "800.0 at position 153 't20', channel 236",
        "300.0 at position 386 't50', channel 42",
    ]
    named = {"235", "42", "0 't0'", "153 't20'", "386 't50'"}
    assert named <= set(texts(svg))
    assert "236" not in texts(svg)  # would meet 235
    assert "Largest channels: 235 (5,000), 236 (800.0), 42 (300.0)" in chart.note


def test_two_models_have_one_scale_each_point_its_own() -> None:
    base, diff = stats_of("base"), stats_of("diff")
    down = dataclasses.replace(
        base.surfaces["hidden_state"], abs_max=[[0.5] * 7 + [2.0]] * 8 + [[0.5] * 8], layer=2
    )
    base = dataclasses.replace(base, surfaces=base.surfaces | {"mlp_down_input": down})
    charts = surface_charts(run_of(base, diff))
    assert [chart.name for chart in charts] == [
        "surface-hidden-state-base",
        "surface-hidden-state-diff",
        "surface-mlp-down-input-base",
    ]
    both = [v for s in (base, diff) for row in s.surfaces["hidden_state"].abs_max for v in row]
    ends = f"median bin {number(median_low(both))} or less", f"{number(max(both))} (log)"
    for chart in charts[:2]:
        assert chart.ramp is not None
        assert (chart.ramp.low, chart.ramp.high) == ends
    assert charts[2].ramp is not None and charts[2].ramp.high == "2.000 (log)"
    assert charts[2].title.endswith("base, layer 2")
    for chart, surface in zip(charts[:2], (base, diff), strict=True):
        shades = opacities(parsed(chart), 28, 28)
        values = surface.surfaces["hidden_state"].abs_max
        faint = [shades[r, c] == 0.06 for r, row in enumerate(values) for c, _ in enumerate(row)]
        want = [v <= median_low(both) for row in values for v in row]
        assert all(is_faint for is_faint, low in zip(faint, want, strict=True) if low)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"abs_max": [[0.0] * 8] * 9}, id="all zero"),
        pytest.param({"abs_max": [[math.nan] * 8] * 9}, id="all NaN"),
        pytest.param({"abs_max": [[1.0] * 7] * 9}, id="rows too short"),
        pytest.param({"abs_max": [[1.0] * 8] * 8}, id="a row too few"),
        pytest.param(
            {"abs_max": [], "positions": [], "tokens": [], "largest_positions": []}, id="no tokens"
        ),
        pytest.param({"abs_max": [[]] * 9, "channels": []}, id="no channels"),
        pytest.param({"tokens": []}, id="tokens of another length"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_left_out(changes: dict[str, Any]) -> None:
    assert surface_charts(run_of(with_surface(stats_of(), **changes))) == ()


@pytest.mark.parametrize("version", ["v1", "v2", "v3"])
def test_older_files_have_none(version: str) -> None:
    assert surface_charts(run_of(stats_of(version=version))) == ()


def test_zeros_nan_and_inf_leave_holes() -> None:
    values = [[float(r + c + 1) for c in range(8)] for r in range(9)]
    values[2][3], values[4][4], values[5][5] = 0.0, math.nan, math.inf
    (chart,) = surface_charts(run_of(with_surface(stats_of(), abs_max=values)))
    holes = {(2, 3), (4, 4), (5, 5)}
    assert (
        opacities(parsed(chart), 28, 28).keys()
        == {(r, c) for r in range(9) for c in range(8)} - holes
    )
    assert chart.ramp is not None and chart.ramp.high == "16.00 (log)"
    assert "inf" not in chart.note and "n/a" not in chart.note


@pytest.mark.parametrize("value", [1.0, 1e-30, 3e38])
def test_equal_values_are_one_shade(value: float) -> None:
    (chart,) = surface_charts(run_of(with_surface(stats_of(), abs_max=[[value] * 8] * 9)))
    assert set(opacities(parsed(chart), 28, 28).values()) == {1.0}


def test_one_element() -> None:
    surface = MagnitudeSurface(
        layer=0, name="x", sequence=0, positions=[3], last_position=3, largest_positions=[3],
        tokens=[None], channels=[0], channel_count=1, abs_max=[[2.0]],
    )  # fmt: skip
    stats = dataclasses.replace(stats_of(), surfaces={"hidden_state": surface})
    (chart,) = surface_charts(run_of(stats))
    assert tips(parsed(chart), "rect", 0) == ["2.000 at position 3, channel 0"]


def test_hostile_names_and_tokens_are_text() -> None:
    stats = with_surface(stats_of(), tokens=[HOSTILE] * 9)
    stats = dataclasses.replace(stats, model=dataclasses.replace(stats.model, name=HOSTILE))
    (chart,) = surface_charts(run_of(stats))
    for text in (page_svg(chart.panels[0], chart.title), file_svg(chart)):
        assert "<script" not in text and "\x1b" not in text
        svg = ElementTree.fromstring(text)
        assert any("</title></svg>" in mark.get("aria-label", "") for mark in svg.iter())
        assert any("</titl" in words for words in texts(svg))
