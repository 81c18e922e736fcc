"""The tables of every point of the model, by layer, and of the probes that saw them."""

from __future__ import annotations

from quantkit.reporting.collect import Run
from quantkit.reporting.groups import (
    EFFECTIVE,
    HIDDEN,
    LOGIT,
    MODIFIED,
    POINT_WORDS,
    of_heads,
    of_layers,
    pooled,
    top,
)
from quantkit.reporting.outlier_tables import kurtosis_range, summaries
from quantkit.reporting.text import NOT_AVAILABLE, Table, number, share
from quantkit.results import GroupStats, Stats

_ALWAYS = (LOGIT, HIDDEN)
_ATTENTION = (LOGIT, MODIFIED, EFFECTIVE)
_SHOWN_RANKS = (1, 2, 3, 100)


def points_table(run: Run) -> Table:
    """Returns one row a model and further point, all layers pooled; empty without such points."""
    rows = []
    for name, stats in summaries(run):
        for point in stats.points:
            group = None if point in _ALWAYS else pooled(stats, point)
            if group is not None:
                figures = _figures(group)
                rows.append((words_of(point), name, *figures, kurtosis_range(stats, point)))
    return Table(
        title="Other points",
        columns=("activation", "model", *_columns(), "kurtosis_oft"),
        rows=tuple(rows),
        text_columns=2,
        note="All layers, heads and maps pooled; kurtosis_oft from its lowest to its highest.",
    )


def layer_tables(run: Run) -> tuple[Table, ...]:
    """Returns one table a model and activation point, a row a layer."""
    tables = []
    for name, stats in summaries(run):
        for point in stats.points:
            if point not in _ATTENTION:
                tables.append(_layer_table(name, stats, point))
    return tuple(table for table in tables if table.rows)


def _layer_table(name: str, stats: Stats, point: str) -> Table:
    rows = []
    for layer, group in of_layers(stats, point):
        channel = _worst_channel(group)
        rows.append(
            (
                str(layer),
                group.name or NOT_AVAILABLE,
                *_figures(group),
                number(group.kurtosis_oft),
                number(group.inf_norm_mean),
                number(group.channel_ratio),
                NOT_AVAILABLE if channel is None else str(channel),
            )
        )
    return Table(
        title=f"By layer: {words_of(point)} of {name}",
        columns=(
            "layer", "module", *_columns(), "kurtosis_oft", "inf_norm_mean", "channel ratio",
            "largest channel",
        ),
        rows=tuple(rows),
        text_columns=2,
    )  # fmt: skip


def head_tables(run: Run) -> tuple[Table, ...]:
    """Returns one table a model and attention point, a row a layer and map: its largest head."""
    tables = []
    for name, stats in summaries(run):
        for point in stats.points:
            if point in _ATTENTION:
                tables.append(_head_table(name, stats, point))
    return tuple(table for table in tables if table.rows)


def _head_table(name: str, stats: Stats, point: str) -> Table:
    worst: dict[tuple[int, int | None], GroupStats] = {}
    for layer, _, group in of_heads(stats, point):
        known = worst.get((layer, group.map))
        if known is None or top(group) > top(known):
            worst[layer, group.map] = group
    return Table(
        title=f"By layer: {words_of(point)} of {name}, the head with the largest",
        columns=("layer", "map", "head", *_columns(), "kurtosis_oft", "entropy", "sink rate"),
        rows=tuple(
            (
                str(layer),
                NOT_AVAILABLE if map_ is None else str(map_),
                str(group.head),
                *_figures(group),
                number(group.kurtosis_oft),
                number(group.entropy),
                share(group.sink_rate),
            )
            for (layer, map_), group in worst.items()
        ),
        text_columns=0,
    )


def hits_table(run: Run) -> Table:
    """Returns the proof of execution: every probe that fired, with calls and elements."""
    return Table(
        title="Probe hits",
        columns=("model", "point", "module", "calls", "elements"),
        rows=tuple(
            (name, hit.point, hit.name, number(hit.calls), number(hit.elements))
            for name, stats in summaries(run)
            for hit in stats.hits
        ),
        text_columns=3,
        note="Forward calls that a probe saw, and the elements that went through it.",
    )


def sampling_notes(run: Run) -> tuple[str, ...]:
    """Returns one sentence a model whose attention was sampled by rows."""
    return tuple(
        f"{name}: medians, kurtosis, entropy and spans of attention are of {stats.sampled_rows} "
        f"sampled query rows a sequence and layer (seed {stats.seed}); extremes and top-k are of "
        "all rows."
        for name, stats in summaries(run)
        if stats.sampled_rows is not None
    )


def words_of(point: str) -> str:
    """Returns a point's name in words."""
    return POINT_WORDS.get(point, point)


def _columns() -> tuple[str, ...]:
    tops = (f"top-{rank}" for rank in _SHOWN_RANKS)
    return (*tops, "median", "max", "min", "kurtosis", "99.9 % span")


def _figures(group: GroupStats) -> tuple[str, ...]:
    tops = (number(top(group, rank)) for rank in _SHOWN_RANKS)
    figures = (group.abs_median, group.max, group.min, group.kurtosis)
    return (*tops, *map(number, figures), share(group.span_999_frac))


def _worst_channel(group: GroupStats) -> int | None:
    largest = group.channel_absmax
    return max(range(len(largest)), key=largest.__getitem__) if largest else None
