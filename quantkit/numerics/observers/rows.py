"""What every observer is fed: a dense float tensor [groups, elements], and what counts in it."""

from __future__ import annotations

from typing import Any, Protocol, Self

import torch
from torch import Tensor

from quantkit.errors import InputError


class Observer(Protocol):
    """A monoid over tensors [groups, elements]; every row is a group of its own.

    `merge` is associative with `empty` as its neutral element, and updating with two halves is
    the merge of the two halves' updates: exactly for counts, extremes and top-k, to float64
    rounding for sums. Nothing is changed in place: `update` and `merge` return a new observer.
    """

    @property
    def groups(self) -> int:
        """How many rows are told apart."""

    def update(self, x: Tensor, *, valid: Tensor | None = None) -> Self:
        """Returns the observer that has also seen `x`."""

    def merge(self, other: Self) -> Self:
        """Returns the observer that has seen what both saw, group by group."""

    def pool(self) -> Self:
        """Returns the observer of one group that has seen what all groups saw."""

    def finish(self) -> Any:
        """Returns what was observed."""

    def state(self) -> dict[str, Tensor]:
        """Returns tensors from which `from_state` makes this observer again."""


def checked(x: Tensor, groups: int) -> Tensor:
    """Returns `x` detached, if it is a floating tensor [groups, elements].

    Raises:
        InputError: it is not; says what came.
    """
    if x.dim() != 2 or x.shape[0] != groups or not x.is_floating_point():
        raise InputError(
            f"Expected a floating tensor [groups={groups}, elements], "
            f"got {x.dtype} {list(x.shape)}."
        )
    return x.detach()


def counted(x: Tensor, valid: Tensor | None) -> Tensor:
    """Returns `valid` as bool in the shape of `x` (a view where it was [1, elements]).

    Raises:
        InputError: not a bool tensor [groups or 1, elements].
    """
    if valid is None:
        return torch.ones((), dtype=torch.bool, device=x.device).expand(x.shape)
    fits = valid.dim() == 2 and valid.shape[0] in (1, x.shape[0]) and valid.shape[1] == x.shape[1]
    if valid.dtype != torch.bool or not fits:
        raise InputError(
            f"Expected valid as bool [{x.shape[0]} or 1, {x.shape[1]}], "
            f"got {valid.dtype} {list(valid.shape)}."
        )
    return valid.expand(x.shape)


def require_same_groups(mine: int, other: int) -> None:
    """Returns if two observers can be merged.

    Raises:
        InputError: they tell a different number of groups apart.
    """
    if mine != other:
        raise InputError(
            f"Expected to merge observers with equal groups, got {mine} and {other}; "
            "pool both first, or observe both in the same layout."
        )
