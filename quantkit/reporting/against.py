"""An earlier run beside this one, every change marked: a section of the page and a sentence.

Results are matched by what they are: model, point, layer, recipe, tensor; never by folder. A figure
is called better or worse only where its interval says so, see `against_tables.RULE`.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, Literal

from quantkit.reporting.against_changes import MARKS, Comparison, Entry, Mark, compare
from quantkit.reporting.against_looks import change_text, leaves, text_of
from quantkit.reporting.against_tables import main_tables, other_table, same_table, source_table
from quantkit.reporting.blocks import Section
from quantkit.reporting.collect import Run
from quantkit.reporting.text import Table, first_of

_MOST_ROWS: Final = 24
"""Of the changes of layers, tensors and steps; a longer table is folded."""
_WORDS: Final[dict[Mark, str]] = {
    "changed": "changed with nothing to judge it by",
    "same": "the same",
}
_HASHED: Final[dict[Literal["data", "model"], str]] = {
    "data": "other data, so not comparable",
    "model": "another model",
}
_RANKED: Final[tuple[tuple[Mark, ...], ...]] = (
    ("better", "worse"), ("changed",), ("within noise",),
)  # fmt: skip
"""Which changes are looked at first for the largest one."""


def against_section(now: Run, earlier: Run) -> Section:
    """Returns the changes since an earlier run: the important ones, all others, what from.

    Raises:
        InputError: the runs have nothing in common.
    """
    found = compare(now, earlier)
    (main, noise), others = main_tables(found), other_table(found)
    is_long = len(others.rows) > _MOST_ROWS
    return Section(
        name="against",
        title="Against the earlier run",
        notes=_notes(found),
        tables=_filled(main, *(() if is_long else (others,)), source_table(found)),
        folded=_filled(noise, *((others,) if is_long else ()), same_table(found)),
    )


def against_sentence(now: Run, earlier: Run) -> str:
    """Returns one sentence: how many figures changed and how, and the largest change.

    Raises:
        InputError: the runs have nothing in common.
    """
    return _sentence(compare(now, earlier))


def _notes(found: Comparison) -> tuple[str, ...]:
    notes = []
    data, models = found.differing("data"), found.differing("model")
    if data:
        notes.append(
            f"The data differ ({_hashes(data)}): figures of other data are not comparable, and "
            "none of them is called better or worse."
        )
    if models:
        notes.append(
            f"The model differs ({_hashes(models)}): a change is one of the model, of the settings "
            "or of both."
        )
    if found.renamed is not None:
        new, old = found.renamed
        notes.append(f"The one model of each run is laid beside the other: {new} now, {old} then.")
    return (*notes, _sentence(found))


def _hashes(entries: tuple[Entry, ...]) -> str:
    texts = dict.fromkeys(
        f"{entry.kind} of {entry.subject}: {' '.join(entry.path)} "
        f"{entry.earlier[:12]} then, {entry.now[:12]} now"
        for entry in entries
    )
    return first_of(list(texts), 2)


def _sentence(found: Comparison) -> str:
    # what one run alone has is one entry, however many figures are below it
    counts: Counter[Mark] = Counter()
    for entry in found.figures:
        counts[entry.mark] += _figures(entry)
    total = sum(counts.values())
    if counts["same"] == total:
        sources = len(found.sources)
        beside = f", {sources:,} facts of their provenance differ" if sources else ""
        return f"Against the earlier run nothing changed: {total:,} figures are the same{beside}."
    parts = [f"{counts[mark]:,} {_WORDS.get(mark, mark)}" for mark in MARKS if counts[mark]]
    return (
        f"Against the earlier run{_beside(found)}, of {total:,} figures: "
        f"{', '.join(parts)}{_most(found)}."
    )


def _figures(entry: Entry) -> int:
    return max(1, *(leaves(node) for node in (entry.now, entry.earlier) if node is not None))


def _beside(found: Comparison) -> str:
    """Returns in brackets which files read other data, or are of other weights."""
    parts = []
    for what, words in _HASHED.items():
        kinds = dict.fromkeys(entry.kind for entry in found.differing(what))
        if kinds:
            parts.append(f"{words}: {', '.join(kinds)}")
    return f" ({'; '.join(parts)})" if parts else ""


def _most(found: Comparison) -> str:
    """Returns the change that is largest among the important ones, else among all."""
    for is_main in (True, False):
        for marks in _RANKED:
            known = [
                entry
                for entry in found.figures
                if entry.mark in marks and entry.look.is_main == is_main and entry.step >= 0
            ]
            if known:
                most = max(known, key=lambda entry: entry.step)
                seen = most.look
                return (
                    f"; the largest change: {seen.words} of {most.subject}, "
                    f"{text_of(most.earlier, seen)} then, {text_of(most.now, seen)} now "
                    f"({change_text(most.now, most.earlier, seen)}, {most.mark})"
                )
    return ""


def _filled(*candidates: Table) -> tuple[Table, ...]:
    return tuple(table for table in candidates if table.rows)
