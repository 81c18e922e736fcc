"""The tables that the command line prints, as plain text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from quantkit.reporting.auto_tables import auto_notes, auto_table
from quantkit.reporting.collect import Run, collect
from quantkit.reporting.data_notes import overlaps
from quantkit.reporting.export_tables import export_table, notes, parity_table
from quantkit.reporting.groups import HIDDEN, LOGIT, ends, of_heads, pooled
from quantkit.reporting.outlier_tables import (
    channel_list,
    kurtosis_range,
    span_text,
    summaries,
    token_counts,
    topk_table,
)
from quantkit.reporting.pair_groups import pair_of
from quantkit.reporting.pair_terminal import pair_text
from quantkit.reporting.place_tables import worst_logits_table, worst_states_table
from quantkit.reporting.sweep_terminal import sweep_text
from quantkit.reporting.tables import ranges_table
from quantkit.reporting.text import (
    Table,
    number,
    plain_table,
    printable,
    share,
    table_width,
    without,
)
from quantkit.results import Stats

WIDTH: Final = 100
"""Characters a line that the tables of statistics keep to."""
WORST: Final = 5
_WARNINGS: Final = 5


def topk_text(run_folder: Path, paper: bool = False) -> str:
    """Returns the top-k table of a run folder, or "" where it has no `stats.json`.

    In the layout of the Differential Transformer paper's Table 5; `paper` adds its own rows.
    """
    return _topk(collect([run_folder]), paper)


def _topk(run: Run, paper: bool) -> str:
    table = topk_table(run, paper=paper)
    if table_width(table) > WIDTH:
        table = topk_table(run, paper=paper, narrow=True)
    return plain_table(table, WIDTH) if table.rows else ""


def stats_text(run_folder: Path, paper: bool = False) -> str:
    """Returns what `quantkit stats` prints, or "" where there is no `stats.json`.

    What is not finite comes first; then the top-k table; then for each model the other statistics,
    the worst heads and layers, and lambda. `paper` adds the paper's rows to the top-k table.
    """
    run = collect([run_folder])
    if not run.stats:
        return ""
    names = [name for name, _ in summaries(run)]
    warnings = [
        line
        for name, found in zip(names, run.stats, strict=True)
        for line in _warnings(name, found.result)
    ]
    parts = ["".join(f"{line}\n" for line in warnings)] if warnings else []
    parts.append(_topk(run, paper))
    for name, found in zip(names, run.stats, strict=True):
        one = Run(stats=(found,))
        start = "" if len(names) == 1 else f"{name}: "
        tables = [
            _statistics(f"{start}Other statistics", found.result),
            without(worst_logits_table(one, most=WORST), "model"),
            without(worst_states_table(one, most=WORST), "model"),
        ]
        parts += [plain_table(replace(table, note=""), WIDTH) for table in tables if table.rows]
        parts += _lambda_lines(found.result)
    return "\n".join(parts)


def _warnings(name: str, stats: Stats) -> list[str]:
    """Returns one line a warning, the first few; what is not finite is said in any case."""
    lines = list(stats.warnings)
    if not lines:
        for point in (stats.summary.attention_logit, stats.summary.hidden_state):
            if point.nan_count or point.inf_count:
                what = point.definition.split(":")[0]
                lines.append(
                    f"{what}s hold {point.nan_count} NaN and {point.inf_count} inf values."
                )
    more = len(lines) - _WARNINGS
    lines = lines[:_WARNINGS] + ([f"and {more} more, in stats.json."] if more > 0 else [])
    return [printable(f"WARNING {name}: {line}") for line in lines]


def _statistics(title: str, stats: Stats) -> Table:
    """Returns one row a statistic, logits beside hidden states."""
    summary = stats.summary
    points = ((LOGIT, summary.attention_logit), (HIDDEN, summary.hidden_state))
    groups = [pooled(stats, point) for point, _ in points]
    entropies = ends(group.entropy for _, _, group in of_heads(stats, LOGIT))
    by_head = f" (heads {span_text(entropies, 3)})" if entropies else ""
    massive, features = summary.massive_activations, summary.outlier_features
    tokens, tokens_pooled = token_counts(stats)
    by_pooling = "" if tokens_pooled is None else f" ({tokens_pooled:,} pooled)"
    channels = channel_list(features.channels, 6)
    rows = [
        ("max (signed)", *(number(point.max) for _, point in points)),
        ("min", *(number(point.min) for _, point in points)),
        ("inf_norm_mean", *(number(point.inf_norm_mean) for _, point in points)),
        ("kurtosis", *(number(point.kurtosis) for _, point in points)),
        ("kurtosis_oft, lowest .. highest", *(kurtosis_range(stats, name) for name, _ in points)),
        ("span of the middle 99.9 %", *(share(g.span_999_frac if g else None) for g in groups)),
        ("entropy, nats", f"{number(summary.attention_entropy)}{by_head}", ""),
        ("sink rate", share(summary.sink_rate), ""),
        ("massive activations", "", f"{number(massive.count)} ({massive.count_pooled:,} pooled)"),
        ("outlier features", "", f"{number(features.count)} ({channels})"),
        ("outlier tokens", "", number(tokens) + by_pooling),
    ]
    return Table(
        title=title, columns=("statistic", "attention logits", "hidden states"), rows=tuple(rows)
    )


def _lambda_lines(stats: Stats) -> list[str]:
    """Returns the layers' lambdas of a differential model, wrapped."""
    parts = stats.differential
    if not parts:
        return []
    known = [part for part in parts if not math.isnan(part.lambda_mean)] or parts
    low = min(known, key=lambda part: part.lambda_mean)
    high = max(known, key=lambda part: part.lambda_mean)
    line = (
        f"lambda {number(low.lambda_mean)} (layer {low.layer}) .. {number(high.lambda_mean)} "
        f"(layer {high.layer}); row sums {span_text(ends(p.row_sum for p in parts))}; negative "
        f"weights {share(min(p.negative_frac for p in parts))} .. "
        f"{share(max(p.negative_frac for p in parts))}"
    )
    layers = "by layer: " + ", ".join(number(part.lambda_mean, 3) for part in parts)
    wrapped = [*textwrap.wrap(line, WIDTH), *textwrap.wrap(layers, WIDTH)]
    return ["".join(f"{text}\n" for text in wrapped)]


