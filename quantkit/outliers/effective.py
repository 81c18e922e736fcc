"""The effective map of a differential head: softmax 1 - lambda softmax 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from quantkit.outliers.maps import MapRecord, RowSampling, record_map
from quantkit.outliers.sinks import mixed
from quantkit.probes import AttentionLogits
from quantkit.probes.token_scan import Adder, Feed


@dataclass(frozen=True, kw_only=True, eq=False)
class EffectiveRecord:
    """What was seen of the effective map of one layer; a monoid.

    Attributes:
        map: Its weights; the entropy in it is of |a| / sum |a|, since a signed row is no
            distribution, and of all rows, sampled or not.
        rows, row_sum: Query rows, and the sum over them of the row's sum, `[heads]`.
        weights, negative: Valid weights, and those below zero, `[heads]`.
        lambdas: Sum, count, smallest and largest lambda, float64 `[4]`.
    """

    map: MapRecord
    rows: Tensor
    row_sum: Tensor
    weights: Tensor
    negative: Tensor
    lambdas: Tensor

    def merge(self, other: Self) -> Self:
        """Returns the record of both."""
        one, two = self.lambdas, other.lambdas
        return type(self)(
            map=self.map.merge(other.map),
            rows=self.rows + other.rows,
            row_sum=self.row_sum + other.row_sum,
            weights=self.weights + other.weights,
            negative=self.negative + other.negative,
            lambdas=torch.stack(
                [
                    one[0] + two[0],
                    one[1] + two[1],
                    torch.minimum(one[2], two[2]),
                    torch.maximum(one[3], two[3]),
                ]
            ),
        )


def scan_effective(
    calls: Sequence[AttentionLogits],
    *,
    first_sequence: int,
    sampling: RowSampling,
    floor: Tensor | None,
) -> EffectiveRecord:
    """Returns the record of one forward pass; memory as much as a tile of each map."""
    calls = [replace(call, all_entries=False) for call in calls]
    sums = _Sums(calls[0].heads)
    record, _ = record_map(
        calls[0],
        _effective_of(calls, sums),
        first_sequence=first_sequence,
        sampling=sampling,
        floor=floor,
        entropy=False,
    )
    return EffectiveRecord(
        map=replace(record, entropy_sum=sums.entropy, entropy_rows=sums.rows.to(torch.int64)),
        rows=sums.rows,
        row_sum=sums.row_sum,
        weights=sums.weights,
        negative=sums.negative,
        lambdas=_lambdas(calls),
    )


class _Sums:
    """What the map's rows add up to, while its blocks go by."""

    def __init__(self, heads: int) -> None:
        zeros = torch.zeros(heads, dtype=torch.float64)
        self.rows, self.row_sum, self.entropy = zeros.clone(), zeros.clone(), zeros.clone()
        self.weights, self.negative = zeros.to(torch.int64), zeros.to(torch.int64)

    def add(self, weights: Tensor, valid: Tensor) -> None:
        """Adds a tile: `weights` `[batch, heads, rows, key]`, zero where not `valid`."""
        some = valid.any(-1) & weights.isfinite().all(-1)
        weights = weights.masked_fill(~some[..., None], 0.0)  # NaN is counted elsewhere
        valid = valid & some[..., None]
        size = weights.abs()
        total = size.sum(-1, keepdim=True)
        shares = size / torch.where(total > 0, total, torch.ones_like(total))
        self.rows += some.sum((0, 2))
        self.row_sum += weights.double().sum(-1).masked_fill(~some, 0.0).sum((0, 2))
        self.entropy += torch.special.entr(shares).double().sum((0, 2, 3))
        self.weights += valid.sum((0, 2, 3))
        self.negative += (valid & (weights < 0)).sum((0, 2, 3))


def _effective_of(calls: Sequence[AttentionLogits], sums: _Sums) -> Feed:
    """Returns the feed of the effective map, tile by tile."""
    spans = calls[0].spans()

    def feed(index: int, adder: Adder) -> None:
        alone = [call.of_sequence(index) for call in calls]
        for tiles in zip(*(call.tiles() for call in alone), strict=True):
            weights = mixed(alone, tiles)
            sums.add(weights, tiles[0].valid)
            adder.add_tile(index, tiles[0].start, weights[0], spans, tiles[0].valid[0])

    return feed


def _lambdas(calls: Sequence[AttentionLogits]) -> Tensor:
    """Returns sum, count, smallest and largest lambda of real queries, float64 `[4]`."""
    values = -torch.as_tensor(calls[-1].mix).detach().double()
    real = calls[-1].real_queries
    if values.dim() == 3 and real is not None:
        values = values[real[:, None].expand(values.shape)]
    flat = values.reshape(-1)
    return torch.stack([flat.sum(), torch.tensor(float(len(flat))), flat.min(), flat.max()])
