"""Any float .onnx file -> a graph that the passes can rewrite; each step says what it leaves.

| step | before | after |
|---|---|---|
| `_require_float` | any graph | nothing is on a grid yet |
| `_raise_opset` | any opset | 21 or more: 4- and 16-bit types; operators as that opset has them |
| `_lift_constants` | weights anywhere | every constant of the main graph is an initializer |
| `_fold_constants` | weights transposed or cast on their way | nodes read constants |
| `_fold_batch_norms` | normalisations behind convolutions | they are in the weights, as ever |
| `_require_float32` | weights of any type | those of layers are float32 and finite |
| `_describe` | shapes known or not | shapes where they can be inferred; unique names of nodes |

What an If, Loop or Scan computes inside is left as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import onnx_ir as ir
from onnx import version_converter
from onnx_ir.passes import common
from onnxscript.optimizer import fold_constants_ir
from onnxscript.rewriter import rewrite
from onnxscript.rewriter.rules.common import (
    fuse_batchnorm_into_conv_rule,
    fuse_batchnorm_into_conv_transpose_rule,
    fuse_batchnorm_into_gemm_rule,
)

from quantkit.errors import InputError
from quantkit.exporting.graphs import (
    quantized_nodes,
    remove_unused_initializers,
    strip_metadata,
)
from quantkit.onnx_runtime import load_float_graph
from quantkit.onnx_runtime.sessions import first_line

LEAST_OPSET: Final = 21
"""The first whose QuantizeLinear knows 4 and 16 bits."""
_IR_VERSION: Final = 10
"""The one that came with it; older readers know no 4-bit tensors."""
_LAYERS: Final = ("MatMul", "Gemm", "Conv", "ConvTranspose")
_WRONG_TYPES: Final = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)
_TURNS: Final = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Identity", "Cast", "Flatten")
"""Nodes that only turn a weight: they are folded however large it is."""
_LARGE: Final = 1024


def prepare_graph(path: Path, *, opset: int = LEAST_OPSET) -> ir.Model:
    """Returns the graph of a float file, ready for the passes; the file is not changed.

    Args:
        opset: The least that it gets; a higher one of its own stays.

    Raises:
        InputError: no ONNX file; it is quantized already, or has weights of other types than
            float32, or NaN or inf in one (all by name); its operators cannot be raised to that
            opset, or it is no graph that can be rewritten.
    """
    model = load_float_graph(path)
    _require_float(model, path)
    with _told_by_one_line(path):
        if model.functions:
            common.InlinePass()(model)
    model = _raise_opset(model, path, max(opset, LEAST_OPSET))
    model.ir_version = max(model.ir_version or 0, _IR_VERSION)
    with _told_by_one_line(path):
        _lift_constants(model)
        if not _has_subgraphs(model):
            _fold_constants(model)
            _fold_batch_norms(model)
    _require_float32(model, path)
    common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedOpsetsPass()(model)
    _describe(model)
    return model


@contextlib.contextmanager
def _told_by_one_line(path: Path) -> Iterator[None]:
    """Turns what other libraries' passes raise over a graph that is none into an InputError."""
    try:
        yield
    except Exception as error:  # onnx_ir's own types, and IndexError and the like
        raise InputError(
            f"{path} is no graph that can be rewritten: {first_line(error)}. Export it again."
        ) from error


def _has_subgraphs(model: ir.Model) -> bool:
    return any(is_control_flow(node) for node in model.graph)


def is_control_flow(node: ir.Node) -> bool:
    """Returns whether the node holds graphs of its own, as If, Loop and Scan do."""
    kinds = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return any(attribute.type in kinds for attribute in node.attributes.values())


def _require_float(model: ir.Model, path: Path) -> None:
    found = quantized_nodes(model)
    if found:
        said = ", ".join(f"{count} {name}" for name, count in sorted(found.items()))
        raise InputError(f"{path} is quantized already ({said}): expected the float graph.")


