"""Which models of a pair guess in a task: what quantization does to guessing says nothing."""

from __future__ import annotations

from collections.abc import Iterable

from quantkit.reporting.pair_groups import Pair
from quantkit.reporting.sweep_groups import CHANCE_MARK, Measured


def counts(pair: Pair, one: Measured) -> bool:
    """Returns whether both models have a float row, and neither may be guessing."""
    return not _guessing(pair, one) and all(one.float_cell(model) for model in pair.models)


def guess_note(pair: Pair, one: Measured) -> str:
    """Returns what to say beside the figures of one task; "" where neither model guesses."""
    found = _guessing(pair, one)
    return _sentence(pair, found, "here", "here") if found else ""


def retrieval_note(pair: Pair) -> str:
    """Returns the same of all retrieval tasks together, for their table."""
    return " ".join(_sentences(pair, (one for one in pair.firsts if one.task in pair.needles)))


def guess_sentences(pair: Pair) -> list[str]:
    """Returns a sentence on each set of models that guess, with the tasks that they guess in."""
    return _sentences(pair, pair.firsts)


def _sentences(pair: Pair, parts: Iterable[Measured]) -> list[str]:
    by_marks: dict[tuple[tuple[str, str], ...], list[Measured]] = {}
    for one in parts:
        if found := _guessing(pair, one):
            by_marks.setdefault(tuple(found.items()), []).append(one)
    return [
        _sentence(pair, dict(found), f"in {_names(pair, mine)}", "there")
        for found, mine in by_marks.items()
    ]


def _guessing(pair: Pair, one: Measured) -> dict[str, str]:
    """Returns model -> mark, of those whose float row may be guessing."""
    cells = {model: one.float_cell(model) for model in pair.models}
    marks = {model: one.chance_mark(cell) for model, cell in cells.items() if cell is not None}
    return {model: mark for model, mark in marks.items() if mark}


def _sentence(pair: Pair, found: dict[str, str], place: str, where: str) -> str:
    above = "above" if set(found.values()) == {CHANCE_MARK} else "shown to be above"
    if len(found) == len(pair.models):
        return (
            f"Neither model is {above} chance {place}: what quantization does {where} says nothing."
        )
    (model,) = found
    return (
        f"{model} is not {above} chance {place}: what quantization does to it {where} says nothing."
    )


def _names(pair: Pair, parts: Iterable[Measured]) -> str:
    """Returns the tasks by name; those of retrieval as one, by the paper's N and R."""
    names: dict[str, list[str]] = {}
    for one in parts:
        key = pair.needles.get(one.task)
        grids = names.setdefault(one.words if key is None else "needles", [])
        if key is not None and (text := f"N = {key[0]}, R = {key[1]}") not in grids:
            grids.append(text)
    return ", ".join(
        name + (f" ({'; '.join(grids)})" if grids else "") for name, grids in names.items()
    )
