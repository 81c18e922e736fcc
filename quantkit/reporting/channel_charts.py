"""The picture of one hidden state's channels: which of them the outliers live in."""

from __future__ import annotations

import math
from typing import Final

import altair as alt

from quantkit.reporting.charts import TICK_FORMAT, nice_ticks
from quantkit.reporting.collect import Run
from quantkit.reporting.drawing import HEIGHT, WIDTH, Chart, Panel, data_of, together
from quantkit.reporting.groups import HIDDEN, by_size, of_layers
from quantkit.reporting.hues import hues
from quantkit.reporting.outlier_tables import summaries
from quantkit.reporting.text import number
from quantkit.reporting.theme import LIGHT, hue
from quantkit.results import GroupStats

_NAMED: Final = 5
_STEMS: Final = 400
"""Stems a picture has at most; of more channels each stem shows the largest of a few."""


def channel_charts(run: Run) -> tuple[Chart, ...]:
    """Returns max |hidden state| by channel of each model's worst layer, the largest named."""
    found = []
    models = hues(run)
    for name, stats in summaries(run):
        layers = by_size((i, g) for i, g in of_layers(stats, HIDDEN) if _has_channels(g))
        if layers:
            layer, group = layers[0]
            colour = models.index(name)
            found.append(_channel_chart(f"{name}, layer {layer}", group, colour))
    return tuple(found)


def _has_channels(group: GroupStats) -> bool:
    return any(value > 0 and math.isfinite(value) for value in group.channel_absmax)


def _channel_chart(label: str, group: GroupStats, colour: int) -> Chart:
    values = group.channel_absmax
    drawn = [c for c, value in enumerate(values) if value > 0 and math.isfinite(value)]
    positive = sorted(values[channel] for channel in drawn)
    pad = (positive[-1] / positive[0]) ** 0.08 if positive[-1] > positive[0] else 3.0
    low, high = positive[0] / pad, positive[-1] * pad
    largest_of: dict[int, int] = {}
    each = math.ceil(len(values) / _STEMS)
    for channel in drawn:
        known = largest_of.get(channel // each)
        if known is None or values[channel] > values[known]:
            largest_of[channel // each] = channel
    named = sorted(drawn, key=lambda channel: -values[channel])[:_NAMED]
    middle = positive[(len(positive) - 1) // 2]
    x = alt.X(
        "c:Q",
        scale=alt.Scale(domain=[-1, len(values)], nice=False),
        axis=alt.Axis(title="channel", format=",d", tickMinStep=1),
    )
    y = alt.Y(
        "v:Q",
        scale=alt.Scale(type="log", domain=[low, high], nice=False),
        axis=alt.Axis(
            title="max |x| (log)", values=nice_ticks(low, high, True), format=TICK_FORMAT
        ),
    )
    stems = [{"c": c, "v": values[c], "low": low} for c in largest_of.values()]
    marks = [
        {
            "c": c,
            "v": values[c],
            "words": str(c),
            "tip": f"{label}, channel {c}: {number(values[c])}",
        }
        for c in named
    ]
    ink = hue(colour)
    spec = alt.layer(
        alt.Chart(data_of(stems))
        .mark_rule(stroke=ink, strokeWidth=1, aria=False)
        .encode(x=x, y=y, y2="low:Q"),
        alt.Chart(data_of([{"v": middle}]))
        .mark_rule(stroke=LIGHT["ink"], strokeDash=[5, 4], aria=False)
        .encode(y=y),
        alt.Chart(data_of(marks))
        .mark_point(shape="circle", size=46, fill=ink, stroke=ink, opacity=1)
        .encode(x=x, y=y, description="tip:N"),
        alt.Chart(data_of(_apart(named, values, high / low)))
        .mark_text(dy=-9, fontWeight=600, aria=False)
        .encode(x=x, y=y, text="words:N"),
    ).properties(width=WIDTH, height=HEIGHT)
    largest = ", ".join(f"{channel} ({number(values[channel])})" for channel in named)
    title = f"Largest |hidden state| by channel: {label}"
    note = (
        f"Largest channels: {largest}. The dashed line is the median channel, {number(middle)}; "
        f"ratio {number(group.channel_ratio)}."
    )
    panel = Panel(spec=spec, words=f"max |x| (log) against channel. {note}", rows=len(marks))
    return together("", title, [panel], note=note)


def _apart(named: list[int], values: list[float], reach: float) -> list[dict[str, float | str]]:
    """Returns the names that do not meet, the largest channel first."""
    kept: list[int] = []
    for channel in named:
        wide = 0.03 * len(values)
        if all(
            abs(channel - other) > wide
            or abs(math.log(values[channel] / values[other])) > 0.07 * math.log(reach)
            for other in kept
        ):
            kept.append(channel)
    return [{"c": c, "v": values[c], "words": str(c)} for c in kept]
