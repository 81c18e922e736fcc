"""Weights of a quantized graph beside the float ones: what each form holds, in real numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnx_ir as ir

from quantkit.exporting.diagnosis.error_sums import decibels
from quantkit.exporting.diagnosis.quantized_graph import PRODUCTS, Array, Product, array_of
from quantkit.exporting.diagnosis.tensor_runs import TensorRuns, dealt

_SCALE_AT: Final = {
    "QLinearMatMul": (4, 5), "QLinearConv": (4, 5), "QGemm": (4, 5),
    "DynamicQuantizeMatMul": (2, 3), "MatMulIntegerToFloat": (3, 5),
}  # fmt: skip
"""Integer products: where the right operand's scale and zero point are."""
_LEFT_SCALE_AT: Final = {
    "QLinearMatMul": (1, 2), "QGemm": (1, 2), "MatMulIntegerToFloat": (2, 4),
}  # fmt: skip
"""The left one's, where that is the weight."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightPair:
    """The weight of one product in both graphs; `node` is the float graph's."""

    product: Product
    node: ir.Node
    value: ir.Value


@dataclass(frozen=True, kw_only=True)
class WeightError:
    """How far a dequantized weight is from the float one; channels are the product's outputs."""

    sqnr_db: float
    cosine: float
    worst_channel: int
    worst_channel_sqnr_db: float
    lo: float
    hi: float


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightGrid:
    """Scales of a weight as they stand in the graph; None where they cannot be read."""

    scale: Array | None
    zero_point: Array | None
    dtype: str


def weight_arrays(
    pairs: Sequence[WeightPair], float_path: Path, quantized_path: Path, limit: int
) -> Iterator[tuple[int, Array, Array]]:
    """Yields (index, float weight, dequantized weight) of one shape; others are left out.

    Args:
        limit: Bytes of weights that may be held at a time.
    """
    costs = [8 * math.prod(_dims(pair.value)) for pair in pairs]
    for group in dealt(costs, limit):
        some = [pairs[index] for index in group]
        ours = _evaluated(float_path, [pair.value for pair in some])
        kinds = ("dequantized", "integer")
        held = [p.product.weight for p in some if p.product.weight_kind in kinds]
        theirs = _evaluated(quantized_path, held)
        for index, pair in zip(group, some, strict=True):
            a = ours[str(pair.value.name)]
            product = pair.product
            if product.weight_kind == "dequantized":
                b: Array | None = theirs[str(product.weight.name)]
            elif product.weight_kind == "blocks":
                b = blocks_of(product.node)
            else:
                b = _integer_weight(product, theirs[str(product.weight.name)])
            if b is None:
                continue
            if a.ndim == b.ndim == 2 and _outputs_axis(product) != channel_axis(
                pair.node, pair.value, 2
            ):
                b = b.T  # a square one shows it by nothing else
            if a.shape == b.shape:
                yield index, a, b


def weight_error(node: ir.Node, value: ir.Value, a: Array, b: Array) -> WeightError:
    """Returns the figures of one weight."""
    axis = channel_axis(node, value, a.ndim)
    rows = [np.moveaxis(x.astype(np.float64), axis, 0).reshape(a.shape[axis], -1) for x in (a, b)]
    signal = (rows[0] ** 2).sum(1)
    noise = ((rows[0] - rows[1]) ** 2).sum(1)
    levels = [decibels(float(s), float(n)) for s, n in zip(signal, noise, strict=True)]
    worst = int(np.argmin(levels))
    size = math.sqrt(float(signal.sum()) * float((rows[1] ** 2).sum()))
    return WeightError(
        sqnr_db=decibels(float(signal.sum()), float(noise.sum())),
        cosine=float((rows[0] * rows[1]).sum()) / size if size else math.nan,
        worst_channel=worst,
        worst_channel_sqnr_db=levels[worst],
        lo=float(a.min()),
        hi=float(a.max()),
    )


def channel_axis(node: ir.Node, value: ir.Value, rank: int) -> int:
    """Returns the axis of a product's weight, float or of integers, that its outputs are on.

    A weight is the left operand where it is the node's first input, and else the right one.
    """
    if PRODUCTS[node.op_type] == "Conv" or rank < 2:
        return 0
    is_left = node.inputs[0] is value
    is_turned = node.attributes.get_int("transA" if is_left else "transB", 0) == 1
    return rank - 2 if is_left != is_turned else rank - 1


def _outputs_axis(product: Product) -> int:
    """Returns `channel_axis` of a matrix as `weight_arrays` reads it from the quantized graph."""
    return 1 if product.weight_kind == "blocks" else channel_axis(product.node, product.weight, 2)


