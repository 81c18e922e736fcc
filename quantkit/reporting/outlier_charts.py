"""The pictures of a model's outliers: by depth, by layer and head, by channel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from quantkit.reporting.charts import Line, Value, heat_map, line_chart
from quantkit.reporting.collect import Run
from quantkit.reporting.drawing import Chart
from quantkit.reporting.groups import (
    EFFECTIVE,
    HIDDEN,
    LOGIT,
    MODIFIED,
    ends,
    of_heads,
    of_layers,
    top,
)
from quantkit.reporting.hues import hues
from quantkit.reporting.outlier_tables import summaries
from quantkit.reporting.text import number, quoted, share
from quantkit.results import GroupStats, Stats

_RANKS: Final = ("1", "2", "3")
_CLASSES: Final = (("first", "first token"), ("others", "other tokens"))


@dataclass(frozen=True, kw_only=True)
class _Point:
    """One value of one layer, with the ends of its whisker."""

    layer: int
    value: float
    low: float = math.nan
    high: float = math.nan


def depth_charts(run: Run) -> tuple[Chart, ...]:
    """Returns top-1, 2, 3 and median of |hidden state| by layer, one picture a token class."""
    models = summaries(run)
    found = []
    classes = _CLASSES if any(of_layers(s, HIDDEN, "first") for _, s in models) else (("all", ""),)
    for token_class, words in classes:
        lines = []
        for name, stats in models:
            groups = of_layers(stats, HIDDEN, token_class)
            for style, rank in enumerate(_RANKS):
                points = [_Point(layer=i, value=g.abs_top.get(rank, math.nan)) for i, g in groups]
                lines.append((name, f"top-{rank}", style, points))
            points = [_Point(layer=layer, value=group.abs_median) for layer, group in groups]
            lines.append((name, "median", 3, points))
        title = f"Hidden states over depth{': ' if words else ''}{words}"
        found.append(_by_layer(run, title, "|hidden state| (log)", lines, log=True))
    return tuple(chart for chart in found if chart is not None)


def entropy_chart(run: Run) -> Chart | None:
    """Returns the entropy of attention by layer: mean over heads, whiskers from end to end."""
    lines = []
    for name, stats in summaries(run):
        for style, (point, map_) in enumerate(_maps(stats, (MODIFIED, LOGIT))):
            points = _over_heads(stats, point, map_, lambda group: group.entropy)
            label = f"map {map_}" if stats.model.maps > 1 else "entropy"
            lines.append((name, label, style, points))
        if of_heads(stats, EFFECTIVE):
            points = _over_heads(stats, EFFECTIVE, None, lambda group: group.entropy)
            lines.append((name, "effective map", 2, points))
    y_label = "nats; whiskers: lowest, highest head"
    return _by_layer(run, "Entropy of attention over depth", y_label, lines)


def _maps(stats: Stats, points: Iterable[str]) -> list[tuple[str, int | None]]:
    """Returns (point, map) of the first of the points whose heads have an entropy."""
    for point in points:
        maps = {g.map for _, _, g in of_heads(stats, point) if g.entropy is not None}
        if maps:
            return [(point, map_) for map_ in sorted(maps, key=lambda m: m or 0)]
    return []


def _over_heads(
    stats: Stats, point: str, map_: int | None, of: Callable[[GroupStats], float | None]
) -> list[_Point]:
    """Returns mean, lowest and highest over the heads of each layer."""
    layers: dict[int, list[float]] = {}
    for layer, _, group in of_heads(stats, point):
        value = of(group)
        if group.map == map_ and value is not None and not math.isnan(value):
            layers.setdefault(layer, []).append(value)
    return [
        _Point(layer=layer, value=sum(v) / len(v), low=min(v), high=max(v))
        for layer, v in layers.items()
    ]


def lambda_chart(run: Run) -> Chart | None:
    """Returns lambda, row sums and negative share by layer of the differential models."""
    lines = []
    for name, stats in summaries(run):
        parts = stats.differential
        if parts:
            lambdas = [
                _Point(layer=p.layer, value=p.lambda_mean, low=p.lambda_min, high=p.lambda_max)
                for p in parts
            ]
            sums = [_Point(layer=p.layer, value=p.row_sum) for p in parts]
            negative = [_Point(layer=p.layer, value=p.negative_frac) for p in parts]
            lines += [
                (name, "lambda", 0, lambdas),
                (name, "row sum", 1, sums),
                (name, "share of negative weights", 2, negative),
            ]
    return _by_layer(run, "Differential attention over depth", "value", lines)


def _by_layer(
    run: Run,
    title: str,
    y_label: str,
    lines: list[tuple[str, str, int, list[_Point]]],
    *,
    log: bool = False,
) -> Chart | None:
    """Returns a picture of (model, what, style, points) over the layers, or None without any."""
    layers = sorted({point.layer for *_, points in lines for point in points})
    if not layers:
        return None
    models = hues(run)
    step = max(1, math.ceil(len(layers) / 12))
    return line_chart(
        title=title,
        x_label="layer",
        y_label=y_label,
        x_names=tuple(str(name) if i % step == 0 else "" for i, name in enumerate(layers)),
        lines=[
            Line(
                name=f"{model}, {what}",
                colour=models.index(model),
                style=style,
                values=tuple(
                    Value(
                        x=layers.index(point.layer),
                        y=point.value,
                        low=point.low,
                        high=point.high,
                        title=_tooltip(model, what, point),
                    )
                    for point in points
                ),
            )
            for model, what, style, points in lines
            if points
        ],
        log=log,
    )


def _tooltip(model: str, what: str, point: _Point) -> str:
    text = f"{model}, layer {point.layer}, {what}: {number(point.value)}"
    if math.isnan(point.low) or point.low == point.high:
        return text
    return f"{text} [{number(point.low)}, {number(point.high)}]"


def heat_maps(run: Run) -> tuple[Chart, ...]:
    """Returns layer x head maps: max |logit| of each attention map, then the sink rate."""
    found = []
    for name, stats in summaries(run):
        for point, words in ((LOGIT, "attention logit"), (MODIFIED, "modified logit")):
            groups = of_heads(stats, point)
            span = ends(top(group) for *_, group in groups)
            for map_ in sorted({group.map for *_, group in groups}, key=lambda m: m or 0):
                many = map_ is not None and stats.model.maps > 1
                label = f"{name}, map {map_}" if many else name
                values = {
                    (layer, head): (top(group), _logit_tooltip(label, layer, head, group))
                    for layer, head, group in groups
                    if group.map == map_
                }
                title = f"Largest |{words}| by layer and head: {label}"
                found.append(heat_map(title, values, scale=span))
        sinks = {
            (layer, head): (group.sink_rate, _sink_tooltip(name, layer, head, group))
            for point in (LOGIT, EFFECTIVE)
            for layer, head, group in of_heads(stats, point)
            if group.sink_rate is not None and not math.isnan(group.sink_rate)
        }
        if sinks:
            title = f"Sink rate by layer and head: {name}"
            found.append(heat_map(title, sinks, scale=(0.0, 1.0), words=share))
    return tuple(found)


def _logit_tooltip(label: str, layer: int, head: int, group: GroupStats) -> str:
    text = f"{label}, layer {layer}, head {head}: {number(top(group))}"
    if not group.top:
        return text
    entry = group.top[0]
    asks, token = (
        f" {quoted(one)}" if one is not None else "" for one in (entry.query_token, entry.token)
    )
    return (
        f"{text} (value {number(entry.value)}, query {entry.position}{asks}, key "
        f"{entry.key}{token}, sequence {entry.sequence})"
    )


def _sink_tooltip(label: str, layer: int, head: int, group: GroupStats) -> str:
    return (
        f"{label}, layer {layer}, head {head}: {share(group.sink_rate)} of the sequences; mean "
        f"attention to the first token {share(group.first_token_attention)}"
    )
