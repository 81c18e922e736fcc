"""The tables of sweeps, as finished strings for HTML and Markdown; the terminal takes some."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from quantkit.recipe import UNQUANTIZED_BITS
from quantkit.reporting.collect import Run
from quantkit.reporting.sweep_groups import Measured, measured, sweeps
from quantkit.reporting.sweep_rows import FLOAT, BitRow, bit_rows, other_cells
from quantkit.reporting.sweep_seeds import by_group, pooled, pooled_masses
from quantkit.reporting.text import NOT_AVAILABLE, Table, first_of, number, without
from quantkit.results import Cell, Delta

LEVEL_WORDS: Final = {True: "level", False: "not shown", None: NOT_AVAILABLE}
"""A row that is not level has not been shown to lose: the interval says which."""

MASS_PARTS: Final = ("answer", "noise", "needles", "first", "question")
"""Parts of the context, as `AttentionMass` names them; the paper's two first."""


def widths(rows: Sequence[BitRow]) -> list[int]:
    """Returns the bits that are there, the most first."""
    return sorted({bits for row in rows for bits in row.cells}, reverse=True)


def bit_tables(run: Run) -> tuple[Table, ...]:
    """Returns a table a task and metric: a row a model and grid of the logits, bits across."""
    return _filled(bit_table(one) for one in by_group(run))


def seed_tables(run: Run) -> tuple[Table, ...]:
    """Returns the tables of every seed by itself, where there are several of a model."""
    single = [one for one in measured(run) if pooled(one) is not one]
    tables = [table(one) for one in single for table in (bit_table, recipe_table)]
    return _filled(replace(table, title=f"Each seed. {table.title}") for table in tables)


def bit_table(one: Measured) -> Table:
    """Returns the table of one task and metric."""
    rows = bit_rows(one.cells)
    bits = widths(rows)
    said = "mean, sampling and sd" if one.is_pooled else "value [95 % interval]"
    table = Table(
        title=f"Sweep: {one.words}, {said} by bits of the attention logits",
        columns=(
            "model", "linear layers and others", "scale of the logits",
            *(f"{width} bits" for width in bits),
        ),
        rows=tuple(
            (
                row.model, row.rest, row.scale,
                *(_bit_text(one, row.cells.get(width), row) for width in bits),
            )
            for row in rows
        ),
        text_columns=3,
        note="16 bits = logits not quantized. Change against 16 bits in round brackets. "
        + one.notes,
    )  # fmt: skip
    has_rest = any(row.rest != "float" for row in rows)
    return table if has_rest else without(table, table.columns[1])


def _filled(tables: Iterable[Table]) -> tuple[Table, ...]:
    return tuple(table for table in tables if table.rows)


def _bit_text(one: Measured, cell: Cell | None, row: BitRow) -> str:
    if cell is None:
        return NOT_AVAILABLE
    base = row.cells.get(UNQUANTIZED_BITS)
    text = ", ".join(filter(None, (one.text(cell), one.scatter(cell))))
    if base is not None and cell is not base:
        value, start = one.pair(cell, base)
        text += f" ({one.change(value - start, start)})"
    return f"{text} {one.mark(cell)}".rstrip()


def recipe_table(one: Measured) -> Table:
    """Returns a row a model and recipe that no row of bits shows, with its paired change."""
    rows = []
    for cell in other_cells(one.cells):
        base = one.float_cell(cell.model)
        delta = one.deltas.get((cell.model, cell.recipe))
        seeds = one.spreads.get((cell.model, cell.recipe))
        change = span = level = ""
        if cell.recipe != FLOAT and base is not None:
            value, start = one.pair(cell, base)
            change = one.change(value - start if delta is None else delta.value, start)
            span = level = NOT_AVAILABLE
            if delta is not None:
                span = one.changes(delta.ci_low, delta.ci_high, start)
                level = NOT_AVAILABLE if one.chance_mark(base) else one.level_word(delta)
        rows.append(
            (
                cell.model,
                cell.recipe,
                f"{one.value(cell.value)} {one.chance_mark(cell)}".rstrip(),
                one.reach(cell),
                change,
                span,
                level,
                NOT_AVAILABLE if seeds is None else one.value(seeds.sd),
            )
        )
    table = Table(
        title=f"Sweep: {one.words}, other recipes against float",
        columns=(
            "model", "recipe", "value", "95 % sampling" if one.is_pooled else "95 % interval",
            "change", "paired interval", "level", "sd",
        ),
        rows=tuple(rows),
        text_columns=2,
        note=one.notes,
    )  # fmt: skip
    return table if one.is_pooled else without(table, "sd")


def recipe_tables(run: Run) -> tuple[Table, ...]:
    """Returns the table of the other recipes of every task and metric."""
    return _filled(recipe_table(one) for one in by_group(run))


def delta_table(run: Run) -> Table:
    """Returns the paired differences, between recipes and between models."""
    parts = {(one.task, one.metric): one for one in measured(run)}
    rows = []
    for sweep in sweeps(run):
        for delta in sweep.deltas:
            one = parts.get((delta.task, delta.metric))
            rows.append(
                (
                    delta.model, delta.recipe, _reference(delta), delta.task, delta.metric,
                    "" if one is None else one.margin(delta) or NOT_AVAILABLE,
                    LEVEL_WORDS[delta.is_level] if one is None else one.level_word(delta),
                    number(delta.value), f"[{number(delta.ci_low)}, {number(delta.ci_high)}]",
                    number(delta.n),
                )
            )  # fmt: skip
    table = Table(
        title="Paired differences",
        columns=("model", "recipe", "against", "task", "metric", "margin", "level", "difference",
                 "95 % interval", "n"),
        rows=tuple(rows),
        text_columns=7,
        note="The recipe minus what it is compared with, on the same items, resampled in pairs; in "
        "the metric's own units. level = no loss of more than the margin; better = all of the "
        "interval is a gain.",
    )  # fmt: skip
    unsaid = [name for name in ("margin", "level") if _says_nothing(table, name)]
    for name in unsaid:
        table = without(table, name)
    return table


