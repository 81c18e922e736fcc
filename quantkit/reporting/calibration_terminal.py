"""What `quantkit calibrate` prints: whether the ranges can be trusted, in a screenful."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Final

from quantkit.reporting import calibration_notes
from quantkit.reporting.calibration_groups import calibrations, chosen, ranges, worst_first
from quantkit.reporting.collect import Run, collect
from quantkit.reporting.terminal import WIDTH, ranges_text
from quantkit.reporting.text import (
    Table,
    decibels,
    interval,
    number,
    plain_table,
    printable,
    small_share,
    table_width,
    without,
)
from quantkit.results import Calibration

WORST_LINES: Final = 10
_WARNINGS: Final = 10


def calibration_text(run_folder: Path) -> str:
    """Returns the summary of a run folder: what was seen, the worst tensors, stability, warnings.

    Where there is no `calibration.json` (runs of earlier versions), the table of its ranges; ""
    where there is neither.
    """
    run = collect([run_folder])
    if not run.calibrations:
        return ranges_text(run_folder)
    parts = []
    many = len(run.calibrations) > 1
    for name, found in calibrations(run):
        before = f"{name}: " if many else ""
        table = _worst_table(f"{before}{WORST_LINES} worst tensors", found)
        parts.append(
            _wrapped(f"{name}: {calibration_notes.header(found)}")
            + (f"\n{plain_table(table, WIDTH)}\n" if table.rows else "")
            + "".join(
                _wrapped(f"{sentence[:1].upper()}{sentence[1:]}")
                for sentence in (
                    f"{calibration_notes.stability(found)}.",
                    calibration_notes.better_methods(found),
                    calibration_notes.first_token(found),
                )
                if sentence
            )
        )
    parts[-1] += "".join(
        _wrapped(f"{name}: {sentence}" if many else f"{sentence[:1].upper()}{sentence[1:]}")
        for name, result in ranges(run)
        for sentence in (
            calibration_notes.until_stable(result),
            calibration_notes.smoothing(result),
            calibration_notes.weights(result),
            calibration_notes.waived(result),
        )
        if sentence
    )
    parts[-1] += "".join(_wrapped(line) for line in _warning_lines(run))
    return "\n".join(parts)


def _worst_table(title: str, calibration: Calibration) -> Table:
    """Returns the worst tensors, with names short enough for a terminal; ends of names stay."""
    tensors = worst_first(calibration)[:WORST_LINES]
    rows = []
    for tensor in tensors:
        ours = chosen(tensor)
        rows.append(
            (
                tensor.name, ours.method.partition(":")[0], interval(ours.lo, ours.hi),
                number(tensor.bits_wasted, 2), small_share(ours.clipped_frac),
                decibels(ours.sqnr_db), decibels(ours.inlier_sqnr_db),
            )
        )  # fmt: skip
    table = Table(
        title=title,
        columns=("tensor", "method", "range", "wasted", "clipped", "SQNR", "inliers"),
        rows=tuple(rows),
        text_columns=2,
        note="wasted: bits of the grid beyond the 99.9 % span; SQNR of all elements and of those "
        "inside the span, in dB.",
    )
    if len({tensor.chosen for tensor in tensors}) == 1:
        table = without(table, "method")  # the line above says it
    return _shortened(table)


def _shortened(table: Table) -> Table:
    """Returns the table with its first column cut from the left where a line would be too long.

    The point in front stays: `linear_input/...12.mlp.down_proj`.
    """
    too_long = table_width(table) - WIDTH
    if too_long <= 0:
        return table
    longest = max(len(printable(row[0])) for row in table.rows)
    room = max(24, longest - too_long)
    rows = tuple((_tail(row[0], room), *row[1:]) for row in table.rows)
    return replace(table, rows=rows)


def _tail(name: str, width: int) -> str:
    point, slash, rest = name.partition("/")
    kept = width - len(point) - 4
    if len(name) <= width:
        return name
    if not slash or kept < 8:
        return f"...{name[-(width - 3) :]}"
    return f"{point}/...{rest[-kept:]}"


def _warning_lines(run: Run) -> list[str]:
    lines = calibration_notes.warnings(run)
    more = len(lines) - _WARNINGS
    lines = [f"WARNING {line}" for line in lines[:_WARNINGS]]
    return lines + ([f"and {more} more warnings, in calibration.json."] if more > 0 else [])


def _wrapped(text: str) -> str:
    return "".join(f"{line}\n" for line in textwrap.wrap(printable(text), WIDTH))
