"""Graph files and the few pieces of graph surgery that every rewrite needs."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.numerics.qtypes import QType

MODEL_FILE: Final = "model.onnx"
PROTOBUF_BYTES: Final = 1_500_000_000
"""Most bytes of weights in a graph's own file: protobuf ends at 2 GB, and nodes need room, too."""
_OLD: Final = "old"
_SIGNED = {4: ir.DataType.INT4, 8: ir.DataType.INT8, 16: ir.DataType.INT16}
_UNSIGNED = {4: ir.DataType.UINT4, 8: ir.DataType.UINT8, 16: ir.DataType.UINT16}
_BYTES = (ir.DataType.INT8, ir.DataType.UINT8)
_SCOPES = "pkg.torch.onnx.name_scopes"
_ON_A_GRID: Final = re.compile("(?i:quantize)|^Q[A-Z]|Integer|NBits|Bnb4")
"""Operators of ONNX and of com.microsoft that read or write integers in place of real numbers."""


def load_graph(path: Path) -> ir.Model:
    """Returns the graph; weights stay in their file until read.

    Raises:
        InputError: no such file.
    """
    if not path.is_file():
        raise InputError(f"no ONNX file {path}.")
    return ir.load(path)


def save_graph(
    model: ir.Model, folder: Path, name: str = MODEL_FILE, *, external_bytes: int = 0
) -> Path:
    """Writes `name`, and its weights to `name.data`, to `folder`; returns the path of `name`.

    Both are written aside and moved, weights first, so that a reader never sees half a file, and
    a graph may be written over the one whose weights it still reads. Where it fails, the files that
    were there are there again. The same graph gives the same bytes.

    Args:
        external_bytes: Weights of no more bytes than that stay in `name`. Default: none do, since
            loaders of exported models look for both files. One protobuf holds 2 GB, so that it may
            not be beyond `PROTOBUF_BYTES`.

    Raises:
        InputError: the folder cannot be written to, or `external_bytes` is more than fits.
    """
    if not 0 <= external_bytes <= PROTOBUF_BYTES:
        raise InputError(
            f"expected external_bytes between 0 and {PROTOBUF_BYTES} (a graph in one file holds "
            f"less than 2 GB), got {external_bytes}."
        )
    data = f"{name}.data"
    is_external = _weight_bytes(model) > external_bytes
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as aside:
            ir.save(model, Path(aside) / name, external_data=data if is_external else None)
            _move(Path(aside), folder, name, data)
    except OSError as error:
        raise InputError(f"cannot write {folder / name}: {error.strerror or error}.") from error
    return folder / name


def _weight_bytes(model: ir.Model) -> int:
    return sum(
        value.const_value.nbytes
        for graph in model.graphs()
        for value in graph.initializers.values()
        if value.const_value is not None
    )


def _move(aside: Path, folder: Path, graph: str, data: str) -> None:
    """Puts both files of `aside` in place of the folder's; old weights go where there are no new.

    The old graph leaves first and the new one comes last, so that no graph ever stands beside
    another's weights. Where it is stopped midway, the old files come back.
    """
    kept: list[str] = []
    placed: list[str] = []
    (aside / _OLD).mkdir()
    try:
        for name in (graph, data):
            if (folder / name).exists():
                os.replace(folder / name, aside / _OLD / name)
                kept.append(name)
        for name in (data, graph):
            if (aside / name).exists():
                os.replace(aside / name, folder / name)
                placed.append(name)
    except BaseException:
        for name in placed:
            (folder / name).unlink()
        for name in kept:
            os.replace(aside / _OLD / name, folder / name)
        raise


def quantized_nodes(model: ir.Model) -> Counter[str]:
    """Returns how many nodes of each quantized operator there are, subgraphs and functions too.

    Names alone tell, whatever the domain: QuantizeLinear, QLinear operators, QGemm, QAttention,
    MatMulInteger, MatMulNBits, GatherBlockQuantized, DynamicQuantizeLSTM and their like.
    """
    return Counter(node.op_type for node in all_nodes(model) if _ON_A_GRID.search(node.op_type))


