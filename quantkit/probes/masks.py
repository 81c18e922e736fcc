"""Which logits are valid, as a boolean mask that is made one tile of query rows at a time.

transformers describes a mask by a function of (batch, head, query, key) positions and by the 2-D
padding mask. `LazyMask` keeps that description, so that memory stays linear in the sequence length,
and carries beside it the mask that the model's own attention function would have been given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask

from quantkit.errors import ProbeError


@dataclass(frozen=True, kw_only=True, eq=False)
class LazyMask:
    """The mask of one forward pass, not yet materialized.

    Attributes:
        original: What the replaced mask function returned: a tensor, a block mask, None, or the
            `LazyMask` of an outer `attach`.
        arguments: Keyword arguments of transformers' mask interface, without `q_length`/`q_offset`.
        query_length: Rows of the whole mask.
        query_offset: Position of the first query (a filled cache shifts it).
    """

    original: Any
    arguments: dict[str, Any]
    query_length: int
    query_offset: Any

    def rows(self, start: int, stop: int) -> Tensor:
        """Returns valid entries of query rows start..stop: bool `[batch, 1, stop-start, key]`."""
        tile = sdpa_mask(
            q_length=stop - start,
            q_offset=self.query_offset + start,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            **self.arguments,
        )
        assert tile is not None  # neither skip is allowed
        return tile.to(torch.bool)


@dataclass(frozen=True, kw_only=True, eq=False)
class Spans:
    """The valid keys of each query row: `lo <= key < hi`, int64 `[batch, query]` on the CPU.

    Causal, windowed, chunked and padded masks are of this kind. Where a row has holes (or heads
    have different masks) `has_holes` says so, and lo and hi hold all valid keys between them.
    Rows without a valid key have lo = hi = 0.
    """

    lo: Tensor
    hi: Tensor
    has_holes: bool = False

    @classmethod
    def full(cls, batch: int, queries: int, keys: int) -> Self:
        """Returns the spans of a map where every key is valid."""
        lo = torch.zeros(batch, queries, dtype=torch.int64)
        return cls(lo=lo, hi=torch.full_like(lo, keys))

    @classmethod
    def causal(cls, batch: int, queries: int, keys: int) -> Self:
        """Returns the spans of a causal map whose last query is the last key."""
        hi = (torch.arange(queries) + (keys - queries + 1)).clamp_min(0).expand(batch, queries)
        return cls(lo=torch.zeros_like(hi), hi=hi)

    @classmethod
    def of(cls, parts: Iterable[Tensor]) -> Self:
        """Returns the spans of a boolean mask, in pieces `[batch, heads or 1, rows, key]`."""
        los, his, has_holes = [], [], False
        for valid in parts:
            some = valid.any(1)
            count = some.sum(-1)
            lo = some.to(torch.int8).argmax(-1)
            hi = some.shape[-1] - some.flip(-1).to(torch.int8).argmax(-1)
            hi = torch.where(count > 0, hi, lo)
            has_holes = has_holes or bool((hi - lo != count).any())
            has_holes = has_holes or (valid.shape[1] > 1 and not torch.equal(some, valid.all(1)))
            los.append(torch.where(count > 0, lo, 0).cpu())
            his.append(torch.where(count > 0, hi, 0).cpu())
        return cls(lo=torch.cat(los, 1), hi=torch.cat(his, 1), has_holes=has_holes)

    @property
    def counts(self) -> Tensor:
        """Valid keys of each row where there are no holes, int64 `[batch, query]`."""
        return self.hi - self.lo


def lazy_mask_function(original: Callable[..., Any]) -> Callable[..., LazyMask]:
    """Returns a function for transformers' mask registry that wraps `original`'s mask."""

    def make(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: Any = 0,
        kv_offset: Any = 0,
        attention_mask: Tensor | None = None,
        device: Any = "cpu",
        use_vmap: bool = False,
        **kwargs: Any,
    ) -> LazyMask:
        shared = {
            "batch_size": batch_size,
            "kv_length": kv_length,
            "kv_offset": kv_offset,
            "attention_mask": attention_mask,
            "device": device,
            "use_vmap": use_vmap,
        }
        mask = original(q_length=q_length, q_offset=q_offset, **shared, **kwargs)
        function = kwargs.get("mask_function")
        described = {**shared, **({} if function is None else {"mask_function": function})}
        return LazyMask(
            original=mask, arguments=described, query_length=q_length, query_offset=q_offset
        )

    return make


def valid_rows(
    mask: LazyMask | Tensor | None, start: int, stop: int, shape: tuple[int, int, int], causal: bool
) -> Tensor:
    """Returns which logits of query rows start..stop are valid, bool `[batch|1, 1, rows, key]`.

    Args:
        mask: A lazy mask, a boolean `[batch or 1, heads or 1, query, key]` tensor, or None
            (`causal` decides).
        shape: (batch, query length, key length) of the whole attention call.

    Raises:
        ProbeError: an additive mask given from outside; what it means by "masked" is not defined.
    """
    _, queries, keys = shape
    if isinstance(mask, LazyMask):
        return mask.rows(start, stop)
    if mask is None:
        if not causal:
            return torch.ones(1, 1, stop - start, keys, dtype=torch.bool)
        query = torch.arange(start, stop)[:, None] + (keys - queries)
        return (torch.arange(keys)[None, :] <= query)[None, None]
    if mask.dtype != torch.bool:
        raise ProbeError(
            f"an additive attention mask ({mask.dtype}) reached the probe; expected a boolean one. "
            "Pass a 2-D attention_mask of zeros and ones to the model instead."
        )
    return mask[:, :, start:stop, :keys]
