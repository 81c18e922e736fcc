"""The geometry of the report's pictures; templates draw it as inline SVG.

Colour tells the model, dash and marker tell the granularity (or the rank, or the map), so that a
picture can also be read without colour. A heat map is one hue whose opacity is the value, which
works on a light and on a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from quantkit.reporting.collect import Run, labels
from quantkit.reporting.sweep_groups import hue_names
from quantkit.reporting.text import number, text_width

COLOURS = 8
"""Number of hues in the style sheet (`--c0` to `--c7`); further models start over."""
WIDTH, HEIGHT = 480.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 12.0, 12.0, 44.0
TITLE_END = 18.0
"""Where the upright title of an axis ends, on the right; its baseline is at 12."""


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A label at `at` (SVG units along its axis)."""

    at: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A point, its whisker (`low` and `high` in SVG units, or None) and its tooltip."""

    x: float
    y: float
    low: float | None
    high: float | None
    title: str


@dataclass(frozen=True, kw_only=True)
class Label:
    """Words at a place, centred."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line: `path` is SVG path data; `style` picks dash and marker, `colour` the hue.

    `area` is a band about it, `hollow` draws its markers so, `thin` its line; one without a name
    is not in the legend.
    """

    name: str
    colour: int
    style: int
    path: str
    marks: tuple[Mark, ...]
    area: str = ""
    hollow: bool = False
    thin: bool = False


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """A line chart; its legend is the names of its series. `rules` are level lines with words."""

    title: str
    x_label: str
    y_label: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    series: tuple[Series, ...]
    note: str = ""
    rules: tuple[Tick, ...] = ()
    width: float = WIDTH
    height: float = HEIGHT
    left: float = LEFT
    right: float = WIDTH - RIGHT
    top: float = TOP
    bottom: float = HEIGHT - BOTTOM


@dataclass(frozen=True, kw_only=True)
class HeatCell:
    """A cell, by its upper left corner; opacity 0 to 1."""

    x: float
    y: float
    opacity: float
    title: str


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """A heat map: layers down, heads across.

    Attributes:
        side: Width of a cell; `tall`: its height, None where it is a square.
        low, high: The ends of the scale, in words.
    """

    title: str
    cells: tuple[HeatCell, ...]
    side: float
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    low: str
    high: str
    width: float
    height: float
    tall: float | None = None


@dataclass(frozen=True, kw_only=True)
class ChannelChart:
    """max |x| by channel: one stem a channel (or a few), the largest named.

    Attributes:
        stems: SVG path data of all stems.
        marks: The largest channels; `labels` says which of them have room for their name.
        median: Height of the median channel, in SVG units.
    """

    title: str
    stems: str
    colour: int
    marks: tuple[Mark, ...]
    labels: tuple[Label, ...]
    median: float
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    note: str
    x_label: str = "channel"
    y_label: str = "max |x| (log)"
    width: float = WIDTH
    height: float = HEIGHT
    left: float = LEFT
    right: float = WIDTH - RIGHT
    top: float = TOP
    bottom: float = HEIGHT - BOTTOM


@dataclass(frozen=True, kw_only=True)
class Value:
    """A point in data units; `least` and `most` are the ends of a band."""

    x: float
    y: float
    low: float = math.nan
    high: float = math.nan
    title: str = ""
    least: float = math.nan
    most: float = math.nan


@dataclass(frozen=True, kw_only=True)
class Line:
    """A series in data units."""

    name: str
    colour: int
    style: int
    values: tuple[Value, ...]
    hollow: bool = False
    thin: bool = False


def hues(run: Run) -> list[str]:
    """Returns the models in one order for all pictures: a model keeps its hue.

    Several seeds of one model have one, under the name of their group.
    """
    names = labels([found.result.model for found in run.stats])
    return list(dict.fromkeys([*names, *hue_names(run).values()]))


def heat_map(
    title: str,
    values: Mapping[tuple[int, int], tuple[float, str]],
    *,
    scale: tuple[float, float] | None = None,
    words: Callable[[float], str] = number,
) -> HeatMap:
    """Returns the picture of (layer, head) -> (value, tooltip); only layers that are there.

    Without `scale` the ends are the smallest and the largest value; values that are not finite
    leave a hole. `words` writes the ends of the scale.
    """
    layers = sorted({layer for layer, _ in values})
    heads = 1 + max(head for _, head in values)
    finite = [value for value, _ in values.values() if math.isfinite(value)] or [0.0]
    low, high = scale or (min(finite), max(finite))
    left, top, bottom = 34.0, 6.0, 36.0
    tall = max(5.0, min(22.0, 264.0 / len(layers)))
    side = min(6 * tall, 60.0, (WIDTH - left - 6.0) / heads)
    tall = min(tall, max(side, 12.0))
    cells = tuple(
        HeatCell(
            x=rounded(left + head * side),
            y=rounded(top + layers.index(layer) * tall),
            opacity=rounded(0.06 + 0.94 * (value - low) / (high - low)) if high > low else 0.5,
            title=tooltip,
        )
        for (layer, head), (value, tooltip) in sorted(values.items())
        if math.isfinite(value)
    )
    return HeatMap(
        title=title,
        cells=cells,
        side=rounded(side - min(1.0, side / 8)),
        tall=rounded(tall - min(1.0, tall / 8)),
        x_ticks=_index_ticks(range(heads), left, side),
        y_ticks=_index_ticks(layers, top, tall),
        low=words(low),
        high=words(high),
        width=WIDTH,
        height=rounded(top + len(layers) * tall + bottom),
    )


def _index_ticks(names: Sequence[int], start: float, side: float) -> tuple[Tick, ...]:
    step = max(1, math.ceil(18.0 / side))
    return tuple(
        Tick(at=rounded(start + (i + 0.5) * side), text=str(names[i]))
        for i in range(0, len(names), step)
    )


def line_chart(
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_names: Sequence[str],
    lines: Sequence[Line],
    log: bool,
    rules: Sequence[tuple[float, str]] = (),
    reach: Sequence[float] = (),
    width: float = WIDTH,
    height: float = HEIGHT,
) -> LineChart:
    """Returns the picture; values that are not finite (or not positive on a log axis) are noted.

    `reach`: values that the axis holds though no line has them, e.g. those of a chart beside.
    """

    def drawable(y: float) -> bool:
        return math.isfinite(y) and (y > 0 or not log)

    def scaled(y: float) -> float:
        return math.log10(y) if log else y

    shown = [v for line in lines for v in line.values if drawable(v.y)]
    held = [y for v in shown for y in (v.y, v.low, v.high, v.least, v.most)]
    held += [*reach, *(y for y, _ in rules)]
    ends = [scaled(y) for y in held if drawable(y)] or [0.0, 1.0]
    low, high = min(ends), max(ends)
    pad = 0.06 * (high - low) or 0.5
    low, high = low - pad, high + pad
    heights = {y: tick_text(y) for y in nice_ticks(low, high, log) if drawable(y)}
    left = left_of(heights.values())
    x_span = (width - RIGHT - left) / max(1, len(x_names))
    y_span = height - BOTTOM - TOP

    def to_x(x: float) -> float:
        return rounded(left + (x + 0.5) * x_span)

    def to_y(y: float) -> float:
        return rounded(TOP + (high - scaled(y)) / (high - low) * y_span)

    series = []
    for line in lines:
        marks = tuple(
            Mark(
                x=to_x(v.x),
                y=to_y(v.y),
                low=to_y(v.low) if drawable(v.low) and drawable(v.high) else None,
                high=to_y(v.high) if drawable(v.low) and drawable(v.high) else None,
                title=v.title,
            )
            for v in line.values
            if drawable(v.y)
        )
        path = " ".join(f"{'L' if i else 'M'}{mark.x} {mark.y}" for i, mark in enumerate(marks))
        band = [v for v in line.values if all(map(drawable, (v.y, v.least, v.most)))]
        edge = [(v.x, v.most) for v in band] + [(v.x, v.least) for v in reversed(band)]
        area = " ".join(f"{'L' if i else 'M'}{to_x(x)} {to_y(y)}" for i, (x, y) in enumerate(edge))
        series.append(
            Series(
                name=line.name,
                colour=line.colour,
                style=line.style,
                path=path,
                marks=marks,
                area=f"{area}Z" if area else "",
                hollow=line.hollow,
                thin=line.thin,
            )
        )
    left_out = sum(len(line.values) for line in lines) - len(shown)
    return LineChart(
        title=title,
        x_label=x_label,
        y_label=y_label,
        x_ticks=tuple(Tick(at=to_x(i), text=name) for i, name in enumerate(x_names) if name),
        y_ticks=tuple(Tick(at=to_y(y), text=text) for y, text in heights.items()),
        series=tuple(series),
        width=width,
        height=height,
        left=left,
        right=width - RIGHT,
        bottom=height - BOTTOM,
        note=f"{left_out} values are not finite and not drawn." if left_out else "",
        rules=tuple(Tick(at=to_y(y), text=words) for y, words in rules if drawable(y)),
    )


def left_of(ticks: Iterable[str]) -> float:
    """Returns where the axis stands, so that no tick's text reaches the title beside it."""
    return rounded(max([LEFT, *(TITLE_END + 6.0 + text_width(text) for text in ticks)]))


def tick_text(value: float) -> str:
    """Returns a round number as an axis shows it."""
    return f"{value:,.10g}" if 1e-3 <= abs(value) < 1e6 else f"{value:g}"


def nice_ticks(low: float, high: float, log: bool) -> list[float]:
    """Returns about five round values between the ends (log10 of the ends where `log`)."""
    if log:
        decades = range(math.floor(low), math.floor(high) + 1)
        for steps in ((1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
            ticks = [m * 10.0**e for e in decades for m in steps]
            ticks = [tick for tick in ticks if low <= math.log10(tick) <= high]
            if 3 <= len(ticks) <= 8:
                return ticks
        if high - low > 2:
            return ticks[:: math.ceil(len(ticks) / 8)]
    first, last = (10.0**low, 10.0**high) if log else (low, high)
    raw = (last - first) / 4
    base = 10.0 ** math.floor(math.log10(raw))
    step_size = min((m * base for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - raw))
    start = math.ceil(first / step_size)
    count = math.floor(last / step_size) - start + 1
    return [(start + i) * step_size for i in range(count)]


def rounded(value: float) -> float:
    """Returns SVG units to two decimals: small files, and the same bytes everywhere."""
    return round(value, 2)