def _says_nothing(table: Table, column: str) -> bool:
    at = table.columns.index(column)
    return all(row[at] == NOT_AVAILABLE for row in table.rows)


def _reference(delta: Delta) -> str:
    other = delta.against_model
    return delta.against if other in ("", delta.model) else f"{other} {delta.against}"


def spread_table(run: Run) -> Table:
    """Returns how far the seeds of one model are apart, beside the sampling error."""
    rows = []
    for one in measured(run):
        for spread in one.spreads.values():
            rows.append(
                (
                    spread.group, spread.recipe, one.words, number(len(spread.models)),
                    one.value(spread.mean), one.value(spread.sd),
                    f"{one.value(spread.low)} .. {one.value(spread.high)}",
                    one.value(spread.sampling_stderr),
                )
            )  # fmt: skip
    return Table(
        title="Seeds of one model: their spread, beside the sampling error of one",
        columns=("model", "recipe", "task", "seeds", "mean", "sd of seeds", "lowest .. highest",
                 "sampling error"),
        rows=tuple(rows),
        text_columns=3,
    )  # fmt: skip


def mass_table(run: Run, *, parts: Sequence[str] = MASS_PARTS[:2]) -> Table:
    """Returns attention mass by depth of the asked needle, in the layout of the paper's Table 3."""
    masses = pooled_masses(run)
    depths = sorted({mass.depth_frac for mass in masses})
    several = len({mass.task for mass in masses}) > 1
    cells = {(m.task, m.model, m.kind, m.depth_frac): m for m in masses}
    rows = []
    for part in parts:
        for task, model, kind in dict.fromkeys((m.task, m.model, m.kind) for m in masses):
            found = [cells.get((task, model, kind, depth)) for depth in depths]
            label = f"{model}, {task}" if several else model
            texts = (NOT_AVAILABLE if m is None else f"{getattr(m, part):.3f}" for m in found)
            rows.append((part, label, kind, *texts))
    counts = sorted({mass.n for mass in masses})
    n = " to ".join(f"{count:,}" for count in (counts[:1] + counts[1:][-1:]))
    return Table(
        title="Attention mass by depth of the needle, float model (Table 3 layout)",
        columns=("on", "model", "weights", *(f"{100 * depth:g} %" for depth in depths)),
        rows=tuple(rows),
        text_columns=3,
        note=f"n = {n} questions a depth." if masses else "",
    )


def detail_tables(run: Run) -> tuple[Table, ...]:
    """Returns the other figures of each task, a row a model and recipe."""
    tables = []
    for one in measured(run):
        names = list(dict.fromkeys(name for cell in one.cells for name in cell.details))
        rows = tuple(
            (cell.model, cell.recipe, *(number(cell.details.get(name)) for name in names))
            for cell in one.cells
            if cell.details
        )
        title = f"{one.task}: other figures, without an interval"
        columns = ("model", "recipe", *names)
        tables.append(Table(title=title, columns=columns, rows=rows, text_columns=2))
    return _filled(tables)


def fired_table(run: Run) -> Table:
    """Returns how many quantizers of each cell fired, how often, and on how many elements."""
    rows = tuple(
        (
            cell.model, cell.recipe, cell.task, number(len(cell.quantizers)),
            number(sum(fired.hits for fired in cell.quantizers.values())),
            number(sum(fired.elements for fired in cell.quantizers.values())),
        )
        for sweep in sweeps(run)
        for cell in sweep.cells
        if cell.quantizers
    )  # fmt: skip
    return Table(
        title="Quantizers that fired",
        columns=("model", "recipe", "task", "quantizers", "hits", "elements"),
        rows=rows,
        text_columns=3,
        note="Each by its name in sweep.json; one that never fires fails the run.",
    )


def task_table(run: Run) -> Table:
    """Returns what each task was measured on."""
    rows = tuple(
        (
            found.place, task.name, ", ".join(task.metrics), task.data.source, task.sha256[:16],
            f"{task.items:,} {task.unit}",
        )
        for found in run.sweeps
        for task in found.result.tasks
    )  # fmt: skip
    return Table(
        title="Tasks",
        columns=("file", "task", "metrics", "data", "items sha256", "items"),
        rows=rows,
        text_columns=5,
    )


_AT_CHANCE: Final = re.compile(r"(?P<task>\S+): .* is (at|not shown to be above) chance \(")
"""A sweep's remark on a figure that guessing may reach."""
_MOST_GUESSED: Final = 6
"""Such remarks beyond which they are counted."""


def notes(run: Run) -> tuple[str, ...]:
    """Returns what the sweeps themselves remark, and what they kept in float.

    Of figures at chance it says where; the tables mark each.
    """
    said = [note for sweep in sweeps(run) for note in sweep.notes]
    guessed = [found for note in said if (found := _AT_CHANCE.match(note))]
    lines = [note for note in said if not _AT_CHANCE.match(note)]
    if len(guessed) > _MOST_GUESSED:
        tasks = first_of(list(dict.fromkeys(found["task"] for found in guessed)))
        lines.append(
            f"{len(guessed)} figures are at chance or not shown to be above it, in {tasks}: what "
            "bits do to them says nothing. The tables mark them."
        )
    else:
        lines += [found.string for found in guessed]
    for sweep in sweeps(run):
        if sweep.kept:
            lines.append(f"Kept in float in every row: {first_of(sweep.kept)}.")
    return tuple(dict.fromkeys(lines))
