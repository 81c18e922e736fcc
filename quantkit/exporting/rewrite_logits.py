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
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.exporting.graphs import quantize_value, scopes_of
from quantkit.numerics.qtypes import QType
from quantkit.quantization import static_logit_scale
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
    model: ir.Model, quant: LogitQuant, ranges: Mapping[str, Range]
) -> list[QuantizerInfo]:
    """Rewrites every logit in place; returns one entry per layer and map, `hits` its products.

    Raises:
        InputError: a dynamic range (a graph has static ones), or a range that is missing.
    """
    if quant.range != "static":
        raise InputError(
            f"a graph takes static ranges of logits, got {str(quant)!r}: "
            f"write logits{quant.bits}:head:static (or :tensor:static)."
        )
    qtype = QType(bits=quant.bits, narrow=True)
    infos: dict[str, QuantizerInfo] = {}
    calls: dict[int, int] = {}
    for logit in find_logits(model):
        parts = logit_scales(ranges, logit.layer, logit.heads, quant)
        scale = np.concatenate(parts)
        if np.all(scale == scale[0]) and quant.granularity == "tensor":
            scale = scale[:1]  # one number: the cheaper kernel, the same grid
        call = calls[logit.layer] = calls.get(logit.layer, 0) + 1
        _insert(model, logit, scale, qtype, suffix="" if call == 1 else f"/call {call}")
        for map_, part in enumerate(parts, 1):
            name = f"attention_logit/{logit.layer}/map {map_}"
            infos[name] = QuantizerInfo(
                name=name,
                qtype=str(qtype),
                granularity=quant.granularity,
                scale_min=float(part.min()),
                scale_max=float(part.max()),
                hits=call,
            )
    return list(infos.values())


def _insert(
    model: ir.Model, logit: LogitValue, scale: NDArray[np.float32], qtype: QType, *, suffix: str
) -> None:
    uses = list(logit.value.uses())
    producer = logit.value.producer()
    assert producer is not None  # a product has a node
    after = model.graph[model.graph.index(producer) + 1] if uses else producer
    name = f"attention_logit/{logit.layer}{suffix}"
    grid = quantize_value(
        model, logit.value, name=name, scale=scale, zero_point=0, qtype=qtype, before=after
    )
    replaced = grid.dequantize(model, after, f"{name}/dequantize")
    for user, index in uses:
        user.replace_input_with(index, replaced)


def logit_scales(
    ranges: Mapping[str, Range], layer: int, heads: int, quant: LogitQuant
) -> list[NDArray[np.float32]]:
    """Returns one array of scales per map that calibration saw, one scale for each of its heads.

    The first heads of a product are map 1, the last ones map 2.

    Raises:
        InputError: no range of that layer, or one for another number of heads.
    """
    maps = 0
    while f"attention_logit/{layer}/map {maps + 1}" in ranges:
        maps += 1
    maps = max(maps, 1)  # with none, the lookup of map 1 raises the error that names it
    each, rest = divmod(heads, maps)
    parts: list[NDArray[np.float32]] = []
    for map_ in range(1, maps + 1):
        scale = static_logit_scale(ranges, layer, map_, quant)
        if rest or scale.numel() not in (1, each):
            raise InputError(
                f"attention_logit/{layer}/map {map_}: expected {heads} / {maps} heads, "
                f"got {scale.numel()} ranges."
            )
        parts.append(torch.broadcast_to(scale, (each,)).numpy())
    return parts


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
