"""The exact largest magnitudes of each group, with their signs and where they stood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.numerics.observers.rows import checked, counted, require_same_groups

MISSING = -1.0
"""Stands in `values` where a group had fewer than k elements; no magnitude is negative."""

_LAST = torch.iinfo(torch.int64).max


@dataclass(frozen=True, kw_only=True, eq=False)
class TopK:
    """The k largest |x| of each group; all tensors are [groups, k], largest first.

    `values` float32 |x|, `signed` float32 x, `tags` int64: what the caller said of the element.
    Missing entries are -1, 0 and -1. NaN and inf do not take part (`MinMax` counts them).

    Equal magnitudes are ordered by tag, then positive first: with distinct tags the result does
    not depend on how the elements were cut into batches.
    """

    values: Tensor
    signed: Tensor
    tags: Tensor

    @classmethod
    def empty(cls, groups: int, *, k: int = 100, device: torch.device | str = "cpu") -> Self:
        """Returns the observer that has seen nothing. k is 100, the last rank of the paper's
        table of outliers (Differential Transformer, Table 5).

        Raises:
            InputError: k below 1.
        """
        if k < 1:
            raise InputError(f"Expected to keep at least 1 value, got k={k}.")
        values = torch.full((groups, k), MISSING, dtype=torch.float32, device=device)
        return cls(
            values=values,
            signed=torch.zeros_like(values),
            tags=torch.full((groups, k), -1, dtype=torch.int64, device=device),
        )

    @classmethod
    def of(cls, state: dict[str, Tensor], *, k: int) -> Self:
        """Returns the k largest of candidates in any order; `state` as in `state()`, any width."""
        groups = state["values"].shape[0]
        return cls.empty(groups, k=k)._with(state["values"], state["signed"], state["tags"])

    @property
    def groups(self) -> int:
        """How many rows are told apart."""
        return self.values.shape[0]

    @property
    def k(self) -> int:
        """How many magnitudes are kept for each group."""
        return self.values.shape[1]

    def update(self, x: Tensor, tags: Tensor | None = None, *, valid: Tensor | None = None) -> Self:
        """Returns the observer that has also seen `x` [groups, elements].

        Args:
            x: floating.
            tags: int64 [groups or 1, elements], below 2^62 in magnitude; -1 where not given.
            valid: bool [groups or 1, elements]; where False the element does not exist.

        Raises:
            InputError: a shape or dtype that does not fit.
        """
        x = checked(x, self.groups)
        if tags is None:
            tags = torch.full((), -1, dtype=torch.int64, device=x.device).expand(x.shape)
        elif tags.dtype != torch.int64 or tags.shape not in (x.shape, (1, x.shape[1])):
            raise InputError(
                f"Expected tags as int64 [{x.shape[0]} or 1, {x.shape[1]}], "
                f"got {tags.dtype} {list(tags.shape)}."
            )
        tags = tags.expand(x.shape)
        size = x.abs()
        out = ~size.isfinite()
        if valid is not None:
            out |= ~counted(x, valid)
        size = size.masked_fill(out, MISSING)

        # Only what reaches the group's k-th place so far can enter: after the first few updates
        # that is next to nothing, and sorting it is cheap.
        enters = (size >= self.values[:, -1:]) & (size != MISSING)
        widest = int(enters.sum(1).max()) if enters.numel() else 0
        if widest == 0:
            return self
        if widest <= x.shape[1] // 8:
            row, column = enters.nonzero(as_tuple=True)
            place = (enters.cumsum(1) - 1)[row, column]
            shape = (self.groups, widest)
            few = torch.full(shape, MISSING, dtype=torch.float32, device=x.device)
            few[row, place] = size[row, column].to(torch.float32)
            few_signed = torch.zeros_like(few)
            few_signed[row, place] = x[row, column].to(torch.float32)
            few_tags = torch.full(shape, -1, dtype=torch.int64, device=x.device)
            few_tags[row, place] = tags[row, column]
            return self._with(few, few_signed, few_tags)
        return self._with(size.to(torch.float32), x.to(torch.float32), tags)

    def _with(self, values: Tensor, signed: Tensor, tags: Tensor) -> Self:
        """Returns the k largest of mine and of these; ties fall as the class says."""
        values, signed, tags = _narrow(values, signed, tags, self.k)
        values = torch.cat([self.values, values], 1)
        signed = torch.cat([self.signed, signed], 1)
        tags = torch.cat([self.tags, tags], 1)
        # Two stable sorts, the lesser key first.
        by_tag = _tie_key(signed, tags).argsort(dim=1, stable=True)
        by_size = values.gather(1, by_tag).argsort(dim=1, descending=True, stable=True)
        order = by_tag.gather(1, by_size)
        values, signed, tags = (t.gather(1, order) for t in (values, signed, tags))
        k = self.k
        return type(self)._cleaned(values[:, :k], signed[:, :k], tags[:, :k])

    @classmethod
    def _cleaned(cls, values: Tensor, signed: Tensor, tags: Tensor) -> Self:
        missing = values == MISSING
        return cls(
            values=values.contiguous(),
            signed=signed.masked_fill(missing, 0.0),
            tags=tags.masked_fill(missing, -1),
        )

    def merge(self, other: Self) -> Self:
        """Returns the observer that has seen what both saw."""
        require_same_groups(self.groups, other.groups)
        if self.k != other.k:
            raise InputError(f"Expected to merge equal k, got {self.k} and {other.k}.")
        return self._with(other.values, other.signed, other.tags)

    def pool(self) -> Self:
        """Returns the observer of one group that has seen what all groups saw."""
        nothing = type(self).empty(1, k=self.k, device=self.values.device)
        rows = (t.reshape(1, -1) for t in (self.values, self.signed, self.tags))
        return nothing._with(*rows)

    def finish(self) -> Tensor:
        """Returns |x| by rank, float32 [groups, k]; NaN where a group had fewer elements."""
        return self.values.masked_fill(self.values == MISSING, torch.nan)

    def state(self) -> dict[str, Tensor]:
        """Returns tensors from which `from_state` makes this observer again."""
        return {"values": self.values, "signed": self.signed, "tags": self.tags}

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> Self:
        """Returns the observer whose `state` this was."""
        return cls(**state)


def _tie_key(signed: Tensor, tags: Tensor) -> Tensor:
    return tags * 2 + (signed < 0).to(torch.int64)


def _narrow(values: Tensor, signed: Tensor, tags: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns candidates [groups, <= 2k] among which the k winners of each row are."""
    if values.shape[1] <= 2 * k:
        return values, signed, tags
    top, at = values.topk(k, dim=1)
    kth = top[:, -1:]
    if bool(((values >= kth).sum(1) == k).all()):  # no tie at the k-th place
        return top, signed.gather(1, at), tags.gather(1, at)
    # topk takes any of the tied: keep what lies above, and of the tied the k first by key.
    above = torch.where(top > kth, top, torch.full_like(top, MISSING))
    key = torch.where(values == kth, _tie_key(signed, tags), _LAST)
    first, tied = key.topk(k, dim=1, largest=False)
    tied_values = torch.where(first == _LAST, torch.full_like(top, MISSING), values.gather(1, tied))
    at = torch.cat([at, tied], 1)
    return torch.cat([above, tied_values], 1), signed.gather(1, at), tags.gather(1, at)
