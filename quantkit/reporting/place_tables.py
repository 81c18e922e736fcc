"""The tables that say where the outliers stand: layer, head, token, channel."""

from __future__ import annotations

from quantkit.reporting.collect import Run
from quantkit.reporting.groups import HIDDEN, LOGIT, by_size, of_heads, of_layers, top
from quantkit.reporting.outlier_tables import summaries
from quantkit.reporting.text import NOT_AVAILABLE, Table, number, quoted, share
from quantkit.results import Stats

MAX_ENTRIES = 10
"""Rows of a table that a page shows, of each model or of all."""


def worst_logits_table(run: Run, *, most: int = MAX_ENTRIES) -> Table:
    """Returns the heads with the largest |logit| of each model, and where it stands."""
    rows = [(name, *row) for name, stats in summaries(run) for row in _worst_logits(stats)[:most]]
    return Table(
        title="Heads with the largest |attention logit|",
        columns=("model", "key token", "value", "layer", "head", "map", "query", "key", "sequence"),
        rows=tuple(rows),
        text_columns=2,
        note=f"The {most} largest heads and maps of a model, one entry each.",
    )


def _worst_logits(stats: Stats) -> list[tuple[str, ...]]:
    rows = []
    for layer, group in by_size((layer, group) for layer, _, group in of_heads(stats, LOGIT)):
        entry = group.top[0] if group.top else None
        place = (layer, group.head, group.map)
        rows.append(
            (
                quoted(entry.token) if entry else "",
                number(entry.value if entry else top(group)),
                *map(_index, place),
                *map(_index, (entry.position, entry.key, entry.sequence) if entry else [None] * 3),
            )
        )
    return rows


def worst_states_table(run: Run, *, most: int = MAX_ENTRIES) -> Table:
    """Returns the layers with the largest |hidden state| of each model, and where it stands."""
    rows = [(name, *row) for name, stats in summaries(run) for row in _worst_states(stats)[:most]]
    return Table(
        title="Layers with the largest |hidden state|",
        columns=(
            "model", "token", "value", "layer", "position", "channel", "channel ratio", "sequence"
        ),
        rows=tuple(rows),
        text_columns=2,
        note="channel ratio: the largest channel's max |x| over the median channel's.",
    )  # fmt: skip


def _worst_states(stats: Stats) -> list[tuple[str, ...]]:
    rows = []
    for layer, group in by_size(of_layers(stats, HIDDEN)):
        entry = group.top[0] if group.top else None
        rows.append(
            (
                quoted(entry.token) if entry else "",
                number(entry.value if entry else top(group)),
                _index(layer),
                *map(_index, (entry.position, entry.channel) if entry else (None, None)),
                number(group.channel_ratio),
                _index(entry.sequence if entry else None),
            )
        )
    return rows


def massive_table(run: Run) -> Table:
    """Returns where the massive activations stand, largest first."""
    rows: list[tuple[float, tuple[str, ...]]] = []
    for name, stats in summaries(run):
        for entry in stats.summary.massive_activations.entries:
            place = (entry.layer, entry.sequence, entry.position, entry.channel)
            row = (name, quoted(entry.token), number(entry.value), *map(_index, place))
            rows.append((abs(entry.value), row))
    return Table(
        title="Massive activations",
        columns=("model", "token", "value", "layer", "sequence", "position", "channel"),
        rows=_largest(rows),
        text_columns=2,
        note=_of(rows),
    )


def token_table(run: Run) -> Table:
    """Returns where the outlier tokens stand, the largest ratio first."""
    rows: list[tuple[float, tuple[str, ...]]] = []
    for name, stats in summaries(run):
        for entry in stats.summary.outlier_tokens.entries:
            place = (entry.layer, entry.sequence, entry.position)
            row = (name, quoted(entry.token), number(entry.ratio), *map(_index, place))
            rows.append((entry.ratio, row))
    return Table(
        title="Outlier tokens",
        columns=("model", "token", "ratio", "layer", "sequence", "position"),
        rows=_largest(rows),
        text_columns=2,
        note=f"ratio: the token's largest |x| over the median token's. {_of(rows)}".rstrip(),
    )


def feature_table(run: Run) -> Table:
    """Returns the outlier features with their shares of layers and positions."""
    rows: list[tuple[float, tuple[str, ...]]] = []
    for name, stats in summaries(run):
        found = stats.summary.outlier_features
        if not found.layer_share:
            continue
        for channel, layers, positions in zip(
            found.channels, found.layer_share, found.position_share, strict=False
        ):
            rows.append((layers, (name, str(channel), share(layers), share(positions))))
    return Table(
        title="Outlier features",
        columns=("model", "channel", "layers", "positions"),
        rows=_largest(rows),
        note=_of(rows),
    )


def differential_table(run: Run) -> Table:
    """Returns lambda, row sums and negative share of every layer of the differential models."""
    return Table(
        title="Differential attention by layer",
        columns=(
            "model", "layer", "lambda", "lowest", "highest", "row sum", "negative weights"
        ),
        rows=tuple(
            (
                name,
                str(part.layer),
                *map(number, (part.lambda_mean, part.lambda_min, part.lambda_max, part.row_sum)),
                share(part.negative_frac),
            )
            for name, stats in summaries(run)
            for part in stats.differential
        ),
        note="row sum: measured mean sum of a row of softmax 1 - lambda softmax 2, so 1 - lambda; "
        "negative weights: share of the valid ones that are below zero.",
    )  # fmt: skip


def _largest(rows: list[tuple[float, tuple[str, ...]]]) -> tuple[tuple[str, ...], ...]:
    """Returns the rows with the largest keys, at most `MAX_ENTRIES`; NaN last."""
    ordered = sorted(rows, key=lambda pair: -pair[0] if pair[0] == pair[0] else float("inf"))
    return tuple(row for _, row in ordered[:MAX_ENTRIES])


def _of(rows: list[tuple[float, tuple[str, ...]]]) -> str:
    return f"The largest {MAX_ENTRIES} of {len(rows)}." if len(rows) > MAX_ENTRIES else ""


def _index(value: int | None) -> str:
    return NOT_AVAILABLE if value is None else str(value)
