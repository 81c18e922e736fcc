"""The rows of a sweep: the float one, the bits of the logits in every way asked for, and others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from quantkit.recipe import UNQUANTIZED_BITS, LogitQuant, Recipe


def logit_recipes(
    bits: Sequence[int],
    granularity: Sequence[str],
    ranges: Sequence[str] = ("dynamic",),
    grids: Sequence[str] = ("symmetric",),
) -> list[Recipe]:
    """Returns the float row first, always, then ranges x grids x bits x granularity.

    What cannot be, a static range per row, is left out.
    """
    recipes = [Recipe()]
    for range_, grid, width, name in product(ranges, grids, bits, granularity):
        if width != UNQUANTIZED_BITS and not (range_ == "static" and name == "row"):
            quant = LogitQuant(
                bits=width,
                granularity=name,  # type: ignore[arg-type]
                range=range_,  # type: ignore[arg-type]
                symmetric=grid == "symmetric",
            )
            recipes.append(Recipe(logits=quant))
    return recipes


def unique(recipes: Sequence[Recipe]) -> list[Recipe]:
    """Returns each recipe once, in the order of its first appearance."""
    return list(dict.fromkeys(recipes))
