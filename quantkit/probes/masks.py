"""Which logits are valid, as a boolean mask that is made one tile of query rows at a time.

transformers describes a mask by a function of (batch, head, query, key) positions and by the 2-D
padding mask. `LazyMask` keeps that description, so that memory stays linear in the sequence length,
and carries beside it the mask that the model's own attention function would have been given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
        mask: A lazy mask, a boolean `[batch, 1, query, key]` tensor, or None (`causal` decides).
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
