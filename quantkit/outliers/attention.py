"""Statistics of attention logits, per layer, map, head and class of the key.

Classes: `first` (the key is the sequence's first token), `others`; the one entry of row 0 belongs
to neither and enters only the pooled figures.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.numerics.outliers import SINK_ABOVE, SINK_QUERIES
from quantkit.outliers.bundle import Bundle, merged
from quantkit.outliers.places import first_real, pack
from quantkit.probes import AttentionLogits, LogitTile

ROW_0 = "row 0"
CLASSES = (ROW_0, "first", "others")


@dataclass
class LogitStatistics:
    """Grows by `see(call)` once for each layer and map of a forward pass.

    Attributes:
        bundles: By (layer, map, class); groups are heads.
        inf_norm: By (layer, map): sum over sequences of max |logit|, float64 `[heads]`.
        excluded: Masked entries that were left out.
        lambdas: lambda of each differential layer, else empty.
        first_sequence: Index of the batch's first sequence; set before each batch.
    """

    lambdas: list[float] = field(default_factory=list)
    bundles: dict[tuple[int, int, str], Bundle] = field(default_factory=dict)
    inf_norm: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    excluded: int = 0
    first_sequence: int = 0
    batch_inf_norm: Tensor | None = None
    sinks: int = 0
    sink_candidates: int = 0
    _first_map: list[tuple[Tensor, ...]] = field(default_factory=list)

    def see(self, call: AttentionLogits) -> None:
        """Adds one attention map; memory as much as one tile."""
        batch, _, queries, _ = call.query.shape
        real = call.real_queries
        if real is None:
            real = torch.ones(batch, queries, dtype=torch.bool)
        first = first_real(real)
        inf_norm = torch.zeros(batch, call.heads)
        counted = 0
        early = []
        for tile in call.tiles():
            counted += int(tile.valid.sum()) * call.heads
            self._update(call, tile, first)
            size = tile.logits.abs().masked_fill(~tile.valid, 0.0)
            inf_norm = torch.maximum(inf_norm, size.amax(dim=(2, 3)))
            early.append(_first_token_share(tile, first, real))
        self.excluded += call.entries - counted
        key = (call.layer, call.map)
        self.inf_norm[key] = self.inf_norm.get(key, torch.zeros(call.heads, dtype=torch.float64))
        self.inf_norm[key] = self.inf_norm[key] + inf_norm.double().sum(0)
        largest = inf_norm.amax(1)
        self.batch_inf_norm = (
            largest if self.batch_inf_norm is None else torch.maximum(self.batch_inf_norm, largest)
        )
        self._count_sinks(call, early)

    def _update(self, call: AttentionLogits, tile: LogitTile, first: Tensor) -> None:
        batch, heads, rows, keys = tile.logits.shape
        flat = tile.logits.transpose(0, 1).reshape(heads, -1)
        query = torch.arange(tile.start, tile.start + rows)[None, :, None]
        key = torch.arange(keys)[None, None, :]
        sequence = torch.arange(self.first_sequence, self.first_sequence + batch)[:, None, None]
        tags = pack(sequence, query, key).reshape(-1)
        valid = tile.valid[:, 0]
        starts = first[:, None, None]
        of_first = valid & (key == starts)
        row_0 = of_first & (query == starts)
        for name, chosen in (
            (ROW_0, row_0),
            ("first", of_first & ~row_0),
            ("others", valid & ~of_first),
        ):
            where = chosen.reshape(-1).nonzero()[:, 0]
            slot = (call.layer, call.map, name)
            before = self.bundles.get(slot) or Bundle.empty(heads)
            self.bundles[slot] = before.update(flat[:, where], tags[where])

    def _count_sinks(self, call: AttentionLogits, early: list[tuple[Tensor, ...]]) -> None:
        """Counts (sequence, head) above the sink threshold; a differential pair counts as one."""
        probabilities = [part for part in early if part]
        if not self.lambdas:
            shares = torch.cat([_share(p[0], p[2]) for p in probabilities], dim=2)
            self._add_sinks(shares, torch.cat([p[1] for p in probabilities], dim=1))
            return
        if call.map == 1:
            self._first_map = probabilities
            return
        weight = self.lambdas[call.layer]
        parts: list[Tensor] = []
        counted: list[Tensor] = []
        for one, two in zip(self._first_map, probabilities, strict=True):
            parts.append(_share(one[0] - weight * two[0], one[2]))
            counted.append(one[1])
        self._add_sinks(torch.cat(parts, dim=2), torch.cat(counted, dim=1))

    def _add_sinks(self, shares: Tensor, counted: Tensor) -> None:
        number = counted.sum(1)  # [batch]
        total = (shares * counted[:, None]).sum(2)
        some = number > 0
        mean = total[some] / number[some, None]
        self.sinks += int((mean > SINK_ABOVE).sum())
        self.sink_candidates += mean.numel()

    def layers(self) -> list[tuple[int, int]]:
        """Returns the (layer, map) pairs that were seen, in order."""
        return sorted({(layer, map_) for layer, map_, _ in self.bundles})

    def pooled_classes(self, layer: int, map_: int) -> Bundle:
        """Returns one layer and map over all classes; groups are heads."""
        return merged([self.bundles[layer, map_, name] for name in CLASSES])

    @property
    def sink_rate(self) -> float:
        """Share of (sequence, layer, head) above the threshold; NaN where there is none."""
        return self.sinks / self.sink_candidates if self.sink_candidates else float("nan")


def _first_token_share(tile: LogitTile, first: Tensor, real: Tensor) -> tuple[Tensor, ...]:
    """Returns (probabilities, which queries count, first key) of the early rows, or nothing."""
    low, high = SINK_QUERIES
    stop = min(int(first.max()) + high + 1 - tile.start, tile.logits.shape[2])
    if stop <= 0:
        return ()
    masked = tile.logits[:, :, :stop].masked_fill(~tile.attended[:, :, :stop], float("-inf"))
    probabilities = torch.softmax(masked, dim=-1).nan_to_num(nan=0.0)
    query = torch.arange(tile.start, tile.start + stop)[None]
    rank = query - first[:, None]
    counted = (rank >= low) & (rank <= high) & real[:, tile.start : tile.start + stop]
    return probabilities, counted, first


def _share(attention: Tensor, first: Tensor) -> Tensor:
    """Returns |a| of the first key over sum |a|: `[batch, heads, query]`."""
    size = attention.abs()
    # a tile may end before the first token where padding is on the left: its rows do not count
    first = first.clamp_max(size.shape[3] - 1)
    index = first[:, None, None, None].expand(*size.shape[:3], 1)
    total = size.sum(-1)
    return size.gather(3, index)[..., 0] / torch.where(total > 0, total, torch.ones_like(total))
