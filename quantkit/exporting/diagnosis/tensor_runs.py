"""Tensors of a graph, run as it is written, a bounded number of bytes at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from quantkit.errors import InputError
from quantkit.onnx_runtime.graph_tensors import load_float_graph, shapes_of
from quantkit.onnx_runtime.sessions import MESSAGE, first_line, open_graph

Arrays = Mapping[str, NDArray[Any]]
_BYTES: Final = 4


class TensorRuns:
    """The part of one graph that computes some of its tensors."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self.path, self.names = path, list(dict.fromkeys(names))
        if self.names:
            self.session = open_graph(path, _part(path, self.names))

    def run(self, feeds: Arrays) -> dict[str, NDArray[Any]]:
        """Returns the tensors of one batch by name; the graph takes what it needs of `feeds`."""
        if not self.names:
            return {}
        return dict(zip(self.names, run(self.session, self.names, feeds, self.path), strict=True))


def run(
    session: ort.InferenceSession, names: Sequence[str] | None, feeds: Arrays, path: Path
) -> list[NDArray[Any]]:
    """Returns outputs of a session.

    Raises:
        InputError: a missing input, or a shape or type that the graph refuses.
    """
    wanted = [value.name for value in session.get_inputs()]
    missing = [name for name in wanted if name not in feeds]
    if missing:
        raise InputError(
            f"{path} reads {missing[0]!r}, which the samples lack: they hold "
            f"{', '.join(feeds) or 'nothing'}."
        )
    try:
        found = session.run(names, {name: feeds[name] for name in wanted})
    except Exception as error:
        shapes = ", ".join(f"{name} {list(feeds[name].shape)}" for name in wanted)
        raise InputError(
            f"ONNX Runtime cannot run {path}: {first_line(error)} (given {shapes[:MESSAGE]})"
        ) from error
    return list(found)


def _part(path: Path, names: Sequence[str]) -> bytes:
    """Returns the serialized part that computes these tensors, with the inputs that it needs."""
    model = load_float_graph(path)
    values = {str(v.name): v for v in (*model.graph.inputs, *model.graph.initializers.values())}
    values |= {str(v.name): v for node in model.graph for v in node.outputs}
    model.graph.outputs.clear()
    model.graph.outputs.extend(values[name] for name in names)
    RemoveUnusedNodesPass()(model)
    for value in list(model.graph.inputs):
        if not value.uses() and not value.is_graph_output():
            model.graph.inputs.remove(value)
    return bytes(ir.to_proto(model).SerializeToString())


def tensor_bytes(path: Path, names: Sequence[str], feeds: Arrays) -> dict[str, int]:
    """Returns how much each tensor takes in this batch, at 4 bytes an element."""
    if not names:
        return {}
    session = open_graph(path, shapes_of(load_float_graph(path), names))
    shapes = run(session, [value.name for value in session.get_outputs()], feeds, path)
    return {name: prod(s.tolist()) * _BYTES for name, s in zip(names, shapes, strict=True)}


def dealt(costs: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Yields indices in runs whose costs are at most `limit` together, or one index."""
    group: list[int] = []
    held = 0
    for index, cost in enumerate(costs):
        if group and held + cost > limit:
            yield group
            group, held = [], 0
        group.append(index)
        held += cost
    if group:
        yield group


def as_float(values: NDArray[Any]) -> NDArray[np.float32]:
    """Returns numbers as float32; it does not copy what is that already."""
    return np.asarray(values, np.float32)
