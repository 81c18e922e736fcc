"""What `quantkit sensitivity` prints: the worst units, and how many of them to keep in float."""

from __future__ import annotations

from pathlib import Path

from quantkit.reporting.calibration_groups import WORST
from quantkit.reporting.collect import collect
from quantkit.reporting.sensitivity_tables import suggestion, worst_first
from quantkit.reporting.text import Table, number, plain_table, printable, share
from quantkit.results import Sensitivity


def sensitivity_text(run_folder: Path, top: int = WORST) -> str:
    """Returns the worst units, and how many of them to keep in float.

    "" where there is no `sensitivity.json`.
    """
    return "\n".join(_text(found.result, top) for found in collect([run_folder]).sensitivities)


def _text(found: Sensitivity, top: int) -> str:
    rows = tuple(
        (
            str(row.rank),
            row.name,
            number(row.enable_one_kl),
            number(row.enable_one_stderr, 2),
            number(row.disable_one_kl),
            share(row.removed_frac),
            share(row.removed_stderr_frac),
        )
        for row in worst_first(found)[:top]
    )
    table = Table(
        title=printable(
            f"Sensitivity: {found.model.name}, {found.recipe}, {found.data.sequences} x "
            f"{found.data.seq_len} tokens; KL {number(found.total_kl)} nats a token in all"
        ),
        columns=("rank", found.group, "alone", "+-", "all but it", "removes", "+-"),
        rows=rows,
        text_columns=2,
        note=f"{len(found.rows) - len(rows)} more in sensitivity.json."
        if len(rows) < len(found.rows)
        else "",
    )
    lines = [*(f"WARNING: {line}" for line in found.warnings), f"{suggestion(found)}."]
    return plain_table(table) + "".join(f"{printable(line)}\n" for line in lines)
