"""The moving average of each sample's extremes, as a monoid although the order matters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.numerics.observers.rows import require_same_groups


@dataclass(frozen=True, kw_only=True, eq=False)
class MovingAverage:
    """What r = (1 - c) r + c x gives over numbered samples, for the min and the max of each group.

    Unrolled, sample 0 has weight (1 - c)^last and any other sample i weight c (1 - c)^(last - i):
    a sum over samples, which merges in any order, as each sample says its number. Several
    processes may hold interleaved samples; no sample may be given twice.

    `lo_sum`, `hi_sum`, `weight` float64 [groups]: the weighted sums and the sum of the weights, as
    of `last` int64 [groups], the group's last sample (-1: none). A sample without a finite element
    in a group does not take part in that group: the weights of the others are as if it had been
    there, and are scaled to a sum of 1.
    """

    constant: float
    lo_sum: Tensor
    hi_sum: Tensor
    weight: Tensor
    last: Tensor

    @classmethod
    def empty(
        cls, groups: int, *, constant: float = 0.01, device: torch.device | str = "cpu"
    ) -> Self:
        """Returns the identity of `merge`. `constant`: c, torch's default.

        Raises:
            InputError: a constant outside (0, 1].
        """
        if not 0.0 < constant <= 1.0:
            raise InputError(f"Expected an averaging constant in (0, 1], got {constant}.")
        zeros = torch.zeros(groups, dtype=torch.float64, device=device)
        return cls(
            constant=constant,
            lo_sum=zeros,
            hi_sum=zeros,
            weight=zeros,
            last=torch.full((groups,), -1, dtype=torch.int64, device=device),
        )

    @property
    def groups(self) -> int:
        """How many rows are told apart."""
        return self.weight.shape[0]

    def update(self, sample: int, lo: Tensor, hi: Tensor) -> Self:
        """Returns the observer that has also seen sample number `sample` (from 0).

        `lo`, `hi` [groups]: its extremes; where one is not finite the group had no element in it.

        Raises:
            InputError: a negative number, or another shape.
        """
        if sample < 0 or lo.shape != (self.groups,) or hi.shape != (self.groups,):
            raise InputError(
                f"Expected a sample number from 0 and extremes [{self.groups}], got {sample}, "
                f"{list(lo.shape)} and {list(hi.shape)}."
            )
        there = lo.isfinite() & hi.isfinite()
        share = torch.where(there, 1.0 if sample == 0 else self.constant, 0.0).to(torch.float64)
        return self.merge(
            replace(
                self,
                lo_sum=share * lo.detach().to(torch.float64).masked_fill(~there, 0.0),
                hi_sum=share * hi.detach().to(torch.float64).masked_fill(~there, 0.0),
                weight=share,
                last=torch.where(there, sample, -1),
            )
        )

    def merge(self, other: Self) -> Self:
        """Returns the observer that has seen the samples of both.

        Raises:
            InputError: another number of groups or another constant.
        """
        require_same_groups(self.groups, other.groups)
        if self.constant != other.constant:
            raise InputError(
                "Expected to merge moving averages of one constant, got "
                f"{self.constant} and {other.constant}."
            )
        last = torch.maximum(self.last, other.last)

        def faded(part: Self) -> Tensor:
            age = torch.where(part.last >= 0, last - part.last, 0).to(torch.float64)
            return (1.0 - self.constant) ** age  # 0^0 is 1

        mine, its = faded(self), faded(other)
        return replace(
            self,
            lo_sum=self.lo_sum * mine + other.lo_sum * its,
            hi_sum=self.hi_sum * mine + other.hi_sum * its,
            weight=self.weight * mine + other.weight * its,
            last=last,
        )

    def select(self, start: int, stop: int) -> Self:
        """Returns the groups `start <= group < stop`."""
        return replace(
            self,
            lo_sum=self.lo_sum[start:stop],
            hi_sum=self.hi_sum[start:stop],
            weight=self.weight[start:stop],
            last=self.last[start:stop],
        )

    def finish(self) -> tuple[Tensor, Tensor]:
        """Returns the averaged (min, max), float32 [groups]; NaN where nothing was seen."""
        lo, hi = self.lo_sum / self.weight, self.hi_sum / self.weight
        return lo.to(torch.float32), hi.to(torch.float32)

    def state(self) -> dict[str, Tensor]:
        """Returns tensors from which `from_state` makes this observer again."""
        return {
            "constant": torch.tensor(self.constant, dtype=torch.float64),
            "lo_sum": self.lo_sum,
            "hi_sum": self.hi_sum,
            "weight": self.weight,
            "last": self.last,
        }

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> Self:
        """Returns the observer whose `state` this was."""
        return cls(
            constant=float(state["constant"]),
            lo_sum=state["lo_sum"],
            hi_sum=state["hi_sum"],
            weight=state["weight"],
            last=state["last"],
        )
