"""The tables that a model is summed up in: the paper's Table 5, spread, sinks and outlier rules."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quantkit.reporting.collect import Run, labels
from quantkit.reporting.groups import HIDDEN, LOGIT, ends, of_heads, of_layers, pooled, top
from quantkit.reporting.paper import (
    ALL_READING,
    BASELINE,
    DIFF,
    NOTE,
    TABLE_5,
    VALID_READING,
    reading_of,
)
from quantkit.reporting.text import NOT_AVAILABLE, Table, number, share, without
from quantkit.results import TOP_RANKS, PointSummary, Stats

_POINTS = ((LOGIT, "attention logits"), (HIDDEN, "hidden states"))
_NARROW = ((LOGIT, "logits"), (HIDDEN, "states"))


def summaries(run: Run) -> list[tuple[str, Stats]]:
    """Returns (label, statistics) of every model; no two labels are equal."""
    names = labels([found.result.model for found in run.stats])
    return [(name, found.result) for name, found in zip(names, run.stats, strict=True)]


def topk_table(run: Run, *, paper: bool = False, narrow: bool = False) -> Table:
    """Returns the layout of the Differential Transformer paper's Table 5, one row a model.

    With two models a third row has their ratio, the first over the second; where only one of them
    is differential, that one over the other. With `paper` the paper's own rows
    stand below, marked; and a column says which logits each row counts, as it does where a run
    counted masked ones. `narrow` has shorter words, for a terminal.
    """
    models = summaries(run)
    counted = {_summary(stats, LOGIT).definition for _, stats in models}
    readings = {reading_of(definition) for definition in counted}
    with_reading = bool(models) and (paper or ALL_READING in readings)
    rows: list[tuple[str, ...]] = []
    swapped = [stats.model.maps > 1 for _, stats in models] == [False, True]
    for point, words in _NARROW if narrow else _POINTS:
        found = [(name, _summary(stats, point)) for name, stats in models]
        for name, summary in found:
            reading = reading_of(summary.definition) if point == LOGIT else ""
            rows.append((words, name, reading, *map(number, _figures(summary))))
        if len(found) == 2:
            is_fair = point != LOGIT or len(readings) == 1
            rows.append((words, *_divided(found, swapped, "", is_fair)))
        if with_reading and point == LOGIT:
            rows += [(words, *row) for row in _all_entries(models, swapped)]
        if paper and models:
            rows += [(words, *row) for row in _paper(point, with_ratio=len(found) == 2)]
    start: tuple[str, ...] = ("activation", "model", "reading")
    if not with_reading:
        start = start[:2]
        rows = [(*row[:2], *row[3:]) for row in rows]
    return Table(
        title="Largest magnitudes (Table 5 layout)",
        columns=(*start, *(f"top-{rank}" for rank in TOP_RANKS), "median"),
        rows=tuple(rows),
        text_columns=len(start),
        note=_topk_note(readings, with_reading, paper),
    )


def _divided(
    pair: Sequence[tuple[str, PointSummary]], swapped: bool, reading: str, is_fair: bool
) -> tuple[str, ...]:
    """Returns name, reading and ratios of the first of two over the second, or swapped."""
    (name, over), (other, under) = reversed(pair) if swapped else pair
    return (f"{name} / {other}", reading, *_ratios(_figures(over), _figures(under), is_fair))


def _all_entries(models: Sequence[tuple[str, Stats]], swapped: bool) -> list[tuple[str, ...]]:
    """Returns the rows of the second reading, where it was asked for."""
    seconds = [(name, stats.summary.attention_logit_unmasked) for name, stats in models]
    found = [(name, second) for name, second in seconds if second is not None]
    rows = [(name, ALL_READING, *map(number, _figures(second))) for name, second in found]
    return [*rows, _divided(found, swapped, ALL_READING, True)] if len(found) == 2 else rows


def _paper(point: str, *, with_ratio: bool) -> list[tuple[str, ...]]:
    """Returns the paper's rows, and DIFF over the Transformer."""
    found = {row.model: row for row in TABLE_5 if row.point == point}
    rows = [
        (row.label, row.reading, *(f"{value:,.1f}" for value in row.figures))
        for row in found.values()
    ]
    if with_ratio:
        over, under = found[DIFF], found[BASELINE]
        ratios = _ratios(over.figures, under.figures, True)
        rows.append(("DIFF ratio (paper)", over.reading, *ratios))
    return rows


def _topk_note(readings: set[str], with_reading: bool, paper: bool) -> str:
    note = "|x| at each rank, pooled over layers, heads and maps"
    if not with_reading:
        return f"{note}; masked positions left out."
    note += (
        f". Reading: {VALID_READING} = masked positions left out; {ALL_READING} = every entry, "
        "masked ones too."
    )
    if len(readings) > 1:
        note += " The models' logits were counted in two ways, so they are not divided."
    return f"{note} {NOTE}" if paper else note


def _summary(stats: Stats, point: str) -> PointSummary:
    summary = stats.summary
    return summary.attention_logit if point == LOGIT else summary.hidden_state


