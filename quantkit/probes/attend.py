"""Attention computed here, with what replaces parts of it, as the model would have done.

Where an edit can work in place, a map is made block by block in a processor's cache: its logits,
what replaces them, the softmax, what replaces that, and the product with the values. On CUDA a grid
of the logits alone is left to one fused kernel (`flex`). Elsewhere a map is made in tiles of query
rows. None of them holds anything of size query x key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quantkit.numerics.threads import side_by_side
from quantkit.probes.attention import AttentionLogits
from quantkit.probes.flex import attend_flex
from quantkit.probes.pieces import (
    AttentionEdit,
    BlockTransform,
    LogitBlock,
    LogitTile,
    LogitTransform,
)


def attend(maps: Sequence[tuple[AttentionLogits, AttentionEdit | None]], value: Tensor) -> Tensor:
    """Returns softmax(logits) @ value with the given edits: `[batch, query, heads, d]`.

    After an edit of the logits come the model's own softcap, bias and sinks, where it has them.

    Args:
        maps: Each map of the call in head order, with what replaces parts of it (None: nothing).
        value: `[batch, kv_heads, key, d]` over all maps.

    Masked entries get no weight; a query row that is masked altogether gives zeros.
    """
    batch, _, queries, _ = maps[0][0].query.shape
    heads_in_all = sum(call.heads for call, _ in maps)
    per_kv = heads_in_all // value.shape[1]
    out = torch.zeros(batch, queries, heads_in_all, value.shape[-1], device=value.device)
    first = 0
    for call, edit in maps:
        values = value[:, first // per_kv : (first + call.heads) // per_kv].float()
        _attend_map(call, edit or AttentionEdit(), values, out[:, :, first : first + call.heads])
        first += call.heads
    return out.to(value.dtype)


def _attend_map(call: AttentionLogits, edit: AttentionEdit, value: Tensor, out: Tensor) -> None:
    """Writes one map's attention to `out`, `[batch, query, heads, d]`."""
    call = call.edited(edit)
    if value.shape[1] == call.key.shape[1] and not _is_differentiated(value):
        if (fused := attend_flex(call, edit, value)) is not None:
            out.copy_(fused.transpose(1, 2))
            return
        if in_blocks(call, edit.logits, edit):
            _attend_blocks(call, edit, value, out)
            return
    groups = value.shape[1]
    for tile in edited_tiles(call, edit.logits):
        if edit.probabilities is not None:
            tile = replace(tile, logits=edit.probabilities(tile))
        batch, heads, rows, keys = tile.logits.shape
        grouped = tile.logits.reshape(batch, groups, heads // groups * rows, keys)
        part = torch.matmul(grouped, value[:, :, :keys]).reshape(batch, heads, rows, -1)
        out[:, tile.start : tile.start + rows] = part.transpose(1, 2)


def _attend_blocks(call: AttentionLogits, edit: AttentionEdit, value: Tensor, out: Tensor) -> None:
    per_kv = call.heads // value.shape[1]

    def add(block: LogitBlock) -> None:
        if isinstance(edit.probabilities, BlockTransform):
            edit.probabilities.in_place(block)
        for first in range(0, len(block.logits), per_kv):
            weights = block.logits[first : first + per_kv].flatten(0, 1)
            head = block.head + first
            part = torch.mm(weights, value[block.sequence, head // per_kv, block.keys])
            place = out[block.sequence, block.rows, head : head + per_kv]
            place.copy_(part.view(per_kv, -1, part.shape[-1]).transpose(0, 1))

    def work(share: tuple[int, int]) -> None:
        for block in softmax_blocks(call, edit.logits, share):
            add(block)

    shared_out(call, work)


def shared_out(call: AttentionLogits, work: Callable[[tuple[int, int]], None]) -> None:
    """Runs `work((worker, workers))` for every thread that shares a map's blocks."""
    workers = torch.get_num_threads()
    call.spans()  # found once, before the threads ask for them

    def one(worker: int) -> None:
        with torch.inference_mode():
            work((worker, workers))

    side_by_side(one, workers)


def in_blocks(
    call: AttentionLogits, logits: LogitTransform | None, edit: AttentionEdit | None = None
) -> bool:
    """Whether a map can be made in blocks: on the CPU, without a graph, by what works in place."""
    edits = (logits, None if edit is None else edit.probabilities)
    return (
        call.query.device.type == "cpu"
        and call.given is None
        and call.sinks is None
        and not call.all_entries
        and not _is_differentiated(call.query)
        and not _is_differentiated(call.key)
        and all(part is None or isinstance(part, BlockTransform) for part in edits)
    )


def softmax_blocks(
    call: AttentionLogits, logits: LogitTransform | None, share: tuple[int, int] = (0, 1)
) -> Iterator[LogitBlock]:
    """Yields a map's softmax outputs in blocks, with what replaces its logits.

    Zeros where nothing is attended to. See `in_blocks` for where it may be asked.
    """
    for block in call.blocks(share=share):
        if isinstance(logits, BlockTransform):
            logits.in_place(block)
        if call.is_modified:
            call.modify(block)
        block.fill_masked(float("-inf"))
        torch.softmax(block.logits, dim=-1, out=block.logits)
        block.fill_empty_rows(0.0)
        yield block


def edited_tiles(call: AttentionLogits, logits: LogitTransform | None) -> Iterator[LogitTile]:
    """Yields a map's softmax outputs in tiles, with what replaces its logits."""
    for tile in call.tiles():
        replaced = tile.logits if logits is None else logits(tile)
        yield replace(tile, logits=call.weights(tile, replaced))


def _is_differentiated(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad
