"""Attention logits of a graph on their integer grid: after the model's scale, before the mask.

Static grids stand here, those of a call's own extremes in `rewrite_dynamic_logits`. Where a
differential head's two calls were not merged into one product, each is rewritten, with the same
scales.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import onnx_ir as ir

from quantkit.errors import InputError
from quantkit.exporting.graphs import quantize_value
from quantkit.exporting.logits import LogitValue, find_logits
from quantkit.exporting.rewrite_dynamic_logits import DynamicLogits
from quantkit.numerics.affine import QParams
from quantkit.quantization import static_logit_grid
from quantkit.recipe import LogitQuant
from quantkit.results import QuantizerInfo, Range


def quantize_logits(
    model: ir.Model,
    quant: LogitQuant,
    ranges: Mapping[str, Range],
    keep: Collection[str] = (),
    *,
    maps: int | None = None,
) -> list[QuantizerInfo]:
    """Rewrites every logit in place; returns one entry per layer and map, `hits` its products.

    Args:
        keep: Names of maps that stay in float; a layer's maps are one product, so all or none.
        maps: Softmax maps of a layer; None: as many as `ranges` names of it, else 1.

    Raises:
        InputError: a range that is missing or was chosen for another width, a dynamic one that is
            asymmetric or of logits whose mask the graph does not show, or a map to keep that the
            graph does not have by itself.
    """
    infos: dict[str, QuantizerInfo] = {}
    calls: dict[int, int] = {}
    logits = find_logits(model)
    dynamic = DynamicLogits(model=model, quant=quant) if quant.range == "dynamic" else None
    _require_layers(keep, {logit.layer for logit in logits})
    for logit in logits:
        names = _maps(logit.layer, ranges, maps)
        if _is_kept(logit.layer, names, keep):
            continue
        call = calls[logit.layer] = calls.get(logit.layer, 0) + 1
        suffix = "" if call == 1 else f"/call {call}"
        if dynamic is not None:
            infos |= {i.name: i for i in dynamic.insert(logit, names, call=call, suffix=suffix)}
            continue
        grids = logit_grids(ranges, logit.layer, logit.heads, quant, maps=len(names))
        _insert(model, logit, grids, logit.heads // len(grids), suffix=suffix)
        for name, grid in zip(names, grids, strict=True):
            infos[name] = QuantizerInfo(
                name=name,
                qtype=str(grid.qtype),
                granularity=quant.granularity,
                scale_min=float(grid.scale.min()),
                scale_max=float(grid.scale.max()),
                hits=call,
            )
    if dynamic is not None:
        model.graph.sort()  # a mask may be computed after the logits that it says are valid
    return list(infos.values())


def _insert(
    model: ir.Model, logit: LogitValue, grids: list[QParams], each: int, *, suffix: str
) -> None:
    """Puts the grids, each for `each` heads, between the product and all that reads it."""
    scale, zero_point = (
        np.concatenate([np.broadcast_to(part.numpy(), each) for part in parts])
        for parts in ([g.scale for g in grids], [g.zero_point for g in grids])
    )
    if np.all(scale == scale[0]) and np.all(zero_point == zero_point[0]):
        scale, zero_point = scale[:1], zero_point[:1]  # the cheaper kernel, the same grid
    uses = list(logit.value.uses())
    producer = logit.value.producer()
    assert producer is not None  # a product has a node
    after = model.graph[model.graph.index(producer) + 1] if uses else producer
    name = f"attention_logit/{logit.layer}{suffix}"
    grid = quantize_value(
        model,
        logit.value,
        name=name,
        scale=scale,
        zero_point=zero_point,
        qtype=grids[0].qtype,
        before=after,
    )
    replaced = grid.dequantize(model, after, f"{name}/dequantize")
    for user, index in uses:
        user.replace_input_with(index, replaced)


def logit_grids(
    ranges: Mapping[str, Range], layer: int, heads: int, quant: LogitQuant, *, maps: int
) -> list[QParams]:
    """Returns the grid of each map, for one number or each of its heads.

    The first heads of a product are map 1, the last ones map 2.

    Raises:
        InputError: no range of a map, or one for another number of heads.
    """
    each, rest = divmod(heads, maps)
    grids: list[QParams] = []
    for map_ in range(1, maps + 1):
        grid = static_logit_grid(ranges, layer, map_, quant)
        if rest or grid.scale.numel() not in (1, each):
            raise InputError(
                f"attention_logit/{layer}/map {map_}: expected {heads} / {maps} heads, "
                f"got {grid.scale.numel()} ranges."
            )
        grids.append(grid)
    return grids


def _maps(layer: int, ranges: Mapping[str, Range], maps: int | None) -> list[str]:
    """Returns the names of the layer's maps: so many, or those with a range, but one at least."""
    names = [f"attention_logit/{layer}/map {n}" for n in range(1, (maps or 1) + 1)]
    while maps is None and (more := f"attention_logit/{layer}/map {len(names) + 1}") in ranges:
        names.append(more)
    return names


def _is_kept(layer: int, names: list[str], keep: Collection[str]) -> bool:
    kept = [name for name in keep if name.startswith(f"attention_logit/{layer}/")]
    rest = [name for name in names if name not in keep]
    if kept and rest:
        raise InputError(
            f"{kept[0]!r} cannot stay in float alone: the graph computes the maps of layer {layer} "
            f"as one product. Keep {rest[0]!r} too, or neither."
        )
    return bool(kept)


def _require_layers(keep: Collection[str], layers: set[int]) -> None:
    for name in keep:
        if not name.startswith("attention_logit/"):
            continue
        layer = name.split("/")[1]
        if not layer.isdecimal() or int(layer) not in layers:
            numbers = f"{min(layers)} to {max(layers)}"
            raise InputError(f"to keep in float: {name!r} is no logit of the layers {numbers}.")
