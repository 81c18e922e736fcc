"""The pictures of a calibration: how a tensor is distributed under its ranges, and what moved.

Below the bars of a histogram each method has a lane with its interval, so that they can be told
apart where several chose the same; the thick one is in force.
"""

from __future__ import annotations

import math
from typing import Final

import altair as alt

from quantkit.reporting.calibration_groups import calibrations, chosen, methods, worst_first
from quantkit.reporting.charts import TICK_FORMAT, Line, Value, line_chart
from quantkit.reporting.collect import Run
from quantkit.reporting.drawing import SHAPES, SMALL_WIDTH, Chart, Panel, data_of, together
from quantkit.reporting.svg import Spec
from quantkit.reporting.text import clipped, decibels, interval, number, printable, small_share
from quantkit.reporting.theme import LIGHT, hue
from quantkit.results import Calibration, DrawnHistogram, MethodRange, TensorDiagnosis

BINS: Final = 72
"""Bars a picture has at most; neighbouring bins of the file are added up."""
_SHOWN: Final = 9
"""Tensors of a calibration that are drawn, the worst."""
_BARS: Final = 110
_LANE: Final = 14
"""Pixels, high."""
_LANE_CHARACTERS: Final = 16
_STYLES: Final = 4
_MOVED: Final = 4
_FINE: Final = 60  # slots of the sample axis, which is logarithmic
_FLOOR: Final = 1e-4  # percent: where nothing is drawn that moved


def histogram_charts(run: Run) -> tuple[Chart, ...]:
    """Returns the histograms of each calibration's worst tensors, the worst first."""
    order = methods(run)
    found = []
    for name, calibration in calibrations(run):
        tensors = worst_first(calibration)[:_SHOWN]
        drawn = [t for t in tensors if _is_drawable(t.histogram)]
        missing = [t.name for t in tensors if not _is_drawable(t.histogram)]
        if not drawn:
            continue
        of = f" of {name}" if len(run.calibrations) > 1 else ""
        note = (
            "Counts are logarithmic. Shaded: the 99.9 % span. Lanes below the bars: each method's "
            "range; the thick one is in force."
        )
        if missing:
            note += f" Without a histogram: {', '.join(missing)}."
        title = f"Histograms and ranges of the {len(drawn)} worst tensors{of}"
        panels = [_histogram(tensor, order) for tensor in drawn]
        found.append(together("calibration-histograms", title, panels, note=note))
    return tuple(found)


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


def _histogram(tensor: TensorDiagnosis, order: list[str]) -> Panel:
    merged = _merged(tensor.histogram)
    known = [m for m in tensor.methods if math.isfinite(m.lo) and math.isfinite(m.hi)]
    places = [merged.edges[0], merged.edges[-1], *(x for m in known for x in (m.lo, m.hi))]
    low, high = min(places), max(places)
    pad = 0.03 * (high - low) or 0.5 * abs(high) or 0.5
    scale = alt.Scale(domain=[low - pad, high + pad], nice=False, zero=False)
    lanes = sorted(known, key=lambda m: order.index(m.method))
    bars = _bars(tensor, merged, scale)
    names = [printable(clipped(found.method, _LANE_CHARACTERS)) for found in lanes]
    y = alt.Y(
        "lane:N",
        sort=None,
        axis=alt.Axis(title=None, grid=False, labelFontSize=11),
        scale=alt.Scale(domain=names),
    )
    x = alt.X(
        "lo:Q", scale=scale, axis=alt.Axis(title=None, format=TICK_FORMAT, grid=True, tickCount=5)
    )
    layers = []
    for name, found in zip(names, lanes, strict=True):
        index = order.index(found.method)
        ink = hue(index)
        data = alt.Chart(
            data_of(
                [
                    {"lane": name, "lo": found.lo, "hi": found.hi}
                    | {"tip": printable(_method_words(found))}
                ]
            )
        )
        wide = 4.0 if found.method == tensor.chosen else 1.4
        ends = data.mark_point(
            shape=SHAPES[index % _STYLES], size=28, fill=ink, stroke=ink, opacity=1, aria=False
        )
        layers += [
            data.mark_rule(stroke=ink, strokeWidth=wide).encode(
                x=x, x2="hi:Q", y=y, description="tip:N"
            ),
            ends.encode(x=x, y=y),
            ends.encode(x=alt.X("hi:Q", scale=scale), y=y),
        ]
    spec = bars
    if layers:
        below = alt.layer(*layers).properties(width=SMALL_WIDTH, height=_LANE * len(lanes))
        spec = alt.vconcat(bars, below, spacing=4)
    return Panel(
        spec=spec,
        title=tensor.name,
        caption=_words(tensor),
        words=_description(tensor),
        rows=sum(count > 0 for count in merged.counts) + len(lanes),
    )


