"""What `quantkit sweep` prints: the headline, then tables that 100 columns hold."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Final

from quantkit.reporting.collect import Run, collect
from quantkit.reporting.data_notes import overlaps
from quantkit.reporting.sweep_groups import Measured, measured, sweeps
from quantkit.reporting.sweep_rows import FLOAT, BitRow, bit_rows
from quantkit.reporting.sweep_seeds import by_group
from quantkit.reporting.sweep_tables import (
    mass_table,
    notes,
    recipe_table,
    widths,
)
from quantkit.reporting.text import (
    NOT_AVAILABLE,
    Table,
    clipped,
    number,
    plain_table,
    printable,
    without,
)
from quantkit.results import Delta, Sweep

WIDTH: Final = 100
_MODEL, _REST, _SCALE = 18, 14, 16
"""Characters that columns of words keep when bits have to share the line, at the least."""
_PAIRS: Final = 6
"""Differences between two models that are printed."""


def sweep_text(run_folder: Path) -> str:
    """Returns the sweep of a run folder, or "" where it has no `sweep.json`.

    A table for the first metric of each task; the others are one line each, all of them in the
    report.
    """
    run = collect([run_folder])
    run = Run(sweeps=run.sweeps)
    parts = by_group(run)
    if not parts:
        return ""
    headlines = [found.headline for found in sweeps(run) if found.headline]
    tables: list[Table] = []
    for one in parts:
        if one.is_first:
            tables += _bit_tables(one)
            recipes = recipe_table(one)
            tables += [replace(recipes, note="") if bit_rows(one.cells) else recipes]
    tables += [*_across(run), _others(parts), mass_table(run)]
    texts = [plain_table(table, WIDTH) for table in tables if table.rows]
    ends = [*notes(run), *_fired(measured(run))]
    warnings = [f"WARNING {line}" for line in overlaps(run)]
    said = ["".join(_wrapped(headlines))] if headlines else []
    last = "".join(_wrapped(ends)) + "".join(f"{printable(line)}\n" for line in warnings)
    return "\n".join([*said, *texts]) + ("\n" if ends and texts else "") + last


def _bit_tables(one: Measured) -> list[Table]:
    """Returns the table of bits: value above interval (and sd of seeds); the widest bits first.

    Several tables where the bits do not fit side by side.
    """
    rows = bit_rows(one.cells)
    bits = widths(rows)
    if not bits:
        return []
    beside = any(row.rest != "float" for row in rows)
    words = ("model", "beside the logits", "scale")
    reserved = min(_MODEL, max(len(row.model) for row in rows)) + 2
    reserved += min(_SCALE, max(len(row.scale) for row in rows))
    reserved += min(_REST, max(len(row.rest) for row in rows)) + 2 if beside else 0
    tall = 3 if one.is_pooled else 2
    columns = {width: _column(one, rows, width) for width in bits}
    blocks: list[list[int]] = [[]]
    room = WIDTH - reserved
    for width in bits:
        wide = 2 + max(len(text) for text in columns[width])
        if blocks[-1] and room < wide:
            blocks.append([])
            room = WIDTH - reserved
        blocks[-1].append(width)
        room -= wide
    tables = []
    for i, block in enumerate(blocks):
        last = i == len(blocks) - 1
        lines: list[tuple[str, ...]] = []
        for at, row in enumerate(rows):
            if not any(width in row.cells for width in block):
                continue
            words_of_row = (row.model, row.rest, row.scale)
            for i_line in range(tall):
                texts = (columns[b][tall * at + i_line] for b in block)
                lines.append((*(("", "", "") if i_line else words_of_row), *texts))
        table = Table(
            title=f"Sweep: {one.words} by bits of the attention logits ({one.count})"
            + (", continued" if i else ""),
            columns=(*words, *(f"{width} bits" for width in block)),
            rows=tuple(lines),
            text_columns=3,
            note=" ".join(filter(None, (one.marks_note, one.note))) if last else "",
        )
        tables.append(table if beside else without(table, words[1]))
    return tables


def _column(one: Measured, rows: Sequence[BitRow], width: int) -> list[str]:
    """Returns two texts a row: value with its mark, and interval; of seeds sampling and sd."""
    texts = []
    for row in rows:
        cell = row.cells.get(width)
        if cell is None:
            texts += [NOT_AVAILABLE, *([""] * (2 if one.is_pooled else 1))]
            continue
        texts += [f"{one.value(cell.value)} {one.mark(cell)}".rstrip(), one.reach(cell)]
        if one.is_pooled:
            texts.append(one.scatter(cell))
    return texts


def _across(run: Run) -> list[Table]:
    """Returns what two models differ by at the same recipe, of files with two and no seeds."""
    parts = {(one.task, one.metric): one for one in measured(run)}
    tables = []
    for sweep in sweeps(run):
        models = list(dict.fromkeys(cell.model for cell in sweep.cells))
        if len(models) == len({cell.group or cell.model for cell in sweep.cells}) == 2:
            tables.append(_pair_table(sweep, models[0], models[1], parts))
    return tables


def _pair_table(
    sweep: Sweep, first: str, second: str, parts: Mapping[tuple[str, str], Measured]
) -> Table:
    """Returns the first differences of each task in turn, in its first metric that has any."""
    cells = {(c.model, c.recipe, c.task, c.metric): c for c in sweep.cells}
    same = [d for d in sweep.deltas if d.against_model and d.recipe == d.against]
    back = {(d.recipe, d.task, d.metric): d for d in same if d.model == second}
    by_task: dict[str, list[Delta]] = {}
    for task, metric in parts:
        mine = [d for d in same if (d.model, d.task, d.metric) == (first, task, metric)]
        if mine:
            by_task.setdefault(task, mine)
    turns = [d for row in zip_longest(*by_task.values()) for d in row if d is not None]
    shown = sorted(turns[:_PAIRS], key=lambda d: list(by_task).index(d.task))
    rows = []
    for delta in shown:
        one, key = parts[delta.task, delta.metric], (delta.recipe, delta.task, delta.metric)
        base = cells[second, *key]
        # of a row that may guess, being level says nothing
        guesses = any(one.chance_mark(cells[model, *key]) for model in (first, second))
        both = (None, None) if guesses else (delta, back.get(key))
        levels = (NOT_AVAILABLE if d is None else one.level_word(d) for d in both)
        rows.append(
            (
                one.words, delta.recipe, *levels,
                one.change(delta.value, base.value),
                one.changes(delta.ci_low, delta.ci_high, base.value),
            )
        )  # fmt: skip
    margins = dict.fromkeys(parts[d.task, d.metric].margin(d) for d in shown)
    more = len(turns) - len(shown)
    return Table(
        title=f"{first} minus {second} at the same recipe, on the same items",
        columns=(
            "task", "recipe", clipped(first, _MODEL), clipped(second, _MODEL), "difference",
            "95 % interval",
        ),
        rows=tuple(rows),
        text_columns=4,
        note=f"level = the model does not lose more than the margin ({' or '.join(margins)}) "
        "against the other, by the paired 95 % interval; better = all of the interval is a gain."
        + (f" The report has {more:,} more." if more else ""),
    )  # fmt: skip


def _others(parts: Sequence[Measured]) -> Table:
    """Returns the float row of the metrics that have no table of their own."""
    rows = tuple(
        (one.task, one.metric, cell.model, one.value(cell.value), one.reach(cell))
        for one in parts
        if not one.is_first
        for cell in one.cells
        if cell.recipe == FLOAT
    )
    return Table(
        title="Other metrics of the float row; the report has those of every recipe",
        columns=("task", "metric", "model", "value", "95 % interval"),
        rows=rows,
        text_columns=3,
    )


def _fired(parts: Sequence[Measured]) -> list[str]:
    """Returns one line on the quantizers of all cells, where the files name them."""
    cells = [cell for one in parts for cell in one.cells if cell.quantizers]
    if not cells:
        return []
    fired = [fired for cell in cells for fired in cell.quantizers.values()]
    return [
        f"Quantizers: {len(fired):,} fired in {len(cells):,} cells, "
        f"{sum(f.hits for f in fired):,} times on {number(float(sum(f.elements for f in fired)))} "
        "elements; each by name in sweep.json."
    ]


def _wrapped(texts: Iterable[str]) -> list[str]:
    return [f"{line}\n" for text in texts for line in textwrap.wrap(printable(text), WIDTH)]
