"""Linear layers of a graph: which node is which torch module, and their 8-bit form.

The exporter folds the transpose of a weight into a new, nameless constant. So a layer is found by
what it holds: a MatMul (or Gemm) whose constant operand has the bytes of the module's weight. Where
modules share bytes (tied or freshly initialised weights) the node's own record of the module that
it was traced in decides.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quantkit.calibration import WeightRanges
from quantkit.errors import InputError
from quantkit.exporting.graphs import (
    GraphGrid,
    constant,
    quantize_value,
    scopes_of,
    storage_dtype,
)
from quantkit.numerics.affine import check_range, quantize
from quantkit.numerics.qtypes import QType
from quantkit.quantization import linear_input_grid, weight_scale
from quantkit.results import QuantizerInfo, Range

ModuleLinears = Mapping[str, Tensor | nn.Module]
"""Module name -> its weight `[out, in]`, or the module that holds it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearNode:
    """The node of one torch linear layer. `transposed`: its constant is `[out, in]`, as torch's."""

    module: str
    node: ir.Node
    weight: Tensor
    transposed: bool


def match_linears(model: ir.Model, module_linears: ModuleLinears) -> list[LinearNode]:
    """Returns the nodes of the named modules, in graph order.

    Raises:
        InputError: a module that no node, or more than one node, holds; it is named.
    """
    weights = {name: linear_weight(name, module) for name, module in module_linears.items()}
    shapes = {tuple(weight.shape) for weight in weights.values()}
    by_hash: dict[str, list[str]] = defaultdict(list)
    for name, weight in weights.items():
        by_hash[_digest(weight.numpy())].append(name)
    digests: dict[tuple[str, bool], str] = {}
    found: dict[str, LinearNode] = {}
    for node in model.graph:
        side = _constant_operand(node)
        if side is None:
            continue
        value, transposed = side
        shape = tuple(int(d) for d in (value.shape or ()) if isinstance(d, int))
        if (shape if transposed else shape[::-1]) not in shapes:
            continue
        key = (str(value.name), transposed)
        if key not in digests:
            tensor = value.const_value
            assert tensor is not None  # _constant_operand returns constants only
            array = tensor.numpy()
            digests[key] = _digest(array if transposed else array.T)
        names = by_hash.get(digests[key], [])
        scopes = scopes_of(node)
        exact = [name for name in names if name in scopes]
        for name in exact or (names if len(names) == 1 else []):
            if name in found:
                raise InputError(f"two nodes of the graph hold linear layer {name!r}.")
            found[name] = LinearNode(
                module=name, node=node, weight=weights[name], transposed=transposed
            )
    missing = [name for name in module_linears if name not in found]
    if missing:
        raise InputError(
            f"no node of the graph holds the weight of linear layer {missing[0]!r}"
            + (f" (nor of {len(missing) - 1} more)" if missing[1:] else "")
            + ": is this the float graph of this model?"
        )
    return list(found.values())


def quantize_linears(
    model: ir.Model,
    linears: list[LinearNode],
    *,
    weight_bits: int | None,
    activation_bits: int | None,
    ranges: Mapping[str, Range],
    keep: Collection[str] = (),
    weight_ranges: WeightRanges | None = None,
) -> list[QuantizerInfo]:
    """Rewrites the nodes in place and returns what was put on which grid.

    Weights: symmetric narrow, one scale per output channel, stored as integers in front of a
    DequantizeLinear. Inputs: the static asymmetric grid of `linear_input/<module>`; layers that
    share an input and a grid share its QuantizeLinear. What `keep` names is left as it is.

    Raises:
        InputError: a range is missing, by name; NaN or inf in a range or weight; ranges of weights
            by group.
    """
    require_channels(weight_ranges, weight_bits)
    infos: list[QuantizerInfo] = []
    shared: dict[tuple[str, float, int], GraphGrid] = {}
    for linear in linears:
        input_bits = None if f"linear_input/{linear.module}" in keep else activation_bits
        own_bits = None if f"weight/{linear.module}" in keep else weight_bits
        if input_bits is not None and own_bits is not None:
            linear = _without_bias(model, linear)
        if input_bits is not None:
            infos.append(_quantize_input(model, linear, input_bits, ranges, shared))
        if own_bits is not None:
            infos.append(_quantize_weight(model, linear, own_bits, weight_ranges))
    return infos


def _without_bias(model: ir.Model, linear: LinearNode) -> LinearNode:
    """Returns the layer with its bias, where it is a Gemm that has one, in an Add behind it.

    ONNX Runtime computes a Gemm in integers only if its bias is an integer, too. Beside one in
    float it would turn input and weight back, and lose the time that the grids were to save.
    """
    node = linear.node
    beta = node.attributes.get_float("beta", 1.0)
    if node.op_type != "Gemm" or len(node.inputs) < 3 or node.inputs[2] is None or beta != 1.0:
        return linear
    scopes, old = dict(node.metadata_props), node.outputs[0]
    product = ir.node(
        "Gemm",
        node.inputs[:2],
        {key: value for key, value in node.attributes.items() if key != "beta"},
        name=f"{linear.module}/product",
        metadata_props=scopes,
    )
    total = ir.node(
        "Add",
        [product.outputs[0], node.inputs[2]],
        name=f"{linear.module}/bias",
        metadata_props=scopes,
    )
    inner = product.outputs[0]
    inner.name, inner.shape, inner.type = f"{product.name}_output", old.shape, old.type
    ir.convenience.replace_nodes_and_values(
        model.graph, node, [node], [product, total], [old], total.outputs
    )
    return replace(linear, node=product)


