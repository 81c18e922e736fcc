"""Inputs of linear layers on a symmetric range a token, which the graph finds as it runs.

Before: `x W`. After: `r * (Q/DQ(x / r) W)` with `r` the largest |x| of the token: what is quantized
lies in [-1, 1], so one constant scale serves, ONNX Runtime fuses Q/DQ and product into its int8
kernel, and `r` scales the result. A token's result depends on no other token: neither on padding
nor on the batch, as it would with DynamicQuantizeLinear, whose range is the whole call's.

The operators are those of opset 18; the grid is that of `fake_quantized`, `q = x / (r / qmax)`, up
to the last bit of the two divisions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx_ir as ir

from quantkit.exporting.graphs import GraphGrid, constant, quantize_value
from quantkit.exporting.linears import LinearNode
from quantkit.numerics.qtypes import QType
from quantkit.results import QuantizerInfo

TINY: Final = float(np.finfo(np.float32).tiny)
"""Least range: a token of zeros stays zeros, and nothing is divided by 0."""


UNIT: Final = "/unit"
"""How the name ends of the node that divides a tensor by its range."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenGrid:
    """A tensor over its range a token, as integers, and that range `[..., 1]`."""

    grid: GraphGrid
    absmax: ir.Value


def quantize_tokens(
    model: ir.Model, linear: LinearNode, bits: int, shared: dict[str, TokenGrid]
) -> QuantizerInfo:
    """Rewrites one layer in place; returns its quantizer, `linear_input/<module>`.

    Its scales are those of x over its range: 1 / (2^(bits-1) - 1).

    Args:
        shared: What was quantized already, by tensor; added to.
    """
    node, name = linear.node, f"linear_input/{linear.module}"
    source = node.inputs[0]
    assert source is not None  # a product's first input is not optional
    scale = 1.0 / ((1 << (bits - 1)) - 1)
    if source.name not in shared:
        shared[str(source.name)] = _token_grid(model, source, name, scale, bits, node)
    own = shared[str(source.name)]
    node.replace_input_with(0, own.grid.dequantize(model, node, f"{name}/dequantize"))
    _scale_result(model, linear, own.absmax)
    return QuantizerInfo(
        name=name,
        qtype=str(QType(bits=bits, narrow=True)),
        granularity="token",
        scale_min=scale,
        scale_max=scale,
        hits=1,
    )


def _token_grid(
    model: ir.Model, source: ir.Value, name: str, scale: float, bits: int, before: ir.Node
) -> TokenGrid:
    axes = constant(model, f"{name}/axes", np.asarray([-1]), ir.DataType.INT64)
    least = constant(model, f"{name}/least", np.asarray(TINY), ir.DataType.FLOAT)
    size = ir.node("Abs", [source], name=f"{name}/abs")
    largest = ir.node(
        "ReduceMax", [size.outputs[0], axes], {"keepdims": 1}, name=f"{name}/reduce_max"
    )
    absmax = ir.node("Max", [largest.outputs[0], least], name=f"{name}/absmax")
    unit = ir.node("Div", [source, absmax.outputs[0]], name=f"{name}{UNIT}")
    for node in (size, largest, absmax, unit):
        node.outputs[0].name = f"{node.name}_output"
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        if source.shape is not None:
            kept = source.shape if node in (size, unit) else [*source.shape[:-1], 1]
            node.outputs[0].shape = ir.Shape(kept)
    model.graph.insert_before(before, [size, largest, absmax, unit])
    grid = quantize_value(
        model,
        unit.outputs[0],
        name=name,
        scale=np.asarray(scale, np.float32),
        zero_point=1 << (bits - 1),
        qtype=QType(bits=bits, signed=False),
        before=before,
    )
    return TokenGrid(grid=grid, absmax=absmax.outputs[0])


def _scale_result(model: ir.Model, linear: LinearNode, absmax: ir.Value) -> None:
    """Puts the product with the range behind the layer, in front of all that reads it."""
    old = linear.node.outputs[0]
    uses = list(old.uses())
    name, is_output = old.name, old.is_graph_output()
    scaled = ir.node(
        "Mul",
        [old, absmax],
        name=f"linear_input/{linear.module}/rescale",
        metadata_props=dict(linear.node.metadata_props),
    )
    new = scaled.outputs[0]
    new.shape, new.type = old.shape, old.type
    new.name = f"{scaled.name}_output"
    model.graph.insert_after(linear.node, scaled)
    for user, index in uses:
        user.replace_input_with(index, new)
    if is_output:
        model.graph.outputs[list(model.graph.outputs).index(old)] = new
        old.name, new.name = f"{name}/unscaled", name
