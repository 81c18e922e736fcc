"""Which tensor of a quantized graph is which tensor of its float graph.

By name first: tools keep the names of float tensors, or append their own words. What is left, after
a tool that renamed, goes by the order of products and other landmarks, with the shapes of their
weights. A name alone is no proof (exporters count: `val_12`), so its node has to fit, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Final

import onnx_ir as ir

from quantkit.exporting.diagnosis.quantized_graph import (
    LAYOUT,
    OUTPUT_SCALE,
    PRODUCTS,
    Array,
    Quantizer,
    array_of,
    readers,
    real_output,
)
from quantkit.exporting.graphs import scopes_of

SUFFIXES: Final = (
    "_QuantizeLinear_Output", "_QuantizeLinear_Input", "_DequantizeLinear_Output",
    "_output_quantized", "_quantized", "_dequantized", "_QuantizeLinear", "_DequantizeLinear",
)  # fmt: skip
"""What onnxruntime and others append to the name of a float tensor."""
_LANDMARKS: Final = frozenset(
    ("Softmax", "LayerNormalization", "BatchNormalization", "InstanceNormalization", "Erf", "Gelu",
     "Relu", "Sigmoid", "Tanh", "ReduceMean", "MaxPool", "GlobalAveragePool", "LSTM", "GRU")
)  # fmt: skip
_TURNS_BACK: Final = frozenset(("DequantizeLinear", "Mul", "Cast", "Add", "Identity"))
"""What may write a float tensor where an integer operator stands for the float one."""
_FUSED: Final = frozenset(("Relu", "Clip"))
_FLOATS: Final = (ir.DataType.FLOAT, ir.DataType.FLOAT16, None)


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """One tensor in both graphs.

    Attributes:
        node: The float graph's, that writes `value`, or the product whose Relu wrote it.
        scale, zero_point: Of the quantized one's integers, where it has these.
        before: The tensor that the quantized one's grid is put on; the grid's ends are the Relu.
    """

    node: ir.Node
    value: ir.Value
    quantized: ir.Value
    before: ir.Value | None = None
    scale: Array | None = None
    zero_point: Array | None = None


def pair_tensors(
    float_model: ir.Model, quantized_model: ir.Model, constants: set[ir.Value]
) -> list[Pair]:
    """Returns the tensors that both graphs compute, in the order of the float graph.

    Args:
        constants: Of the float graph; they are no pair.
    """
    theirs = {str(v.name): v for node in quantized_model.graph for v in node.outputs if v.name}
    found: dict[ir.Value, Pair] = {}
    for node in float_model.graph:
        if node.op_type in LAYOUT:
            continue
        for value in node.outputs:
            if value in constants or value.dtype not in _FLOATS or not value.name:
                continue
            pair = _by_name(node, value, theirs)
            if pair is not None:
                found[value] = pair
    taken = {pair.quantized for pair in found.values()}
    ours = [n for n in _landmarks(float_model) if n.outputs[0] not in found]
    left = [n for n in _landmarks(quantized_model) if _result(n) not in taken]
    matcher = SequenceMatcher(None, list(map(_sign, ours)), list(map(_sign, left)), False)
    for block in matcher.get_matching_blocks():
        for i in range(block.size):
            one, other = ours[block.a + i], left[block.b + i]
            found[one.outputs[0]] = _pair(one, one.outputs[0], _result(other))
    for pair in list(found.values()):
        moved = _behind_fused(pair)
        if moved is not None and moved.value not in found:
            del found[pair.value]
            found[moved.value] = moved
    order = [value for node in float_model.graph for value in node.outputs]
    return [found[value] for value in order if value in found]


def layer_of(node: ir.Node) -> str:
    """Returns what people call a node: the module that it was traced in, else its own name."""
    scopes = [part for part in scopes_of(node) if part]
    modules = [part for part in scopes if "." in part] or scopes[-2:-1]  # the last one is the call
    return modules[-1] if modules else (node.name or str(node.outputs[0].name))


def float_tensor(
    quantizer: Quantizer, pairs: dict[ir.Value, Pair], values: dict[str, ir.Value]
) -> ir.Value | None:
    """Returns the float graph's tensor that a quantizer takes, or None where it has none.

    Args:
        pairs: By the quantized graph's tensor.
        values: The float graph's tensors by name.
    """
    for value in (quantizer.source, quantizer.integers):
        if value is None:
            continue
        if value in pairs:
            return pairs[value].value
        name = _stripped(str(value.name))
        same = values.get(name)
        if same is not None and (value is quantizer.integers or _same_kind(same, value)):
            return same
    return None


def _same_kind(value: ir.Value, other: ir.Value) -> bool:
    """Whether tensors of one name can be the same: inputs, or outputs of like nodes."""
    ours, theirs = value.producer(), other.producer()
    if ours is None or theirs is None:
        return ours is theirs
    return _fits(ours, theirs)


def _fits(ours: ir.Node, theirs: ir.Node) -> bool:
    one, other = (PRODUCTS.get(n.op_type, n.op_type) for n in (ours, theirs))
    return one == other or theirs.op_type in _TURNS_BACK or other == f"QLinear{one}"


def _by_name(node: ir.Node, value: ir.Value, theirs: dict[str, ir.Value]) -> Pair | None:
    same = theirs.get(str(value.name))
    if same is not None:
        producer = same.producer()
        if producer is None or not _fits(node, producer) or same.dtype not in _FLOATS:
            return None
        rescaled = _rescaled(value, same)
        return _pair(node, value, same if rescaled is None else rescaled)
    for suffix in SUFFIXES:
        other = theirs.get(f"{value.name}{suffix}")
        producer = None if other is None else other.producer()
        if other is None or producer is None or not _fits(node, producer):
            continue
        return _pair(node, value, other)
    return None


def _behind_fused(pair: Pair) -> Pair | None:
    """Returns the pair of what comes after a Relu or Clip that a tool made part of the grid."""
    users = {user for user, _ in pair.value.uses()}
    if len(users) != 1 or pair.value.is_graph_output():
        return None
    (user,) = users
    if user.op_type not in _FUSED or user.op_type in {n.op_type for n in readers(pair.quantized)}:
        return None
    after = pair.quantized
    for operation in ("QuantizeLinear", "DequantizeLinear"):
        users = {node for node, _ in after.uses() if node.op_type == operation}
        after = users.pop().outputs[0] if len(users) == 1 else after
    return Pair(
        node=pair.node,
        value=user.outputs[0],
        quantized=after if pair.scale is None else pair.quantized,
        before=pair.quantized,
        scale=pair.scale,
        zero_point=pair.zero_point,
    )


def by_quantized(pairs: Sequence[Pair]) -> dict[ir.Value, Pair]:
    """Returns the pairs by the quantized graph's tensors."""
    found = {pair.quantized: pair for pair in pairs}
    return found | {pair.before: pair for pair in pairs if pair.before is not None}


