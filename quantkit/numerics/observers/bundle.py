"""The observers that every reported group carries, updated together; a monoid like its parts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Self

import torch
from torch import Tensor

from quantkit.numerics.observers.histogram import Histogram
from quantkit.numerics.observers.minmax import MinMax
from quantkit.numerics.observers.moments import Moments
from quantkit.numerics.observers.topk import TopK


@dataclass(frozen=True, kw_only=True, eq=False)
class Bundle:
    """Extremes, exact top-k with tags, float64 moments and an integer histogram, per group.

    Moments and histogram may stand for a sample of the rows (`RowScan`); extremes never do.
    """

    minmax: MinMax
    topk: TopK
    moments: Moments
    histogram: Histogram

    @classmethod
    def empty(cls, groups: int, *, k: int = 100) -> Self:
        """Returns the identity of `merge` for that many groups."""
        return cls(
            minmax=MinMax.empty(groups),
            topk=TopK.empty(groups, k=k),
            moments=Moments.empty(groups),
            histogram=Histogram.empty(groups),
        )

    def update(
        self,
        x: Tensor,
        tags: Tensor,
        *,
        valid: Tensor | None = None,
        sampled: Tensor | None = None,
    ) -> Self:
        """Returns the bundle with `x` `[groups, elements]` added.

        Args:
            tags: int64 `[elements]` or `[1, elements]`.
            valid: bool `[groups or 1, elements]`; where False the element does not exist.
            sampled: The same for moments and histogram; default: as `valid`.
        """
        if x.shape[1] == 0:
            return self
        sampled = valid if sampled is None else sampled
        return type(self)(
            minmax=self.minmax.update(x, valid=valid),
            topk=self.topk.update(x, tags.expand(x.shape), valid=valid),
            moments=self.moments.update(x, valid=sampled),
            histogram=self.histogram.update(x, valid=sampled),
        )

    def merge(self, other: Self) -> Self:
        """Returns the bundle of both parts' elements."""
        return type(self)(
            minmax=self.minmax.merge(other.minmax),
            topk=self.topk.merge(other.topk),
            moments=self.moments.merge(other.moments),
            histogram=self.histogram.merge(other.histogram),
        )

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Returns the states of the parts, by name."""
        return {
            "minmax": self.minmax.state(),
            "topk": self.topk.state(),
            "moments": self.moments.state(),
            "histogram": self.histogram.state(),
        }

    @classmethod
    def from_state(cls, state: dict[str, dict[str, Tensor]]) -> Self:
        """Returns the bundle whose `state` this was."""
        return cls(
            minmax=MinMax.from_state(state["minmax"]),
            topk=TopK.from_state(state["topk"]),
            moments=Moments.from_state(state["moments"]),
            histogram=Histogram.from_state(state["histogram"]),
        )

    def to(self, device: torch.device | str) -> Self:
        """Returns the bundle with its tensors on another device."""
        moved = {
            part: {
                name: tensor if tensor.dim() == 0 else tensor.to(device)
                for name, tensor in state.items()
            }
            for part, state in self.state().items()
        }
        return type(self).from_state(moved)

    @property
    def floor(self) -> Tensor:
        """Magnitudes below which nothing new can enter the top-k, float32 `[groups]`; -1: all."""
        return self.topk.values[:, -1]

    def select(self, start: int, stop: int) -> Self:
        """Returns the groups `start <= group < stop`."""
        return type(self)(
            minmax=MinMax.from_state({n: x[start:stop] for n, x in self.minmax.state().items()}),
            topk=TopK.from_state({n: x[start:stop] for n, x in self.topk.state().items()}),
            moments=self.moments.select(start, stop),
            histogram=self.histogram.select(start, stop),
        )

    def pool(self) -> Self:
        """Returns one group that holds the elements of all."""
        return type(self)(
            minmax=self.minmax.pool(),
            topk=self.topk.pool(),
            moments=self.moments.pool(),
            histogram=self.histogram.pool(),
        )


def merged(bundles: list[Bundle]) -> Bundle:
    """Returns the merge of one or more bundles with the same number of groups."""
    return reduce(lambda left, right: left.merge(right), bundles)
