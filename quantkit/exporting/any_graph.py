"""A recipe on a graph without a torch model: which layers take it, and what stays in float.

Layers are MatMul and Gemm with a constant matrix and, for w8a8 and w8a16, Conv with a constant
weight. Products of two activations, as in attention, stay in float. So does a decoder's
vocabulary projection, as in a graph made from a torch model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

import onnx_ir as ir

from quantkit.errors import InputError
from quantkit.exporting.graphs import remove_unused_initializers
from quantkit.exporting.linears import LinearNode, find_linears, turns_input
from quantkit.exporting.prepare import is_control_flow
from quantkit.exporting.rewrite_conv import (
    BITS,
    INPUT_BITS,
    ConvNode,
    conv_names,
    find_convs,
    quantize_convs,
)
from quantkit.exporting.rewrite_linear import quantize_linears
from quantkit.jobs import Storage
from quantkit.quantization import require_known
from quantkit.recipe import Recipe, WeightQuant
from quantkit.results import QuantizerInfo, Range

IDS: Final = "input_ids"
LOGITS: Final = "logits"
_PASSING: Final = ("Add", "Cast", "Identity")
"""What may stand between a vocabulary projection and the logits: its bias, a change of type."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GraphLayers:
    """What a recipe takes of a graph.

    Attributes:
        linears, convs: The layers that it quantizes.
        left: One sentence each: what stays in float, and why.
    """

    linears: list[LinearNode]
    convs: list[ConvNode] = field(default_factory=list)
    left: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Names of all quantizers that a recipe can put there."""
        names = [f"{kind}/{x.module}" for x in self.linears for kind in ("linear_input", "weight")]
        return names + [name for conv in self.convs for name in conv_names(conv)]

    @property
    def observed(self) -> dict[str, str]:
        """Name of a range -> the tensor that it is of."""
        found = {f"linear_input/{x.module}": str(_input(x.node).name) for x in self.linears}
        for conv in self.convs:
            before, _, behind = conv_names(conv)
            found[before], found[behind] = str(_input(conv.node).name), str(conv.result.name)
        return found


def graph_layers(model: ir.Model, recipe: Recipe) -> GraphLayers:
    """Returns the layers of a prepared graph that the recipe quantizes.

    Raises:
        InputError: the recipe quantizes what belongs to attention, or there is no layer for it.
    """
    if recipe.weights is None and recipe.activations is None and not recipe.is_float:
        raise InputError(_attention(recipe))
    if any(part is not None for part in (recipe.logits, recipe.cache)):
        raise InputError(_attention(recipe))
    linears = find_linears(model)
    head = _vocabulary_projection(model)
    left = []
    if any(linear.node is head for linear in linears):
        linears = [linear for linear in linears if linear.node is not head]
        left.append("the vocabulary projection stays in float, as in a model of transformers")
    turned = sum(_is_constant(node.inputs[1]) for node in model.graph if turns_input(node))
    if turned and not recipe.is_float:
        left.append(
            f"{turned} Gemm nodes with transA stay in float: their inputs lie on the first axis"
        )
    convs, transposed = find_convs(model), _count(model, "ConvTranspose")
    inputs = recipe.activations
    fits = (
        isinstance(recipe.weights, WeightQuant)
        and (recipe.weights.bits, recipe.weights.group_size) == (BITS, None)
        and inputs is not None
        and inputs.bits in INPUT_BITS
        and inputs.range == "static"
    )
    if convs and not fits and not recipe.is_float:
        left.append(
            f"{len(convs)} convolutions stay in float: they are quantized by w8a8 and w8a16, whose "
            "ranges are static"
        )
        convs = []
    if transposed and not recipe.is_float:
        left.append(
            f"{transposed} transposed convolutions stay in float: ONNX Runtime has none in integers"
        )
    if not linears and not convs:
        inner = sum(is_control_flow(node) for node in model.graph)
        nested = f"; {inner} If or Loop nodes hold graphs of their own, left as they are"
        raise InputError(
            f"the graph has no MatMul, Gemm{' or Conv' if fits else ''} with constant weights for "
            f"recipe {recipe}{nested if inner else ''}." + (f" ({left[0]})" if left else "")
        )
    return GraphLayers(linears=linears, convs=convs, left=tuple(left))


def quantize_layers(
    model: ir.Model,
    layers: GraphLayers,
    recipe: Recipe,
    *,
    ranges: Mapping[str, Range],
    keep: Collection[str] = (),
    storage: Storage = "qdq",
) -> list[QuantizerInfo]:
    """Rewrites the prepared graph in place and returns what was put on which grid.

    Args:
        layers: Of this graph.
        ranges: By the names of `layers.observed`; read by static recipes.
        keep: Names of quantizers that stay in float.

    Raises:
        InputError: an unknown name in `keep`, a range that is missing or carries no grid, a format
            that the storage cannot hold.
    """
    require_known(keep, layers.names, "to keep in float")
    infos: list[QuantizerInfo] = []
    if layers.convs:
        assert recipe.activations is not None  # else graph_layers leaves them out
        bits = recipe.activations.bits
        infos = quantize_convs(model, layers.convs, bits=bits, ranges=ranges, keep=keep)
    infos += quantize_linears(
        model, layers.linears, recipe, ranges=ranges, keep=keep, storage=storage
    )
    remove_unused_initializers(model)
    return infos


def _attention(recipe: Recipe) -> str:
    return (
        f"recipe {recipe}: an .onnx file says nothing of which tensors are attention's: quantize "
        "its weights and linear inputs alone, e.g. w8a8, or export the torch model."
    )


def _input(node: ir.Node) -> ir.Value:
    value = node.inputs[0]
    assert value is not None  # a layer's first input is not optional
    return value


def _is_constant(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None


def _count(model: ir.Model, operation: str) -> int:
    return sum(node.op_type == operation for node in model.graph)


def _vocabulary_projection(model: ir.Model) -> ir.Node | None:
    """Returns the node that makes `logits` of a graph that reads token ids."""
    if IDS not in {value.name for value in model.graph.inputs}:
        return None
    value = next((value for value in model.graph.outputs if value.name == LOGITS), None)
    if value is None or (value.shape is not None and len(value.shape) != 3):
        return None
    node = value.producer()
    while node is not None and node.op_type in _PASSING:
        sources = [x for x in node.inputs if x is not None and x.const_value is None]
        node = sources[0].producer() if len(sources) == 1 else None
    return node
