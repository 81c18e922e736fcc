"""The callbacks that put linear inputs and attention logits on their grids."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from quantkit.errors import ProbeError
from quantkit.numerics.affine import (
    QParams,
    affine_params,
    fake_quantize,
    reduce_absmax,
    symmetric_scale,
)
from quantkit.numerics.granularity import PerRow, logit_granularity
from quantkit.probes import Activation, AttentionLogits, LogitTile, LogitTransform
from quantkit.quantization.grids import linear_input_grid, logit_qtype, static_logit_grid
from quantkit.recipe import ActivationQuant, LogitQuant
from quantkit.results import Range


def input_quantizer(
    quant: ActivationQuant, ranges: Mapping[str, Range]
) -> Callable[[Activation], Tensor]:
    """Returns a `linear_input` callback: the static asymmetric signed grid of each module.

    Raises:
        InputError: when called, for a module without a range or with an unusable one.
    """
    grids: dict[str, QParams] = {}

    def quantizer(visit: Activation) -> Tensor:
        if visit.name not in grids:
            grids[visit.name] = linear_input_grid(ranges, visit.name, quant.bits)
        grid = grids[visit.name]
        return fake_quantize(visit.tensor, grid.scale, grid.zero_point, grid.qtype)

    return quantizer


def logit_quantizer(
    quant: LogitQuant, ranges: Mapping[str, Range]
) -> Callable[[AttentionLogits], LogitTransform]:
    """Returns an `attention_logit` callback: the grid of `quant`.

    Dynamic scales per sequence or head take a first look at all tiles of the map; per row none.
    """
    qtype = logit_qtype(quant)
    granularity = logit_granularity(quant.granularity)

    def extremes(tile: LogitTile) -> Tensor:
        """Returns the sizes `[1 or 2, ...]` that the grid must reach: absmax, or -lo and hi.

        Of lo and hi only the side of 0 that is theirs counts, since a grid includes 0.
        """
        sides = [tile.logits]
        if not quant.symmetric:
            sides = [tile.logits.clamp_max(0.0), tile.logits.clamp_min(0.0)]
        return torch.stack([reduce_absmax(side, granularity, tile.valid) for side in sides])

    def dynamic_grid(reach: Tensor, call: AttentionLogits) -> tuple[Tensor, Tensor | int]:
        if not bool(reach.isfinite().all()):
            raise ProbeError(f"logits of {call.name}, map {call.map}, are not finite")
        if quant.symmetric:
            return symmetric_scale(reach[0], qtype), 0
        return affine_params(-reach[0], reach[1], qtype)

    def quantizer(call: AttentionLogits) -> LogitTransform:
        scale: Tensor
        zero_point: Tensor | int
        if quant.range == "static":
            grid = static_logit_grid(ranges, call.layer, call.map, quant)
            device = call.query.device
            scale = grid.scale.reshape(1, -1, 1, 1).to(device)
            zero_point = 0
            if not quant.symmetric:
                zero_point = grid.zero_point.reshape(1, -1, 1, 1).to(device)
        elif isinstance(granularity, PerRow):

            def by_row(tile: LogitTile) -> Tensor:
                own_scale, own_zero = dynamic_grid(extremes(tile), call)
                return fake_quantize(tile.logits, own_scale, own_zero, qtype)

            return by_row
        else:
            reach = torch.stack([extremes(tile) for tile in call.tiles()]).amax(0)
            scale, zero_point = dynamic_grid(reach, call)

        def by_scale(tile: LogitTile) -> Tensor:
            return fake_quantize(tile.logits, scale, zero_point, qtype)

        return by_scale

    return quantizer
