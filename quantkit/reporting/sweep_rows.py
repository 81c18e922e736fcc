"""The cells of a task and metric in rows: by bits of the logits, and what no such row shows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from quantkit.errors import InputError
from quantkit.recipe import UNQUANTIZED_BITS, Recipe
from quantkit.results import Cell

FLOAT: Final = "none"
"""The recipe of the float row."""


@dataclass(frozen=True, kw_only=True)
class BitRow:
    """A line of a table or a picture: one model and grid of the logits, at several widths.

    Attributes:
        rest: What is quantized beside the logits, as a recipe; `float` for nothing.
        scale: What shares a scale of the logits, and other words of their grid.
        cells: By bits of the logits; the unquantized one is shared by all rows of `rest`.
    """

    model: str
    rest: str
    scale: str
    cells: dict[int, Cell]


def split_recipe(name: str, cell: Cell | None = None) -> tuple[str, str]:
    """Returns what is quantized beside the logits, and the logits' grid in words ("" for none).

    A name that the grammar does not know stands for itself, as what is beside.
    """
    try:
        recipe = Recipe.parse(name)
    except InputError:
        if cell is None or cell.granularity is None:
            return name, ""
        return name, cell.granularity
    logits = recipe.logits
    rest = str(replace(recipe, logits=None))
    rest = "float" if rest == FLOAT else rest
    if logits is None:
        return rest, ""
    words: list[str] = [logits.granularity]
    words += ["static"] if logits.range == "static" else []
    return rest, " ".join(words + ([] if logits.symmetric else ["asymmetric"]))


def bit_rows(cells: Iterable[Cell]) -> list[BitRow]:
    """Returns the rows of quantized logits of one task and metric, a model after the other.

    A recipe without logits is in the rows that share its other parts; where there are none, it is
    one of `other_cells`.
    """
    floats: dict[tuple[str, str], Cell] = {}
    rows: dict[tuple[str, str, str], dict[int, Cell]] = {}
    for cell in cells:
        rest, scale = split_recipe(cell.recipe, cell)
        if scale:
            rows.setdefault((cell.model, rest, scale), {})[cell.bits] = cell
        else:
            floats[cell.model, rest] = cell
    models = list(dict.fromkeys(model for model, *_ in rows))
    found = []
    for (model, rest, scale), widths in sorted(rows.items(), key=lambda r: models.index(r[0][0])):
        base = floats.get((model, rest))
        start = {} if base is None else {UNQUANTIZED_BITS: base}
        found.append(BitRow(model=model, rest=rest, scale=scale, cells=start | widths))
    return found


def other_cells(cells: Iterable[Cell]) -> list[Cell]:
    """Returns the cells that no row of bits shows, behind their model's float row.

    [] where there is nothing but rows of bits.
    """
    cells = list(cells)
    rows = bit_rows(cells)
    shown = {id(cell) for row in rows for cell in row.cells.values()}
    left = [cell for cell in cells if id(cell) not in shown]
    models = dict.fromkeys(cell.model for cell in left)
    return [
        cell
        for model in models
        for cell in sorted(cells, key=lambda c: c.recipe != FLOAT)
        if cell.model == model and (cell.recipe == FLOAT or id(cell) not in shown)
    ]
