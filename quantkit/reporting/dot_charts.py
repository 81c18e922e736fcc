"""The geometry of a dot chart: a value with its interval, one row a name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.reporting.charts import RIGHT, TOP, WIDTH, Tick, nice_ticks, rounded, tick_text
from quantkit.reporting.text import clipped

_LEFT, _BOTTOM = 176.0, 44.0
_STEP, _GAP = 13.0, 11.0
TICK_CHARACTER = 6.7
"""Width of a character of a tick, in SVG units, about."""
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


@dataclass(frozen=True, kw_only=True)
class DotMark:
    """A dot and its whisker (`low` and `high` in SVG units, or None) and its tooltip."""

    x: float
    y: float
    low: float | None
    high: float | None
    title: str


@dataclass(frozen=True, kw_only=True)
class DotSeries:
    """The dots of one model."""

    name: str
    colour: int
    style: int
    marks: tuple[DotMark, ...]
    hollow: bool = False


@dataclass(frozen=True, kw_only=True)
class DotChart:
    """A dot chart; `bands` are the tops and heights of every other row's background."""

    title: str
    x_label: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    bands: tuple[tuple[float, float], ...]
    series: tuple[DotSeries, ...]
    height: float
    bottom: float
    note: str = ""
    rules: tuple[Tick, ...] = ()
    width: float = WIDTH
    left: float = _LEFT
    right: float = WIDTH - RIGHT
    top: float = TOP


def dot_chart(
    *,
    title: str,
    x_label: str,
    dots: Sequence[Dot],
    log: bool,
    rules: Sequence[tuple[float, str]] = (),
) -> DotChart:
    """Returns the picture, rows in the order of the dots; values that cannot be drawn are noted."""

    def drawable(x: float) -> bool:
        return math.isfinite(x) and (x > 0 or not log)

    def scaled(x: float) -> float:
        return math.log10(x) if log else x

    rows = list(dict.fromkeys(dot.row for dot in dots))
    names = list(dict.fromkeys((dot.name, dot.colour, dot.style) for dot in dots))
    shown = [dot for dot in dots if drawable(dot.x)]
    reach = [x for dot in shown for x in (dot.x, dot.low, dot.high)] + [x for x, _ in rules]
    ends = [scaled(x) for x in reach if drawable(x)] or [0.0, 1.0]
    low, high = min(ends), max(ends)
    pad = 0.06 * (high - low) or 0.5
    low, high = low - pad, high + pad
    tall = _STEP * len(names) + _GAP
    bottom = TOP + tall * len(rows)

    def to_x(x: float) -> float:
        return rounded(_LEFT + (scaled(x) - low) / (high - low) * (WIDTH - RIGHT - _LEFT))

    def mark(dot: Dot, lane: int) -> DotMark:
        has_span = drawable(dot.low) and drawable(dot.high)
        return DotMark(
            x=to_x(dot.x),
            y=rounded(TOP + rows.index(dot.row) * tall + _GAP / 2 + (lane + 0.5) * _STEP),
            low=to_x(dot.low) if has_span else None,
            high=to_x(dot.high) if has_span else None,
            title=dot.title,
        )

    series = tuple(
        DotSeries(
            name=name,
            colour=colour,
            style=style,
            marks=tuple(
                mark(dot, lane) for dot in shown if (dot.name, dot.colour, dot.style) == key
            ),
        )
        for lane, key in enumerate(names)
        for name, colour, style in [key]
    )
    left_out = len(dots) - len(shown)
    return DotChart(
        title=title,
        x_label=x_label,
        x_ticks=_apart(
            [Tick(at=to_x(x), text=tick_text(x)) for x in nice_ticks(low, high, log) if drawable(x)]
        ),
        y_ticks=tuple(
            Tick(at=rounded(TOP + (i + 0.5) * tall), text=clipped(row, LABEL_CHARACTERS))
            for i, row in enumerate(rows)
        ),
        bands=tuple((rounded(TOP + i * tall), tall) for i in range(0, len(rows), 2)),
        series=series,
        height=rounded(bottom + _BOTTOM),
        bottom=rounded(bottom),
        note=f"{left_out} values are not finite and not drawn." if left_out else "",
        rules=tuple(Tick(at=to_x(x), text=words) for x, words in rules if drawable(x)),
    )


def _apart(ticks: Sequence[Tick]) -> tuple[Tick, ...]:
    """Returns the ticks whose words neither meet nor leave the picture."""
    kept: list[Tick] = []
    end = 0.0
    for tick in ticks:
        half = TICK_CHARACTER * len(tick.text) / 2
        if tick.at - half >= end and tick.at + half <= WIDTH:
            kept.append(tick)
            end = tick.at + half + TICK_CHARACTER
    return tuple(kept)
