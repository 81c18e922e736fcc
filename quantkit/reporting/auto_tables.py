"""What `--quantize auto` tried: one row a graph, the fastest first."""

from __future__ import annotations

import math

from quantkit.reporting.collect import Run
from quantkit.reporting.text import Table, first_of, number, printable, share, size
from quantkit.results import AutoResult, Trial


def auto_tables(run: Run) -> tuple[Table, ...]:
    """Returns one table a search."""
    return tuple(auto_table(found.result) for found in run.searches)


def auto_table(found: AutoResult) -> Table:
    """Returns every graph that was tried, with its accuracy, speed and size."""
    return Table(
        title=printable(
            f"Tried for {found.model.name}: {found.metric} within {share(found.max_drop)}, float "
            f"{number(found.float_value)} ({found.data.sequences} x {found.data.seq_len} tokens)"
        ),
        columns=(
            "graph", "status", found.metric, "change", "95 %", "ms", "float ms", "speed-up", "size",
        ),
        rows=tuple(_row(found, trial) for trial in found.trials),
        text_columns=2,
        note="chosen: the fastest whose far end of the 95 % interval is within the budget; front: "
        "no other graph that was tried is both faster and better. Speed: against float in the same "
        f"calls, a prompt of {found.prefill_tokens} tokens.",
    )  # fmt: skip


def auto_notes(found: AutoResult) -> tuple[str, ...]:
    """Returns why the choice is what it is, and what it left in float."""
    kept = next((trial.kept for trial in found.trials if trial.name == found.chosen), [])
    notes = [f"{found.reason}."]
    if kept:
        notes.append(f"in float: {first_of(kept)}.")
    if found.reported is not None:
        one = found.reported
        notes.append(
            f"{one.metric} on items that took no part in the choice: float {number(one.float)}, "
            f"chosen {number(one.quantized)}."
        )
    return tuple(printable(note) for note in notes)


def _row(found: AutoResult, trial: Trial) -> tuple[str, ...]:
    marks = ["chosen"] if trial.name == found.chosen else []
    marks += ["front"] if trial.is_on_front else []
    marks += ["within" if trial.is_within else "over budget"]
    ends = (trial.change_low, trial.change_high)
    known = all(map(math.isfinite, ends))
    return (
        trial.name,
        ", ".join(marks),
        number(trial.value),
        number(trial.change),
        " .. ".join(number(end) for end in ends) if known else "unknown",
        number(trial.latency_ms),
        number(trial.float_ms),
        f"{trial.speedup:.2f}x",
        size(trial.bytes),
    )
