"""Attention logits, recomputed from q and k in tiles of query rows.

A logit is `s[b,h,i,j] = scale * q_i . k_j`: after RoPE and the model's own scale, before mask,
softcap and softmax, in float32. Nothing of size query x key is ever held.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Final, Self, TypeGuard

import torch
from torch import Tensor

from quantkit.probes.masks import LazyMask, Spans, valid_rows
from quantkit.probes.pieces import AttentionEdit, LogitBlock, LogitTile

TILE_ROWS: Final = 128
"""Query rows per tile: 8 heads x 128 x 8,192 keys of float32 take 34 MB."""
BLOCK_ELEMENTS: Final = 1 << 19
"""Logits per block: 2 MB of float32, about a core's second-level cache."""


Place = tuple[int | slice, slice, slice, slice]
"""(sequence, heads, query rows, keys) of a map."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionLogits:
    """One attention map of one layer in one forward pass; `tiles()` or `blocks()` compute it.

    Attributes:
        layer: Index of the layer; `name`: its attention module.
        map: 1, or 1 and 2 for a differential head; `maps`: how many there are.
        query: `[batch, heads, query, d]`; `key`: `[batch, kv_heads, key, d]`.
        given: float32 `[batch, heads, query, key]` where the model made the logits itself (then
            `query` and `key` are empty in d), else None.
        scale: The model's own factor.
        mask: Which entries are attended to; a tensor is bool
            `[batch or 1, heads or 1, query, key]`.
        real_queries: bool `[batch, query]`, False where the query is padding.
        softcap: The model goes on with `softcap * tanh(logit / softcap)`.
        bias: The model goes on with `logit + bias`, `[batch or 1, heads or 1, query or 1, key]`.
        sinks: `[heads]`, a logit beside each row's that takes probability and gives no value.
        is_cross: Queries and keys are of different sequences.
        query_offset: Which key is the first query's own, behind those of a filled cache: query i
            stands where key `query_offset + i` does. 0 for as many keys as queries, for cross
            attention, and where the queries do not end one key after the other.
        mix: The factor of this map's softmax in the effective attention map: 1, or -lambda for
            map 2 of a differential head; a number, or `[batch, heads, query]`.
        known_spans: Where `spans()` keeps what it found for a mask that many layers share.
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
    given: Tensor | None = None
    softcap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    is_cross: bool = False
    query_offset: int = 0
    maps: int = 1
    mix: float | Tensor = 1.0
    known_spans: dict[int, tuple[object, Spans]] = field(default_factory=dict)

    @property
    def heads(self) -> int:
        """Heads of this map."""
        return self.query.shape[1]

    @property
    def entries(self) -> int:
        """Logits of this map in all, masked ones included: batch x heads x query x key."""
        batch, heads, queries, _ = self.query.shape
        return batch * heads * queries * self.key.shape[2]

    @property
    def is_modified(self) -> bool:
        """Whether the model changes the logits before it masks them."""
        return self.softcap is not None or self.bias is not None

    def edited(self, edit: AttentionEdit | None) -> Self:
        """Returns the map of the queries and keys that an edit puts in the place of its own."""
        if edit is None or (edit.query is None and edit.key is None):
            return self
        query = self.query if edit.query is None else edit.query
        return replace(self, query=query, key=self.key if edit.key is None else edit.key)

    def of_sequence(self, index: int) -> Self:
        """Returns the map of one sequence of the batch, as a batch of one."""

        def own(x: Tensor | None) -> Tensor | None:
            return x if x is None or len(x) == 1 else x[index : index + 1]

        return replace(
            self,
            query=self.query[index : index + 1],
            key=self.key[index : index + 1],
            given=own(self.given),
            mask=self.mask.of_sequence(index)
            if isinstance(self.mask, LazyMask)
            else own(self.mask),
            real_queries=own(self.real_queries),
            bias=own(self.bias),
            mix=self.mix[index : index + 1] if _is_per_head(self.mix) else self.mix,
            known_spans={},
        )

    def tiles(self, rows: int = TILE_ROWS) -> Iterator[LogitTile]:
        """Yields the map from the first query row to the last."""
        batch, _, queries, _ = self.query.shape
        shape = (batch, queries, self.key.shape[2])
        for start in range(0, queries, rows):
            stop = min(start + rows, queries)
            valid = self._valid(start, stop)
            keys = shape[2] if self.all_entries else _last_valid(valid)
            attended = valid[..., :keys]
            valid = torch.ones_like(attended) if self.all_entries else attended
            if self.given is None:
                part = self.query[:, :, start:stop]
                logits = grouped_logits(part, self.key[:, :, :keys], self.scale)
            else:
                logits = self.given[:, :, start:stop, :keys].float()
            yield LogitTile(start=start, logits=logits, valid=valid, attended=attended)

    def probabilities(self, tile: LogitTile) -> Tensor:
        """Returns the attention of a tile's rows, as the model's softmax: float32, its shape.

        After softcap and bias, with sinks in the denominator. Zeros where nothing is attended to;
        NaN where a logit is.
        """
        return self.weights(tile, tile.logits)

    def weights(self, tile: LogitTile, logits: Tensor) -> Tensor:
        """Returns `probabilities` of a tile with other logits in place of its own."""
        keys = logits.shape[3]
        masked = self.modified(tile, logits).masked_fill(~tile.attended, float("-inf"))
        if self.sinks is not None:
            sinks = self.sinks.float()[None, :, None, None].expand(*masked.shape[:3], 1)
            masked = torch.cat([masked, sinks], dim=3)
        nothing = ~tile.attended.any(-1, keepdim=True)
        return torch.softmax(masked, dim=-1)[..., :keys].masked_fill(nothing, 0.0)

    def modified(self, tile: LogitTile, logits: Tensor) -> Tensor:
        """Returns a tile's `logits`, or others in their place, after softcap and bias."""
        rows = slice(tile.start, tile.start + logits.shape[2])
        return self._modified(logits, (slice(None), slice(None), rows, slice(logits.shape[3])))

    def modify(self, block: LogitBlock) -> None:
        """Does the same to the logits of a block, in place."""
        place = (block.sequence, block.heads, block.rows, block.keys)
        self._modified(block.logits, place, out=block.logits)

    def spans(self) -> Spans:
        """Returns the keys of each query row that count: attended ones, or all."""
        if self.all_entries:
            batch, _, queries, _ = self.query.shape
            return Spans.full(batch, queries, self.key.shape[2])
        return self.attended_spans()

    def attended_spans(self) -> Spans:
        """Returns the keys that each query row attends to."""
        batch, _, queries, _ = self.query.shape
        shape = (batch, queries, self.key.shape[2])
        if self.mask is None:
            spans = Spans.causal(*shape) if self.causal else Spans.full(*shape)
            return spans if self.real_queries is None else spans.of_rows(self.real_queries)
        known = self.mask.known_spans if isinstance(self.mask, LazyMask) else self.known_spans
        if id(self.mask) not in known:
            starts = range(0, queries, TILE_ROWS)
            spans = Spans.of(self._valid(n, min(n + TILE_ROWS, queries)) for n in starts)
            # the mask is held with them, so that its id stays its own
            held = None if isinstance(self.mask, LazyMask) else self.mask
            known[id(self.mask)] = (held, spans)
        return known[id(self.mask)][1]

    def query_is_real(self) -> Tensor:
        """Returns which queries are no padding, bool `[batch, query]`."""
        if self.real_queries is not None:
            return self.real_queries
        batch, _, queries, _ = self.query.shape
        return torch.ones(batch, queries, dtype=torch.bool, device=self.query.device)

    def real_keys(self) -> Tensor:
        """Returns which keys are no padding, bool `[batch, key]`.

        Those of real queries where both are of one sequence; else those that some query attends to.
        """
        batch, _, queries, _ = self.query.shape
        keys = self.key.shape[2]
        if not self.is_cross and keys == queries:
            return self.query_is_real()
        seen = torch.zeros(batch, keys, dtype=torch.bool, device=self.key.device)
        for start in range(0, queries, TILE_ROWS):
            seen |= self._valid(start, min(start + TILE_ROWS, queries)).flatten(1, 2).any(1)
        return seen

    def blocks(
        self,
        *,
        modified: bool = False,
        sequence: int | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> Iterator[LogitBlock]:
        """Yields the map in pieces that a processor's cache holds, sequence by sequence.

        Keys before the first and after the last valid one of the rows are not computed; rows
        without any are left out. The same numbers as `tiles()`, where q and k are.

        Args:
            modified: After softcap and bias, as the model goes on with them.
            sequence: Of this one alone.
            share: (worker, workers): only this worker's pieces, which are dealt out in turn.
        """
        spans = self.spans()
        queries, groups = self.query.shape[2], self.key.shape[1]
        per_kv = self.heads // groups
        widest = per_kv * int(spans.counts.max()) if spans.counts.numel() else 0
        height = min(max(BLOCK_ELEMENTS // max(widest, 1), 32), TILE_ROWS)
        most = min(max(BLOCK_ELEMENTS, height * widest), groups * height * widest)
        buffer = torch.empty(most, device=self.query.device)
        turn = -1
        wanted = range(self.query.shape[0]) if sequence is None else (sequence,)
        for index, start in product(wanted, range(0, queries, height)):
            rows = slice(start, min(start + height, queries))
            lo, hi = spans.lo[index, rows], spans.hi[index, rows]
            right = int(hi.max())
            if right == 0:
                continue
            seen = hi > lo
            left = int(lo[seen].min())
            keys = slice(left, right)
            size = per_kv * (rows.stop - start) * (right - left)  # of one key head's queries
            at_once = min(groups, max(1, BLOCK_ELEMENTS // size))
            valid = None
            if spans.has_holes and not self.all_entries:
                valid = self._valid(start, rows.stop, index)[:, :, keys]
            for first in range(0, groups, at_once):
                turn += 1
                if turn % share[1] != share[0]:
                    continue
                kv = slice(first, min(first + at_once, groups))
                head = slice(first * per_kv, kv.stop * per_kv)
                if buffer.numel() < size * (kv.stop - first):  # spans that move on, as windows do
                    buffer = torch.empty(size * at_once, device=self.query.device)
                logits = buffer[: size * (kv.stop - first)].view(
                    -1, rows.stop - start, right - left
                )
                self._fill(logits, index, head, kv, rows, keys)
                if modified:
                    self._modified(logits, (index, head, rows, keys), out=logits)
                yield LogitBlock(
                    sequence=index,
                    head=head.start,
                    row=start,
                    column=left,
                    logits=logits,
                    lo=torch.where(seen, lo - left, 0),
                    hi=torch.where(seen, hi - left, 0),
                    valid=valid if valid is None or len(valid) == 1 else valid[head],
                )

    def _fill(
        self, out: Tensor, sequence: int, head: slice, kv: slice, rows: slice, keys: slice
    ) -> None:
        """Writes the logits of one block."""
        if self.given is not None:
            out.copy_(self.given[sequence, head, rows, keys])
            return
        per_kv = (head.stop - head.start) // (kv.stop - kv.start)
        # a factor inside the product rounds as one after it only where it is a power of two
        is_exact = math.frexp(self.scale)[0] == 0.5
        for index in range(kv.start, kv.stop):
            part = slice((index - kv.start) * per_kv, (index - kv.start + 1) * per_kv)
            queries = self.query[sequence, head][part, rows].float().flatten(0, 1)
            against = self.key[sequence, index, keys].float().T
            flat = out[part].flatten(0, 1)
            inside = self.scale if is_exact else 1.0
            torch.addmm(flat, queries, against, beta=0, alpha=inside, out=flat)
        if not is_exact:
            out.mul_(self.scale)

    def _modified(self, logits: Tensor, place: Place, out: Tensor | None = None) -> Tensor:
        """Returns the logits at a place of the map after softcap and bias, in `out` if given."""
        if self.softcap is not None:
            capped = torch.tanh(torch.div(logits, self.softcap, out=out), out=out)
            logits = torch.mul(capped, self.softcap, out=out)
        if self.bias is not None:
            full = (*self.query.shape[:3], self.key.shape[2])
            logits = torch.add(logits, self.bias.expand(full)[place], out=out)
        return logits

    def _valid(self, start: int, stop: int, sequence: int | None = None) -> Tensor:
        """Returns which entries are attended to: bool `[batch, heads or 1, rows, key]`.

        With `sequence`, of that one alone: `[heads or 1, rows, key]`.
        """
        batch, _, queries, _ = self.query.shape
        shape = (batch, queries, self.key.shape[2])
        valid = valid_rows(self.mask, start, stop, shape, self.causal).to(self.query.device)
        valid = valid.expand(batch, valid.shape[1], stop - start, shape[2])
        if self.real_queries is not None:
            valid = valid & self.real_queries[:, None, start:stop, None]
        return valid if sequence is None else valid[sequence]


def grouped_logits(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Returns `scale * q k^T`, float32 `[batch, heads, query, key]`, for grouped queries too."""
    batch, heads, rows, width = query.shape
    kv_heads = key.shape[1]
    grouped = query.float().reshape(batch, kv_heads, heads // kv_heads * rows, width)
    logits = torch.matmul(grouped, key.float().transpose(2, 3))
    return logits.reshape(batch, heads, rows, key.shape[2]) * scale


def _is_per_head(mix: float | Tensor) -> TypeGuard[Tensor]:
    return isinstance(mix, Tensor) and mix.dim() > 0


def _last_valid(valid: Tensor) -> int:
    """Returns one past the last key that any row may see, at least 1."""
    seen = valid.flatten(0, 2).any(dim=0).nonzero()
    return int(seen[-1]) + 1 if len(seen) else 1
