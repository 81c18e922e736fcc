"""What `auto` tries first: recipes with their storage, smoothing and method of ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, cast

from quantkit.jobs import Storage
from quantkit.recipe import LogitQuant, Recipe
from quantkit.results import Trial

Smoothed = Literal["none", "auto", "0.5"]
"""SmoothQuant's migration: none, a strength searched for each group, or one for all."""

STATIC: Final = "w8a8"
BY_TOKEN: Final = "w8a8:token:symmetric"
BLOCKS: Final = ("w8:group32", "w4:group32")
OF_TENSORS: Final[tuple[Smoothed, ...]] = ("none", "auto")
OF_TOKENS: Final[tuple[Smoothed, ...]] = ("none", "0.5")
"""What is tried for ranges of a tensor, for which the strengths are searched, and of a token, whose
range the largest channel sets alone: SmoothQuant's own default evens channels out."""
METHODS: Final = ("minmax", "mse")
"""Of static ranges: the widest, and the one of the least squared error."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One export that may be built.

    Attributes:
        method: How static ranges of inputs are chosen; empty where none are read.
        keep: Quantizers that stay in float, the one that costs most first.
    """

    recipe: Recipe
    storage: Storage = "qdq"
    smoothing: Smoothed = "none"
    method: str = ""
    keep: tuple[str, ...] = ()

    @classmethod
    def of(cls, trial: Trial) -> Candidate:
        """Returns the candidate that a trial is of."""
        return cls(
            recipe=Recipe.parse(trial.recipe),
            storage=cast(Storage, trial.storage),
            smoothing=cast(Smoothed, trial.smoothing),
            method=trial.method,
            keep=tuple(trial.kept),
        )

    @property
    def name(self) -> str:
        """Derived from all that it is: `w8a8, mse, smoothed, 12 in float`."""
        parts = [str(self.recipe)]
        parts += ["MatMulNBits"] if self.storage == "matmulnbits" else []
        parts += [self.method] if self.method else []
        if self.smoothing != "none":
            parts.append("smoothed" if self.smoothing == "auto" else f"smoothed {self.smoothing}")
        parts += [f"{len(self.keep)} in float"] if self.keep else []
        return ", ".join(parts)

    @property
    def family(self) -> tuple[str, str]:
        """What candidates share that differ in ranges, smoothing and kept tensors alone."""
        return str(self.recipe), self.storage

    def keeping(self, names: Sequence[str]) -> Candidate:
        """Returns the same with these quantizers in float."""
        return replace(self, keep=tuple(names))


def first_candidates(
    *,
    can_smooth: bool,
    methods: Sequence[str] = METHODS,
    storage: Storage = "matmulnbits",
    logits: LogitQuant | None = None,
) -> list[Candidate]:
    """Returns what is tried before anything is kept in float.

    Args:
        can_smooth: Whether the model has groups of layers whose scales can move.
        storage: Of weights by group.
        logits: Added to every recipe.
    """

    def recipe(name: str) -> Recipe:
        return replace(Recipe.parse(name), logits=logits)

    found = [
        Candidate(recipe=recipe(STATIC), smoothing=smoothing, method=method)
        for smoothing in OF_TENSORS
        for method in methods
    ]
    found += [Candidate(recipe=recipe(BY_TOKEN), smoothing=smoothing) for smoothing in OF_TOKENS]
    found += [Candidate(recipe=recipe(name), storage=storage) for name in BLOCKS]
    return [one for one in found if can_smooth or one.smoothing == "none"]
