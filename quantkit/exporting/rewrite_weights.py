"""Weights of linear layers with one scale an output channel: integers before a DequantizeLinear.

Before: a layer multiplies by a float constant. After: by the output of a DequantizeLinear along the
output channels, whose integers lie on the symmetric narrow grid of `fake_quantized`.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quantkit.calibration import WeightRanges
from quantkit.exporting.graphs import constant, storage_dtype
from quantkit.exporting.linears import LinearNode
from quantkit.numerics.affine import check_range, quantize
from quantkit.numerics.qtypes import QType
from quantkit.quantization import weight_scale
from quantkit.results import QuantizerInfo


def quantize_weight(
    model: ir.Model, linear: LinearNode, bits: int, ranges: WeightRanges | None
) -> QuantizerInfo:
    """Rewrites one layer in place; returns its quantizer, `weight/<module>`.

    Args:
        ranges: As in `fake_quantized`, one a channel; None: absmax.

    Raises:
        InputError: NaN or inf in the weight, or no range for it at this width.
    """
    qtype = QType(bits=bits, narrow=True)
    name = f"{linear.module}.weight"
    check_range(linear.weight.min(), linear.weight.max(), name)
    scale = weight_scale(linear.weight, bits, module=linear.module, ranges=ranges)
    integers = quantize(linear.weight, scale, 0, qtype)
    array, flat = integers.numpy(), scale.reshape(-1).numpy()
    put_integers(
        model,
        linear,
        array if linear.transposed else array.T,
        flat,
        storage_dtype(qtype),
        {"axis": 0 if linear.transposed else 1},
    )
    return QuantizerInfo(
        name=f"weight/{linear.module}",
        qtype=str(qtype),
        granularity="channel",
        scale_min=float(flat.min()),
        scale_max=float(flat.max()),
        hits=1,
    )


def put_integers(
    model: ir.Model,
    linear: LinearNode,
    integers: NDArray[np.generic],
    scale: NDArray[np.generic],
    dtype: ir.DataType,
    attributes: dict[str, int],
) -> None:
    """Makes a layer read its weight from integers through a DequantizeLinear with zero points 0.

    Args:
        integers: As the layer's constant lies; `scale`: as the operator's attributes say.
    """
    name = f"{linear.module}.weight"
    node = ir.node(
        "DequantizeLinear",
        [
            constant(model, f"{name}_quantized", integers, dtype),
            constant(model, f"{name}_scale", scale, ir.DataType.FLOAT),
            constant(model, f"{name}_zero_point", np.zeros(scale.shape, np.int32), dtype),
        ],
        attributes,
        name=f"weight/{linear.module}/dequantize",
    )
    original = linear.node.inputs[1]
    assert original is not None  # the layer was found by this constant
    output = node.outputs[0]
    output.name, output.shape, output.type = f"{name}_dequantized", original.shape, original.type
    model.graph.insert_before(linear.node, node)
    linear.node.replace_input_with(1, output)
