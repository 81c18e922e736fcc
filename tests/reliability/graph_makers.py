"""Two layers with something between them, as an ONNX graph and in numpy; weights beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Array = NDArray[np.float32]
WIDE, MIDDLE, OUT = 4, 6, 3


def _drawn(*shape: int) -> Array:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


W1, W2 = _drawn(WIDE, MIDDLE), _drawn(MIDDLE, OUT)
ROWS = _drawn(12, WIDE)


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def numpys(x: Array, between: Callable[[Array], Array] = relu) -> Array:
    """Returns what the graph computes."""
    return between(x @ W1) @ W2


def two_layers(opset: int = 21, ir_version: int = 10) -> onnx.ModelProto:
    """From x [batch, 4]: MatMul `first`, Relu `act`, MatMul `last`, to y of no stated shape."""
    node = helper.make_node
    graph = helper.make_graph(
        [
            node("MatMul", ["x", "w1"], ["a"], "first"),
            node("Relu", ["a"], ["b"], "act"),
            node("MatMul", ["b", "w2"], ["y"], "last"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(W1, "w1"), numpy_helper.from_array(W2, "w2")],
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version
    )


def saved(model: onnx.ModelProto, path: Path) -> Path:
    """Writes the graph as it is, sound or not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())
    return path


def samples(path: Path) -> Path:
    np.savez(path, x=ROWS)
    return path


def beside(folder: Path, said: dict[str, object] | None = None, *, data: bool = True) -> Path:
    """Writes the graph with its weights in `w.bin`.

    Args:
        said: What the file says of the place of its first weight, in place of the truth.
        data: Whether `w.bin` is there.
    """
    model, whole = two_layers(), b""
    for tensor in model.graph.initializer:
        raw = tensor.raw_data
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        true: dict[str, object] = {"location": "w.bin", "offset": len(whole), "length": len(raw)}
        for key, value in (true | ((said or {}) if tensor.name == "w1" else {})).items():
            tensor.external_data.add(key=key, value=str(value))
        whole += raw
    path = saved(model, folder / "model.onnx")
    if data:
        (folder / "w.bin").write_bytes(whole)
    return path
