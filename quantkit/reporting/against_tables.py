"""The tables of an earlier run beside this one: what changed, what is the same, what from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from quantkit.reporting.against_changes import Comparison, Entry
from quantkit.reporting.against_looks import TIMING_NOISE, change_text, text_of
from quantkit.reporting.against_values import SAME_FRAC
from quantkit.reporting.text import Table

MOST_IMPORTANT: Final = 40
"""Important changes beyond which those within noise are folded."""
MOST_CHANGES: Final = 5000
"""Rows of the table of all other changes: of more, those that moved most."""
RULE: Final = (
    "better and worse: the 95 % intervals of the two runs do not overlap, on the same items; "
    "within noise: they do, so no difference is shown (a strict rule, since both runs saw the same "
    "items). Sizes and gates have no noise. Latency and memory: less than "
    f"{100 * TIMING_NOISE:.0f} % is within noise, on the same processor. changed: nothing to judge "
    "it by (no interval, no direction, or other items). new, gone: in one run alone. The same is "
    f"what agrees to {SAME_FRAC:g} relative, which batch sizes and threads may move."
)
_COLUMNS: Final = ("of", "what", "mark", "earlier", "now", "change")


def main_tables(found: Comparison) -> tuple[Table, Table]:
    """Returns the important figures that differ, in the order of the page.

    Where they are many, those within noise are a table of their own, which else has no rows.
    """
    entries = [entry for entry in found.figures if entry.is_changed and entry.look.is_main]
    is_long = len(entries) > MOST_IMPORTANT
    noise = [entry for entry in entries if is_long and entry.mark == "within noise"]
    first = [entry for entry in entries if not (is_long and entry.mark == "within noise")]
    more = f" {len(noise):,} more are within noise and stand below." if noise else ""
    return (
        _table("What changed, the most important figures", list(map(_row, first)), RULE + more),
        _table("Important figures within noise", list(map(_row, noise)), ""),
    )


def other_table(found: Comparison) -> Table:
    """Returns all other figures that differ."""
    entries = [entry for entry in found.figures if entry.is_changed and not entry.look.is_main]
    note = "A figure of a layer, a tensor or a step is called what its file calls it."
    if len(entries) > MOST_CHANGES:
        kept = sorted(entries, key=_order)[:MOST_CHANGES]
        note = (
            f"The {MOST_CHANGES:,} of {len(entries):,} changes that moved most (new and gone "
            f"ones first); the files have all. {note}"
        )
        chosen = set(map(id, kept))
        entries = [entry for entry in entries if id(entry) in chosen]
    return _table("All other changes", [_row(entry) for entry in entries], note)


def _order(entry: Entry) -> float:
    return -math.inf if math.isnan(entry.step) else -entry.step


def same_table(found: Comparison) -> Table:
    """Returns the important figures that are the same, and how many others are."""
    same = [entry for entry in found.figures if not entry.is_changed]
    rows = [(_of(e), e.look.words, text_of(e.now, e.look)) for e in same if e.look.is_main]
    counts: dict[str, int] = {}
    for entry in same:
        if not entry.look.is_main:
            counts[_of(entry)] = counts.get(_of(entry), 0) + 1
    rows += [(of, "other figures", f"{count:,} the same") for of, count in counts.items()]
    return Table(
        title="Unchanged", columns=("of", "what", "both"), rows=tuple(rows), text_columns=2
    )  # fmt: skip


def source_table(found: Comparison) -> Table:
    """Returns what differs in where figures come from; files that agree in it share a row."""
    places: dict[tuple[str, str, str, str], list[str]] = {}
    for entry in found.sources:
        sides = (text_of(entry.earlier, entry.look), text_of(entry.now, entry.look))
        change = (
            change_text(entry.now, entry.earlier, entry.look)
            if isinstance(entry.now, list)
            else ""
        )  # fmt: skip
        places.setdefault((" ".join(entry.path), *sides, change), []).append(_of(entry))
    with_change = any(change for *_, change in places)
    rows = [
        (what, old, new, *((change,) if with_change else ()), ", ".join(dict.fromkeys(of)))
        for (what, old, new, change), of in places.items()
    ]
    change_column = ("change",) if with_change else ()
    return Table(
        title="What differs in the provenance",
        columns=("what", "earlier", "now", *change_column, "files"),
        rows=tuple(rows),
        text_columns=4 + with_change,
    )


def _of(entry: Entry) -> str:
    return f"{entry.kind} of {entry.subject}"


def _row(entry: Entry) -> tuple[str, ...]:
    seen = entry.look
    return (
        _of(entry),
        seen.words,
        entry.mark,
        text_of(entry.earlier, seen),
        text_of(entry.now, seen),
        change_text(entry.now, entry.earlier, seen),
    )


def _table(title: str, rows: Sequence[tuple[str, ...]], note: str) -> Table:
    return Table(title=title, columns=_COLUMNS, rows=tuple(rows), text_columns=3, note=note)
