"""Attention logits of a graph, on their integer grid: after the model's scale, before the mask.

A logit is found backwards from the Softmax, which nothing else of a decoder has: through the
additions (or selections) of a mask, up to the product of q and k and the scale that may follow it.
The exporter's `scaled_dot_product_attention` scales q and k by sqrt(scale) each, so there the
product already is the logit; eager attention multiplies afterwards.

Where a differential head's two calls were not merged into one product, each is rewritten, with the
same scales.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from quantkit.errors import InputError
from quantkit.exporting.graphs import quantize_value, scopes_of
from quantkit.numerics.affine import QParams
from quantkit.quantization import static_logit_grid
from quantkit.recipe import LogitQuant
from quantkit.results import QuantizerInfo, Range

_LAYER = re.compile(r"\.(\d+)(?:\.|$)")


@dataclass(frozen=True, kw_only=True, eq=False)
class LogitValue:
    """The scaled, unmasked logits `[batch, heads, query, key]` of one attention call."""

    layer: int
    heads: int
    value: ir.Value


def find_logits(model: ir.Model) -> list[LogitValue]:
    """Returns every logit tensor of the graph, in graph order.

    Raises:
        InputError: a Softmax that no product of two activations feeds, a soft-capped logit, or
            one whose layer or number of heads the graph does not say.
    """
    found: list[LogitValue] = []
    for node in model.graph:
        if node.op_type != "Softmax" or node.domain not in ("", "ai.onnx"):
            continue
        value = _logit_of(node)
        if any(value is other.value for other in found):
            continue
        shape = value.shape
        heads = shape[1] if shape is not None and len(shape) == 4 else None
        scope = scopes_of(node)
        numbers = [match[1] for part in scope if (match := _LAYER.search(part))]
        if not isinstance(heads, int) or not numbers:
            raise InputError(
                f"attention of node {node.name!r}: expected logits [batch, heads, query, key] of a "
                f"numbered layer, got shape {shape} in {'/'.join(scope)!r}."
            )
        found.append(LogitValue(layer=int(numbers[0]), heads=heads, value=value))
    if not found:
        raise InputError("the graph has no Softmax: no attention logits to quantize.")
    return found


def quantize_logits(
    model: ir.Model,
    quant: LogitQuant,
    ranges: Mapping[str, Range],
    keep: Collection[str] = (),
) -> list[QuantizerInfo]:
    """Rewrites every logit in place; returns one entry per layer and map, `hits` its products.

    Args:
        keep: Names of maps that stay in float; a layer's maps are one product, so all or none.

    Raises:
        InputError: a dynamic range (a graph has static ones), a range that is missing or was chosen
            for another width, or a map to keep that the graph does not have by itself.
    """
    if quant.range != "static":
        tail = "" if quant.symmetric else ":asymmetric"
        raise InputError(
            f"a graph takes static ranges of logits, got {str(quant)!r}: "
            f"write logits{quant.bits}:head:static{tail} (or :tensor:static{tail})."
        )
    infos: dict[str, QuantizerInfo] = {}
    calls: dict[int, int] = {}
    logits = find_logits(model)
    _require_layers(keep, {logit.layer for logit in logits})
    for logit in logits:
        if _is_kept(logit.layer, ranges, keep):
            continue
        grids = logit_grids(ranges, logit.layer, logit.heads, quant)
        each = logit.heads // len(grids)
        call = calls[logit.layer] = calls.get(logit.layer, 0) + 1
        _insert(model, logit, grids, each, suffix="" if call == 1 else f"/call {call}")
        for map_, grid in enumerate(grids, 1):
            name = f"attention_logit/{logit.layer}/map {map_}"
            infos[name] = QuantizerInfo(
                name=name,
                qtype=str(grid.qtype),
                granularity=quant.granularity,
                scale_min=float(grid.scale.min()),
                scale_max=float(grid.scale.max()),
                hits=call,
            )
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
    ranges: Mapping[str, Range], layer: int, heads: int, quant: LogitQuant
) -> list[QParams]:
    """Returns the grid of each map that calibration saw, for one number or each of its heads.

    The first heads of a product are map 1, the last ones map 2.

    Raises:
        InputError: no range of that layer, or one for another number of heads.
    """
    maps = max(len(_maps(layer, ranges)), 1)  # with none, the lookup of map 1 names it
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


def _maps(layer: int, ranges: Mapping[str, Range]) -> list[str]:
    """Returns the names of the layer's maps that have a range."""
    names: list[str] = []
    while (name := f"attention_logit/{layer}/map {len(names) + 1}") in ranges:
        names.append(name)
    return names


def _is_kept(layer: int, ranges: Mapping[str, Range], keep: Collection[str]) -> bool:
    kept = [name for name in keep if name.startswith(f"attention_logit/{layer}/")]
    rest = [name for name in _maps(layer, ranges) if name not in keep]
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


def _logit_of(softmax: ir.Node) -> ir.Value:
    """Returns the scaled logit behind a Softmax."""
    value = softmax.inputs[0]
    scaled: ir.Value | None = None
    while value is not None:
        node = value.producer()
        if node is None:
            break
        if node.op_type == "MatMul":
            return scaled or value
        if node.op_type in ("Mul", "Div"):
            operands = [operand for operand in node.inputs if not _is_scalar(operand)]
            if len(operands) != 1:
                break
            scaled, value = scaled or value, operands[0]
        elif node.op_type in ("Add", "Where", "Cast"):
            scaled, value = None, _through_mask(node)
        else:
            break
    raise InputError(
        f"the Softmax {softmax.name!r} is not fed by a masked product of q and k"
        + (f" but by {node.op_type}" if value is not None and node is not None else "")
        + "; soft-capped and biased logits are not supported."
    )


def _through_mask(node: ir.Node) -> ir.Value | None:
    """Returns the operand that leads to a product of q and k."""
    operands = node.inputs[1:] if node.op_type == "Where" else node.inputs
    return next((v for v in operands if v is not None and _leads_to_product(v)), None)


def _leads_to_product(value: ir.Value) -> bool:
    node = value.producer()
    if node is None:
        return False
    if node.op_type == "MatMul":
        return True
    if node.op_type in ("Mul", "Div", "Add", "Where", "Cast", "Tanh"):
        return any(v is not None and _leads_to_product(v) for v in node.inputs)
    return False


def _is_scalar(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None and value.const_value.size == 1
