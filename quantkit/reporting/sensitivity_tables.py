"""The tables and sentences on sensitivity: what a unit costs, and what to keep in float."""

from __future__ import annotations

import shlex
from typing import Final

from quantkit.reporting.calibration_groups import WORST
from quantkit.reporting.calibration_notes import samples
from quantkit.reporting.collect import Run, labels
from quantkit.reporting.text import Table, first_of, number, share, without
from quantkit.results import KeptPoint, Sensitivity, UnitSensitivity

_COLUMNS: Final = (
    "unit", "rank", "alone, KL", "+-", "all but it, KL", "removes", "+-", "quantizers", "point"
)  # fmt: skip
_NOTE: Final = (
    "KL in nats a token. alone: enable-one; all but it and removes: disable-one; +- is one "
    "standard error over blocks."
)


def sensitivities(run: Run) -> list[tuple[str, Sensitivity]]:
    """Returns (label, ranking) of every file: its model, its recipe, what a unit is.

    Where two files agree in all of these, the label has their place too.
    """
    found = run.sensitivities
    models = {(f.result.model.name, f.result.model.sha256): f.result.model for f in found}
    names = dict(zip(models, labels(list(models.values())), strict=True))
    words = [
        f"{names[result.model.name, result.model.sha256]}, {result.recipe} by {result.group}"
        for result in (f.result for f in found)
    ]
    return [
        (word if words.count(word) == 1 else f"{word} ({file.place})", file.result)
        for word, file in zip(words, found, strict=True)
    ]


def worst_first(found: Sensitivity) -> list[UnitSensitivity]:
    """Returns the units by rank."""
    return sorted(found.rows, key=lambda row: row.rank)


def enough(found: Sensitivity) -> KeptPoint | None:
    """Returns the fewest units after which less than the target remains, None where none do."""
    below = [point for point in found.kept if point.remaining_frac < found.target_frac]
    return min(below, key=lambda point: point.units, default=None)


def suggestion(found: Sensitivity) -> str:
    """Returns what keeping the worst ones in float would do; no capital, no full stop."""
    target = share(found.target_frac)
    few = enough(found)
    if few is not None:
        return (
            f"kept in float, the {few.units} worst of {len(found.rows)} leave "
            f"{share(few.remaining_frac)} of the error (KL {number(few.kl)}; below {target})"
        )
    if not found.kept:
        return "there is no error to remove"
    most = max(found.kept, key=lambda point: point.units)
    return (
        f"no number of them leaves less than {target} of the error: all {most.units} leave "
        f"{share(most.remaining_frac)} (KL {number(most.kl)}), which is of what was not switched, "
        "such as weights (--weights switches them too; --remaining sets another target)"
    )


def notes(run: Run) -> tuple[str, ...]:
    """Returns what a page says above the tables: what was measured, and what to keep."""
    lines: list[str] = []
    for name, found in sensitivities(run):
        lines += [f"{name}: {part}." for part in (_measured(found), suggestion(found))]
        if found.keep:
            lines.append(
                f"{name}: {_command(found)}, with the folder of this run, leaves them in float: "
                f"{first_of(found.keep)}."
            )
    return tuple(lines)


def _command(found: Sensitivity) -> str:
    """Returns the export that keeps what was found, on the ranges that it was found with."""
    model, ranges = shlex.quote(found.model.source), shlex.quote(found.ranges)
    return f"quantkit export {model} --ranges {ranges} --quantize {found.recipe} --keep RUN"


def _measured(found: Sensitivity) -> str:
    return (
        f"{len(found.rows):,} units switched one by one on {samples(found.data)}; "
        f"with all of them quantized KL {number(found.total_kl)} +- "
        f"{number(found.total_stderr, 2)} nats a token; ranges by {found.method} from "
        f"{samples(found.calibration)}"
    )


def warnings(run: Run) -> list[str]:
    """Returns the warnings of rankings, but those that are their data's."""
    return [
        f"{name}: {line}"
        for name, found in sensitivities(run)
        for line in found.warnings
        if line not in found.data.warnings
    ]


def worst_table(run: Run) -> Table:
    """Returns the units that cost most, `WORST` a ranking."""
    table = Table(
        title=f"Cost of quantizing: the {WORST} worst",
        columns=("ranking", *_COLUMNS),
        rows=tuple(
            (name, *_row(row))
            for name, found in sensitivities(run)
            for row in worst_first(found)[:WORST]
        ),
        text_columns=2,
        note=_NOTE,
    )
    return _of_rankings(run, table)


def kept_table(run: Run) -> Table:
    """Returns the error that was measured with the worst units in float, by their number."""
    rows = []
    for name, found in sensitivities(run):
        for point in points(found):
            is_enough = point.remaining_frac < found.target_frac
            rows.append(
                (
                    name, number(point.units), number(point.kl), share(point.remaining_frac),
                    share(found.target_frac), "yes" if is_enough else "no",
                )
            )  # fmt: skip
    table = Table(
        title="Error that remains when the worst stay in float",
        columns=("ranking", "kept in float", "KL", "remains", "target", "below it"),
        rows=tuple(rows),
        note="Each row is measured, not added up from what each unit removes.",
    )
    return _of_rankings(run, table)


def points(found: Sensitivity) -> list[KeptPoint]:
    """Returns what was measured by units kept, from none on."""
    if not found.kept:
        return []
    none = KeptPoint(units=0, kl=found.total_kl, remaining_frac=1.0)
    return [none, *sorted(found.kept, key=lambda point: point.units)]


def other_tables(run: Run) -> tuple[Table, ...]:
    """Returns the units below the worst, one table a ranking."""
    return tuple(
        Table(
            title=f"Cost of quantizing: the others{_of(run, name)}",
            columns=_COLUMNS,
            rows=tuple(_row(row) for row in worst_first(found)[WORST:]),
            note=_NOTE,
        )
        for name, found in sensitivities(run)
    )


def keep_tables(run: Run) -> tuple[Table, ...]:
    """Returns the quantizers to keep, one table a ranking."""
    return tuple(
        Table(
            title=f"Quantizers to keep in float{_of(run, name)}",
            columns=("quantizer",),
            rows=tuple((quantizer,) for quantizer in found.keep),
        )
        for name, found in sensitivities(run)
    )


def _row(row: UnitSensitivity) -> tuple[str, ...]:
    return (
        row.name,
        number(row.rank),
        number(row.enable_one_kl),
        number(row.enable_one_stderr, 2),
        number(row.disable_one_kl),
        share(row.removed_frac),
        share(row.removed_stderr_frac),
        number(len(row.quantizers)),
        row.point,
    )


def _of(run: Run, name: str) -> str:
    return f" of {name}" if len(run.sensitivities) > 1 else ""


def _of_rankings(run: Run, table: Table) -> Table:
    """Returns the table without the column `ranking` where there is one ranking."""
    return table if len(run.sensitivities) > 1 else without(table, "ranking")
