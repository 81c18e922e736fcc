"""How much attention the first token gets: the sink rate, per layer and head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.numerics.outliers import SINK_ABOVE, SINK_QUERIES, first_token_attention
from quantkit.probes import AttentionLogits, LogitTile


@dataclass(frozen=True, kw_only=True, eq=False)
class SinkRecord:
    """Of one layer, `[heads]`: sequences, those above the threshold, and the sum of their shares.

    Sequences of one token, which have no query 1, are not among them.
    """

    sequences: Tensor
    above: Tensor
    share: Tensor

    @classmethod
    def of(cls, calls: Sequence[AttentionLogits]) -> Self:
        """Returns the record of one forward pass of a layer, all its maps given."""
        shares = first_token_shares(calls)
        known = ~shares.isnan()
        return cls(
            sequences=known.sum(0),
            above=(shares > SINK_ABOVE).sum(0),  # NaN is not above
            share=shares.nan_to_num(nan=0.0).double().sum(0),
        )

    def merge(self, other: Self) -> Self:
        """Returns the record of both."""
        return type(self)(
            sequences=self.sequences + other.sequences,
            above=self.above + other.above,
            share=self.share + other.share,
        )


def mixed(calls: Sequence[AttentionLogits], tiles: Sequence[LogitTile]) -> Tensor:
    """Returns the effective attention of one tile of each map: sum of mix * softmax.

    For one map that is its softmax; for a differential head softmax 1 - lambda softmax 2
    (arXiv 2410.05258, equation 1). float32 `[batch, heads, rows, key]`.
    """
    total = torch.zeros(())
    for call, tile in zip(calls, tiles, strict=True):
        mix = call.mix
        if isinstance(mix, Tensor):
            rows = tile.logits.shape[2]
            mix = mix[:, :, tile.start : tile.start + rows, None].float()
        total = total + mix * call.probabilities(tile)
    return total


def first_token_shares(calls: Sequence[AttentionLogits]) -> Tensor:
    """Returns the mean share of attention to the first token, float32 `[batch, heads]`.

    Over queries 1 to 63 counted from the first real token; NaN for a shorter sequence.
    """
    call = calls[0]
    batch, heads, queries, _ = call.query.shape
    real = call.real_queries
    if real is None:
        real = torch.ones(batch, queries, dtype=torch.bool)
    shares = torch.full((batch, heads), torch.nan)
    for sequence in range(batch):
        start = int(real[sequence].to(torch.int8).argmax())
        end = start + min(SINK_QUERIES[1] + 1, int(real[sequence].sum()))
        own = [each.of_sequence(sequence) for each in calls]
        parts = []
        for tiles in zip(*(each.tiles(rows=SINK_QUERIES[1] + 1) for each in own), strict=True):
            if tiles[0].start >= end:
                break
            if tiles[0].start + tiles[0].logits.shape[2] > start:
                rows = slice(max(start - tiles[0].start, 0), end - tiles[0].start)
                parts.append(mixed(own, tiles)[:, :, rows, start:])
        width = max((part.shape[3] for part in parts), default=0)
        parts = [pad(part, (0, width - part.shape[3])) for part in parts]
        if parts:
            is_signed = len(calls) > 1
            shares[sequence] = first_token_attention(torch.cat(parts, 2), signed=is_signed)[0].cpu()
    return shares
