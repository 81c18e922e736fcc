"""The extremes of each group, and how much of it was not a number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from quantkit.numerics.observers.rows import checked, counted, require_same_groups


@dataclass(frozen=True, kw_only=True, eq=False)
class MinMax:
    """Smallest and largest finite value, and counts. All tensors are [groups].

    `count` is every valid element, finite or not; NaN and inf are also counted on their own and
    are left out of `min` and `max`. A group without a finite element has min = +inf, max = -inf
    (so that merging needs no special case); `finish` turns those into NaN.
    """

    min: Tensor
    max: Tensor
    count: Tensor
    nan_count: Tensor
    inf_count: Tensor

    @classmethod
    def empty(cls, groups: int, *, device: torch.device | str = "cpu") -> Self:
        """Returns the observer that has seen nothing."""
        zeros = torch.zeros(groups, dtype=torch.int64, device=device)
        high = torch.full((groups,), torch.inf, dtype=torch.float32, device=device)
        return cls(min=high, max=-high, count=zeros, nan_count=zeros, inf_count=zeros)

    @property
    def groups(self) -> int:
        """How many rows are told apart."""
        return self.min.shape[0]

    def update(self, x: Tensor, *, valid: Tensor | None = None) -> Self:
        """Returns the observer that has also seen `x` [groups, elements].

        `valid` (bool, [groups or 1, elements]): where False the element does not exist.
        """
        x = checked(x, self.groups)
        if x.shape[1] == 0:
            return self
        if valid is None:
            lo, hi = torch.aminmax(x, dim=1)
            if bool((lo.isfinite() & hi.isfinite()).all()):  # aminmax hands a NaN through
                return self._with(lo, hi, torch.full_like(self.count, x.shape[1]), None, None)
        counts = counted(x, valid)
        finite = x.isfinite() & counts
        return self._with(
            x.masked_fill(~finite, torch.inf).amin(1),
            x.masked_fill(~finite, -torch.inf).amax(1),
            counts.sum(1),
            (x.isnan() & counts).sum(1),
            (x.isinf() & counts).sum(1),
        )

    def _with(
        self, lo: Tensor, hi: Tensor, count: Tensor, nans: Tensor | None, infs: Tensor | None
    ) -> Self:
        return type(self)(
            min=torch.minimum(self.min, lo.to(torch.float32)),
            max=torch.maximum(self.max, hi.to(torch.float32)),
            count=self.count + count,
            nan_count=self.nan_count if nans is None else self.nan_count + nans,
            inf_count=self.inf_count if infs is None else self.inf_count + infs,
        )

    def merge(self, other: Self) -> Self:
        """Returns the observer that has seen what both saw."""
        require_same_groups(self.groups, other.groups)
        return self._with(other.min, other.max, other.count, other.nan_count, other.inf_count)

    def pool(self) -> Self:
        """Returns the observer of one group that has seen what all groups saw."""
        if self.groups == 0:
            return type(self).empty(1, device=self.min.device)
        return type(self)(
            min=self.min.amin(0, keepdim=True),
            max=self.max.amax(0, keepdim=True),
            count=self.count.sum(0, keepdim=True),
            nan_count=self.nan_count.sum(0, keepdim=True),
            inf_count=self.inf_count.sum(0, keepdim=True),
        )

    def finish(self) -> tuple[Tensor, Tensor]:
        """Returns (min, max), float32 [groups]; NaN where a group had no finite element."""
        seen = self.min <= self.max
        nothing = torch.full_like(self.min, torch.nan)
        return torch.where(seen, self.min, nothing), torch.where(seen, self.max, nothing)

    def state(self) -> dict[str, Tensor]:
        """Returns tensors from which `from_state` makes this observer again."""
        return {
            "min": self.min,
            "max": self.max,
            "count": self.count,
            "nan_count": self.nan_count,
            "inf_count": self.inf_count,
        }

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> Self:
        """Returns the observer whose `state` this was."""
        return cls(**state)