def all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Yields the nodes of the graph, of the graphs inside of nodes, and of functions."""
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


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
    """Returns the smallest ONNX type that holds `qtype`: 4, 8 or 16 bits."""
    types = _SIGNED if qtype.signed else _UNSIGNED
    return next(dtype for bits, dtype in types.items() if bits >= qtype.bits)


def constant(
    model: ir.Model, name: str, array: NDArray[np.generic], dtype: ir.DataType
) -> ir.Value:
    """Returns a new initializer; integers may come in any integer type that holds them."""
    tensor: ir.TensorProtocol
    if dtype in (ir.DataType.INT4, ir.DataType.UINT4):
        # onnx_ir packs what numpy holds as one 4-bit integer a byte.
        tensor = ir.Tensor(array.astype(dtype.numpy()), dtype=dtype, name=name)
    else:
        tensor = ir.tensor(np.array(array, dtype.numpy(), order="C"), dtype=dtype, name=name)
    value = ir.Value(
        name=name, shape=ir.Shape(array.shape), type=ir.TensorType(dtype), const_value=tensor
    )
    model.graph.register_initializer(value)
    return value


@dataclass(frozen=True, kw_only=True, eq=False)
class GraphGrid:
    """A quantized value of a graph: integers, and what turns them back."""

    name: str
    integers: ir.Value
    parameters: tuple[ir.Value, ir.Value]
    like: ir.Value

    def dequantize(self, model: ir.Model, before: ir.Node, name: str) -> ir.Value:
        """Returns the real numbers, in a new node called `name`.

        One for each reader: ONNX Runtime fuses a DequantizeLinear into its only reader and leaves
        a shared one, and all its readers, in float.
        """
        axis = {} if len(self.parameters[0].shape or ()) == 0 else {"axis": 1}
        node = ir.node("DequantizeLinear", [self.integers, *self.parameters], axis, name=name)
        _describe(node, self.like, self.like.dtype)
        model.graph.insert_before(before, node)
        return node.outputs[0]


def quantize_value(
    model: ir.Model,
    value: ir.Value,
    *,
    name: str,
    scale: NDArray[np.float32],
    zero_point: int | NDArray[np.int32],
    qtype: QType,
    before: ir.Node,
) -> GraphGrid:
    """Returns `value` as integers of `qtype`, clipped where the grid is less than its ONNX type.

    Args:
        scale: One number, or one for each entry of axis 1 (heads of `[batch, heads, q, k]`).
        zero_point: One number, or as many as there are scales.
        before: The new nodes go in front of it.
    """
    dtype = storage_dtype(qtype)
    axis = None if scale.size == 1 else 1
    scale = scale.reshape(()) if axis is None else scale.reshape(-1)
    zeros = np.broadcast_to(np.asarray(zero_point, np.int32).reshape(-1), scale.size)
    zeros = zeros.reshape(scale.shape)
    clip = qtype.narrow or qtype.bits < dtype.bitwidth
    if clip and dtype not in _BYTES:
        value_in = _clip_reals(model, value, name, scale, zeros, qtype, before)
    else:
        value_in = value
    parameters = (
        constant(model, f"{name}/scale", scale, ir.DataType.FLOAT),
        constant(model, f"{name}/zero_point", zeros, dtype),
    )
    attributes = {} if axis is None else {"axis": axis}
    nodes = [
        ir.node("QuantizeLinear", [value_in, *parameters], attributes, name=f"{name}/quantize")
    ]
    if clip and dtype in _BYTES:
        # On integers: exact, any granularity, and a third of the time of a clip on reals.
        bounds = [
            constant(model, f"{name}/{end}", np.asarray(bound, np.int32), dtype)
            for end, bound in (("qmin", qtype.qmin), ("qmax", qtype.qmax))
        ]
        nodes.append(ir.node("Clip", [nodes[0].outputs[0], *bounds], name=f"{name}/clip"))
    for node in nodes:
        _describe(node, value, dtype)
    model.graph.insert_before(before, nodes)
    return GraphGrid(name=name, integers=nodes[-1].outputs[0], parameters=parameters, like=value)


def _clip_reals(
    model: ir.Model,
    value: ir.Value,
    name: str,
    scale: NDArray[np.float32],
    zero_point: NDArray[np.int32],
    qtype: QType,
    before: ir.Node,
) -> ir.Value:
    """Returns `value` within the grid, for types whose integers ONNX Runtime cannot clip.

    The bounds are whole steps, so that (k * scale) / scale rounds to k, and nothing else moves.
    Max and Min, not Clip: Clip takes scalars only, and ONNX Runtime 1.32 cannot load one in front
    of a 4-bit QuantizeLinear (its ClipQuantFusion throws).
    """
    shape = scale.shape if scale.ndim == 0 else (1, -1, 1, 1)
    nodes: list[ir.Node] = []
    for operation, end, bound in (("Max", "lo", qtype.qmin), ("Min", "hi", qtype.qmax)):
        steps = np.asarray(bound - zero_point, np.float32)
        real = np.asarray(steps * scale, np.float32).reshape(shape)
        limit = constant(model, f"{name}/{end}", real, ir.DataType.FLOAT)
        source = nodes[-1].outputs[0] if nodes else value
        nodes.append(ir.node(operation, [source, limit], name=f"{name}/clip_{end}"))
    for node in nodes:
        _describe(node, value, value.dtype)
    model.graph.insert_before(before, nodes)
    return nodes[-1].outputs[0]


def _describe(node: ir.Node, like: ir.Value, dtype: ir.DataType | None) -> None:
    """Names the new value after its node and gives it the shape of what it replaces."""
    output = node.outputs[0]
    output.name = f"{node.name}_output"
    output.shape = like.shape
    if dtype is not None:
        output.type = ir.TensorType(dtype)


def remove_unused_initializers(model: ir.Model) -> None:
    """Drops the float weights that nothing reads any more."""
    initializers = model.graph.initializers
    for name, value in list(initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del initializers[name]