def _require_float32(model: ir.Model, path: Path) -> None:
    for node in model.graph:
        if node.op_type not in _LAYERS:
            continue
        for value in node.inputs:
            tensor = None if value is None else value.const_value
            if tensor is not None and tensor.dtype in _WRONG_TYPES:
                raise InputError(
                    f"{path}: the weight of {node.name!r} is {tensor.dtype}: expected a float32 "
                    "graph; export the model in float32."
                )
            if tensor is not None and tensor.dtype == ir.DataType.FLOAT:
                bad = int((~np.isfinite(tensor.numpy())).sum())
                if bad:
                    raise InputError(
                        f"{path}: the weight of {node.name!r} holds {bad} NaN or inf values; "
                        "expected finite ones. Export the model again from sound weights."
                    )


def _raise_opset(model: ir.Model, path: Path, opset: int) -> ir.Model:
    """Returns the model at `opset`, unless it is there; by onnx's own converter.

    Large weights are set aside meanwhile: protobuf holds 2 GB, and the converter reads none.
    """
    own = model.opset_imports.get("", 0)
    if own < 1:
        raise InputError(
            f"{path} says no opset of ONNX's operators (opset_import): expected 1 or more, got "
            f"{own or 'none'}. Export it again."
        )
    if own >= opset:
        return model
    # As of old, an initializer may be an input, too: a default that a caller may replace.
    common.RemoveInitializersFromInputsPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=False)(model)
    aside: dict[str, ir.TensorProtocol] = {}
    for name, value in list(model.graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or value.is_graph_output():
            continue
        if tensor.size <= _LARGE:  # the converter may read it, and opens no other file
            value.const_value = ir.tensor(tensor.numpy(), dtype=tensor.dtype, name=name)
        else:
            aside[name] = tensor
            del model.graph.initializers[name]
            value.const_value = None
            value.shape, value.dtype = ir.Shape(tensor.numpy().shape), tensor.dtype
            model.graph.inputs.append(value)
    # below version 4 an initializer had to be an input, too, and the converter insists
    model.ir_version = max(model.ir_version or 0, _IR_VERSION)
    try:
        raised = version_converter.convert_version(ir.to_proto(model), opset)
        _check(raised)
    except Exception as error:  # onnx raises RuntimeError, its own types and protobuf's
        first = first_line(error)
        raise InputError(
            f"{path} has opset {own}, which cannot be raised to {opset}: {first}. Export it again "
            f"with opset {opset}."
        ) from error
    model = ir.from_proto(raised)
    by_name = {str(value.name): value for value in model.graph.inputs}
    for name, tensor in aside.items():
        value = by_name[name]
        model.graph.inputs.remove(value)
        value.const_value = tensor
        model.graph.register_initializer(value)
    return model


def _check(raised: onnx.ModelProto) -> None:
    """Asks ONNX's checker, which insists on shapes of outputs; a file need not state them."""
    types = [value.type.tensor_type for value in raised.graph.output]
    unknown = [kind for kind in types if kind.elem_type and not kind.HasField("shape")]
    for kind in unknown:
        kind.shape.SetInParent()
    onnx.checker.check_model(raised)
    for kind in unknown:
        kind.ClearField("shape")


def _lift_constants(model: ir.Model) -> None:
    common.RemoveInitializersFromInputsPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)


def _fold_constants(model: ir.Model) -> None:
    def turns(node: ir.Node) -> bool | None:
        return True if node.op_type in _TURNS else None

    fold_constants_ir(model, should_fold=turns)
    _lift_constants(model)
    common.IdentityEliminationPass()(model)


def _fold_batch_norms(model: ir.Model) -> None:
    rules = [
        fuse_batchnorm_into_conv_rule,
        fuse_batchnorm_into_conv_transpose_rule,
        fuse_batchnorm_into_gemm_rule,
    ]
    rewrite(model, pattern_rewrite_rules=rules)
    _lift_constants(model)


def _describe(model: ir.Model) -> None:
    common.NameFixPass()(model)
    strip_metadata(model)
    remove_unused_initializers(model)
    common.ShapeInferencePass()(model)
