"""The pictures of a calibration: how a tensor is distributed under its ranges, and what moved.

A histogram has one lane a method below it, in the order of the legend: the method's interval with
a mark at each end, from which lines rise through the bars. Lane number, mark and dash tell the
methods apart without colour, also where several chose the same interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from quantkit.reporting.calibration_groups import (
    WORST,
    calibrations,
    chosen,
    methods,
    worst_first,
)
from quantkit.reporting.charts import (
    COLOURS,
    Line,
    LineChart,
    Tick,
    Value,
    line_chart,
    nice_ticks,
    rounded,
    tick_text,
)
from quantkit.reporting.collect import Run
from quantkit.reporting.text import decibels, interval, number, small_share
from quantkit.results import Calibration, DrawnHistogram, MethodRange, TensorDiagnosis

BINS: Final = 72
"""Bars a picture has at most; neighbouring bins of the file are added up."""
_WIDTH: Final = 320.0
_LEFT, _RIGHT, _TOP, _BARS = 46.0, 10.0, 8.0, 120.0
_LANE: Final = 11.0
_GAP: Final = 14.0  # from the axis to the first lane, below the words of the axis
_STYLES: Final = 4
_MOVED: Final = 4
_FINE: Final = 60  # slots of the sample axis, which is logarithmic
_FLOOR: Final = 1e-4  # percent: where nothing is drawn that moved


@dataclass(frozen=True, kw_only=True)
class Key:
    """One method of the legend: its lane's number, hue, and mark (hollow from the fifth on)."""

    lane: int
    name: str
    colour: int
    style: int
    hollow: bool


@dataclass(frozen=True, kw_only=True)
class Bin:
    """The area that shows a bin's tooltip, as SVG path data."""

    path: str
    title: str


@dataclass(frozen=True, kw_only=True)
class Lane:
    """A method's interval: from `low` to `high` at height `y`, in SVG units."""

    key: Key
    low: float
    high: float
    y: float
    is_chosen: bool
    title: str


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """One tensor.

    Attributes:
        words: The figures of the method in force, below the name.
        description: What a reader is told who cannot see it.
        area: The bars, as SVG path data.
        span: Ends of the 99.9 % span in SVG units, or None.
    """

    title: str
    words: str
    description: str
    area: str
    bins: tuple[Bin, ...]
    lanes: tuple[Lane, ...]
    span: tuple[float, float] | None
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    height: float
    width: float = _WIDTH
    left: float = _LEFT
    right: float = _WIDTH - _RIGHT
    top: float = _TOP
    bottom: float = _TOP + _BARS


@dataclass(frozen=True, kw_only=True)
class HistogramGroup:
    """The histograms of one calibration's worst tensors, with one legend."""

    title: str
    keys: tuple[Key, ...]
    charts: tuple[Histogram, ...]
    note: str


def histogram_groups(run: Run) -> tuple[HistogramGroup, ...]:
    """Returns the histograms of each calibration's worst tensors, the worst first."""
    keys = _keys(methods(run))
    groups = []
    for name, calibration in calibrations(run):
        tensors = worst_first(calibration)[:WORST]
        drawn = [t for t in tensors if _is_drawable(t.histogram)]
        missing = [t.name for t in tensors if not _is_drawable(t.histogram)]
        if not drawn:
            continue
        of = f" of {name}" if len(run.calibrations) > 1 else ""
        note = (
            "Counts are logarithmic. Shaded: the 99.9 % span. Lanes below the bars: each method's "
            "range, in the order of the legend; the thick one is in force."
        )
        if missing:
            note += f" Without a histogram: {', '.join(missing)}."
        used = {found.method for tensor in drawn for found in tensor.methods}
        groups.append(
            HistogramGroup(
                title=f"Histograms and ranges of the {len(drawn)} worst tensors{of}",
                keys=tuple(key for key in keys.values() if key.name in used),
                charts=tuple(_histogram(tensor, keys) for tensor in drawn),
                note=note,
            )
        )
    return tuple(groups)