def figures_of(stats: Stats, point: str) -> tuple[float, ...]:
    """Returns |x| of a point in the order of Table 5's columns."""
    return _figures(_summary(stats, point))


def largest_logits(stats: Stats) -> dict[str, float]:
    """Returns reading -> the largest |attention logit|, of the readings that were taken."""
    summary = stats.summary
    found = (summary.attention_logit, summary.attention_logit_unmasked)
    return {reading_of(one.definition): _figures(one)[0] for one in found if one is not None}


def _figures(summary: PointSummary) -> tuple[float, ...]:
    tops = (summary.abs_top.get(str(rank), math.nan) for rank in TOP_RANKS)
    return (*tops, summary.abs_median)


def _ratios(first: Sequence[float], second: Sequence[float], is_fair: bool) -> tuple[str, ...]:
    pairs = zip(first, second, strict=True)
    return tuple(
        f"{number(a / b, 3)}x" if is_fair and b > 0 and math.isfinite(a / b) else NOT_AVAILABLE
        for a, b in pairs
    )


def spread_table(run: Run) -> Table:
    """Returns the other figures of each point: signed extremes, kurtosis, span, counts."""
    rows = []
    for point, words in _POINTS:
        for name, stats in summaries(run):
            s = _summary(stats, point)
            group = pooled(stats, point)
            rows.append(
                (
                    words, name, *map(number, (s.max, s.min, s.inf_norm_mean, s.kurtosis)),
                    kurtosis_range(stats, point), share(group.span_999_frac if group else None),
                    number(s.count), number(s.excluded), number(s.nan_count + s.inf_count),
                )
            )  # fmt: skip
    table = Table(
        title="Spread",
        columns=(
            "activation", "model", "max", "min", "inf_norm_mean", "kurtosis", "kurtosis_oft",
            "99.9 % span", "count", "excluded", "NaN, inf",
        ),
        rows=tuple(rows),
        text_columns=2,
        note="kurtosis is Pearson's (a Gaussian has 3); kurtosis_oft from the lowest to the "
        "highest layer (of logits: head); excluded elements were masked.",
    )  # fmt: skip
    is_finite = all(row[-1] == "0" for row in rows)
    return without(table, "NaN, inf") if is_finite else table


def kurtosis_range(stats: Stats, point: str) -> str:
    """Returns the lowest and the highest `kurtosis_oft` of the layers (of logits: heads)."""
    groups = [group for _, _, group in of_heads(stats, point)]
    groups = groups or [group for _, group in of_layers(stats, point)]
    return span_text(ends(group.kurtosis_oft for group in groups))


def span_text(found: tuple[float, float] | None, digits: int = 4) -> str:
    """Returns "low .. high", one number where they read the same, or that there is none."""
    if found is None:
        return NOT_AVAILABLE
    low, high = (number(value, digits) for value in found)
    return low if low == high else f"{low} .. {high}"


def outlier_table(run: Run) -> Table:
    """Returns sinks, entropy and what the outlier rules count, one row a model."""
    rows = []
    for name, stats in summaries(run):
        summary = stats.summary
        massive = summary.massive_activations
        tokens = token_counts(stats)
        rows.append(
            (
                name,
                channel_list(summary.outlier_features.channels),
                share(summary.sink_rate),
                number(summary.attention_entropy),
                number(massive.count),
                number(massive.count_pooled),
                number(summary.outlier_features.count),
                *map(number, tokens),
            )
        )
    return Table(
        title="Sinks, massive activations, outlier features and tokens",
        columns=(
            "model", "outlier channels", "sink rate", "entropy", "massive", "massive (pooled)",
            "features", "tokens", "tokens (pooled)",
        ),
        rows=tuple(rows),
        text_columns=2,
        note="Counts use the median of each sequence and layer; pooled: of each layer over all "
        "sequences. Entropy in nats, mean over query rows, heads and maps.",
    )  # fmt: skip


def token_counts(stats: Stats) -> tuple[int | None, int | None]:
    """Returns the outlier tokens and the pooled count; None where they were not looked for."""
    tokens = stats.summary.outlier_tokens
    return (tokens.count, tokens.count_pooled) if tokens.by_layer else (None, None)


def channel_list(channels: list[int], most: int = 12) -> str:
    """Returns the first few channels, or "none"."""
    listed = ", ".join(map(str, channels[:most]))
    return (listed + (", ..." if len(channels) > most else "")) or "none"


def class_table(run: Run) -> Table:
    """Returns the largest |x| of the first token and of the others, one row a model and point."""
    rows = []
    for point, words in _POINTS:
        for name, stats in summaries(run):
            largest = []
            for token_class in ("first", "others"):
                groups = [g for g in stats.points.get(point, []) if g.token_class == token_class]
                found = ends(top(group) for group in groups)
                largest.append(number(found[1] if found else None))
            rows.append((words, name, *largest))
    return Table(
        title="Largest |x| by token class",
        columns=("activation", "model", "first token", "other tokens"),
        rows=tuple(rows),
        text_columns=2,
        note="A logit's class is its key's.",
    )
