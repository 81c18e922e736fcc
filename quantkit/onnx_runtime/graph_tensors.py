"""Which tensors of a graph a range is for, and the part of the graph that computes them.

Only the main graph's tensors can be named: what an If or Loop computes inside is left alone. No
weight is read here: constants are told by where they come from, and `onnx_ir` leaves external data
in its file.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from quantkit.errors import InputError
from quantkit.onnx_runtime.graph_file import read_graph

_DOMAINS: Final = ("", "ai.onnx")
_FLOATS: Final = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
_ACTIVATION_PLACES: Final = {"MatMul": (0, 1), "Gemm": (0, 1), "Conv": (0,)}
"""Where such a node may read an activation; its other factor is then a constant."""
_DRAWN: Final = ("RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial")
"""Nodes whose output is no constant though all their inputs are."""
_NEAREST: Final = 5
_SHAPE_SUFFIX: Final = "/quantkit_shape"


def load_float_graph(path: Path) -> ir.Model:
    """Returns the graph; external weights stay in their file.

    Raises:
        InputError: as `read_graph`, or the file holds no node.
    """
    model = read_graph(path)
    if not len(model.graph):
        raise InputError(f"{path} holds no ONNX graph: expected at least one node.")
    return model


def input_names(model: ir.Model) -> list[str]:
    """Returns the inputs that a run has to be given (initializers among them have a value)."""
    return [
        _name(value) for value in model.graph.inputs if value.name not in model.graph.initializers
    ]


def linear_inputs(model: ir.Model) -> list[str]:
    """Returns the activation inputs of MatMul, Gemm and Conv with constant weights.

    In graph order, each once: layers that read the same tensor share its range.
    """
    constants = _constants(model)
    found: dict[str, None] = {}
    for node in model.graph:
        places = _ACTIVATION_PLACES.get(node.op_type, ())
        if node.domain not in _DOMAINS or len(node.inputs) < 2:  # too few: ONNX Runtime refuses it
            continue
        for place in places:
            value, factor = node.inputs[place], node.inputs[1 - place]
            if value is not None and value not in constants and factor in constants:
                found[_name(value)] = None
    return list(found)


def choose_tensors(model: ir.Model, patterns: Sequence[str] | None) -> list[str]:
    """Returns the tensors that one of the names or glob patterns matches, in graph order.

    None stands for `linear_inputs`. A pattern that is a tensor's name matches that one alone.

    Raises:
        InputError: a pattern that matches nothing, or a tensor that is known not to be float; or
            the graph has no linear layer and nothing was named.
    """
    if patterns is None:
        names = linear_inputs(model)
        if not names:
            raise InputError(
                "the graph has no MatMul, Gemm or Conv with constant weights: name the tensors "
                "to observe."
            )
        return names
    constants = _constants(model)
    types = {n: v.dtype for n, v in _tensors(model).items() if v not in constants}
    floats = [name for name, dtype in types.items() if dtype is None or dtype in _FLOATS]
    chosen: set[str] = set()
    for pattern in patterns:
        if pattern in types:
            if pattern not in floats:
                raise InputError(
                    f"tensor {pattern!r} is {types[pattern]}: expected FLOAT or FLOAT16."
                )
            chosen.add(pattern)
            continue
        matched = [name for name in floats if fnmatchcase(name, pattern)]
        if not matched:
            near = difflib.get_close_matches(pattern, floats, n=_NEAREST, cutoff=0.0)
            raise InputError(
                f"no float tensor of the graph matches {pattern!r}. Nearest of {len(floats)}: "
                f"{', '.join(near)}."
            )
        chosen.update(matched)
    return [name for name in floats if name in chosen]


def reduced_to(model: ir.Model, names: Sequence[str]) -> bytes:
    """Returns the serialized graph whose outputs are these tensors, in order; changes `model`.

    Nodes that no output needs are gone, e.g. a decoder's vocabulary projection. External weights
    are referred to by the same names, so it has to be opened with their folder.
    """
    tensors = _tensors(model)
    return _with_outputs(model, [tensors[name] for name in names])


def shapes_of(model: ir.Model, names: Sequence[str]) -> bytes:
    """Returns the serialized graph whose outputs are the shapes of these tensors, in order.

    They cost one small array each, so the sizes of all tensors are known without holding any.
    """
    tensors = _tensors(model)
    shapes = []
    for name in names:
        node = ir.node("Shape", [tensors[name]], name=f"{name}{_SHAPE_SUFFIX}")
        node.outputs[0].name = f"{name}{_SHAPE_SUFFIX}"
        node.outputs[0].type = ir.TensorType(ir.DataType.INT64)
        model.graph.append(node)
        shapes.append(node.outputs[0])
    return _with_outputs(model, shapes)


def _with_outputs(model: ir.Model, outputs: Sequence[ir.Value]) -> bytes:
    model.graph.outputs.clear()
    model.graph.outputs.extend(outputs)
    RemoveUnusedNodesPass()(model)
    return bytes(ir.to_proto(model).SerializeToString())


def _tensors(model: ir.Model) -> dict[str, ir.Value]:
    """Returns the main graph's inputs and node outputs by name, in graph order."""
    values = [v for v in model.graph.inputs if v.name not in model.graph.initializers]
    values += [value for node in model.graph for value in node.outputs]
    return {_name(value): value for value in values if value.name}


def _constants(model: ir.Model) -> set[ir.Value]:
    """Returns what does not depend on the inputs: initializers, Constant nodes, what is made of
    them (a weight may be transposed, reshaped or dequantized on its way).
    """
    known = set(model.graph.initializers.values())
    for node in model.graph:
        if node.op_type in _DRAWN or any(
            attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
            for attribute in node.attributes.values()
        ):
            continue
        inputs = [value for value in node.inputs if value is not None]
        is_constant = node.op_type == "Constant" and node.domain in _DOMAINS
        if is_constant or (inputs and all(value in known for value in inputs)):
            known.update(node.outputs)
    return known


def _name(value: ir.Value) -> str:
    return value.name or ""
