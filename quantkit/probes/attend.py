"""Attention computed here, with what replaces its logits, as the model would have done."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.probes.attention import AttentionLogits, LogitTransform


def attend(maps: Sequence[tuple[AttentionLogits, LogitTransform | None]], value: Tensor) -> Tensor:
    """Returns softmax(logits) @ value with the given transforms: `[batch, query, heads, d]`.

    After the transform come the model's own softcap, bias and sinks, where it has them.

    Args:
        maps: Each map of the call in head order, with what replaces its logits (None: nothing).
        value: `[batch, kv_heads, key, d]` over all maps.

    Masked entries get no weight; a query row that is masked altogether gives zeros.
    """
    heads_in_all = sum(call.heads for call, _ in maps)
    per_kv = heads_in_all // value.shape[1]
    outputs = []
    first = 0
    for call, transform in maps:
        values = value[:, first // per_kv : (first + call.heads) // per_kv].float()
        outputs.append(_attend_map(call, transform, values))
        first += call.heads
    return torch.cat(outputs, dim=1).transpose(1, 2).to(value.dtype).contiguous()


def _attend_map(call: AttentionLogits, transform: LogitTransform | None, value: Tensor) -> Tensor:
    batch, heads, queries, _ = call.query.shape
    groups = value.shape[1]
    out = torch.zeros(batch, heads, queries, value.shape[-1], device=value.device)
    for tile in call.tiles():
        logits = tile.logits if transform is None else transform(tile)
        weights = call.weights(tile, logits)
        rows, keys = weights.shape[2:]
        grouped = weights.reshape(batch, groups, heads // groups * rows, keys)
        part = torch.matmul(grouped, value[:, :, :keys])
        out[:, :, tile.start : tile.start + rows] = part.reshape(batch, heads, rows, -1)
    return out