def _bars(tensor: TensorDiagnosis, merged: DrawnHistogram, scale: alt.Scale) -> Spec:
    """Returns the counts on a logarithmic axis that starts at half an element."""
    x = alt.X("lo:Q", scale=scale, axis=alt.Axis(title=None, labels=False, ticks=False))
    y = alt.Y(
        "n:Q",
        scale=alt.Scale(type="log", domain=[0.5, 1.2 * max(merged.counts)], nice=False),
        axis=alt.Axis(title="elements (log)", format="~s", tickCount=4),
    )
    rows = [
        {
            "lo": start,
            "hi": end,
            "n": count,
            "base": 0.5,
            "tip": f"{number(start)} to {number(end)}: {count:,} elements",
        }
        for start, end, count in zip(
            merged.edges[:-1], merged.edges[1:], merged.counts, strict=True
        )
        if count > 0
    ]
    layers = []
    if math.isfinite(tensor.span_lo) and math.isfinite(tensor.span_hi):
        layers.append(
            alt.Chart(data_of([{"lo": tensor.span_lo, "hi": tensor.span_hi}]))
            .mark_rect(fill=LIGHT["rule"], fillOpacity=0.6, aria=False)
            .encode(x=x, x2="hi:Q")
        )
    layers.append(
        alt.Chart(data_of(rows))
        .mark_rect(fill=LIGHT["soft"], fillOpacity=0.75, stroke=LIGHT["soft"], strokeWidth=0.8)
        .encode(x=x, x2="hi:Q", y=y, y2="base:Q", description="tip:N")
    )
    return alt.layer(*layers).properties(width=SMALL_WIDTH, height=_BARS)


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


def stability_charts(run: Run) -> tuple[Chart, ...]:
    """Returns how far ranges moved against the samples: all tensors, and those that moved most."""
    charts = [_stability_chart(run, name, found) for name, found in calibrations(run)]
    return tuple(chart for chart in charts if chart is not None)


def _stability_chart(run: Run, name: str, calibration: Calibration) -> Chart | None:
    whole = calibration.stability
    curves: list[tuple[str, list[tuple[float, float]]]] = [
        ("all tensors: most", [(p.samples, p.moved_max_frac) for p in whole]),
        ("all tensors: median", [(p.samples, p.moved_median_frac) for p in whole]),
        *((tensor.name, _pairs(tensor)) for tensor in _most_moved(calibration)),
    ]
    curves = [(words, [pair for pair in pairs if pair[0] > 0]) for words, pairs in curves]
    curves = [(words, pairs) for words, pairs in curves if pairs]
    counts = sorted({samples for _, pairs in curves for samples, _ in pairs})
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
        lines.append(Line(name=words, colour=i, style=i % _STYLES, values=tuple(values)))
    names = [""] * (_FINE if len(counts) > 1 else 1)
    for samples in counts:
        at = round(slot(samples))
        if not any(names[max(0, at - 5) : at]):
            names[at] = f"{samples:,.10g}"
    of = f" of {name}" if len(run.calibrations) > 1 else ""
    return line_chart(
        title=f"How far ranges moved against the samples{of}",
        x_label="samples (log)",
        y_label="moved, % of the range (log)",
        x_names=names,
        lines=lines,
        log=True,
        note=f"Drawn at {_FLOOR:g} %: ranges that did not move." if still else "",
    )


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
