"""One attention call, split into the maps of a differential head, and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit.models.families import AttentionLayout
from quantkit.probes.attention import AttentionLogits
from quantkit.probes.pieces import AttentionEdit

Pairs = list[tuple[AttentionLogits, AttentionEdit | None]]
"""Each map of one call, with what replaces parts of it."""


def split_maps(
    query: Tensor,
    key: Tensor,
    *,
    layout: AttentionLayout,
    mixes: Sequence[float | Tensor] = (1.0,),
    **common: Any,
) -> list[AttentionLogits]:
    """Returns one `AttentionLogits` for each map that one attention call holds.

    Args:
        query, key: `[batch, heads, tokens, d]`, the heads of all maps, in the layout's order.
        mixes: The factor of each map.
        common: Fields that the maps share; of tensors that have a head for each of the query's
            (`given`, `bias`, `mask`, `sinks`) a map gets its own heads.
    """
    heads = query.shape[1]

    def own(name: str, value: Any, index: int) -> Any:
        if not isinstance(value, Tensor) or name not in ("given", "bias", "mask", "sinks"):
            return value
        if name == "sinks":
            return _heads_of(value[None], index, layout)[0]
        return _heads_of(value, index, layout) if value.shape[1] == heads > 1 else value

    return [
        AttentionLogits(
            map=index + 1,
            maps=len(mixes),
            query=_heads_of(query, index, layout),
            key=key if layout.shared_keys else _heads_of(key, index, layout),
            mix=mix,
            **(common if layout.maps == 1 else {k: own(k, v, index) for k, v in common.items()}),
        )
        for index, mix in enumerate(mixes)
    ]


def join_maps(parts: Sequence[Tensor], layout: AttentionLayout) -> Tensor:
    """Returns the heads of all maps in the layout's order: the inverse of the split.

    Args:
        parts: `[batch, heads, tokens, d]` of each map.
    """
    if len(parts) == 1:
        return parts[0]
    if layout.order == "interleaved":
        return torch.stack(list(parts), dim=2).flatten(1, 2)
    return torch.cat(list(parts), dim=1)


def edited_inputs(pairs: Pairs, layout: AttentionLayout) -> tuple[Tensor, Tensor] | None:
    """Returns (q, k) of a whole call with what replaces them; None if that is not all there is.

    Not where logits or softmax outputs are replaced, nor where maps that share their keys would
    have different ones.
    """
    if not all(edit is None or edit.is_of_inputs for _, edit in pairs):
        return None
    calls = [call.edited(edit) for call, edit in pairs]
    query, key = join_maps([call.query for call in calls], layout), calls[0].key
    if not layout.shared_keys:
        return query, join_maps([call.key for call in calls], layout)
    return (query, key) if all(call.key is key for call in calls) else None


def _heads_of(x: Tensor, index: int, layout: AttentionLayout) -> Tensor:
    """Returns the heads of one map."""
    if layout.maps == 1:
        return x
    if layout.order == "interleaved":
        return x[:, index :: layout.maps]
    return x.chunk(layout.maps, dim=1)[index]
