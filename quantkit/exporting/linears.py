"""Linear layers of a graph: by the torch modules whose weights they hold, or by the graph alone.

The exporter folds the transpose of a weight into a new, nameless constant. So a module's layer is
found by what it holds: a MatMul (or Gemm) whose constant operand has the bytes of the module's
weight. Where modules share bytes (tied or freshly initialised weights) the node's own record of the
module that it was traced in decides. Where there is no module, a layer is called after its node.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quantkit.errors import InputError
from quantkit.exporting.graphs import constant, scopes_of

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


def find_linears(model: ir.Model) -> list[LinearNode]:
    """Returns every MatMul and Gemm with a constant float32 matrix, in graph order.

    None with `transA`, and no product of integers.

    A layer's name is its node's, or `<operation>_<number>` where that has none; of two nodes of
    one name the second one's ends in `#2`.
    """
    found: list[LinearNode] = []
    counts: dict[str, int] = defaultdict(int)
    for index, node in enumerate(model.graph):
        side = _constant_operand(node)
        if side is None:
            continue
        value, transposed = side
        assert value.const_value is not None  # _constant_operand returns constants only
        if value.const_value.dtype != ir.DataType.FLOAT:
            continue
        array = np.array(value.const_value.numpy(), np.float32)
        name = node.name or f"{node.op_type}_{index}"
        counts[name] += 1
        name += f"#{counts[name]}" if counts[name] > 1 else ""
        weight = torch.from_numpy(array if transposed else np.ascontiguousarray(array.T))
        found.append(LinearNode(module=name, node=node, weight=weight, transposed=transposed))
    return found


def turns_input(node: ir.Node) -> bool:
    """Returns whether the node is a Gemm that transposes its input."""
    return node.op_type == "Gemm" and node.attributes.get_int("transA", 0) != 0


def without_bias(model: ir.Model, linear: LinearNode) -> LinearNode:
    """Returns the layer with its bias, where it is a Gemm that has one, in an Add behind it.

    ONNX Runtime computes a Gemm in integers only if its bias is an integer, too. Beside one in
    float it would turn input and weight back, and lose the time that the grids were to save. A
    `beta` is multiplied into the bias: beforehand where that is a constant, else as the graph runs.
    """
    node = linear.node
    bias = node.inputs[2] if node.op_type == "Gemm" and len(node.inputs) > 2 else None
    if bias is None:
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
        [product.outputs[0], _scaled_bias(model, linear, bias)],
        name=f"{linear.module}/bias",
        metadata_props=scopes,
    )
    inner = product.outputs[0]
    inner.name, inner.shape, inner.type = f"{product.name}_output", old.shape, old.type
    ir.convenience.replace_nodes_and_values(
        model.graph, node, [node], [product, total], [old], total.outputs
    )
    return replace(linear, node=product)


def _scaled_bias(model: ir.Model, linear: LinearNode, bias: ir.Value) -> ir.Value:
    """Returns `beta * bias` of a Gemm."""
    beta = np.float32(linear.node.attributes.get_float("beta", 1.0))
    if beta == 1.0:
        return bias
    name = f"{linear.module}/scaled_bias"
    if bias.const_value is not None:
        array = np.asarray(bias.const_value.numpy(), np.float32) * beta
        return constant(model, name, array, ir.DataType.FLOAT)
    factor = constant(model, f"{linear.module}/beta", np.asarray(beta), ir.DataType.FLOAT)
    scaled = ir.node("Mul", [bias, factor], name=name)
    scaled.outputs[0].name = f"{name}_output"
    scaled.outputs[0].shape, scaled.outputs[0].type = bias.shape, bias.type
    model.graph.insert_before(linear.node, scaled)
    return scaled.outputs[0]


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
    """Returns the rank-2 constant of a linear layer and whether it is `[out, in]`.

    None for a Gemm with `transA`: its tokens lie on the last axis, where the passes expect inputs.
    None for a matrix without an element, which has no grid.
    """
    if node.op_type not in ("MatMul", "Gemm") or node.domain not in ("", "ai.onnx"):
        return None
    if turns_input(node):
        return None
    value = node.inputs[1] if len(node.inputs) > 1 else None
    if value is None or value.const_value is None or len(value.const_value.shape) != 2:
        return None
    if not value.const_value.size:
        return None
    transposed = node.op_type == "Gemm" and node.attributes.get_int("transB", 0) == 1
    return value, transposed
