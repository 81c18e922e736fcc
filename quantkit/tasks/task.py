"""What every task is: items, scored batch by batch through a callable, and figures over them.

A task does not know what it scores: a model, a quantized one, a graph. What it finds is one row of
numbers an item, so that a sweep can keep rows, deal batches out to processes and resample items.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quantkit.calib_sets import TokenBatch
from quantkit.results import DataInfo

Rows = NDArray[np.float64]
"""One row an item, `[items, columns]`; what the columns are is the task's own."""


class TextForward(Protocol):
    """A language model as tasks see it."""

    def __call__(self, batch: TokenBatch, positions: Tensor | None = None) -> Tensor:
        """Returns vocabulary logits `[batch, positions, vocabulary]`, on the CPU.

        Args:
            positions: int64, ascending: columns of the batch whose logits are wanted; None: all.
        """


ImageForward = Callable[[Tensor], Tensor]
"""Given images `[batch, channel, height, width]`, returns class logits `[batch, classes]`."""

F = TypeVar("F", contravariant=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class Metric:
    """A figure over units: sum(total) / sum(weight), or exp of it.

    Attributes:
        name: e.g. `perplexity`.
        total, weight: One number a unit, `[units]`.
        link: `exp` for perplexity, whose mean is of logarithms.
        chance: What guessing reaches, where that is meant to be known.
        trials: Where `total` counts successes: independent trials and their number of successes are
            `len(total)` and `total.sum()`, so that an exact test against chance can be made.
        successes: 0 or 1 a unit, what such a test counts instead of `total` where that has several
            trials a unit, which depend on each other (`icl`: the first order's).
        is_share: Whether every unit's own figure lies in [0, 1] by definition: an accuracy, a rate.
            A figure that happens to, such as 0.9 bits per byte, is none.
    """

    name: str
    total: NDArray[np.float64]
    weight: NDArray[np.float64]
    link: Literal["identity", "exp"] = "identity"
    higher_is_better: bool = True
    chance: float | None = None
    trials: bool = False
    successes: NDArray[np.float64] | None = None
    is_share: bool = False

    @property
    def value(self) -> float:
        """The figure over all units."""
        ratio = float(self.total.sum() / self.weight.sum())
        return float(np.exp(ratio)) if self.link == "exp" else ratio


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """What a task found.

    Attributes:
        metrics: The first is the one that is looked at first; all are over the same units.
        details: Other figures, without an interval.
    """

    metrics: tuple[Metric, ...]
    details: Mapping[str, float] = field(default_factory=dict)


class Task(Protocol[F]):
    """Items with what is right, ready for one model: they are tokenized, or made into arrays."""

    @property
    def name(self) -> str:
        """Canonical: the specification it was made from."""

    @property
    def unit(self) -> str:
        """What the metrics are over, in the plural: `blocks`, `items`, `samples`, `images`."""

    @property
    def item_hashes(self) -> tuple[str, ...]:
        """One short hash a unit, over its text and answer (no token ids): the same hash is the
        same item for another model, too.
        """

    @property
    def batches(self) -> Sequence[Sequence[int]]:
        """Items of each forward pass (or of a few); every item once. Fixed by the task alone."""

    @property
    def tokens(self) -> Sequence[int]:
        """Positions that each batch computes, padding included: what its time grows with."""

    @property
    def data(self) -> DataInfo:
        """What a result says about the items."""

    def run(self, forward: F, items: Sequence[int]) -> Rows:
        """Returns the rows of one batch's items, in their order."""

    def scores(self, rows: Rows) -> Scores:
        """Returns the figures over all items' rows, in the order of the items."""