def _keys(names: list[str]) -> dict[str, Key]:
    return {
        name: Key(
            lane=i + 1,
            name=name,
            colour=i % COLOURS,
            style=i % _STYLES,
            hollow=i // _STYLES % 2 == 1,
        )
        for i, name in enumerate(names)
    }


def _is_drawable(histogram: DrawnHistogram) -> bool:
    edges = histogram.edges
    return (
        len(edges) == len(histogram.counts) + 1
        and all(map(math.isfinite, edges))
        and any(count > 0 for count in histogram.counts)
    )


def _merged(histogram: DrawnHistogram) -> DrawnHistogram:
    """Returns at most `BINS` bins; the last may be narrower."""
    edges, counts = histogram.edges, histogram.counts
    each = math.ceil(len(counts) / BINS)
    starts = range(0, len(counts), each)
    return DrawnHistogram(
        edges=[*(edges[start] for start in starts), edges[-1]],
        counts=[sum(counts[start : start + each]) for start in starts],
    )


def _histogram(tensor: TensorDiagnosis, keys: dict[str, Key]) -> Histogram:
    merged = _merged(tensor.histogram)
    known = [m for m in tensor.methods if math.isfinite(m.lo) and math.isfinite(m.hi)]
    places = [merged.edges[0], merged.edges[-1], *(x for m in known for x in (m.lo, m.hi))]
    low, high = min(places), max(places)
    pad = 0.03 * (high - low) or 0.5 * abs(high) or 0.5
    low, high = low - pad, high + pad
    left, right, top, bottom = _LEFT, _WIDTH - _RIGHT, _TOP, _TOP + _BARS
    tallest = math.log10(max(merged.counts))
    base = -0.3  # log10 of half an element, so that a single one can be seen

    def to_x(x: float) -> float:
        return rounded(left + (x - low) / (high - low) * (right - left))

    def to_y(count: float) -> float:
        return rounded(bottom - (math.log10(count) - base) / (tallest - base) * (bottom - top))

    bins, area = [], []
    for i, count in enumerate(merged.counts):
        if count > 0:
            start, end = merged.edges[i], merged.edges[i + 1]
            x = to_x(start)
            wide = rounded(max(to_x(end) - x, 0.8))
            area.append(f"M{x} {bottom}V{to_y(count)}h{wide}V{bottom}Z")
            title = f"{number(start)} to {number(end)}: {count:,} elements"
            bins.append(Bin(path=f"M{x} {top}h{wide}V{bottom}h-{wide}Z", title=title))
    order = sorted(known, key=lambda m: keys[m.method].lane)
    lanes = tuple(
        Lane(
            key=keys[found.method],
            low=to_x(found.lo),
            high=to_x(found.hi),
            y=rounded(bottom + _GAP + _LANE * i),
            is_chosen=found.method == tensor.chosen,
            title=_method_words(found),
        )
        for i, found in enumerate(order)
    )
    has_span = math.isfinite(tensor.span_lo) and math.isfinite(tensor.span_hi)
    return Histogram(
        title=tensor.name,
        words=_words(tensor),
        description=_description(tensor),
        area="".join(area),
        bins=tuple(bins),
        lanes=lanes,
        span=(to_x(tensor.span_lo), to_x(tensor.span_hi)) if has_span else None,
        x_ticks=_thinned([(to_x(x), tick_text(x)) for x in nice_ticks(low, high, False)]),
        y_ticks=_count_ticks(tallest, to_y),
        height=rounded(bottom + _GAP + _LANE * len(lanes) + 22),
    )


def _count_ticks(tallest: float, to_y: Callable[[float], float]) -> tuple[Tick, ...]:
    decades = range(0, math.floor(tallest) + 1, max(1, math.ceil(tallest / 4)))
    return tuple(Tick(at=to_y(10**e), text=tick_text(10**e)) for e in decades)


def _thinned(places: list[tuple[float, str]]) -> tuple[Tick, ...]:
    """Returns the ticks, only every second (third, ...) one where words have no room."""
    widest = max((7.0 * len(text) + 8 for _, text in places), default=0.0)
    gap = abs(places[1][0] - places[0][0]) if len(places) > 1 else widest
    step = max(1, math.ceil(widest / max(gap, 1.0)))
    return tuple(Tick(at=at, text=text) for at, text in places[::step])


