"""What Vega draws: every mark with its words, where an independent axis puts it; nothing else."""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quantkit.reporting.charts import Line, Value, heat_map, line_chart, nice_ticks
from quantkit.reporting.dot_charts import Dot, dot_chart
from quantkit.reporting.drawing import (
    HEIGHT,
    WIDTH,
    Chart,
    Key,
    key_svg,
    page_svg,
    slug,
    together,
)
from quantkit.reporting.picture_files import file_svg, is_ours
from quantkit.reporting.report import page_of
from quantkit.reporting.theme import LIGHT
from tests.reporting.drawn import SVG, axis, marks, place, symbols, tips

REAL = Path(__file__).parents[2] / "reports" / "pair"
HOSTILE = "</svg><script>alert(1)</script>\"'&\x1b[31m\x00\u202e\ufffe\ud800\u2028注意"


def chart_of(*ys: float, log: bool = False, name: str = "a", tip: str = "tip") -> Chart:
    values = tuple(
        Value(x=i, y=y, low=y * 0.9, high=y * 1.1, title=f"{tip} {i}") for i, y in enumerate(ys)
    )
    return line_chart(
        title=name, x_label="x", y_label="y", x_names=[f"n{i}" for i in range(len(ys))],
        lines=[Line(name=name, colour=0, style=1, values=values)], log=log,
    )  # fmt: skip


@pytest.mark.parametrize("log", [False, True], ids=["linear", "logarithmic"])
def test_marks_stand_where_the_axis_says(log: bool) -> None:
    ys = (3.0, 50.0, 700.0)
    (panel,) = chart_of(*ys, log=log).panels
    found = symbols(page_svg(panel, "label"))
    low, high = axis(panel, "y")["scale"]["domain"]
    assert [words for words, _ in found] == tips(panel) == ["tip 0", "tip 1", "tip 2"]
    for i, (y, (_, element)) in enumerate(zip(ys, found, strict=True)):
        share = (
            (math.log(y) - math.log(low)) / (math.log(high) - math.log(low))
            if log
            else (y - low) / (high - low)
        )
        expected = ((i + 0.5) / 3 * WIDTH, (1 - share) * HEIGHT)
        assert place(element) == pytest.approx(expected, abs=0.02)


def test_a_heat_map_is_as_full_as_its_values() -> None:
    values = {(layer, head): (float(layer * 3 + head), f"{layer},{head}") for layer in (0, 2, 5)
              for head in range(3)}  # fmt: skip
    values[5, 2] = (math.nan, "a hole")
    chart = heat_map("heat", values)
    found = {words: e for words, e in symbols(page_svg(chart.panels[0], "heat"))}
    assert set(found) == {words for value, words in values.values() if not math.isnan(value)}
    low, high = 0.0, 16.0
    for value, words in values.values():
        if not math.isnan(value):
            full = float(found[words].get("fill-opacity", "1"))
            assert full == pytest.approx(0.06 + 0.94 * (value - low) / (high - low), abs=1e-6)
    assert chart.ramp is not None and (chart.ramp.low, chart.ramp.high) == ("0", "16.00")


@pytest.mark.kind(8, "report")
def test_foreign_names_stay_text() -> None:
    chart = chart_of(1.0, 2.0, name=HOSTILE, tip=HOSTILE)
    dots = dot_chart(
        title=HOSTILE, x_label=HOSTILE, log=False,
        dots=[Dot(row=HOSTILE, name=HOSTILE, colour=0, style=0, x=1.0, low=0.5, high=2.0,
                  title=HOSTILE)],
    )  # fmt: skip
    for one in (chart, dots):
        for text in (file_svg(one), page_svg(one.panels[0], one.title)):
            root = ElementTree.fromstring(text)
            assert not list(root.iter(f"{SVG}script")) and "\x1b" not in text
            assert all("<script>" in words for words, _ in symbols(text))


