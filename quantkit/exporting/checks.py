"""What a written graph is checked for: ONNX's own checks, and what a client would trip over later.

Everything is read from the file, since that is what a client gets. Weights stay in their file: a
graph of 500 MB takes about a second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from quantkit.errors import GateError, InputError
from quantkit.exporting.graphs import load_graph

NARROW_OPSET: Final = 21
"""The first opset whose QuantizeLinear and DequantizeLinear know 4 and 16 bits, and blocks."""
STANDARD: Final = "ai.onnx"
_NARROW = (ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.INT16, ir.DataType.UINT16)
_QUANTIZE, _DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
_SCALED = (_QUANTIZE, _DEQUANTIZE)
_INTEGER_TYPES = (*_NARROW, ir.DataType.INT8, ir.DataType.UINT8)
_INTEGER_PRODUCTS = ("MatMulInteger", "ConvInteger")
_SHOWN = 300


def check_graph(
    path: Path,
    domains: Collection[str],
    *,
    unread: Collection[str] = (),
    schemas: bool = True,
) -> None:
    """Returns where the file holds what it should; subgraphs and functions are looked into as well.

    ONNX's checker and strict shape inference with data propagation (nodes of other domains than
    ONNX's have no schema there and are passed over, what is around them is not); weights that lie
    whole beside the graph; operator domains; an opset that knows the integers; scales that are
    finite and above 0; a reader for every quantized value, graph input and initializer.

    Args:
        domains: Those that the graph may use, `ai.onnx` for ONNX's own.
        unread: Inputs that nothing need read, of a file that somebody else wrote so.
        schemas: Whether ONNX's checker is asked; not where it refuses the file it was made of.

    Raises:
        InputError: no such file, or it is no ONNX file.
        GateError: one line with the node and its fault.
    """
    try:
        model = load_graph(path)
    except InputError:
        raise
    except Exception as error:  # protobuf and onnx_ir raise types of their own
        raise InputError(f"{path} cannot be read as an ONNX file.") from error
    _check_domains(model, path, domains)
    _check_data_files(model, path)
    _check_opset(model, path)
    _check_scales(model, path)
    _check_readers(model, path, unread)
    said = schema_fault(path) if schemas else ""
    if said:
        raise _fault(path, f"ONNX's checker says: {said}")


def _check_domains(model: ir.Model, path: Path, domains: Collection[str]) -> None:
    for node in _nodes(model):
        domain = node.domain or STANDARD
        if domain not in domains:
            raise _fault(
                path,
                f"{_place(node)} is of the operator domain {domain}; expected "
                f"{' or '.join(sorted(domains))}",
            )


def _check_data_files(model: ir.Model, path: Path) -> None:
    for name, value in _initializers(model):
        tensor = value.const_value
        if tensor is None:
            raise _fault(path, f"the initializer {name!r} has no value")
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        where = path.parent / tensor.location
        if not where.resolve().is_relative_to(path.parent.resolve()):
            raise _fault(path, f"the weights of {name!r} lie outside its folder: {where}")
        if not where.is_file():
            raise _fault(path, f"the weights of {name!r} lie in {where}, which is not there")
        end, size = (tensor.offset or 0) + (tensor.length or 0), where.stat().st_size
        if end > size:
            raise _fault(
                path, f"the weights of {name!r} end at byte {end} of {where}, which has {size}"
            )


def _check_opset(model: ir.Model, path: Path) -> None:
    opset = model.opset_imports.get("", model.opset_imports.get(STANDARD))
    if opset is None or opset >= NARROW_OPSET:
        return
    for node in _nodes(model):
        if node.op_type not in _SCALED or node.domain not in ("", STANDARD):
            continue
        types = [value.dtype for value in (*node.inputs, *node.outputs) if value is not None]
        narrow = [dtype.name for dtype in types if dtype in _NARROW]
        blocks = ["blocks"] if node.attributes.get_int("block_size", 0) else []
        for what in narrow + blocks:
            raise _fault(
                path,
                f"{_place(node)} takes {what}, which is from opset {NARROW_OPSET} on; the graph "
                f"has opset {opset}",
            )


def _check_scales(model: ir.Model, path: Path) -> None:
    for node in _nodes(model):
        if node.op_type not in _SCALED or node.domain not in ("", STANDARD):
            continue
        scale = _constant(node.inputs[1])
        if scale is None:
            continue  # computed as the graph runs
        bad = scale[~(np.isfinite(scale) & (scale > 0))]
        if bad.size:
            raise _fault(
                path,
                f"{_place(node)} has the scale {float(bad.flat[0]):g} ({bad.size} of {scale.size} "
                "are no finite numbers above 0)",
            )


def _check_readers(model: ir.Model, path: Path, unread: Collection[str]) -> None:
    for node in _nodes(model):
        if node.op_type == _QUANTIZE and not _is_read_as_real(node.outputs[0]):
            raise _fault(path, f"no DequantizeLinear reads what {_place(node)} writes")
    for value in model.graph.inputs:
        if not value.uses() and not value.is_graph_output() and value.name not in unread:
            raise _fault(path, f"nothing reads the graph input {value.name!r}")
    for name, value in _initializers(model):
        if not value.uses() and not value.is_graph_output():
            raise _fault(path, f"nothing reads the initializer {name!r}")


def _is_read_as_real(integers: ir.Value) -> bool:
    """Whether integers reach a DequantizeLinear, a product of integers or an output of the graph.

    They may be clipped, moved and joined on the way (a cache in 8 bits is).
    """
    seen: set[int] = set()
    waiting = [integers]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if value.is_graph_output():
            return True
        for node, _ in value.uses():
            if node.op_type == _DEQUANTIZE or node.op_type in _INTEGER_PRODUCTS:
                return True
            if node.op_type.startswith("QLinear") or node.op_type == "Cast":
                return True  # integer products of old, and a conversion spelled out
            if node.op_type != "Shape":
                waiting.extend(node.outputs)
    return False


def schema_fault(path: Path) -> str:
    """Returns what ONNX's own checks say of a file, in one line; empty where it passes.

    They are given the path, so that they find external data and know no limit of 2 GB.
    """
    try:
        onnx.checker.check_model(str(path), full_check=True)
        # data propagation is not among them: shapes that are computed from shapes
        skeleton = onnx.load(str(path), load_external_data=False)
        onnx.shape_inference.infer_shapes(
            skeleton, check_type=True, strict_mode=True, data_prop=True
        )
    except Exception as error:  # onnx's two classes share no base but Exception
        return " ".join(str(error).split())[:_SHOWN].rstrip(".")
    return ""


def _constant(value: ir.Value | None) -> NDArray[np.float64] | None:
    """Returns an initializer's or Constant node's numbers as float64, else None."""
    if value is None:
        return None
    tensor = value.const_value
    producer = value.producer()
    if tensor is None and producer is not None and producer.op_type == "Constant":
        with contextlib.suppress(KeyError, TypeError):
            tensor = producer.attributes["value"].as_tensor()
    return None if tensor is None else np.asarray(tensor.numpy(), np.float64)


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def _initializers(model: ir.Model) -> Iterator[tuple[str, ir.Value]]:
    for graph in model.graphs():
        yield from graph.initializers.items()


def _place(node: ir.Node) -> str:
    output = node.outputs[0].name if node.outputs else ""
    return f"the {node.op_type} {(node.name or output or 'without a name')!r}"


def _fault(path: Path, said: str) -> GateError:
    return GateError(f"{path}: {said}.")
