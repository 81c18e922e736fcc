"""Convolutions on static ranges, at 8 bits in the form that ONNX Runtime computes in integers.

Before: `Conv(x, W, b)` in float, maybe behind it an activation that only clips. After: the input
and the result (that of the activation, where there is one) go through QuantizeLinear and
DequantizeLinear on unsigned asymmetric grids, the weight is int8 with a symmetric narrow scale an
output channel, and the bias int32 on the grid of the products, `scale_x * scale_w`. ONNX Runtime
makes one QLinearConv of it at 8 bits; without the pair behind the node it would compute in float.
With inputs of 16 bits (w8a16, for NPUs) its CPU computes in float what lies on the grids.

A weight is `[out, in / groups, ...]`: its output channels are axis 0, grouped or not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from quantkit.exporting.graphs import constant, quantize_value
from quantkit.exporting.linears import LinearNode
from quantkit.exporting.rewrite_inputs import Shared, input_grid, quantize_input
from quantkit.numerics.affine import check_range, quantize
from quantkit.numerics.qtypes import QType
from quantkit.quantization import weight_scale
from quantkit.results import QuantizerInfo, Range

BITS: Final = 8
"""Of weights."""
INPUT_BITS: Final = (8, 16)
"""Of what they multiply: ONNX Runtime 1.32 computes those of 8 bits in integers, on its CPU."""
_CLIPS: Final = ("Relu", "Clip")
_MOST_STEPS: Final = float(1 << 30)
"""Of a bias: half of what int32 holds."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ConvNode:
    """A convolution with a constant weight.

    Attributes:
        name: Of its node, else `Conv_<number>`; a second one of a name ends in `#2`.
        weight: `[out, in / groups, ...]`.
        result: What its result is quantized as: its own output, or that of the activation behind.
    """

    name: str
    node: ir.Node
    weight: Tensor
    result: ir.Value

    @property
    def flat(self) -> LinearNode:
        """The same as a linear layer, a row an output channel."""
        rows = self.weight.reshape(len(self.weight), -1)
        return LinearNode(module=self.name, node=self.node, weight=rows, transposed=True)


def find_convs(model: ir.Model) -> list[ConvNode]:
    """Returns every Conv with a constant weight and, where it has one, a constant bias."""
    found: list[ConvNode] = []
    counts: dict[str, int] = defaultdict(int)
    for index, node in enumerate(model.graph):
        if node.op_type != "Conv" or node.domain not in ("", "ai.onnx") or len(node.inputs) < 2:
            continue
        weight, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
        if weight is None or weight.const_value is None:
            continue
        if bias is not None and bias.const_value is None:
            continue
        name = node.name or f"Conv_{index}"
        counts[name] += 1
        name += f"#{counts[name]}" if counts[name] > 1 else ""
        array = np.array(weight.const_value.numpy(), np.float32)
        found.append(
            ConvNode(
                name=name,
                node=node,
                weight=torch.from_numpy(array),
                result=_result(node.outputs[0]),
            )
        )
    return found


def conv_names(conv: ConvNode) -> tuple[str, str, str]:
    """Returns the names of its quantizers: of its input, its weight and its result."""
    return f"linear_input/{conv.name}", f"weight/{conv.name}", f"linear_input/{conv.name}/result"


def quantize_convs(
    model: ir.Model,
    convs: Sequence[ConvNode],
    *,
    bits: int = 8,
    ranges: Mapping[str, Range],
    keep: Collection[str] = (),
) -> list[QuantizerInfo]:
    """Rewrites the nodes in place and returns what was put on which grid.

    Args:
        bits: Of inputs and results, one of `INPUT_BITS`.
        ranges: By the names of `conv_names`; input and result.
        keep: A convolution that one of its names is of stays in float whole: ONNX Runtime has no
            half of it.

    Raises:
        InputError: a range is missing, by name; NaN or inf in a range or weight.
    """
    chosen = [conv for conv in convs if not set(conv_names(conv)) & set(keep)]
    infos: list[QuantizerInfo] = []
    done: set[ir.Value] = set()
    for conv in chosen:
        infos.append(_quantize_result(model, conv, bits, ranges, done))
    shared: Shared = {}
    for conv in chosen:
        if conv.node.inputs[0] not in done:
            infos.append(quantize_input(model, conv.flat, bits, ranges, shared))
        infos.append(_quantize_weight(model, conv, bits, ranges))
    return infos


def _result(value: ir.Value) -> ir.Value:
    """Returns what a convolution's result is once a clipping activation behind it is done."""
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return value
    node = uses[0].node
    is_clip = node.op_type in _CLIPS and node.domain in ("", "ai.onnx") and node.inputs[0] is value
    return node.outputs[0] if is_clip else value


