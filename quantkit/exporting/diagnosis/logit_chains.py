"""Which tensors of a float graph are attention logits: between a product and its Softmax."""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

_PASSES: Final = frozenset(
    ("Add", "Sub", "Mul", "Div", "Where", "Tanh", "Clip", "Min", "Max", "Cast", "Identity")
)
"""What may stand between the product of q and k and the Softmax: scale, softcap, mask."""


def logit_chains(model: ir.Model, constants: set[ir.Value]) -> dict[ir.Value, ir.Node]:
    """Returns each tensor on the way from a product of two activations to a Softmax, and that
    Softmax, over the last axis.
    """
    found: dict[ir.Value, ir.Node] = {}
    for node in model.graph:
        if node.op_type == "Softmax" and node.attributes.get_int("axis", -1) in (-1, 3):
            value = node.inputs[0]
            if value is not None:
                _reaches(value, node, constants, found)
    return found


def _reaches(
    value: ir.Value, softmax: ir.Node, constants: set[ir.Value], found: dict[ir.Value, ir.Node]
) -> bool:
    """Whether a product of two activations feeds the value; notes all on the way."""
    node = value.producer()
    if node is None or value in constants:
        return False
    if node.op_type in ("MatMul", "Gemm", "Einsum"):
        reaches = all(v is None or v not in constants for v in node.inputs[:2])
    elif node.op_type in _PASSES:
        given = [v for v in node.inputs if v is not None]
        reaches = any([_reaches(v, softmax, constants, found) for v in given])
    else:
        return False
    if reaches:
        found[value] = softmax
    return reaches
