"""Attention logits of a graph: which tensors they are, and what masks them.

A logit is found backwards from the Softmax, which nothing else of a decoder has: through the
additions (or selections) of a mask, up to the product of q and k and the scale that may follow it.
The exporter's `scaled_dot_product_attention` scales q and k by sqrt(scale) each, so there the
product already is the logit; eager attention multiplies afterwards.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

import onnx_ir as ir
from torch import nn

from quantkit.errors import InputError
from quantkit.exporting.graphs import scopes_of
from quantkit.models import attention_modules, layout_of

MASKED_BELOW: Final = -5000.0
"""What an additive mask holds where it masks is lower: -10^4 in the oldest models, or the type's
lowest number, or -inf. What it adds elsewhere is 0 or a position's bias, and higher."""
_LAYER = re.compile(r"\.(\d+)(?:\.|$)")


@dataclass(frozen=True, kw_only=True, eq=False)
class LogitMask:
    """One mask on the way from the logits to the Softmax; it broadcasts against them.

    Attributes:
        operand: What is added, or the condition of a Where.
        keeps: Of a condition: which of its values leaves the logit; None: the mask is added.
    """

    operand: ir.Value
    keeps: bool | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class LogitValue:
    """The scaled, unmasked logits `[batch, heads, query, key]` of one attention call.

    Attributes:
        masks: None where the graph has one that cannot be read.
    """

    layer: int
    heads: int
    value: ir.Value
    masks: tuple[LogitMask, ...] | None


@dataclass(kw_only=True, eq=False)
class _Trail:
    """What was met on the way back from a Softmax."""

    scaled: ir.Value | None = None
    masks: list[LogitMask] = field(default_factory=list)
    is_readable: bool = True


def maps_of(model: nn.Module) -> int:
    """Returns the softmax maps of an attention layer of a torch model: 2 where differential."""
    return max((layout_of(module).maps for _, module in attention_modules(model)), default=1)


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
        value, masks = _logit_of(node)
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
        found.append(LogitValue(layer=int(numbers[0]), heads=heads, value=value, masks=masks))
    if not found:
        raise InputError("the graph has no Softmax: no attention logits to quantize.")
    return found


def _logit_of(softmax: ir.Node) -> tuple[ir.Value, tuple[LogitMask, ...] | None]:
    """Returns the scaled logit behind a Softmax, and its masks."""
    value, trail = softmax.inputs[0], _Trail()
    while value is not None:
        node = value.producer()
        if node is None:
            break
        if node.op_type == "MatMul":
            masks = tuple(trail.masks) if trail.is_readable else None
            return trail.scaled or value, masks
        if node.op_type in ("Mul", "Div"):
            operands = [operand for operand in node.inputs if not _is_scalar(operand)]
            if len(operands) != 1:
                break
            trail.scaled, value = trail.scaled or value, operands[0]
        elif node.op_type in ("Add", "Where", "Cast"):
            trail.scaled, value = None, _through_mask(node, trail)
        else:
            break
    raise InputError(
        f"the Softmax {softmax.name!r} is not fed by a masked product of q and k"
        + (f" but by {node.op_type}" if value is not None and node is not None else "")
        + "; soft-capped and biased logits are not supported."
    )


def _through_mask(node: ir.Node, trail: _Trail) -> ir.Value | None:
    """Returns the operand that leads to a product of q and k; what masks it is added to `trail`."""
    first = 1 if node.op_type == "Where" else 0
    operands = list(enumerate(node.inputs))[first:]
    index, logit = next(
        ((i, v) for i, v in operands if v is not None and _leads_to_product(v)), (0, None)
    )
    others = [v for i, v in operands if i != index and v is not None]
    if node.op_type == "Add":
        trail.masks += [LogitMask(operand=other) for other in others]
    elif node.op_type == "Where" and node.inputs[0] is not None:
        trail.masks.append(LogitMask(operand=node.inputs[0], keeps=index == 1))
        trail.is_readable &= all(map(_masks, others))
    return logit


def _masks(filled: ir.Value) -> bool:
    """Returns whether a Where that puts this in a logit's place masks it."""
    if filled.const_value is None:
        return False
    return bool((filled.const_value.numpy() < MASKED_BELOW).all())


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
