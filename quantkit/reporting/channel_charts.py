"""The picture of one hidden state's channels: which of them the outliers live in."""

from __future__ import annotations

import math
from typing import Final

from quantkit.reporting import charts
from quantkit.reporting.charts import (
    COLOURS,
    ChannelChart,
    Label,
    Mark,
    Tick,
    hues,
    nice_ticks,
    rounded,
    tick_text,
)
from quantkit.reporting.collect import Run
from quantkit.reporting.groups import HIDDEN, by_size, of_layers
from quantkit.reporting.outlier_tables import summaries
from quantkit.reporting.text import number
from quantkit.results import GroupStats

_NAMED: Final = 5
_STEMS: Final = 400
"""Stems a picture has at most; of more channels each stem shows the largest of a few."""


def channel_charts(run: Run) -> tuple[ChannelChart, ...]:
    """Returns max |hidden state| by channel of each model's worst layer, the largest named."""
    found = []
    models = hues(run)
    for name, stats in summaries(run):
        layers = by_size((i, g) for i, g in of_layers(stats, HIDDEN) if _has_channels(g))
        if layers:
            layer, group = layers[0]
            colour = models.index(name) % COLOURS
            found.append(_channel_chart(f"{name}, layer {layer}", group, colour))
    return tuple(found)


def _has_channels(group: GroupStats) -> bool:
    return any(value > 0 and math.isfinite(value) for value in group.channel_absmax)


def _channel_chart(label: str, group: GroupStats, colour: int) -> ChannelChart:
    values = group.channel_absmax
    drawn = [c for c, value in enumerate(values) if value > 0 and math.isfinite(value)]
    positive = sorted(values[channel] for channel in drawn)
    low, high = math.log10(positive[0]), math.log10(positive[-1])
    pad = 0.08 * (high - low) or 0.5
    low, high = low - pad, high + pad
    heights = {y: tick_text(y) for y in nice_ticks(low, high, True) if y > 0}
    left, right = charts.left_of(heights.values()), charts.WIDTH - charts.RIGHT
    upper, lower = charts.TOP, charts.HEIGHT - charts.BOTTOM

    def to_x(channel: float) -> float:
        return rounded(left + (channel + 0.5) / len(values) * (right - left))

    def to_y(value: float) -> float:
        return rounded(upper + (high - math.log10(value)) / (high - low) * (lower - upper))

    bins: dict[int, int] = {}
    each = math.ceil(len(values) / _STEMS)
    for channel in drawn:
        known = bins.get(channel // each)
        if known is None or values[channel] > values[known]:
            bins[channel // each] = channel
    named = sorted(drawn, key=lambda channel: -values[channel])[:_NAMED]
    largest = ", ".join(f"{channel} ({number(values[channel])})" for channel in named)
    middle = positive[(len(positive) - 1) // 2]
    return ChannelChart(
        title=f"Largest |hidden state| by channel: {label}",
        stems=" ".join(f"M{to_x(c)} {rounded(lower)}V{to_y(values[c])}" for c in bins.values()),
        colour=colour,
        marks=tuple(
            Mark(
                x=to_x(channel),
                y=to_y(values[channel]),
                low=None,
                high=None,
                title=f"{label}, channel {channel}: {number(values[channel])}",
            )
            for channel in named
        ),
        labels=_labels([(to_x(c), to_y(values[c]), str(c)) for c in named], left, right),
        median=to_y(middle),
        x_ticks=tuple(
            Tick(at=to_x(c), text=str(int(c)))
            for c in nice_ticks(0, len(values) - 1, False)
            if c == int(c)
        ),
        y_ticks=tuple(Tick(at=to_y(y), text=text) for y, text in heights.items()),
        left=left,
        note=f"Largest channels: {largest}. The dashed line is the median channel, "
        f"{number(middle)}; ratio {number(group.channel_ratio)}.",
    )


def _labels(places: list[tuple[float, float, str]], left: float, right: float) -> tuple[Label, ...]:
    """Returns the names that fit, the largest channel first; one that would overlap is left out."""
    kept: list[Label] = []
    for x, y, text in places:
        half = 4.0 * len(text)
        at = min(max(x, left + half), right - half)
        label = Label(x=rounded(at), y=rounded(y - 7.0), text=text)
        if all(abs(at - k.x) > half + 4.0 * len(k.text) or abs(label.y - k.y) > 13 for k in kept):
            kept.append(label)
    return tuple(kept)