def require_channels(ranges: WeightRanges | None, bits: int | None) -> None:
    """Returns if a graph can hold weights of that many bits on these ranges.

    Raises:
        InputError: ranges by group, or chosen for another width.
    """
    if ranges is None or bits is None:
        return
    if ranges.group_size is not None:
        raise InputError(
            f"the ranges of weights are by group ({ranges.group_size} inputs each), and the graph "
            "of a recipe such as w8a8 has one scale a channel: calibrate --weights channel."
        )
    ranges.require_width(bits)


def input_grid(ranges: Mapping[str, Range], module: str, bits: int) -> tuple[float, int]:
    """Returns (scale, zero point) of a linear layer's input, as unsigned integers.

    The signed grid of the simulation, 2^(bits-1) higher, so the same real numbers: ONNX Runtime's
    x86 kernels take unsigned activations, and it converts signed ones only where nothing shares
    them; the rest it computes in float.

    Raises:
        InputError: no range of that name, one that carries no grid, or one for another width.
    """
    grid = linear_input_grid(ranges, module, bits)
    return float(grid.scale), int(grid.zero_point) + (1 << (bits - 1))


def _quantize_input(
    model: ir.Model,
    linear: LinearNode,
    bits: int,
    ranges: Mapping[str, Range],
    shared: dict[tuple[str, float, int], GraphGrid],
) -> QuantizerInfo:
    name, qtype = f"linear_input/{linear.module}", QType(bits=bits, signed=False)
    scale, zero_point = input_grid(ranges, linear.module, bits)
    source = linear.node.inputs[0]
    assert source is not None  # a MatMul's first input is not optional
    key = (str(source.name), scale, zero_point)
    if key not in shared:
        shared[key] = quantize_value(
            model,
            source,
            name=name,
            scale=np.asarray(scale, np.float32),
            zero_point=zero_point,
            qtype=qtype,
            before=linear.node,
        )
    linear.node.replace_input_with(
        0, shared[key].dequantize(model, linear.node, f"{name}/dequantize")
    )
    return QuantizerInfo(
        name=name,
        qtype=str(qtype),
        granularity="tensor",
        scale_min=scale,
        scale_max=scale,
        hits=1,
    )


def _quantize_weight(
    model: ir.Model, linear: LinearNode, bits: int, ranges: WeightRanges | None
) -> QuantizerInfo:
    qtype = QType(bits=bits, narrow=True)
    name = f"{linear.module}.weight"
    check_range(linear.weight.min(), linear.weight.max(), name)
    scale = weight_scale(linear.weight, bits, module=linear.module, ranges=ranges)
    integers = quantize(linear.weight, scale, 0, qtype)
    axis = 0 if linear.transposed else 1
    dtype = storage_dtype(qtype)
    array = integers.numpy()
    flat = scale.reshape(-1).numpy()
    stored = constant(model, f"{name}_quantized", array if linear.transposed else array.T, dtype)
    zeros = np.zeros(flat.shape, np.int32)
    node = ir.node(
        "DequantizeLinear",
        [
            stored,
            constant(model, f"{name}_scale", flat, ir.DataType.FLOAT),
            constant(model, f"{name}_zero_point", zeros, dtype),
        ],
        {"axis": axis},
        name=f"weight/{linear.module}/dequantize",
    )
    original = linear.node.inputs[1]
    assert original is not None  # match_linears found the layer by this constant
    output = node.outputs[0]
    output.name, output.shape, output.type = f"{name}_dequantized", original.shape, original.type
    model.graph.insert_before(linear.node, node)
    linear.node.replace_input_with(1, output)
    return QuantizerInfo(
        name=f"weight/{linear.module}",
        qtype=str(qtype),
        granularity="channel",
        scale_min=float(flat.min()),
        scale_max=float(flat.max()),
        hits=1,
    )


def linear_weight(name: str, module: Tensor | nn.Module) -> Tensor:
    """Returns the float32 weight `[out, in]` of a linear layer or `Conv1D`, on the CPU."""
    weight = module if isinstance(module, Tensor) else getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise InputError(f"{name!r} is not a linear layer: it has no weight of rank 2.")
    matrix = weight.t() if isinstance(module, Conv1D) else weight
    return matrix.detach().to(device="cpu", dtype=torch.float32)


def _digest(array: NDArray[np.generic]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array, np.float32).tobytes()).hexdigest()


def _constant_operand(node: ir.Node) -> tuple[ir.Value, bool] | None:
    """Returns the rank-2 constant of a linear layer and whether it is `[out, in]`."""
    if node.op_type not in ("MatMul", "Gemm") or node.domain not in ("", "ai.onnx"):
        return None
    value = node.inputs[1]
    if value is None or value.const_value is None or len(value.const_value.shape) != 2:
        return None
    transposed = node.op_type == "Gemm" and node.attributes.get_int("transB", 0) == 1
    return value, transposed
