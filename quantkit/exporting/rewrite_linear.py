"""Linear layers of a graph on the grids of a recipe: which pass takes which half of which layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from quantkit.calibration import WeightRanges
from quantkit.errors import InputError
from quantkit.exporting.linears import LinearNode, without_bias
from quantkit.exporting.rewrite_blocks import quantize_weight_blocks
from quantkit.exporting.rewrite_inputs import Shared, quantize_input
from quantkit.exporting.rewrite_tokens import TokenGrid, quantize_tokens
from quantkit.exporting.rewrite_weights import quantize_weight
from quantkit.jobs import Storage
from quantkit.recipe import Recipe, WeightQuant
from quantkit.results import QuantizerInfo, Range

_NIBBLE, _BYTE = 4, 8


def quantize_linears(
    model: ir.Model,
    linears: Sequence[LinearNode],
    recipe: Recipe,
    *,
    ranges: Mapping[str, Range],
    keep: Collection[str] = (),
    weight_ranges: WeightRanges | None = None,
    storage: Storage = "qdq",
) -> list[QuantizerInfo]:
    """Rewrites the nodes in place and returns what was put on which grid.

    Weights: symmetric narrow, a scale an output channel or a group of inputs. Inputs: the static
    asymmetric grid of `linear_input/<module>`, or a symmetric one a token; layers that share an
    input and a grid share its QuantizeLinear. What `keep` names is left as it is.

    Raises:
        InputError: a range is missing, by name; NaN or inf in a range or weight; ranges of weights
            of another granularity; a format that the storage cannot hold.
    """
    weights, inputs = recipe.weights, recipe.activations
    group_size = group_size_of(recipe, weight_ranges, storage)
    infos: list[QuantizerInfo] = []
    shared: Shared = {}
    tokens: dict[str, TokenGrid] = {}
    for linear in linears:
        has_input = inputs is not None and f"linear_input/{linear.module}" not in keep
        has_weight = weights is not None and f"weight/{linear.module}" not in keep
        is_dynamic = inputs is not None and inputs.range == "dynamic"
        if (has_weight and (has_input or group_size is not None)) or (has_input and is_dynamic):
            linear = without_bias(model, linear)
        if inputs is not None and has_input:
            if is_dynamic:
                infos.append(quantize_tokens(model, linear, inputs.bits, tokens))
            else:
                infos.append(quantize_input(model, linear, inputs.bits, ranges, shared))
        if weights is not None and has_weight:
            if group_size is None:
                infos.append(quantize_weight(model, linear, weights.bits, weight_ranges))
            else:
                infos.append(
                    quantize_weight_blocks(
                        model, linear, weights.bits, group_size, storage, weight_ranges
                    )
                )
    return infos


def group_size_of(
    recipe: Recipe, ranges: WeightRanges | None, storage: Storage = "qdq"
) -> int | None:
    """Returns the inputs that share a scale of the weights; None: a channel's all.

    Raises:
        InputError: the recipe has other groups or another width than the ranges; or groups of more
            than 4 bits beside inputs of at most 8, which ONNX Runtime fuses and cannot run.
    """
    weights, inputs = recipe.weights, recipe.activations
    if not isinstance(weights, WeightQuant):
        return None
    size = weights.group_size if ranges is None else ranges.group_size
    is_fused = inputs is not None and inputs.bits <= _BYTE and weights.bits > _NIBBLE
    if size is not None and is_fused and storage == "qdq":
        raise InputError(
            f"the ranges of weights are by group ({size} inputs each), and beside inputs of 8 bits "
            "ONNX Runtime takes one scale a channel: calibrate --weights channel, or --storage "
            "matmulnbits."
        )
    if ranges is None:
        return size
    ranges.require_width(weights.bits)
    if weights.group_size not in (None, ranges.group_size):
        found = "channel" if ranges.group_size is None else f"group of {ranges.group_size}"
        raise InputError(
            f"recipe {recipe} has weights by groups of {weights.group_size}, and their ranges were "
            f"chosen for each {found}: calibrate --weights group:{weights.group_size}."
        )
    return ranges.group_size
