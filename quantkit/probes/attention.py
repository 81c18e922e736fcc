"""Attention logits, recomputed from q and k in tiles of query rows.

A logit is `s[b,h,i,j] = scale * q_i . k_j`: after RoPE and the model's own scale, before mask,
softcap and softmax, in float32. Nothing of size query x key is ever held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from quantkit.probes.masks import LazyMask, valid_rows

TILE_ROWS: Final = 128
"""Query rows per tile: 8 heads x 128 x 8,192 keys of float32 take 34 MB."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LogitTile:
    """Some query rows of one attention map.

    Attributes:
        start: Index of the first query row.
        logits: float32 `[batch, heads, rows, key]`; `key` may end early where all that follows
            is masked.
        valid: bool `[batch, 1, rows, key]`: neither causally masked, nor outside a window, nor
            padding on either side. All True where masked entries are to be counted.
        attended: What `valid` is where masked entries are not counted.
    """

    start: int
    logits: Tensor
    valid: Tensor
    attended: Tensor


LogitTransform = Callable[[LogitTile], Tensor]
"""Given a tile, returns what takes the logits' place, the same shape."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionLogits:
    """One attention map of one layer in one forward pass; `tiles()` computes it.

    Attributes:
        layer: Index of the layer; `name`: its attention module.
        map: 1, or 1 and 2 for a differential head.
        query: `[batch, heads, query, d]`; `key`: `[batch, kv_heads, key, d]`.
        scale: The model's own factor.
        real_queries: bool `[batch, query]`, False where the query is padding.
        key_length: Number of keys, masked ones included.
    """

    layer: int
    name: str
    map: int
    query: Tensor
    key: Tensor
    scale: float
    mask: LazyMask | Tensor | None
    causal: bool
    real_queries: Tensor | None
    all_entries: bool = False

    @property
    def heads(self) -> int:
        """Heads of this map."""
        return self.query.shape[1]

    @property
    def entries(self) -> int:
        """Logits of this map in all, masked ones included: batch x heads x query x key."""
        batch, heads, queries, _ = self.query.shape
        return batch * heads * queries * self.key.shape[2]

    def tiles(self, rows: int = TILE_ROWS) -> Iterator[LogitTile]:
        """Yields the map from the first query row to the last."""
        batch, _, queries, _ = self.query.shape
        shape = (batch, queries, self.key.shape[2])
        for start in range(0, queries, rows):
            stop = min(start + rows, queries)
            valid = valid_rows(self.mask, start, stop, shape, self.causal).to(self.query.device)
            valid = valid.expand(batch, 1, stop - start, shape[2])
            if self.real_queries is not None:
                valid = valid & self.real_queries[:, None, start:stop, None]
            keys = shape[2] if self.all_entries else _last_valid(valid)
            attended = valid[..., :keys]
            valid = torch.ones_like(attended) if self.all_entries else attended
            logits = grouped_logits(self.query[:, :, start:stop], self.key[:, :, :keys], self.scale)
            yield LogitTile(start=start, logits=logits, valid=valid, attended=attended)


def grouped_logits(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Returns `scale * q k^T`, float32 `[batch, heads, query, key]`, for grouped queries too."""
    batch, heads, rows, width = query.shape
    kv_heads = key.shape[1]
    grouped = query.float().reshape(batch, kv_heads, heads // kv_heads * rows, width)
    logits = torch.matmul(grouped, key.float().transpose(2, 3))
    return logits.reshape(batch, heads, rows, key.shape[2]) * scale


def attend(maps: Sequence[tuple[AttentionLogits, LogitTransform | None]], value: Tensor) -> Tensor:
    """Returns softmax(logits) @ value with the given transforms: `[batch, query, heads, d]`.

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
        masked = logits.masked_fill(~tile.valid, float("-inf"))
        weights = torch.softmax(masked, dim=-1).nan_to_num(nan=0.0)  # nan: no valid key at all
        rows, keys = weights.shape[2:]
        grouped = weights.reshape(batch, groups, heads // groups * rows, keys)
        part = torch.matmul(grouped, value[:, :, :keys])
        out[:, :, tile.start : tile.start + rows] = part.reshape(batch, heads, rows, -1)
    return out


def split_maps(maps: int, query: Tensor, key: Tensor, **common: Any) -> list[AttentionLogits]:
    """Returns one `AttentionLogits` a map: heads of map 1 come first, then those of map 2."""
    queries, keys = query.chunk(maps, dim=1), key.chunk(maps, dim=1)
    return [
        AttentionLogits(map=index + 1, query=queries[index], key=keys[index], **common)
        for index in range(maps)
    ]


def _last_valid(valid: Tensor) -> int:
    """Returns one past the last key that any row may see, at least 1."""
    seen = valid.flatten(0, 2).any(dim=0).nonzero()
    return int(seen[-1]) + 1 if len(seen) else 1