def weight_grid(product: Product) -> WeightGrid:
    """Returns the scales of a weight."""
    node = product.node
    if product.weight_kind == "blocks":
        zero = array_of(node.inputs[3]) if len(node.inputs) > 3 else None
        bits = node.attributes.get_int("bits", 4)
        return WeightGrid(
            scale=array_of(node.inputs[2]), zero_point=None if zero is None else zero * 0,
            dtype=f"UINT{bits}",
        )  # fmt: skip
    if product.weight_kind == "integer":
        scale, zero = _integer_scale(product)
        return WeightGrid(scale=scale, zero_point=zero, dtype=_dtype(product.weight, zero))
    above = _dequantize_above(product.weight)
    if above is None:
        return WeightGrid(scale=None, zero_point=None, dtype="")
    first = above.inputs[0]
    zero = array_of(above.inputs[2]) if len(above.inputs) > 2 else None
    return WeightGrid(scale=array_of(above.inputs[1]), zero_point=zero, dtype=_dtype(first, zero))


def _dtype(integers: ir.Value | None, zero_point: Array | None) -> str:
    if integers is not None and integers.dtype is not None:
        return integers.dtype.name
    return "INT8" if zero_point is None else str(zero_point.dtype).upper()


def blocks_of(node: ir.Node) -> Array | None:
    """Returns the weight `[K, N]` of a MatMulNBits node; None for bits that it cannot unpack."""
    rows, columns = node.attributes.get_int("K", 0), node.attributes.get_int("N", 0)
    bits, size = node.attributes.get_int("bits", 4), node.attributes.get_int("block_size", 32)
    packed, scale = array_of(node.inputs[1]), array_of(node.inputs[2])
    if packed is None or scale is None or bits not in (2, 4, 8):
        return None
    blocks = -(-rows // size)
    integers = _unpacked(packed.reshape(columns, blocks, -1), bits)[..., :size]
    zeros: Array = np.full((columns, blocks), 1 << (bits - 1), np.float32)
    given = array_of(node.inputs[3]) if len(node.inputs) > 3 else None
    if given is not None and given.dtype == np.uint8:
        zeros = _unpacked(given.reshape(columns, -1), bits)[:, :blocks].astype(np.float32)
    elif given is not None:
        zeros = given.reshape(columns, blocks).astype(np.float32)
    steps = scale.reshape(columns, blocks, 1).astype(np.float32)
    real = (integers.astype(np.float32) - zeros[..., None]) * steps
    weight: Array = real.reshape(columns, -1)[:, :rows].T
    return weight


def _unpacked(packed: Array, bits: int) -> Array:
    """Returns the integers of bytes, lowest bits first, on the last axis."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    parts = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return parts.reshape(*packed.shape[:-1], -1)


def _integer_weight(product: Product, integers: Array) -> Array | None:
    scale, zero = _integer_scale(product)
    if scale is None:
        return None
    axis = channel_axis(product.node, product.weight, integers.ndim)
    factor = _along(scale, axis, integers.shape)
    offset = np.zeros(1) if zero is None else _along(zero, axis, integers.shape)
    if factor is None or offset is None:
        return None
    real: Array = (integers.astype(np.float32) - offset.astype(np.float32)) * factor
    return real


def _along(numbers: Array, axis: int, shape: tuple[int, ...]) -> Array | None:
    """Returns scales or zero points so that they fit a weight; None where they do not."""
    if numbers.size == 1:
        return numbers.reshape([1] * len(shape))
    if numbers.ndim == len(shape):  # a stack of matrices has scales `[stack, 1, outputs]`
        fits = all(own in (1, size) for own, size in zip(numbers.shape, shape, strict=True))
        return numbers if fits else None
    if numbers.ndim != 1 or numbers.size != shape[axis]:
        return None
    sizes = [1] * len(shape)
    sizes[axis] = -1
    return numbers.reshape(sizes)


def _integer_scale(product: Product) -> tuple[Array | None, Array | None]:
    node = product.node
    inputs = [*node.inputs, *(None,) * 8]
    is_left = inputs[0] is product.weight
    if node.op_type in _SCALE_AT:
        scale, zero = (_LEFT_SCALE_AT if is_left else _SCALE_AT).get(node.op_type, (0, 0))
        return (array_of(inputs[scale]), array_of(inputs[zero])) if scale else (None, None)
    zero_point = array_of(inputs[2 if is_left else 3])
    last = product.output.producer()  # Mul(Cast(product), Mul(scale of the input, scale))
    for value in () if last is None else last.inputs:
        above = None if value is None else value.producer()
        if above is not None and above.op_type == "Mul":
            found = [a for v in above.inputs if (a := array_of(v)) is not None]
            return (found[0] if found else None), zero_point
    return None, zero_point


def _dequantize_above(value: ir.Value) -> ir.Node | None:
    node = value.producer()
    if node is None or node.op_type == "DequantizeLinear":
        return node
    return next((n for v in node.inputs if v is not None and (n := _dequantize_above(v))), None)


def _evaluated(path: Path, values: Sequence[ir.Value]) -> Mapping[str, Array]:
    found: dict[str, Array] = {}
    for value in values:
        known = array_of(value)
        if known is not None:
            found[str(value.name)] = known
    rest = [str(value.name) for value in values if str(value.name) not in found]
    return {**found, **TensorRuns(path, rest).run({})}


def _dims(value: ir.Value) -> list[int]:
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is not None:
        return [d for d in tensor.shape if isinstance(d, int)]
    producer = value.producer()
    if producer is None or not producer.inputs or producer.inputs[0] is None:
        return [1]
    return _dims(producer.inputs[0])
