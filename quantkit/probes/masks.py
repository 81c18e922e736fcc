"""Which logits are valid, as a boolean mask that is made one tile of query rows at a time.

transformers describes a mask by a function of (batch, head, query, key) positions and by the 2-D
padding mask. `LazyMask` keeps that description, so that memory stays linear in the sequence length,
and carries beside it the mask that the model's own attention function would have been given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

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
        only: Index of the one sequence that is asked for, or None for all.
        known_spans: What the layers of this forward that share the mask found.
    """

    original: Any
    arguments: dict[str, Any]
    query_length: int
    query_offset: Any
    only: int | None = None
    known_spans: dict[int, tuple[object, Spans]] = field(default_factory=dict)

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
        tile = tile.to(torch.bool)
        return tile if self.only is None or len(tile) == 1 else tile[self.only : self.only + 1]

    def of_sequence(self, index: int) -> LazyMask:
        """Returns the mask of one sequence of the batch, as a batch of one."""
        return replace(self, only=index, known_spans={})


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

    def of_rows(self, real: Tensor) -> Self:
        """Returns the spans of the real query rows; the others have none. `real`: as lo, bool."""
        real = real.cpu()
        return replace(self, lo=self.lo.where(real, 0), hi=self.hi.where(real, 0))

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


MASKED: Final = -9.9e3
"""An additive mask's entry below this masks: -inf, finfo.min, and -1e4, which in bfloat16 is -9984,
and which a logit that it is added to moves by what a logit is."""
_SMALL_MASK: Final = (-90.0, -50.0)
"""Some models mask with -100 (Swin), which may stand beside a bias of a few units. ALiBi goes as
far, but in steps: where nothing lies between these two, what lies below masks."""


def masking(added: Tensor, masked: Tensor) -> Tensor:
    """Returns which entries of what is added to logits mask, given those that do beyond doubt."""
    below, above = _SMALL_MASK
    small = (added < above) & ~masked
    if not bool(small.any()) or bool((small & (added > below)).any()):
        return masked
    return masked | small


def split_additive(mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Returns (what is attended to, what is added there) of a mask that is added to logits.

    Bool and float32, shaped as `mask`; None where nothing is masked, or nothing added.
    """
    attended = ~masking(mask, mask <= MASKED)
    bias = mask.detach().float().masked_fill(~attended, 0.0)
    return (
        None if bool(attended.all()) else attended,
        bias if bool(bias.any()) else None,
    )


def first_keys_causal(queries: int, keys: int, device: torch.device) -> Tensor:
    """Returns SDPA's `is_causal`, bool `[1, 1, query, key]`: query i sees the keys 0 to i."""
    return torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device).tril()


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
        mask: A lazy mask, a boolean `[batch|1, heads|1, query|1, key]` tensor, or None
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
    return mask[:, :, slice(None) if mask.shape[2] == 1 else slice(start, stop), :keys]