def pair_of(node: ir.Node, pairs: Mapping[ir.Value, Pair]) -> Pair | None:
    """Returns the pair of what a node of the quantized graph writes, in real numbers.

    A tool may make a product and a sum of a Gemm: it is then the pair of the sum.
    """
    value = real_output(node)
    users = [user for user, _ in value.uses()]
    if value in pairs or len(users) != 1 or users[0].op_type != "Add":
        return pairs.get(value)
    found = pairs.get(users[0].outputs[0])
    return found if found is not None and found.node.op_type == "Gemm" else None


def _before_output(value: ir.Value) -> ir.Value:
    """Returns what a pair of Q and DQ reads, where that pair writes the tensor (an output); the
    integers where an operator wrote them.
    """
    back = value.producer()
    integers = None if back is None or back.op_type != "DequantizeLinear" else back.inputs[0]
    node = None if integers is None else integers.producer()
    if integers is not None and node is not None and node.op_type in OUTPUT_SCALE:
        return integers
    if node is None or node.op_type != "QuantizeLinear" or node.inputs[0] is None:
        return value
    return node.inputs[0]


def _pair(node: ir.Node, value: ir.Value, quantized: ir.Value) -> Pair:
    quantized = _before_output(quantized)
    producer = quantized.producer()
    at = None if producer is None else OUTPUT_SCALE.get(producer.op_type)
    if producer is None or at is None:
        return Pair(node=node, value=value, quantized=quantized)
    return Pair(
        node=node,
        value=value,
        quantized=quantized,
        scale=array_of(producer.inputs[at]),
        zero_point=array_of(producer.inputs[at + 1]),
    )


def _rescaled(value: ir.Value, same: ir.Value) -> ir.Value | None:
    """Returns the product behind `same` that stands for it, where only a new Mul reads it."""
    users = [user for user, _ in same.uses()]
    if len(users) != 1 or users[0].op_type != "Mul" or same.is_graph_output():
        return None
    if any(user.op_type == "Mul" for user, _ in value.uses()):
        return None
    return users[0].outputs[0]


def _landmarks(model: ir.Model) -> list[ir.Node]:
    return [n for n in model.graph if n.op_type in PRODUCTS or n.op_type in _LANDMARKS]


def _sign(node: ir.Node) -> tuple[str, tuple[int, ...]]:
    """Returns what tells landmarks apart: the operator and its weight's sizes, in any order."""
    sizes: tuple[int, ...] = ()
    if node.op_type == "MatMulNBits":
        sizes = tuple(sorted(node.attributes.get_int(name, 0) for name in ("K", "N")))
    elif node.op_type in PRODUCTS:
        shapes = [_sizes(value) for value in node.inputs if value is not None]
        sizes = next((tuple(sorted(s)) for s in reversed(shapes) if len(s) >= 2), ())
    return PRODUCTS.get(node.op_type, node.op_type), sizes


def _sizes(value: ir.Value) -> tuple[int, ...]:
    """Returns a constant's shape, through the nodes that turn it back; () where it is open."""
    producer = value.producer()
    if value.shape is None and producer is not None and producer.inputs:
        inner = producer.inputs[0]
        return () if inner is None else _sizes(inner)
    sizes = [d for d in value.shape or () if isinstance(d, int)]
    return tuple(sizes) if value.shape is not None and len(sizes) == len(value.shape) else ()


def _result(node: ir.Node) -> ir.Value:
    return real_output(node)


def _stripped(name: str) -> str:
    for suffix in SUFFIXES:
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name
