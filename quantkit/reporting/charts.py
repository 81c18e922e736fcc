"""Charts of lines and of heat, in data units: what Vega-Lite is asked to draw.

Colour tells the model, dash and marker tell the granularity (or the rank, or the map), so that a
picture can also be read without colour. A heat map is one hue whose opacity is the value, which
works on a light and on a dark page.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import altair as alt

from quantkit.reporting.drawing import (
    HEAT,
    HEIGHT,
    WIDTH,
    Chart,
    Key,
    Panel,
    Ramp,
    data_of,
    together,
)
from quantkit.reporting.text import number, printable
from quantkit.reporting.theme import LIGHT, hue

TICK_FORMAT: Final = ",.6~g"
_SMALLEST, _LARGEST = -307.0, 308.0
"""Powers of ten that an axis can reach."""
_FAINTEST: Final = 0.06
"""Opacity of a heat map's smallest value, which shows that there is a cell."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """A point in data units; `low` and `high` end its whisker, `least` and `most` a band."""

    x: float
    y: float
    low: float = math.nan
    high: float = math.nan
    title: str = ""
    least: float = math.nan
    most: float = math.nan


@dataclass(frozen=True, kw_only=True)
class Line:
    """A series; `hollow` draws its markers so, `thin` its line; without a name it has no key.

    `marked`: every so many points have a marker; 0: none has.
    """

    name: str
    colour: int
    style: int
    values: tuple[Value, ...]
    hollow: bool = False
    thin: bool = False
    marked: int = 1

    @property
    def key(self) -> Key:
        """Its entry in a legend."""
        return Key(name=self.name, colour=self.colour, style=self.style, hollow=self.hollow)


def line_chart(
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_names: Sequence[str],
    lines: Sequence[Line],
    log: bool,
    rules: Sequence[tuple[float, str]] = (),
    note: str = "",
    name: str = "",
) -> Chart:
    """Returns a chart of one panel, see `line_panel`; `name` is its title's unless given."""
    panel = line_panel(
        x_label=x_label, y_label=y_label, x_names=x_names, lines=lines, log=log, rules=rules
    )
    return together(name, title, [panel], note=note)


def line_panel(
    *,
    x_label: str,
    y_label: str,
    x_names: Sequence[str],
    lines: Sequence[Line],
    log: bool,
    title: str = "",
    rules: Sequence[tuple[float, str]] = (),
    reach: Sequence[float] = (),
    width: int = WIDTH,
    height: int = HEIGHT,
) -> Panel:
    """Returns the panel; values that are not finite (or not positive on a log axis) are noted.

    Args:
        x_names: Words of the slots 0, 1, ... of the axis, "" for none.
        rules: Level lines with their words.
        reach: Values that the axis holds though no line has them, e.g. those of a panel beside.
    """

    def drawable(y: float) -> bool:
        return math.isfinite(y) and (y > 0 or not log)

    shown = [v for line in lines for v in line.values if drawable(v.y)]
    held = [y for v in shown for y in (v.y, v.low, v.high, v.least, v.most)]
    held += [*reach, *(y for y, _ in rules)]
    low, high = padded([y for y in held if drawable(y)], log)
    x = alt.X(
        "x:Q",
        scale=alt.Scale(domain=[-0.5, max(1, len(x_names)) - 0.5], nice=False, zero=False),
        axis=alt.Axis(
            title=x_label,
            values=[i for i, words in enumerate(x_names) if words],
            labelExpr=f"{quoted(x_names)}[datum.value]",
        ),
    )
    y = alt.Y(
        "y:Q",
        scale=alt.Scale(
            type="log" if log else "linear", domain=[low, high], nice=False, zero=False
        ),
        axis=alt.Axis(title=y_label, values=nice_ticks(low, high, log), format=TICK_FORMAT),
    )
    layers: list[alt.Chart] = []
    for level, words in rules:
        layers += _rule(level, words, x, y)
    for line in lines:
        layers += _line(line, [v for v in line.values if drawable(v.y)], drawable, x, y)
    spec = alt.layer(*(layers or [_nothing(x, y)])).properties(width=width, height=height)
    left_out = sum(len(line.values) for line in lines) - len(shown)
    names = "; ".join(dict.fromkeys(line.name for line in lines if line.name))
    return Panel(
        title=title,
        spec=spec,
        words=f"{y_label} against {x_label}, one line each: {names}.",
        rows=len(shown),
        keys=tuple(dict.fromkeys(line.key for line in lines if line.name)),
        note=f"{left_out} values are not finite and not drawn." if left_out else "",
    )


def _line(
    line: Line, shown: list[Value], drawable: Callable[[float], bool], x: alt.X, y: alt.Y
) -> list[alt.Chart]:
    """Returns the layers of a series: band, line, whiskers, markers."""
    ink = hue(line.colour)
    key = line.key
    rows: list[dict[str, Any]] = [{"x": v.x, "y": v.y, "tip": printable(v.title)} for v in shown]
    band = [v for v in shown if drawable(v.least) and drawable(v.most)]
    spans = [v for v in shown if drawable(v.low) and drawable(v.high)]
    layers = []
    if band:
        data = [{"x": v.x, "y": v.least, "y2": v.most} for v in band]
        layers.append(
            _of(data).mark_area(fill=ink, fillOpacity=0.16, aria=False).encode(x=x, y=y, y2="y2:Q")
        )
    if len(rows) > 1:
        layers.append(
            _of([{"x": row["x"], "y": row["y"]} for row in rows])
            .mark_line(
                stroke=ink,
                strokeWidth=1 if line.thin else 2,
                strokeOpacity=0.55 if line.thin else 1,
                strokeDash=key.dash,
                aria=False,
            )
            .encode(x=x, y=y, order=alt.Order("x:Q"))
        )
    if spans:
        data = [{"x": v.x, "y": v.low, "y2": v.high} for v in spans]
        layers.append(
            _of(data)
            .mark_rule(stroke=ink, strokeWidth=1.4, strokeOpacity=0.7, aria=False)
            .encode(x=x, y=y, y2="y2:Q")
        )
    marks = rows[:: line.marked] if line.marked else []
    if marks:
        layers.append(
            _of(marks)
            .mark_point(
                shape=key.shape,
                size=46,
                fill=LIGHT["page"] if line.hollow else ink,
                stroke=ink,
                strokeWidth=1.4,
                opacity=1,
            )
            .encode(x=x, y=y, description="tip:N")
        )
    return layers


