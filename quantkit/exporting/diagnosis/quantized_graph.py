"""The quantizers and the products of a quantized graph, whichever tool wrote it.

| form | quantizer | product |
|---|---|---|
| Q/DQ | QuantizeLinear, DequantizeLinear | MatMul, Gemm, Conv |
| QOperator | QuantizeLinear, what QLinear operators write | QLinearMatMul, QLinearConv, QGemm |
| dynamic | DynamicQuantizeLinear | MatMulInteger, ConvInteger, MatMulIntegerToFloat |
| fused | the product itself | DynamicQuantizeMatMul, MatMulNBits |

Domains `""` and `com.microsoft` are told apart by nothing here: the same names mean the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Array = NDArray[Any]

OUTPUT_SCALE: Final = {
    "QLinearMatMul": 6, "QLinearConv": 6, "QLinearAdd": 6, "QLinearMul": 6, "QGemm": 7,
    "QLinearSigmoid": 3, "QLinearLeakyRelu": 3, "QLinearSoftmax": 3, "QLinearAveragePool": 3,
    "QLinearGlobalAveragePool": 3, "QLinearConcat": 0,
}  # fmt: skip
"""Operators that write integers: where their output's scale is; its zero point comes next."""
PRODUCTS: Final = {
    "MatMul": "MatMul", "Gemm": "MatMul", "MatMulInteger": "MatMul", "QLinearMatMul": "MatMul",
    "QGemm": "MatMul", "MatMulNBits": "MatMul", "DynamicQuantizeMatMul": "MatMul",
    "MatMulIntegerToFloat": "MatMul", "FusedMatMul": "MatMul",
    "Conv": "Conv", "ConvInteger": "Conv", "QLinearConv": "Conv", "FusedConv": "Conv",
}  # fmt: skip
"""Operator -> what it is in a float graph."""
INTEGER: Final = frozenset(PRODUCTS) - {"MatMul", "Gemm", "Conv", "FusedMatMul", "FusedConv"}
JUDGED: Final = INTEGER.union(
    OUTPUT_SCALE, ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")
)
"""Quantized operators that are told apart here; others only pass for what they compute."""
LAYOUT: Final = frozenset(
    ("Reshape", "Transpose", "Identity", "Unsqueeze", "Squeeze", "Flatten", "Expand", "Cast",
     "Slice", "Split", "Concat", "Gather", "Shape")
)  # fmt: skip
"""What moves numbers and computes none."""
_BETWEEN: Final = frozenset(("QuantizeLinear", "DequantizeLinear"))
_WEIGHT_AT: Final = {"QLinearMatMul": 3, "QLinearConv": 3, "QGemm": 3}
_FLOATS: Final = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
_UNITS: Final = {
    "UINT2": (0, 3), "INT2": (-2, 1), "UINT4": (0, 15), "INT4": (-8, 7), "UINT8": (0, 255),
    "INT8": (-128, 127), "UINT16": (0, 65535), "INT16": (-32768, 32767),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Quantizer:
    """What turns an activation into integers.

    Attributes:
        source: The float tensor that it reads; None where an integer operator writes the integers.
        integers: What it writes; None where they stay inside of a fused product.
        scale, zero_point: Static ones, one number or one a channel; None: found as the graph runs.
        qmin, qmax: Of the grid, after a Clip of the integers; both 0 where it is no integer grid.
        axis: Which the channels are on; None for one scale.
    """

    name: str
    op: str
    source: ir.Value | None
    integers: ir.Value | None
    scale: Array | None
    zero_point: Array | None
    dtype: str
    qmin: int
    qmax: int
    axis: int | None
    blocked: bool
    readers: tuple[ir.Node, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Product:
    """A matrix product or convolution with a constant weight.

    Attributes:
        output: Its result in real numbers, after what turns integers back.
        weight: The constant operand; `weight_kind` says how it is held.
    """

    node: ir.Node
    output: ir.Value
    weight: ir.Value
    weight_kind: Literal["float", "dequantized", "integer", "blocks"]
    input_quantized: bool


def array_of(value: ir.Value | None) -> Array | None:
    """Returns the number or numbers of an initializer or a Constant node; None for no constant."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else np.asarray(tensor.numpy())


def constants_of(model: ir.Model) -> set[ir.Value]:
    """Returns initializers, Constant nodes, and what is made of nothing else."""
    known = set(model.graph.initializers.values())
    for node in model.graph:
        given = [value for value in node.inputs if value is not None]
        inside = any(a.type == ir.AttributeType.GRAPH for a in node.attributes.values())
        if node.op_type == "Constant" or (given and not inside and known.issuperset(given)):
            known.update(node.outputs)
    return known


def quantizers_of(model: ir.Model, constants: set[ir.Value]) -> list[Quantizer]:
    """Returns the quantizers of activations, in graph order."""
    found = []
    for node in model.graph:
        if node.op_type == "QuantizeLinear" and node.inputs[0] not in constants:
            found.append(_static(node, node.inputs[0], 1))
        elif node.op_type in OUTPUT_SCALE:
            found.append(_static(node, None, OUTPUT_SCALE[node.op_type]))
        elif node.op_type in ("DynamicQuantizeLinear", "DynamicQuantizeMatMul"):
            fused = node.op_type == "DynamicQuantizeMatMul"
            integers = None if fused else node.outputs[0]
            read = (node,) if fused else tuple(readers(node.outputs[0]))
            found.append(
                Quantizer(
                    name=node.name or str(node.outputs[0].name), op=node.op_type,
                    source=node.inputs[0], integers=integers, scale=None, zero_point=None,
                    dtype="UINT8", qmin=0, qmax=255, axis=None, blocked=False, readers=read,
                )
            )  # fmt: skip
    return found


def _static(node: ir.Node, source: ir.Value | None, at: int) -> Quantizer:
    inputs = [*node.inputs, None, None]
    scale, zero = array_of(inputs[at]), array_of(inputs[at + 1])
    integers = node.outputs[0]
    dtype = _dtype(node, inputs[at + 1], integers)
    qmin, qmax = _UNITS.get(dtype, (0, 0))
    users = [user for user, _ in integers.uses()]
    if len(users) == 1 and users[0].op_type == "Clip":
        ends = [array_of(value) for value in users[0].inputs[1:3]]
        qmin = qmin if ends[0] is None else max(qmin, int(ends[0]))
        qmax = qmax if len(ends) < 2 or ends[1] is None else min(qmax, int(ends[1]))
        integers = users[0].outputs[0]
    if scale is not None and zero is None:
        zero = np.zeros(scale.shape, np.int64)
    many = scale is not None and scale.size > 1
    return Quantizer(
        name=node.name or str(node.outputs[0].name),
        op=node.op_type,
        source=source,
        integers=integers,
        scale=None if scale is None else scale.astype(np.float64),
        zero_point=None if scale is None or zero is None else zero.astype(np.int64),
        dtype=dtype,
        qmin=qmin,
        qmax=qmax,
        axis=node.attributes.get_int("axis", 1) if many else None,
        blocked=node.attributes.get_int("block_size", 0) > 0,
        readers=tuple(readers(integers)),
    )


def _dtype(node: ir.Node, zero_point: ir.Value | None, integers: ir.Value) -> str:
    """Returns the integer type, by the zero point, the attribute, or UINT8, ONNX's default."""
    if zero_point is not None and zero_point.dtype is not None:
        return zero_point.dtype.name
    tensor = None if zero_point is None else ir.convenience.get_const_tensor(zero_point)
    if tensor is not None:
        return tensor.dtype.name
    named = node.attributes.get_int("output_dtype", 0)
    if named:
        return ir.DataType(named).name
    return integers.dtype.name if integers.dtype is not None else "UINT8"


def readers(value: ir.Value) -> Iterator[ir.Node]:
    """Yields the nodes that compute with a value: behind Q, DQ, a Clip of integers and layout."""
    for user, _ in value.uses():
        is_grid = user.op_type == "Clip" and value.dtype not in (None, *_FLOATS)
        if is_grid or user.op_type in _BETWEEN or user.op_type in LAYOUT:
            for output in user.outputs:
                yield from readers(output)
        else:
            yield user


def products_of(model: ir.Model, constants: set[ir.Value]) -> list[Product]:
    """Returns the products with constant weights, in graph order."""
    found = []
    for node in model.graph:
        if node.op_type not in PRODUCTS or len(node.inputs) < 2:
            continue
        at = _WEIGHT_AT.get(node.op_type, 1)
        weight = node.inputs[at]
        if weight is None or weight not in constants:
            weight = node.inputs[0] if PRODUCTS[node.op_type] == "MatMul" else None
            if weight is None or weight not in constants:
                continue
        kind: Literal["float", "dequantized", "integer", "blocks"] = "float"
        if node.op_type == "MatMulNBits":
            kind = "blocks"
        elif node.op_type in INTEGER:
            kind = "integer"
        elif _has_dequantize(weight):
            kind = "dequantized"
        inside = node.op_type in INTEGER and node.op_type != "MatMulNBits"
        others = [v for v in node.inputs[:2] if v is not None and v is not weight]
        found.append(
            Product(
                node=node,
                output=real_output(node),
                weight=weight,
                weight_kind=kind,
                input_quantized=inside or any(_is_dequantized(value) for value in others),
            )
        )
    return found


def real_output(node: ir.Node) -> ir.Value:
    """Returns a node's result in real numbers: behind the Cast and Mul of an integer product."""
    value = node.outputs[0]
    if node.op_type not in ("MatMulInteger", "ConvInteger"):
        return value
    for wanted in ("Cast", "Mul"):
        users = [user for user, _ in value.uses()]
        if len(users) != 1 or users[0].op_type != wanted:
            break
        value = users[0].outputs[0]
    return value


def _has_dequantize(value: ir.Value) -> bool:
    node = value.producer()
    if node is None:
        return False
    if node.op_type in ("DequantizeLinear", "QuantizeLinear"):
        return True
    return any(_has_dequantize(v) for v in node.inputs if v is not None)


def _is_dequantized(value: ir.Value) -> bool:
    node = value.producer()
    while node is not None and node.op_type in LAYOUT and node.inputs and node.inputs[0]:
        node = node.inputs[0].producer()
    return node is not None and node.op_type == "DequantizeLinear"
