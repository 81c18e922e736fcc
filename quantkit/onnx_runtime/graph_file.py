"""An ONNX file somebody gave -> `onnx_ir`, its weights checked before anything reads them.

A file says where its weights lie and how many bytes they have. Neither is believed: weights lie in
regular files at or below the graph's folder, links followed, and every tensor has exactly the bytes
of its shape and type, in the file or beside it. No weight is read from its own file here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Final

import onnx
import onnx_ir as ir

from quantkit.errors import InputError

_ALIAS: Final = "ai.onnx"
"""ONNX's own domain, spelled out: the same as the empty name, which is what all passes look for."""
_FIELDS: Final = ("float_data", "int32_data", "string_data", "int64_data", "double_data",
                  "uint64_data")  # fmt: skip
_AGAIN: Final = "The file is damaged: get it or export it again."

for _name in ("onnx_ir", "onnxscript"):
    # where nobody set up logging, Python writes their warnings to stderr, some with a traceback;
    # what matters of them is raised, and whoever asks for these loggers still hears them
    logging.getLogger(_name).addHandler(logging.NullHandler())


def read_graph(path: Path) -> ir.Model:
    """Returns the graph; weights that lie beside it stay in their file.

    Raises:
        InputError: no such file, or it is no ONNX file; a tensor whose bytes are not those of its
            shape and type; weights outside of the graph's folder, or in no regular file.
    """
    if not path.is_file():
        raise InputError(f"no ONNX file {path}.")
    try:
        proto = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf raises types of its own
        raise InputError(f"{path} cannot be read as an ONNX file. {_AGAIN}") from error
    for graph in (proto.graph, *_inner_graphs(proto.graph)):
        if graph.sparse_initializer:
            name = graph.sparse_initializer[0].values.name
            raise InputError(f"{path}: the weight {name!r} is sparse: expected dense ones.")
    for tensor in _tensors(proto):
        fault = _fault(tensor, path.parent)
        if fault:
            raise InputError(f"{path}: the tensor {tensor.name!r} {fault}")
    _use_one_name(proto)
    try:
        model = ir.from_proto(proto)
    except Exception as error:  # onnx_ir raises types of its own
        raise InputError(f"{path} cannot be read as an ONNX file. {_AGAIN}") from error
    ir.external_data.set_base_dir(model.graph, path.parent)
    return model


def _nodes(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    for graph in (proto.graph, *proto.functions, *_inner_graphs(proto.graph)):
        yield from graph.node
    for function in proto.functions:
        for graph in _inner_graphs(function):
            yield from graph.node


def _inner_graphs(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.GraphProto]:
    """Yields the graphs inside of nodes, at any depth; protobuf itself ends at a depth of 100."""
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield inner
                yield from _inner_graphs(inner)


def _tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for graph in (proto.graph, *_inner_graphs(proto.graph)):
        yield from graph.initializer
    for node in _nodes(proto):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


def _fault(tensor: onnx.TensorProto, folder: Path) -> str:
    """Returns what is wrong with a tensor as it stands in the file; empty where nothing is."""
    shape = list(tensor.dims)
    if any(size < 0 for size in shape):
        return f"has the shape {shape}: expected sizes of at least 0. {_AGAIN}"
    try:
        dtype = ir.DataType(tensor.data_type)
    except ValueError:
        dtype = ir.DataType.UNDEFINED
    if dtype == ir.DataType.UNDEFINED:
        return f"has the type {tensor.data_type}, which ONNX does not know. {_AGAIN}"
    if dtype == ir.DataType.STRING:
        return ""
    expected = (prod(shape) * dtype.bitwidth + 7) // 8
    of = f"{expected} bytes of {dtype.name} {shape}"
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return _external_fault(tensor, folder, expected, of)
    if tensor.HasField("raw_data"):
        found = len(tensor.raw_data)
        return "" if found == expected else f"has {found} bytes, expected {of}. {_AGAIN}"
    count = sum(len(getattr(tensor, field)) for field in _FIELDS)
    packed = (prod(shape) + 1) // 2 if dtype.bitwidth < 8 else prod(shape)
    if dtype in (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128):
        packed *= 2
    return "" if count in (prod(shape), packed) else f"has {count} numbers, expected {of}. {_AGAIN}"


def _external_fault(tensor: onnx.TensorProto, folder: Path, expected: int, of: str) -> str:
    said = {entry.key: entry.value for entry in tensor.external_data}
    location = said.get("location", "")
    try:
        offset, length = (int(said.get(key, default)) for key, default in
                          (("offset", "0"), ("length", str(expected))))  # fmt: skip
        where = (folder / location).resolve()
        is_inside = bool(location) and where.is_relative_to(folder.resolve())
    except (ValueError, OSError, RuntimeError):  # no number; a name with NUL; links in a circle
        return f"lies at no place that can be read ({location!r:.80}). {_AGAIN}"
    if not is_inside or Path(location).is_absolute():
        return (
            f"lies in {location!r:.80}, outside of the graph's folder, where nothing is read: put "
            "the weights beside the graph, as a file and not as a link."
        )
    if not where.is_file():
        return f"lies in {location!r:.80}, and there is no such file beside the graph: get it, too."
    if length != expected:
        return f"has {length} bytes, expected {of}. {_AGAIN}"
    status = where.stat()
    if not 0 <= offset <= status.st_size - expected:
        return (
            f"ends at byte {offset + expected} of {location!r:.80}, which has {status.st_size}: it "
            "was cut short, or belongs to another graph. Get it again."
        )
    if status.st_nlink > 1:  # onnx_ir reads none of these
        return (
            f"lies in {location!r:.80}, which has {status.st_nlink} hard links, so that it may be "
            "another's file: copy it, and put the copy in its place."
        )
    return ""


def _use_one_name(proto: onnx.ModelProto) -> None:
    """Calls ONNX's own domain by its empty name throughout."""
    for imports in (proto.opset_import, *(function.opset_import for function in proto.functions)):
        names = {entry.domain for entry in imports}
        for entry in imports:
            if entry.domain == _ALIAS and "" not in names:
                entry.domain = ""
    for node in _nodes(proto):
        if node.domain == _ALIAS:
            node.domain = ""