@pytest.mark.parametrize(
    ("ys", "noted"),
    [
        ((), 0), ((1.0,), 0), ((2.0, 2.0, 2.0), 0), ((1e300, 1e-300), 0), ((5e-324, 1.0), 0),
        ((math.nan, math.inf, 1.0), 2), ((-1.0, 0.0, 1.0), 2), ((math.nan,), 1),
    ],
    ids=["none", "one", "equal", "huge", "subnormal", "not finite", "not positive", "nothing left"],
)  # fmt: skip
@pytest.mark.parametrize("log", [False, True], ids=["linear", "logarithmic"])
def test_whatever_comes_is_drawn_or_noted(ys: tuple[float, ...], noted: int, log: bool) -> None:
    chart = chart_of(*ys, log=log)
    expected = sum(not math.isfinite(y) or (log and y <= 0) for y in ys)
    assert expected <= noted
    said = f"{expected} values are not finite and not drawn." if expected else ""
    assert chart.note == said
    drawn = symbols(page_svg(chart.panels[0], "label"))
    assert len(drawn) == len(ys) - expected == chart.panels[0].rows
    assert "NaN" not in file_svg(chart)


def test_six_thousand_points_are_not_refused() -> None:
    (panel,) = chart_of(*[1.0 + i for i in range(6000)]).panels
    assert len(symbols(page_svg(panel, "many"))) == 6000


def test_every_chart_of_a_real_run_is_sound() -> None:
    page = page_of([REAL])
    assert len({chart.name for chart in page.charts}) == len(page.charts) > 15
    allowed = {*LIGHT.values(), "none", "transparent"}
    for chart in page.charts:
        text = file_svg(chart)
        root = ElementTree.fromstring(text)
        colours = {e.get(w) for e in root.iter() for w in ("fill", "stroke")} - {None}
        assert colours <= allowed, (chart.name, colours - allowed)
        assert not [e for e in root.iter() if e.get("id")]  # two pictures of a page could clash
        said = [words for words, _ in symbols(text)]
        assert said == [tip for panel in chart.panels for tip in tips(panel)]
        for panel in chart.panels:
            shared = chart.name.startswith("surface-")  # a block of cells has one mark
            assert (
                (0 < len(marks(panel)) < panel.rows)
                if shared
                else (len(marks(panel)) == panel.rows)
            )


def test_a_file_is_known_by_its_hash() -> None:
    text = file_svg(chart_of(1.0, 2.0))
    assert text == file_svg(chart_of(1.0, 2.0))
    assert is_ours(text.encode())
    assert not is_ours(text.replace("tip 0", "tip 9").encode())
    assert not is_ours(text.encode() + b"\n") and not is_ours(b"")
    assert "prefers-color-scheme: dark" in text


def test_panels_share_a_legend_and_say_their_notes_once() -> None:
    one, other = chart_of(1.0, math.nan), chart_of(math.nan, 2.0, name="b")
    both = together("x", "both", [*one.panels, *other.panels], note="first.")
    assert [key.name for key in both.keys] == ["a", "b"]
    assert both.note == "first. 1 values are not finite and not drawn."
    text = file_svg(both)
    assert re.search(r">a</text>", text) and re.search(r">b</text>", text)


def test_a_name_is_no_path() -> None:
    assert slug("../../etc/passwd") == "etc-passwd"


def test_a_key_has_a_line_only_for_lines() -> None:
    line, dots = (
        key_svg(Key(name="k", colour=1, style=1, has_line=has_line)) for has_line in (True, False)
    )
    assert "<line" in line and "<line" not in dots
    assert LIGHT["c1"] in line and LIGHT["c1"] in dots


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(("low", "high"), [(0.1, 0.11), (1, 1000), (3e-9, 4e-3), (80.1, 95.3)])
def test_ticks_are_round_and_inside(low: float, high: float, log: bool) -> None:
    ticks = nice_ticks(low, high, log)
    assert 2 <= len(ticks) <= 12
    assert all(low * (1 - 1e-9) <= tick <= high * (1 + 1e-9) for tick in ticks)
