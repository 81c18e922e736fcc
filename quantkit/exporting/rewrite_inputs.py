"""Inputs of linear layers on static ranges: QuantizeLinear and DequantizeLinear before the layer.

Before: a layer reads a float tensor. After: it reads a DequantizeLinear of its own; layers that
share the tensor and the grid share the QuantizeLinear.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from quantkit.exporting.graphs import GraphGrid, quantize_value
from quantkit.exporting.linears import LinearNode
from quantkit.numerics.qtypes import QType
from quantkit.quantization import linear_input_grid
from quantkit.results import QuantizerInfo, Range

Shared = dict[tuple[str, float, int], GraphGrid]
"""What was quantized already: (tensor, scale, zero point) -> its integers."""


def input_grid(ranges: Mapping[str, Range], module: str, bits: int) -> tuple[float, int]:
    """Returns (scale, zero point) of a linear layer's input, as unsigned integers.

    The signed grid of the simulation, 2^(bits-1) higher, so the same real numbers: ONNX Runtime's
    x86 kernels take unsigned activations, and it converts signed ones only where nothing shares
    them; the rest it computes in float.

    Raises:
        InputError: no range of that name, one that carries no grid, or one for another width.
    """
    grid = linear_input_grid(ranges, module, bits)
    return float(grid.scale), int(grid.zero_point) + (1 << (bits - 1))


def quantize_input(
    model: ir.Model,
    linear: LinearNode,
    bits: int,
    ranges: Mapping[str, Range],
    shared: Shared,
) -> QuantizerInfo:
    """Rewrites one layer in place; returns its quantizer, `linear_input/<module>`.

    Args:
        shared: Of this graph, added to.

    Raises:
        InputError: as `input_grid`.
    """
    name, qtype = f"linear_input/{linear.module}", QType(bits=bits, signed=False)
    scale, zero_point = input_grid(ranges, linear.module, bits)
    source = linear.node.inputs[0]
    assert source is not None  # a MatMul's first input is not optional
    key = (str(source.name), scale, zero_point)
    if key not in shared:
        shared[key] = quantize_value(
            model,
            source,
            name=name,
            scale=np.asarray(scale, np.float32),
            zero_point=zero_point,
            qtype=qtype,
            before=linear.node,
        )
    linear.node.replace_input_with(
        0, shared[key].dequantize(model, linear.node, f"{name}/dequantize")
    )
    return QuantizerInfo(
        name=name,
        qtype=str(qtype),
        granularity="tensor",
        scale_min=scale,
        scale_max=scale,
        hits=1,
    )