def terminal_tables(run_folder: Path) -> str:
    """Returns the view of a matched pair; of other run folders, the tables that there are."""
    run = collect([run_folder])
    pair = pair_of(run)
    if pair is not None:
        return pair_text(pair, run)
    texts = (topk_text(run_folder), sweep_text(run_folder))
    return "\n".join(text for text in texts if text)


def ranges_text(run_folder: Path) -> str:
    """Returns the table of calibrated ranges, or "" where there is no `ranges.json`."""
    return _ranges(collect([run_folder]))


def _ranges(run: Run) -> str:
    table = ranges_table(run)
    return plain_table(table, WIDTH) if table.rows else ""


def export_text(run_folder: Path) -> str:
    """Returns what was tried and exported, left in float or smoothed, and the parity.

    "" where there is neither `auto.json` nor `export.json`.
    """
    run = collect([run_folder])
    parts = [
        plain_table(auto_table(found.result)) + _lines(auto_notes(found.result))
        for found in run.searches
    ]
    if not run.exports:
        return "\n".join(parts)
    parts += [plain_table(export_table(run)) + _lines(notes(run))]
    parts += [plain_table(table) for table in [parity_table(run)] if table.rows]
    return "\n".join(parts) + _lines(_overlaps(Run(exports=run.exports)))


def _overlaps(run: Run) -> list[str]:
    return [f"WARNING {line}" for line in overlaps(run)]


def _lines(texts: Iterable[str]) -> str:
    return "".join(f"{printable(text)}\n" for text in texts)
