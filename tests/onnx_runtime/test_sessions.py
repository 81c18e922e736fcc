"""A file is run optimised, bytes as they are written; refusals are one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantkit.errors import InputError
from quantkit.onnx_runtime import open_graph
from quantkit.onnx_runtime.sessions import MESSAGE, first_line


def written(path: Path) -> Path:
    """A product and a Tanh, and the weight in a file of its own."""
    weight = np.arange(600, dtype=np.float32).reshape(20, 30)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Tanh", ["a"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("rows", 20))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(weight, "w")],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(made, path, save_as_external_data=True, location="w.data", size_threshold=0)
    return path


def test_bytes_find_their_weights_beside_the_file(tmp_path: Path) -> None:
    path = written(tmp_path / "m.onnx")
    model = onnx.load(path, load_external_data=False)
    model.graph.output[0].name = model.graph.node[0].output[0]
    x = np.eye(20, dtype=np.float32)
    (found,) = open_graph(path, model.SerializeToString(), threads=1).run(None, {"x": x})
    np.testing.assert_array_equal(found, np.arange(600).reshape(20, 30))
    (whole,) = open_graph(path).run(None, {"x": x})
    np.testing.assert_allclose(whole, np.tanh(found), atol=1e-6)


@pytest.mark.kind(8, "export")
@pytest.mark.parametrize("as_bytes", [False, True], ids=["file", "bytes"])
def test_a_graph_that_is_refused_is_one_line(tmp_path: Path, as_bytes: bool) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"no graph")
    with pytest.raises(InputError, match=r"ONNX Runtime cannot load .*m\.onnx: ") as error:
        open_graph(path, path.read_bytes() if as_bytes else None)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("\n first\nsecond"), "first"),
        (RuntimeError("x" * 999), "x" * MESSAGE),
        (RuntimeError(), "RuntimeError"),
    ],
    ids=["many lines", "long", "mute"],
)
def test_the_first_line_of_an_error(error: Exception, said: str) -> None:
    assert first_line(error) == said
