"""Graph files and the few pieces of graph surgery that every rewrite needs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.numerics.qtypes import QType

MODEL_FILE: Final = "model.onnx"
_SCOPES = "pkg.torch.onnx.name_scopes"


def load_graph(path: Path) -> ir.Model:
    """Returns the graph; weights stay in their file until read.

    Raises:
        InputError: no such file.
    """
    if not path.is_file():
        raise InputError(f"no ONNX file {path}.")
    return ir.load(path)


def save_graph(model: ir.Model, folder: Path, name: str = MODEL_FILE) -> Path:
    """Writes `name` and its weights `name.data` to `folder`; returns the path of `name`.

    Both are written aside and moved, weights first, so that a reader never sees half a file, and
    a graph may be written over the one whose weights it still reads.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as aside:
        ir.save(model, Path(aside) / name, external_data=f"{name}.data")
        for file in (f"{name}.data", name):
            if (Path(aside) / file).exists():
                os.replace(Path(aside) / file, folder / file)
    return folder / name


def strip_metadata(model: ir.Model) -> None:
    """Keeps of every node's metadata only its module: the rest holds paths of this machine."""
    for node in model.graph.all_nodes():
        scopes = node.metadata_props.get(_SCOPES)
        node.metadata_props.clear()
        node.doc_string = None
        if scopes is not None:
            node.metadata_props[_SCOPES] = scopes
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


def scopes_of(node: ir.Node) -> tuple[str, ...]:
    """Returns the names of the modules that the node was traced in, outermost first."""
    text = node.metadata_props.get(_SCOPES, "")
    return tuple(part.strip(" '\"") for part in text.strip("[]").split(","))


def storage_dtype(qtype: QType) -> ir.DataType:
    """Returns the ONNX type that holds `qtype`: the smallest of INT4, INT8, INT16."""
    if not qtype.signed:
        raise InputError(f"graphs hold signed grids, got {qtype}.")
    if qtype.bits <= 4:
        return ir.DataType.INT4
    return ir.DataType.INT8 if qtype.bits <= 8 else ir.DataType.INT16


def constant(
    model: ir.Model, name: str, array: NDArray[np.generic], dtype: ir.DataType
) -> ir.Value:
    """Returns a new initializer. Sub-byte types take their integers as an int8 array."""
    tensor: ir.TensorProtocol
    if dtype == ir.DataType.INT4:
        # onnx_ir packs what numpy holds as one int4 a byte.
        tensor = ir.Tensor(array.astype(dtype.numpy()), dtype=dtype, name=name)
    else:
        tensor = ir.tensor(np.array(array, order="C"), dtype=dtype, name=name)
    value = ir.Value(
        name=name, shape=ir.Shape(array.shape), type=ir.TensorType(dtype), const_value=tensor
    )
    model.graph.register_initializer(value)
    return value


def fake_quantize_value(
    model: ir.Model,
    value: ir.Value,
    *,
    name: str,
    scale: NDArray[np.float32],
    zero_point: int,
    qtype: QType,
    before: ir.Node,
) -> ir.Value:
    """Returns `value` on the grid: clipped where the grid is less than its ONNX type.

    Args:
        scale: One number, or one for each entry of axis 1 (heads of `[batch, heads, q, k]`).
        before: The new nodes go in front of it.
    """
    dtype = storage_dtype(qtype)
    axis = None if scale.size == 1 else 1
    scale = scale.reshape(()) if axis is None else scale.reshape(-1)
    nodes: list[ir.Node] = []
    current = value
    full = {ir.DataType.INT4: 4, ir.DataType.INT8: 8, ir.DataType.INT16: 16}[dtype]
    if qtype.narrow or qtype.bits < full:
        # ONNX saturates at the ends of the type; the grid ends earlier. The bounds are whole
        # steps, so that (k * scale) / scale rounds to k and clipping moves nothing else.
        # Max and Min, not Clip: ONNX Runtime 1.32 cannot load Clip before a 4-bit QuantizeLinear
        # with a scalar scale (it fails in its own ClipQuantFusion), and Clip takes scalars only.
        lo = (np.float32(qtype.qmin - zero_point) * scale).astype(np.float32)
        hi = (np.float32(qtype.qmax - zero_point) * scale).astype(np.float32)
        if axis is not None:
            lo, hi = lo.reshape(1, -1, 1, 1), hi.reshape(1, -1, 1, 1)
        low = constant(model, f"{name}/lo", lo, ir.DataType.FLOAT)
        high = constant(model, f"{name}/hi", hi, ir.DataType.FLOAT)
        nodes.append(ir.node("Max", [current, low], name=f"{name}/clip_lo"))
        nodes.append(ir.node("Min", [nodes[0].outputs[0], high], name=f"{name}/clip_hi"))
        current = nodes[-1].outputs[0]
    zeros = np.full(scale.shape, zero_point, np.int8 if full < 16 else np.int16)
    grid = [
        constant(model, f"{name}/scale", scale, ir.DataType.FLOAT),
        constant(model, f"{name}/zero_point", zeros, dtype),
    ]
    attributes = {} if axis is None else {"axis": axis}
    nodes.append(ir.node("QuantizeLinear", [current, *grid], attributes, name=f"{name}/quantize"))
    integers = nodes[-1].outputs[0]
    nodes.append(
        ir.node("DequantizeLinear", [integers, *grid], attributes, name=f"{name}/dequantize")
    )
    _describe(nodes, value, dtype, integers)
    model.graph.insert_before(before, nodes)
    return nodes[-1].outputs[0]


def _describe(
    nodes: Sequence[ir.Node], like: ir.Value, dtype: ir.DataType, integers: ir.Value
) -> None:
    """Names the new values after their nodes and gives them the shape of what they replace."""
    for node in nodes:
        output = node.outputs[0]
        output.name = f"{node.name}_output"
        output.shape = like.shape
        output.type = ir.TensorType(dtype) if output is integers else like.type


def remove_unused_initializers(model: ir.Model) -> None:
    """Drops the float weights that nothing reads any more."""
    initializers = model.graph.initializers
    for name, value in list(initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del initializers[name]
