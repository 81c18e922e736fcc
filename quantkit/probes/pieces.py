"""Pieces of an attention map, and what a callback puts in the place of them.

A tile is some query rows of a whole batch; a block lies in a processor's cache, is of one sequence,
and can be written to. Both hold logits, or softmax outputs where those are to be replaced.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LogitTile:
    """Some query rows of one attention map.

    Attributes:
        start: Index of the first query row.
        logits: float32 `[batch, heads, rows, key]`; `key` may end early where all that follows
            is masked.
        valid: bool `[batch, heads or 1, rows, key]`: neither causally masked, nor outside a
            window, nor padding on either side. All True where masked entries are to be counted.
        attended: What `valid` is where masked entries are not counted.
    """

    start: int
    logits: Tensor
    valid: Tensor
    attended: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LogitBlock:
    """Some query rows of some heads of one sequence; the memory is used again for the next block.

    Attributes:
        sequence: Index in the batch; `head`: index of the first head.
        row, column: The query and the key that `logits[:, 0, 0]` stands for.
        logits: float32 `[heads, rows, keys]`, contiguous.
        lo, hi: int64 `[rows]`, on the CPU: the valid keys of a row are `lo <= key < hi`, in
            columns of `logits`; none where `lo == hi`.
        valid: bool `[heads or 1, rows, keys]` where a row's valid keys have holes, else None.
    """

    sequence: int
    head: int
    row: int
    column: int
    logits: Tensor
    lo: Tensor
    hi: Tensor
    valid: Tensor | None

    @property
    def heads(self) -> slice:
        """Which heads of the map it holds."""
        return slice(self.head, self.head + self.logits.shape[0])

    @property
    def rows(self) -> slice:
        """Which query rows."""
        return slice(self.row, self.row + self.logits.shape[1])

    @property
    def keys(self) -> slice:
        """Which keys."""
        return slice(self.column, self.column + self.logits.shape[2])

    def fill_masked(self, number: float) -> None:
        """Writes a number to every entry that is not valid.

        By spans: of a causal block only the columns at the diagonal are looked at.
        """
        if self.valid is not None:
            self.logits.masked_fill_(~self.valid, number)
            return
        keys = self.logits.shape[2]
        first, last = int(self.lo.max()), int(self.hi.min())
        if first > 0:
            before = torch.arange(first) < self.lo[:, None]
            self.logits[:, :, :first].masked_fill_(before, number)
        if last < keys:
            behind = torch.arange(last, keys) >= self.hi[:, None]
            self.logits[:, :, last:].masked_fill_(behind, number)

    def fill_empty_rows(self, number: float) -> None:
        """Writes a number to every row without a valid entry."""
        if self.valid is not None:
            self.logits.masked_fill_(~self.valid.any(-1, keepdim=True), number)
        elif bool((empty := self.lo >= self.hi).any()):
            self.logits[:, empty] = number


LogitTransform = Callable[[LogitTile], Tensor]
"""Given a tile, returns what takes the place of its logits, the same shape."""


class BlockTransform(ABC):
    """A transform of tiles that can do the same to a block, in place.

    Where attention allows it, what a map is made of then never leaves a processor's cache.
    """

    @abstractmethod
    def __call__(self, tile: LogitTile) -> Tensor:
        """Returns what takes the place of the tile's logits."""

    @abstractmethod
    def in_place(self, block: LogitBlock) -> None:
        """Writes it over the block's logits; what is masked may become anything, but not NaN."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionEdit:
    """What takes the place of parts of one map, in this order; None leaves a part as it is.

    Attributes:
        query, key: Shaped as the map's own; the logits are computed of them.
        logits: Given a tile of those logits.
        probabilities: Given a tile whose `logits` are the softmax outputs.
    """

    query: Tensor | None = None
    key: Tensor | None = None
    logits: LogitTransform | None = None
    probabilities: LogitTransform | None = None

    @property
    def is_of_inputs(self) -> bool:
        """Whether the model's own attention can do it, given other queries and keys."""
        return self.logits is None and self.probabilities is None

    @property
    def is_nothing(self) -> bool:
        """Whether all is left as it is."""
        return self.is_of_inputs and self.query is None and self.key is None
