"""Attention maps on a grid, logits or softmax outputs, and the extremes that a grid must reach.

A scale belongs to one sequence and map: to all of it, to a head, or to a query row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quantkit.errors import ProbeError
from quantkit.numerics.affine import affine_params, fake_quantize, symmetric_scale
from quantkit.numerics.qtypes import QType
from quantkit.probes import AttentionLogits, LogitBlock, LogitTile
from quantkit.probes.attend import edited_tiles, in_blocks, shared_out, softmax_blocks
from quantkit.probes.flex import GridTransform, RowGrids
from quantkit.probes.pieces import LogitTransform

Granularity = Literal["tensor", "head", "row"]
Grid = tuple[Tensor, Tensor | int]
"""(scale, zero point), which broadcast against what they are for."""


def grid_of(reach: Tensor, qtype: QType, *, symmetric: bool, what: str) -> Grid:
    """Returns the grid that spans `reach`, float32 `[2, ...]`: -lo and hi, neither below 0.

    Raises:
        ProbeError: a reach of NaN or inf; `what` says of what.
    """
    if not bool(reach.isfinite().all()):
        raise ProbeError(
            f"{what}, are not finite: find the layer that first makes a NaN or an inf, or try "
            "dtype float32."
        )
    if symmetric:
        return symmetric_scale(torch.maximum(reach[0], reach[1]), qtype), 0
    return affine_params(-reach[0], reach[1], qtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class OnGrid(GridTransform):
    """Puts a map on a grid that is known.

    Attributes:
        scale, zero_point: `[batch or 1, heads or 1, 1, 1]`; a zero point of 0 is a number.
    """

    scale: Tensor
    zero_point: Tensor | int
    qtype: QType

    def __call__(self, tile: LogitTile) -> Tensor:
        """Returns the tile on the grid."""
        return fake_quantize(tile.logits, self.scale, self.zero_point, self.qtype)

    def in_place(self, block: LogitBlock) -> None:
        """Puts the block on the grid."""
        scale, zero_point = _own(self.scale, block), self.zero_point
        if isinstance(zero_point, Tensor):
            zero_point = _own(zero_point, block)
        fake_quantize(block.logits, scale, zero_point, self.qtype, out=block.logits)

    def row_grids(self, call: AttentionLogits) -> RowGrids:
        """Returns the grid, the same for every row."""
        return RowGrids.of(self.scale, self.zero_point, self.qtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class ByRow(GridTransform):
    """Puts each query row of a map on a grid of its own.

    Attributes:
        what: For messages.
    """

    qtype: QType
    symmetric: bool
    what: str

    def __call__(self, tile: LogitTile) -> Tensor:
        """Returns the tile's rows on their grids."""
        scale, zero_point = self._grid(_tile_reach(tile, (3,)))
        return fake_quantize(tile.logits, scale, zero_point, self.qtype)

    def in_place(self, block: LogitBlock) -> None:
        """Puts the block's rows on their grids."""
        block.fill_masked(0.0)  # a grid includes 0
        scale, zero_point = self._grid(_reach(block.logits))
        fake_quantize(block.logits, scale, zero_point, self.qtype, out=block.logits)

    def row_grids(self, call: AttentionLogits) -> RowGrids:
        """Returns the grids of all rows, after a first look at them."""
        reach = torch.cat([_tile_reach(tile, (3,)) for tile in call.tiles()], dim=3)
        return RowGrids.of(*self._grid(reach), self.qtype)

    def _grid(self, reach: Tensor) -> Grid:
        return grid_of(reach, self.qtype, symmetric=self.symmetric, what=self.what)


def logit_reach(call: AttentionLogits, granularity: Granularity) -> Tensor:
    """Returns (-lo, hi) of a map's valid logits and 0, `[2, batch, heads or 1, 1, 1]`."""
    if not in_blocks(call, None):
        return _reach_of_tiles(call.tiles(), granularity)

    def add(found: Tensor, share: tuple[int, int]) -> None:
        for block in call.blocks(share=share):
            block.fill_masked(0.0)
            _raise(found, block)

    return _reach_of_blocks(call, granularity, add)


def probability_reach(
    call: AttentionLogits, logits: LogitTransform | None, granularity: Granularity
) -> Tensor:
    """Returns (0, hi) of a map's softmax outputs, with what replaces its logits before."""
    if not in_blocks(call, logits):
        return _reach_of_tiles(edited_tiles(call, logits), granularity)

    def add(found: Tensor, share: tuple[int, int]) -> None:
        for block in softmax_blocks(call, logits, share):
            _raise(found, block)

    return _reach_of_blocks(call, granularity, add)


def _reach_of_blocks(
    call: AttentionLogits,
    granularity: Granularity,
    add: Callable[[Tensor, tuple[int, int]], None],
) -> Tensor:
    batch, heads = call.query.shape[:2]
    found = torch.zeros(torch.get_num_threads(), 2, batch, heads)
    shared_out(call, lambda share: add(found[share[0]], share))
    reach = found.amax(0)[..., None, None]
    return reach.amax(2, keepdim=True) if granularity == "tensor" else reach


def _raise(found: Tensor, block: LogitBlock) -> None:
    """Raises (-lo, hi) `[2, batch, heads]` to what a block reaches."""
    its = _reach(block.logits.flatten(1)).squeeze(-1)
    place = found[:, block.sequence, block.heads]
    torch.maximum(place, its, out=place)


def _reach(x: Tensor) -> Tensor:
    """Returns (-lo, hi) of the last axis and 0, `[2, ..., 1]`."""
    # two vectorized passes; torch.aminmax along an axis is eight times as slow (torch 2)
    lo, hi = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    return torch.stack([-lo, hi]).clamp_min_(0.0)


def _reach_of_tiles(tiles: Iterable[LogitTile], granularity: Granularity) -> Tensor:
    axes = (1, 2, 3) if granularity == "tensor" else (2, 3)
    return torch.stack([_tile_reach(tile, axes) for tile in tiles]).amax(0)


def _tile_reach(tile: LogitTile, axes: tuple[int, ...]) -> Tensor:
    x = tile.logits.detach().masked_fill(~tile.valid, 0.0)
    return torch.stack([-x.amin(axes, keepdim=True), x.amax(axes, keepdim=True)]).clamp_min_(0.0)


def _own(x: Tensor, block: LogitBlock) -> Tensor:
    """Returns what is of a block's sequence and heads, `[heads or 1, 1, 1]`."""
    x = x[block.sequence if len(x) > 1 else 0]
    return x[block.heads] if len(x) > 1 else x
