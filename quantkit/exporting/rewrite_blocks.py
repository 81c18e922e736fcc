"""Weights of linear layers with a scale a group of inputs, in one of two forms.

* Q/DQ: integers before a DequantizeLinear by blocks (opset 21). Standard operators alone; ONNX
  Runtime fuses it with the product into MatMulNBits as it loads the graph, and there it quantizes
  the inputs to 8 bits unless `session.qdq_matmulnbits_accuracy_level` is 1.
* MatMulNBits: ONNX Runtime's own operator, with the same integers and scales, 4 or 8 bits, float
  inputs (`accuracy_level` 1).

Before: a layer multiplies by a float constant. After: by integers of the symmetric narrow grid of
`fake_quantized`, group by group along the inputs; the last group of a row may be short.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit.calibration import WeightRanges
from quantkit.errors import InputError
from quantkit.exporting.graphs import constant, storage_dtype
from quantkit.exporting.linears import LinearNode, turns_input
from quantkit.exporting.rewrite_weights import put_integers
from quantkit.jobs import Storage
from quantkit.numerics.affine import (
    check_range,
    expand_groups,
    quantize,
    reduce_absmax,
    symmetric_scale,
)
from quantkit.numerics.granularity import PerGroup
from quantkit.numerics.qtypes import QType
from quantkit.quantization import weight_scale
from quantkit.results import QuantizerInfo

FLOAT_INPUTS: Final = 1
"""MatMulNBits' `accuracy_level` that computes in float32."""
_NBITS: Final = (4, 8)
_LEAST_BLOCK: Final = 16
_DOMAIN: Final = "com.microsoft"


def quantize_weight_blocks(
    model: ir.Model,
    linear: LinearNode,
    bits: int,
    group_size: int,
    storage: Storage,
    ranges: WeightRanges | None,
) -> QuantizerInfo:
    """Rewrites one layer in place; returns its quantizer, `weight/<module>`.

    Args:
        linear: Without a bias of its own.
        ranges: As in `fake_quantized`, by groups of that size; None: absmax.

    Raises:
        InputError: NaN or inf in the weight, no range for it, or what MatMulNBits cannot hold.
    """
    name = f"{linear.module}.weight"
    check_range(linear.weight.min(), linear.weight.max(), name)
    qtype = QType(bits=bits, narrow=True)
    groups = PerGroup(axis=1, group_size=group_size)
    if ranges is None:
        by_group = symmetric_scale(reduce_absmax(linear.weight, groups), qtype)
        scale = expand_groups(by_group, groups, linear.weight.shape)
    else:
        scale = weight_scale(linear.weight, bits, module=linear.module, ranges=ranges)
    integers = quantize(linear.weight, scale, 0, qtype)
    firsts = scale.expand(linear.weight.shape)[:, ::group_size].contiguous()
    if storage == "matmulnbits":
        _as_matmulnbits(model, linear, integers, firsts, bits, group_size)
    else:
        _as_blocks(model, linear, integers, firsts, qtype, group_size)
    return QuantizerInfo(
        name=f"weight/{linear.module}",
        qtype=str(qtype),
        granularity=f"group{group_size}",
        scale_min=float(firsts.min()),
        scale_max=float(firsts.max()),
        hits=1,
    )


def _as_blocks(
    model: ir.Model,
    linear: LinearNode,
    integers: Tensor,
    scale: Tensor,
    qtype: QType,
    group_size: int,
) -> None:
    def turned(x: Tensor) -> NDArray[np.generic]:
        array: NDArray[np.generic] = x.numpy()
        return array if linear.transposed else np.ascontiguousarray(array.T)

    put_integers(
        model,
        linear,
        turned(integers),
        turned(scale),
        storage_dtype(qtype),
        {"axis": int(linear.transposed), "block_size": group_size},
    )


def _as_matmulnbits(
    model: ir.Model,
    linear: LinearNode,
    integers: Tensor,
    scale: Tensor,
    bits: int,
    group_size: int,
) -> None:
    """Replaces the layer's node; quantkit's narrow integers, 2^(bits-1) higher, are its unsigned
    ones, whose zero point is that number where none is given.
    """
    node, name = linear.node, f"{linear.module}.weight"
    is_power = group_size & (group_size - 1) == 0
    if bits not in _NBITS or group_size < _LEAST_BLOCK or not is_power:
        raise InputError(
            f"MatMulNBits holds 4 or 8 bits in groups of 16, 32, 64, ...; got {bits} bits in "
            f"groups of {group_size}: change the recipe, or --storage qdq."
        )
    scales = node.op_type == "Gemm" and node.attributes.get_float("alpha", 1.0) != 1.0
    has_bias = len(node.inputs) > 2 and node.inputs[2] is not None
    if turns_input(node) or scales or has_bias:
        raise InputError(
            f"{linear.module}: MatMulNBits cannot stand for a Gemm with transA, alpha or a bias: "
            "use --storage qdq."
        )
    outputs, inputs = integers.shape
    packed = _packed(integers, bits, group_size)
    new = ir.node(
        "MatMulNBits",
        [
            node.inputs[0],
            constant(model, f"{name}_quantized", packed, ir.DataType.UINT8),
            constant(model, f"{name}_scale", scale.numpy(), ir.DataType.FLOAT),
        ],
        {
            "K": inputs,
            "N": outputs,
            "bits": bits,
            "block_size": group_size,
            "accuracy_level": FLOAT_INPUTS,
        },
        domain=_DOMAIN,
        name=f"weight/{linear.module}/product",
        metadata_props=dict(node.metadata_props),
    )
    old = node.outputs[0]
    new.outputs[0].name, new.outputs[0].shape, new.outputs[0].type = old.name, old.shape, old.type
    ir.convenience.replace_nodes_and_values(
        model.graph, node, [node], [new], [old], [new.outputs[0]]
    )
    model.opset_imports.setdefault(_DOMAIN, 1)


def _packed(integers: Tensor, bits: int, group_size: int) -> NDArray[np.uint8]:
    """Returns `[outputs, groups, group_size * bits / 8]`; of two 4-bit numbers the first is low."""
    outputs, inputs = integers.shape
    groups = -(-inputs // group_size)
    zero = 1 << (bits - 1)
    padded = torch.full((outputs, groups * group_size), zero, dtype=torch.int32)
    padded[:, :inputs] = integers.to(torch.int32) + zero
    array = padded.numpy().astype(np.uint8).reshape(outputs, groups, group_size)
    if bits == 8:
        return array
    low, high = array[..., 0::2], array[..., 1::2]
    return np.asarray(low | (high << 4), np.uint8)
