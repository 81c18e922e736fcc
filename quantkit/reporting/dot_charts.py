"""Dot charts: a value with its interval, one row a name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import altair as alt

from quantkit.reporting.charts import TICK_FORMAT, nice_ticks, padded, quoted
from quantkit.reporting.drawing import WIDTH, Chart, Key, Panel, data_of, together
from quantkit.reporting.text import clipped, printable
from quantkit.reporting.theme import LIGHT, hue

_STEP, _GAP = 13, 11
"""Pixels a model takes of a row, and between rows."""
LABEL_CHARACTERS = 25
"""What the space left of the plot takes; a longer name loses its middle."""


@dataclass(frozen=True, kw_only=True)
class Dot:
    """A value in data units, of one model in one row."""

    row: str
    name: str
    colour: int
    style: int
    x: float
    low: float
    high: float
    title: str


def dot_chart(
    *,
    title: str,
    x_label: str,
    dots: Sequence[Dot],
    log: bool,
    rules: Sequence[tuple[float, str]] = (),
    note: str = "",
    name: str = "",
) -> Chart:
    """Returns the picture, rows in the order of the dots; values that cannot be drawn are noted."""

    def drawable(x: float) -> bool:
        return math.isfinite(x) and (x > 0 or not log)

    rows = list(dict.fromkeys(dot.row for dot in dots))
    keys = list(dict.fromkeys(_key(dot) for dot in dots))
    shown = [dot for dot in dots if drawable(dot.x)]
    reach = [x for dot in shown for x in (dot.x, dot.low, dot.high)] + [x for x, _ in rules]
    low, high = padded([x for x in reach if drawable(x)], log)
    tall = _STEP * len(keys) + _GAP
    x = alt.X(
        "x:Q",
        scale=alt.Scale(
            type="log" if log else "linear", domain=[low, high], nice=False, zero=False
        ),
        axis=alt.Axis(
            title=x_label, values=nice_ticks(low, high, log), format=TICK_FORMAT, grid=True
        ),
    )
    # a row is a unit of the axis; its models stand in lanes within it
    names = [printable(clipped(row, LABEL_CHARACTERS)) for row in rows]
    y = alt.Y(
        "y:Q",
        scale=alt.Scale(domain=[len(rows), 0], nice=False, zero=False),
        axis=alt.Axis(
            title=None, grid=False, values=[i + 0.5 for i in range(len(rows))],
            labelColor=LIGHT["ink"], labelOverlap=False,
            labelExpr=f"{quoted(names)}"
            "[floor(datum.value)]",
        ),
    )  # fmt: skip
    layers = [
        alt.Chart(data_of([{"y": i, "y2": i + 1} for i in range(0, len(rows), 2)]))
        .mark_rect(fill=LIGHT["panel"], aria=False)
        .encode(y=y, y2="y2:Q")
    ]
    for level, _words in rules:
        layers.append(
            alt.Chart(data_of([{"x": level}]))
            .mark_rule(stroke=LIGHT["ink"], strokeDash=[5, 4], aria=False)
            .encode(x=x)
        )
    for lane, key in enumerate(keys):
        ink = hue(key.colour)
        mine = [dot for dot in shown if _key(dot) == key]
        at = (_GAP / 2 + (lane + 0.5) * _STEP) / tall
        data = [
            {"x": dot.x, "y": rows.index(dot.row) + at, "tip": printable(dot.title)} for dot in mine
        ]
        spans = [
            {"x": dot.low, "x2": dot.high, "y": rows.index(dot.row) + at}
            for dot in mine
            if drawable(dot.low) and drawable(dot.high)
        ]
        layers.append(
            alt.Chart(data_of(spans))
            .mark_rule(stroke=ink, strokeWidth=1.4, strokeOpacity=0.7, aria=False)
            .encode(x=x, x2="x2:Q", y=y)
        )
        layers.append(
            alt.Chart(data_of(data))
            .mark_point(shape=key.shape, size=46, fill=ink, stroke=ink, opacity=1)
            .encode(x=x, y=y, description="tip:N")
        )
    left_out = len(dots) - len(shown)
    panel = Panel(
        spec=alt.layer(*layers).properties(width=WIDTH - 80, height=tall * len(rows)),
        words=f"{x_label}, a row each: {', '.join(rows)}; one marker each: "
        f"{'; '.join(key.name for key in keys)}.",
        rows=len(shown),
        keys=tuple(keys),
        note=f"{left_out} values are not finite and not drawn." if left_out else "",
    )
    return together(name, title, [panel], note=note)


def _key(dot: Dot) -> Key:
    return Key(name=dot.name, colour=dot.colour, style=dot.style, has_line=False)
