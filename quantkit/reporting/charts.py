"""The geometry of the report's pictures; templates draw it as inline SVG.

Colour tells the model, dash and marker tell the granularity (or top-1 from median), so that a
picture can also be read without colour. A heat map is one hue whose opacity is the value, which
works on a light and on a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.recipe import LOGIT_GRANULARITIES
from quantkit.reporting.collect import Run, labels
from quantkit.reporting.tables import sweep_rows
from quantkit.reporting.text import number

COLOURS = 8
"""Number of hues in the style sheet (`--c0` to `--c7`); further models start over."""
WIDTH, HEIGHT = 480.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 12.0, 12.0, 44.0


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
class Series:
    """A line: `path` is SVG path data; `style` picks dash and marker, `colour` the hue."""

    name: str
    colour: int
    style: int
    path: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """A line chart; `key` lists (name, colour, style) of the legend."""

    title: str
    x_label: str
    y_label: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    series: tuple[Series, ...]
    note: str = ""
    width: float = WIDTH
    height: float = HEIGHT
    left: float = LEFT
    right: float = WIDTH - RIGHT
    top: float = TOP
    bottom: float = HEIGHT - BOTTOM


@dataclass(frozen=True, kw_only=True)
class HeatCell:
    """A square; opacity 0 to 1."""

    x: float
    y: float
    opacity: float
    title: str


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """A heat map: layers down, heads across."""

    title: str
    cells: tuple[HeatCell, ...]
    side: float
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    low: str
    high: str
    width: float
    height: float


@dataclass(frozen=True, kw_only=True)
class _Value:
    """A point in data units."""

    x: float
    y: float
    low: float = math.nan
    high: float = math.nan
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class _Line:
    name: str
    colour: int
    style: int
    values: tuple[_Value, ...]


def sweep_charts(run: Run) -> tuple[LineChart, ...]:
    """Returns a picture of the metric against the bits for every task."""
    rows = sweep_rows(cell for found in run.sweeps for cell in found.result.cells)
    models = _hues(run)
    charts = []
    for task, linear in dict.fromkeys((key[1], key[2]) for key in rows):
        mine = {key: row for key, row in rows.items() if key[1:3] == (task, linear)}
        bits = sorted({width for row in mine.values() for width in row}, reverse=True)
        if len(bits) < 2:
            continue
        lines = []
        for (model, _, _, granularity), row in mine.items():
            word = granularity.split(" ")[0]
            style = LOGIT_GRANULARITIES.index(word) if word in LOGIT_GRANULARITIES else 3
            values = tuple(
                _Value(
                    x=bits.index(width),
                    y=cell.value,
                    low=cell.ci_low,
                    high=cell.ci_high,
                    title=f"{model}, {granularity}, {width} bits: {number(cell.value)} "
                    f"[{number(cell.ci_low)}, {number(cell.ci_high)}]",
                )
                for width, cell in sorted(row.items(), reverse=True)
            )
            colour = models.index(model) % COLOURS
            name = f"{model}, {granularity}"
            lines.append(_Line(name=name, colour=colour, style=style, values=values))
        perplexity = "perplexity" in task
        layers = "" if linear == "float" else f" ({linear} linear layers)"
        charts.append(
            _line_chart(
                title=f"{task} against bits of the attention logits{layers}",
                x_label="bits (16 = not quantized)",
                y_label=f"{task}{' (log)' if perplexity else ''}",
                x_names=tuple(str(width) for width in bits),
                lines=lines,
                log=perplexity,
            )
        )
    return tuple(charts)


def depth_chart(run: Run) -> LineChart | None:
    """Returns top-1 and median of |hidden state| by layer, or None without per-layer figures."""
    lines = []
    names = labels([found.result.model for found in run.stats])
    models = _hues(run)
    depth = 0
    for name, found in zip(names, run.stats, strict=True):
        groups = [
            group
            for group in found.result.points.get("hidden_state", [])
            if group.token_class == "all"
        ]
        groups.sort(key=lambda group: group.layer)
        depth = max([depth, *(group.layer + 1 for group in groups)])
        for style, what in enumerate(("top-1", "median")):
            pairs = [
                (g.layer, g.abs_top.get("1", math.nan) if what == "top-1" else g.abs_median)
                for g in groups
            ]
            values = tuple(
                _Value(x=x, y=y, title=f"{name}, layer {x}, {what}: {number(y)}") for x, y in pairs
            )
            line = _Line(
                name=f"{name}, {what}",
                colour=models.index(name) % COLOURS,
                style=style,
                values=values,
            )
            lines.append(line)
    if depth == 0:
        return None
    step = max(1, math.ceil(depth / 12))
    return _line_chart(
        title="Hidden states over depth",
        x_label="layer",
        y_label="|hidden state| (log)",
        x_names=tuple(str(i) if i % step == 0 else "" for i in range(depth)),
        lines=lines,
        log=True,
    )


def _hues(run: Run) -> list[str]:
    """Returns the models in one order for all pictures: a model keeps its hue."""
    names = labels([found.result.model for found in run.stats])
    return list(
        dict.fromkeys([*names, *(c.model for found in run.sweeps for c in found.result.cells)])
    )


def heat_maps(run: Run) -> tuple[HeatMap, ...]:
    """Returns layer x head maps of max |logit|, one a model and attention map."""
    maps = []
    names = labels([found.result.model for found in run.stats])
    for name, found in zip(names, run.stats, strict=True):
        groups = [
            group
            for group in found.result.points.get("attention_logit", [])
            if group.token_class == "all" and group.head is not None
        ]
        for which in sorted({group.map for group in groups}, key=lambda m: (m is None, m or 0)):
            values = {
                (group.layer, group.head or 0): group.abs_top.get("1", math.nan)
                for group in groups
                if group.map == which
            }
            label = name if which is None or found.result.model.maps < 2 else f"{name}, map {which}"
            maps.append(_heat_map(label, values))
    return tuple(maps)


def _heat_map(name: str, values: dict[tuple[int, int], float]) -> HeatMap:
    layers = 1 + max(layer for layer, _ in values)
    heads = 1 + max(head for _, head in values)
    finite = [value for value in values.values() if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    left, top, bottom = 34.0, 6.0, 36.0
    side = min(26.0, (WIDTH - left - 6.0) / heads)
    cells = tuple(
        HeatCell(
            x=_round(left + head * side),
            y=_round(top + layer * side),
            opacity=_round(0.06 + 0.94 * (value - low) / (high - low)) if high > low else 0.5,
            title=f"{name}, layer {layer}, head {head}: {number(value)}",
        )
        for (layer, head), value in sorted(values.items())
        if math.isfinite(value)
    )
    return HeatMap(
        title=f"Largest |attention logit| by layer and head: {name}",
        cells=cells,
        side=_round(side - min(1.0, side / 8)),
        x_ticks=_index_ticks(heads, left, side),
        y_ticks=_index_ticks(layers, top, side),
        low=number(low),
        high=number(high),
        width=WIDTH,
        height=_round(top + layers * side + bottom),
    )


def _index_ticks(count: int, start: float, side: float) -> tuple[Tick, ...]:
    step = max(1, math.ceil(18.0 / side))
    return tuple(
        Tick(at=_round(start + (i + 0.5) * side), text=str(i)) for i in range(0, count, step)
    )


def _line_chart(
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_names: Sequence[str],
    lines: Sequence[_Line],
    log: bool,
) -> LineChart:
    """Returns the picture; values that are not finite (or not positive on a log axis) are noted."""

    def drawable(y: float) -> bool:
        return math.isfinite(y) and (y > 0 or not log)

    def scaled(y: float) -> float:
        return math.log10(y) if log else y

    shown = [v for line in lines for v in line.values if drawable(v.y)]
    ends = [scaled(y) for v in shown for y in (v.y, v.low, v.high) if drawable(y)] or [0.0, 1.0]
    low, high = min(ends), max(ends)
    pad = 0.06 * (high - low) or 0.5
    low, high = low - pad, high + pad
    x_span = (WIDTH - RIGHT - LEFT) / max(1, len(x_names))
    y_span = HEIGHT - BOTTOM - TOP

    def to_x(x: float) -> float:
        return _round(LEFT + (x + 0.5) * x_span)

    def to_y(y: float) -> float:
        return _round(TOP + (high - scaled(y)) / (high - low) * y_span)

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
        series.append(
            Series(name=line.name, colour=line.colour, style=line.style, path=path, marks=marks)
        )
    left_out = sum(len(line.values) for line in lines) - len(shown)
    return LineChart(
        title=title,
        x_label=x_label,
        y_label=y_label,
        x_ticks=tuple(Tick(at=to_x(i), text=name) for i, name in enumerate(x_names) if name),
        y_ticks=tuple(
            Tick(at=to_y(y), text=f"{y:,.10g}" if 1e-3 <= abs(y) < 1e6 else f"{y:g}")
            for y in _nice(low, high, log)
            if drawable(y)
        ),
        series=tuple(series),
        note=f"{left_out} values are not finite and not drawn." if left_out else "",
    )


def _nice(low: float, high: float, log: bool) -> list[float]:
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


def _round(value: float) -> float:
    return round(value, 2)