def _quantize_weight(
    model: ir.Model, conv: ConvNode, bits: int, ranges: Mapping[str, Range]
) -> QuantizerInfo:
    """Puts weight and bias on their grids.

    Where a bias is so large beside its channel's weights that int32 would not hold it, the weights
    get a coarser step: they hardly count there.
    """
    qtype, name = QType(bits=BITS, narrow=True), f"{conv.name}.weight"
    input_scale = input_grid(ranges, conv.name, bits)[0]
    rows = conv.flat.weight
    check_range(rows.min(), rows.max(), name)
    scale = weight_scale(rows, BITS, module=conv.name)
    node = conv.node
    value = node.inputs[2] if len(node.inputs) > 2 else None
    bias = None
    if value is not None:
        assert value.const_value is not None  # find_convs takes constants only
        bias = torch.from_numpy(np.array(value.const_value.numpy(), np.float32))
        check_range(bias.min(), bias.max(), f"{conv.name}.bias")
        scale = torch.maximum(scale, bias.abs()[:, None] / (input_scale * _MOST_STEPS))
    integers = quantize(rows, scale, 0, qtype).reshape(conv.weight.shape)
    flat = scale.reshape(-1).numpy()
    _dequantized(model, conv, 1, integers.numpy(), flat, ir.DataType.INT8, "weight")
    if bias is not None:
        steps = np.asarray(flat * np.float32(input_scale), np.float32)
        rounded = np.rint(bias.numpy().astype(np.float64) / steps).astype(np.int32)
        _dequantized(model, conv, 2, rounded, steps, ir.DataType.INT32, "bias")
    return QuantizerInfo(
        name=f"weight/{conv.name}",
        qtype=str(qtype),
        granularity="channel",
        scale_min=float(flat.min()),
        scale_max=float(flat.max()),
        hits=1,
    )


def _dequantized(
    model: ir.Model,
    conv: ConvNode,
    place: int,
    integers: np.ndarray[tuple[int, ...], np.dtype[np.generic]],
    scale: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
    dtype: ir.DataType,
    part: str,
) -> None:
    """Replaces a constant input by integers behind a DequantizeLinear along axis 0."""
    name, original = f"{conv.name}.{part}", conv.node.inputs[place]
    assert original is not None  # it was read a moment ago
    node = ir.node(
        "DequantizeLinear",
        [
            constant(model, f"{name}_quantized", integers, dtype),
            constant(model, f"{name}_scale", scale, ir.DataType.FLOAT),
            constant(model, f"{name}_zero_point", np.zeros(scale.shape, np.int32), dtype),
        ],
        {"axis": 0},
        name=f"{part}/{conv.name}/dequantize",
    )
    output = node.outputs[0]
    output.name, output.shape, output.type = f"{name}_dequantized", original.shape, original.type
    model.graph.insert_before(conv.node, node)
    conv.node.replace_input_with(place, output)


def _quantize_result(
    model: ir.Model,
    conv: ConvNode,
    bits: int,
    ranges: Mapping[str, Range],
    done: set[ir.Value],
) -> QuantizerInfo:
    """Puts the result on its grid, for all that read it in the main graph.

    Args:
        done: What lies on such a grid; added to.
    """
    name, value = conv_names(conv)[2], conv.result
    scale, zero_point = input_grid(ranges, f"{conv.name}/result", bits)
    uses, producer = list(value.uses()), value.producer()
    assert producer is not None  # it is a node's output
    marker = ir.node("Identity", [value])  # a place right behind the producer
    model.graph.insert_after(producer, marker)
    grid = quantize_value(
        model,
        value,
        name=name,
        scale=np.asarray(scale, np.float32),
        zero_point=zero_point,
        qtype=QType(bits=bits, signed=False),
        before=marker,
    )
    for index, (user, place) in enumerate(uses):
        if user.graph is model.graph:
            real = grid.dequantize(model, user, f"{name}/dequantize_{index}")
            user.replace_input_with(place, real)
            done.add(real)
    if value.is_graph_output():
        real = grid.dequantize(model, marker, f"{name}/dequantize")
        outputs, kept = model.graph.outputs, value.name
        outputs[list(outputs).index(value)] = real
        value.name, real.name = f"{kept}/unquantized", kept
    model.graph.remove(marker, safe=True)
    return QuantizerInfo(
        name=name,
        qtype=str(QType(bits=bits, signed=False)),
        granularity="tensor",
        scale_min=scale,
        scale_max=scale,
        hits=1,
    )