def _rule(level: float, words: str, x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """Returns a level line across the view, and its words at the left."""
    data = _of([{"x": -0.5, "y": level, "words": printable(words)}])
    return [
        data.mark_rule(stroke=LIGHT["ink"], strokeWidth=1, strokeDash=[5, 4], aria=False).encode(
            y=y
        ),
        data.mark_text(align="left", baseline="bottom", dx=4, dy=-2, aria=False).encode(
            x=x, y=y, text="words:N"
        ),
    ]


def _nothing(x: alt.X, y: alt.Y) -> alt.Chart:
    nothing: alt.Chart = _of([]).mark_point(aria=False).encode(x=x, y=y)
    return nothing


def heat_map(
    title: str,
    values: Mapping[tuple[int, int], tuple[float, str]],
    *,
    across: str = "head",
    column_names: Sequence[str] | None = None,
    scale: tuple[float, float] | None = None,
    words: Callable[[float], str] = number,
) -> Chart:
    """Returns the picture of (layer, column) -> (value, tooltip); only layers that are there.

    Without `scale` the ends are the smallest and the largest value; values that are not finite
    leave a hole. `words` writes the ends of the scale.
    """
    layers = sorted({layer for layer, _ in values})
    columns = 1 + max(column for _, column in values)
    finite = [value for value, _ in values.values() if math.isfinite(value)] or [0.0]
    low, high = scale or (min(finite), max(finite))
    reach = high - low
    rows = [
        {
            "layer": layer,
            "column": column,
            "o": _FAINTEST + (1 - _FAINTEST) * (value - low) / reach if reach > 0 else 0.5,
            "tip": printable(tooltip),
        }
        for (layer, column), (value, tooltip) in sorted(values.items())
        if math.isfinite(value)
    ]
    tall = max(5.0, min(22.0, 264.0 / len(layers)))
    named = "" if column_names is None else f"{quoted(column_names)}[datum.value]"
    x = alt.X(
        "column:O",
        scale=alt.Scale(domain=list(range(columns)), paddingInner=0.08),
        axis=alt.Axis(
            title=across, orient="bottom", labelAngle=0, ticks=False, domain=False,
            labelExpr=named or "datum.label",
        ),
    )  # fmt: skip
    y = alt.Y(
        "layer:O",
        scale=alt.Scale(domain=layers, paddingInner=0.08),
        axis=alt.Axis(title="layer", grid=False),
    )
    spec: alt.Chart = (
        _of(rows)
        .mark_rect(fill=HEAT, stroke=None)
        .encode(
            x=x, y=y, fillOpacity=alt.FillOpacity("o:Q", scale=None, legend=None),
            description="tip:N",
        )
        .properties(width=min(WIDTH, round(60 * columns)), height=round(tall * len(layers)))
    )  # fmt: skip
    panel = Panel(
        spec=spec,
        words=f"{title}, from {words(low)} (faint) to {words(high)} (full).",
        rows=len(rows),
    )
    return together("", title, [panel], ramp=Ramp(low=words(low), high=words(high)))


def padded(values: Sequence[float], log: bool) -> tuple[float, float]:
    """Returns the ends of an axis that holds the values, with some room.

    A logarithmic axis has no place for what is not above 0.
    """

    def scaled(y: float) -> float:
        return math.log10(y) if log else y

    ends = [scaled(y) for y in values if y > 0.0 or not log] or [0.0, 1.0]
    low, high = min(ends), max(ends)
    pad = 0.06 * (high - low) or 0.5
    low, high = low - pad, high + pad
    if not log:
        return low, high
    return 10.0 ** max(low, _SMALLEST), 10.0 ** min(high, _LARGEST)


def nice_ticks(low: float, high: float, log: bool) -> list[float]:
    """Returns about five round values between the ends."""
    if log:
        first, last = math.log10(low), math.log10(high)
        decades = range(math.floor(first), math.floor(last) + 1)
        for steps in ((1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
            ticks = [m * 10.0**e for e in decades for m in steps]
            ticks = [tick for tick in ticks if low <= tick <= high]
            if 3 <= len(ticks) <= 8:
                return ticks
        if last - first > 2:
            return ticks[:: math.ceil(len(ticks) / 8)]
    raw = (high - low) / 4
    base = 10.0 ** math.floor(math.log10(raw))
    step = min((m * base for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - raw))
    start = math.ceil(low / step)
    count = math.floor(high / step) - start + 1
    return [(start + i) * step for i in range(count)]


def _of(rows: Sequence[Mapping[str, Any]]) -> alt.Chart:
    return alt.Chart(data_of(rows))


def quoted(words: Sequence[str]) -> str:
    """Returns the words as an array of a Vega expression: foreign text stays text."""
    return json.dumps([printable(word) for word in words])
