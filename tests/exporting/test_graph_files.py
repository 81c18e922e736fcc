"""Written graphs: the same bytes every time, weights beside them, whole or not there at all."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from quantkit.errors import InputError
from quantkit.exporting.graphs import PROTOBUF_BYTES, constant, load_graph, save_graph
from tests.exporting.conftest import Exported

ROOT = Path(__file__).parents[2]
WRITE = """
import sys
from pathlib import Path
from quantkit.exporting.graphs import load_graph, save_graph
from quantkit.exporting.linears import find_linears
from quantkit.exporting.rewrite_linear import quantize_linears
from quantkit.recipe import Recipe

model = load_graph(Path(sys.argv[1]))
recipe = Recipe.parse("w8a8:token:symmetric")
quantize_linears(model, find_linears(model), recipe, ranges={}, keep=())
save_graph(model, Path(sys.argv[2]))
"""


def summing(fill: float = 1.0, size: int = 1000) -> ir.Model:
    """A graph `y = x + weight` with `size` floats of weights."""
    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            [onnx.helper.make_node("Add", ["x", "weight"], ["y"], name="sum")],
            "g",
            [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [size])],
            [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [size])],
            [onnx.numpy_helper.from_array(np.full(size, fill, np.float32), "weight")],
        ),
        opset_imports=[onnx.helper.make_opsetid("", 21)],
        ir_version=10,
    )
    return ir.from_proto(model)


def total(path: Path, size: int = 1000) -> float:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return float(session.run(None, {"x": np.zeros(size, np.float32)})[0].sum())


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_two_processes_write_the_same_bytes(
    exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    source = exported("llama").path
    running = [
        subprocess.Popen(
            [sys.executable, "-c", WRITE, str(source), str(tmp_path / seed)],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
        )
        for seed in ("1", "4242")
    ]
    assert [process.wait() for process in running] == [0, 0]
    first, second = files(tmp_path / "1"), files(tmp_path / "4242")
    assert sorted(first) == ["model.onnx", "model.onnx.data"]
    assert first["model.onnx"] != source.read_bytes()
    digests = [{name: hashlib.sha256(of[name]).digest() for name in of} for of in (first, second)]
    assert digests[0] == digests[1]


@pytest.mark.kind(6, "export")
@pytest.mark.parametrize(
    ("external_bytes", "names"),
    [
        (0, ["model.onnx", "model.onnx.data"]),
        (3999, ["model.onnx", "model.onnx.data"]),
        (4000, ["model.onnx"]),
    ],
    ids=["by default", "one byte too many", "just fits"],
)
def test_weights_beyond_the_threshold_go_beside_the_graph(
    tmp_path: Path, external_bytes: int, names: list[str]
) -> None:
    path = save_graph(summing(), tmp_path, external_bytes=external_bytes)
    assert sorted(files(tmp_path)) == names
    assert total(path) == 1000
    onnx.checker.check_model(str(path), full_check=True)


def test_a_graph_in_one_file_leaves_no_old_weights_behind(tmp_path: Path) -> None:
    save_graph(summing(1.0), tmp_path)
    path = save_graph(summing(2.0), tmp_path, external_bytes=4000)
    assert sorted(files(tmp_path)) == ["model.onnx"]
    assert total(path) == 2000


@pytest.mark.kind(6, "export")
@pytest.mark.parametrize("external_bytes", [-1, PROTOBUF_BYTES + 1, 2**31])
def test_more_than_a_protobuf_holds_is_never_asked_of_one(
    tmp_path: Path, external_bytes: int
) -> None:
    with pytest.raises(InputError, match=r"less than 2 GB\), got -?\d+\.$"):
        save_graph(summing(), tmp_path, external_bytes=external_bytes)
    assert not files(tmp_path)


def test_a_graph_is_written_over_the_weights_that_it_reads(tmp_path: Path) -> None:
    path = save_graph(summing(3.0), tmp_path)
    model = load_graph(path)
    constant(model, "another", np.arange(5000, dtype=np.float32), ir.DataType.FLOAT)
    save_graph(model, tmp_path)
    assert total(path) == 3000


@pytest.mark.kind(6, "export")
def test_any_folder_name_does(tmp_path: Path) -> None:
    path = save_graph(summing(), tmp_path / "Größe 25 %" / "мої моделі", "модель ü.onnx")
    assert total(path) == 1000
    assert [tensor.name for tensor in load_graph(path).graph.initializers.values()] == ["weight"]


@pytest.mark.kind(6, "export")
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"^cannot write .*file/model\.onnx: .*\.$") as error:
        save_graph(summing(), tmp_path / "file")
    assert "\n" not in str(error.value)


@pytest.mark.kind(6, "export")
@pytest.mark.parametrize("stopped", [0, 1, 2, 3, 4], ids=lambda n: f"at move {n + 1}")
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_is_stopped_midway_leaves_the_old_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: int, error: BaseException
) -> None:
    save_graph(summing(1.0), tmp_path)
    before = files(tmp_path)
    replace, moves = os.replace, iter(range(100))

    def failing(*arguments: Any) -> None:
        if next(moves) == stopped:
            raise error
        replace(*arguments)

    monkeypatch.setattr(os, "replace", failing)
    expected = InputError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        save_graph(summing(2.0, size=3000), tmp_path)
    assert files(tmp_path) == before


@pytest.mark.kind(6, "export")
def test_what_cannot_be_serialized_leaves_the_old_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_graph(summing(1.0), tmp_path)
    before = files(tmp_path)

    def half(model: ir.Model, path: Path, **_: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ir, "save", half)
    with pytest.raises(InputError, match="No space left on device"):
        save_graph(summing(2.0), tmp_path)
    assert files(tmp_path) == before