def _method_words(found: MethodRange) -> str:
    return (
        f"{found.method}: {interval(found.lo, found.hi)}, clips {small_share(found.clipped_frac)}, "
        f"SQNR {decibels(found.sqnr_db)} dB, inliers {decibels(found.inlier_sqnr_db)} dB"
    )


def _words(tensor: TensorDiagnosis) -> str:
    wasted = f"{tensor.bits_wasted:.2f}" if math.isfinite(tensor.bits_wasted) else "n/a"
    return f"{_method_words(chosen(tensor))}; {wasted} bits wasted"


def _description(tensor: TensorDiagnosis) -> str:
    parts = [_method_words(found) for found in tensor.methods]
    return (
        f"Histogram of {tensor.count:,} elements from {number(tensor.min)} to "
        f"{number(tensor.max)}, 99.9 % span {interval(tensor.span_lo, tensor.span_hi)}. In force: "
        f"{tensor.chosen}. {'; '.join(parts)}."
    )


def stability_charts(run: Run) -> tuple[LineChart, ...]:
    """Returns how far ranges moved against the samples: all tensors, and those that moved most."""
    charts = [_stability_chart(run, name, found) for name, found in calibrations(run)]
    return tuple(chart for chart in charts if chart is not None)


def _stability_chart(run: Run, name: str, calibration: Calibration) -> LineChart | None:
    whole = calibration.stability
    curves: list[tuple[str, list[tuple[float, float]]]] = [
        ("all tensors: most", [(p.samples, p.moved_max_frac) for p in whole]),
        ("all tensors: median", [(p.samples, p.moved_median_frac) for p in whole]),
        *((tensor.name, _pairs(tensor)) for tensor in _most_moved(calibration)),
    ]
    curves = [(words, pairs) for words, pairs in curves if pairs]
    counts = sorted({samples for _, pairs in curves for samples, _ in pairs if samples > 0})
    if not counts:
        return None
    first, last = math.log(counts[0]), math.log(counts[-1])

    def slot(samples: float) -> float:
        return (math.log(samples) - first) / (last - first) * (_FINE - 1) if last > first else 0.0

    lines = []
    still = False
    for i, (words, pairs) in enumerate(curves):
        values = []
        for samples, moved in pairs:
            still = still or moved == 0
            values.append(
                Value(
                    x=slot(samples),
                    y=max(100 * moved, _FLOOR) if not math.isnan(moved) else moved,
                    title=f"{words}, {samples:,.10g} samples: moved {small_share(moved)}",
                )
            )
        lines.append(Line(name=words, colour=i % COLOURS, style=i % _STYLES, values=tuple(values)))
    names = [""] * (_FINE if len(counts) > 1 else 1)
    for samples in counts:
        at = round(slot(samples))
        if not any(names[max(0, at - 5) : at]):
            names[at] = f"{samples:,.10g}"
    of = f" of {name}" if len(run.calibrations) > 1 else ""
    chart = line_chart(
        title=f"How far ranges moved against the samples{of}",
        x_label="samples (log)",
        y_label="moved, % of the range (log)",
        x_names=names,
        lines=lines,
        log=True,
    )
    floor = f"Drawn at {_FLOOR:g} %: ranges that did not move." if still else ""
    return replace(chart, note=" ".join(text for text in (chart.note, floor) if text))


def _pairs(tensor: TensorDiagnosis) -> list[tuple[float, float]]:
    return [(pair[0], pair[1]) for pair in tensor.stability if len(pair) == 2]


def _most_moved(calibration: Calibration) -> list[TensorDiagnosis]:
    """Returns the tensors that moved most at their last sample count."""
    known = [
        (pairs[-1][1], tensor)
        for tensor in calibration.tensors
        if (pairs := _pairs(tensor)) and not math.isnan(pairs[-1][1])
    ]
    return [tensor for _, tensor in sorted(known, key=lambda pair: -pair[0])[:_MOVED]]
