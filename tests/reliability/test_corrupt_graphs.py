"""Kind 8: a damaged or hostile ONNX file is refused in one line, before anything is written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from quantkit.errors import InputError
from quantkit.onnx_runtime import load_float_graph
from tests.reliability.graph_makers import W1, beside, samples, saved, two_layers
from tests.reliability.one_line import ran, refused

NO_FILE = "there is no such file beside the graph"
OUTSIDE = "outside of the graph's folder, where nothing is read"
Files = Callable[[Path], Path]


def written(content: bytes) -> Files:
    def make(folder: Path) -> Path:
        (folder / "model.onnx").write_bytes(content)
        return folder / "model.onnx"

    return make


def cut(kept: int) -> Files:
    return lambda folder: written(two_layers().SerializeToString()[:kept])(folder)


def changed(change: Callable[[onnx.ModelProto], None]) -> Files:
    def make(folder: Path) -> Path:
        model = two_layers()
        change(model)
        return saved(model, folder / "model.onnx")

    return make


def external(**said: object) -> Files:
    return lambda folder: beside(folder, said)


def weight(array: np.ndarray) -> Files:
    return changed(lambda m: m.graph.initializer[0].CopyFrom(numpy_helper.from_array(array, "w1")))


def shaped(*shape: int) -> Files:
    def change(model: onnx.ModelProto) -> None:
        model.graph.initializer[0].dims[:] = shape

    return changed(change)


def spoilt(value: float) -> Files:
    array = W1.copy()
    array[1, 2] = value
    return weight(array)


def typed(number: int) -> Files:
    def change(model: onnx.ModelProto) -> None:
        model.graph.initializer[0].data_type = number

    return changed(change)


def reading(name: str) -> Files:
    def change(model: onnx.ModelProto) -> None:
        model.graph.node[0].input[0] = name

    return changed(change)


def one_input(model: onnx.ModelProto) -> None:
    model.graph.node[0].input.pop()


def one_name_twice(model: onnx.ModelProto) -> None:
    model.graph.node[1].output[0] = "a"


def short(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].raw_data = b"0123456789"


def short_in_a_branch(model: onnx.ModelProto) -> None:
    """The broken tensor stands in an attribute of a node in a graph in a node."""
    value = [onnx.helper.make_tensor_value_info("t", TensorProto.FLOAT, None)]
    held = numpy_helper.from_array(W1, "deep")
    held.raw_data = b"0123"
    inner = [onnx.helper.make_node("Constant", [], ["t"], value=held)]
    branch = onnx.helper.make_graph(inner, "branch", [], value)
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    model.graph.node.append(
        onnx.helper.make_node("If", ["yes"], ["z"], then_branch=branch, else_branch=branch)
    )


def few_numbers(model: onnx.ModelProto) -> None:
    held = model.graph.initializer[0]
    held.ClearField("raw_data")
    held.float_data.extend([1.0, 2.0])


def gone(folder: Path) -> Path:
    return beside(folder, data=False)


def truncated(folder: Path) -> Path:
    path = beside(folder)
    os.truncate(folder / "w.bin", 90)
    return path


def elsewhere(folder: Path) -> Path:
    """Returns a weights file outside of the graph's folder."""
    path = folder.parent / "secret.bin"
    path.write_bytes(bytes(4096))
    return path


def climbing(folder: Path) -> Path:
    elsewhere(folder)
    return beside(folder, {"location": "../secret.bin", "offset": 0})


def absolute(folder: Path) -> Path:
    return beside(folder, {"location": elsewhere(folder), "offset": 0})


def inside_but_absolute(folder: Path) -> Path:
    return beside(folder, {"location": folder / "w.bin"})


def linked(to: Callable[[Path], object], at: str = "w.bin") -> Files:
    def make(folder: Path) -> Path:
        path = beside(folder, data=False)
        (folder / at).symlink_to(str(to(folder)))
        return path

    return make


def linked_folder(folder: Path) -> Path:
    path = beside(folder, {"location": "sub/secret.bin", "offset": 0})
    elsewhere(folder)
    (folder / "sub").symlink_to(folder.parent)
    return path


def hard_link(folder: Path) -> Path:
    path = beside(folder)
    os.link(folder / "w.bin", folder / "again.bin")
    return path


def pipe(folder: Path) -> Path:
    path = beside(folder, data=False)
    os.mkfifo(folder / "w.bin")
    return path


BAD: dict[str, tuple[Files, str]] = {
    "an empty file": (written(b""), "holds no ONNX graph"),
    "random bytes": (written(bytes(range(255, 0, -1)) * 9), "cannot be read as an ONNX file"),
    "a web page": (written(b"<html></html>"), "cannot be read as an ONNX file"),
    "half a file": (cut(120), "cannot be read as an ONNX file. The file is damaged: get it"),
    "a byte too few": (cut(-1), "cannot be read as an ONNX file"),
    "no nodes": (changed(lambda m: m.graph.ClearField("node")), "expected at least one node"),
    "no graph": (changed(lambda m: m.ClearField("graph")), "expected at least one node"),
    "a tensor's bytes cut": (changed(short), "has 10 bytes, expected 96 bytes of FLOAT [4, 6]"),
    "a tensor's bytes cut, deep": (changed(short_in_a_branch), "'deep' has 4 bytes, expected 96"),
    "a tensor's numbers cut": (changed(few_numbers), "has 2 numbers, expected 96 bytes"),
    "an absurd shape": (shaped(2**31, 2**31), "has 96 bytes, expected 18446744073709551616"),
    "a negative shape": (shaped(-4, -6), "has the shape [-4, -6]: expected sizes of at least 0"),
    "an unknown type": (typed(99), "has the type 99, which ONNX does not know"),
    "no type": (typed(0), "has the type 0"),
    "strings as weights": (weight(np.full((4, 6), "x", object)), "'tensor(string)'"),
    "NaN in a weight": (spoilt(np.nan), "the weight of 'first' holds 1 NaN or inf values"),
    "inf in a weight": (spoilt(np.inf), "the weight of 'first' holds 1 NaN or inf values"),
    "a circle": (reading("y"), "not acyclic"),
    "an input from nowhere": (reading("nowhere"), "Node input 'nowhere' is not a graph input"),
    "a node without its input": (changed(one_input), "INVALID_GRAPH"),
    "two values of one name": (changed(one_name_twice), "cannot be read as an ONNX file"),
    "weights that are not there": (gone, NO_FILE),
    "weights cut": (truncated, "ends at byte 96 of 'w.bin', which has 90: it was cut short"),
    "an offset behind the end": (external(offset=10**9), "ends at byte 1000000096 of 'w.bin'"),
    "an offset of 2^64": (external(offset=2**64), "ends at byte 18446744073709551712"),
    "a negative offset": (external(offset=-8), "ends at byte 88 of 'w.bin'"),
    "an offset in words": (external(offset="x"), "lies at no place that can be read"),
    "a length behind the end": (external(length=10**9), "has 1000000000 bytes, expected 96"),
    "a short length": (external(length=8), "has 8 bytes, expected 96 bytes of FLOAT [4, 6]"),
    "an empty place": (external(location=""), OUTSIDE),
    "the folder itself": (external(location="."), NO_FILE),
    "NUL in a place": (external(location="w\0.bin"), "lies at no place that can be read"),
    "the graph itself": (external(location="model.onnx", offset=9**9), "ends at byte"),
    "an absolute path": (absolute, OUTSIDE),
    "an absolute path to its own folder": (inside_but_absolute, OUTSIDE),
    "a file of the system": (external(location="/etc/passwd"), OUTSIDE),
    "an endless file": (external(location="/dev/zero"), OUTSIDE),
    "a path upwards": (climbing, OUTSIDE),
    "a link out of the folder": (linked(elsewhere), OUTSIDE),
    "a folder that is a link outwards": (linked_folder, OUTSIDE),
    "a link to nothing": (linked(lambda folder: folder / "none"), NO_FILE),
    "a link to itself": (linked(lambda folder: folder / "w.bin"), "at no place that can be read"),
    "a hard link": (hard_link, "has 2 hard links, so that it may be another's file: copy it"),
    "a pipe": (pipe, NO_FILE),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net").mkdir()
    return tmp_path / "net"


@pytest.mark.kind(8, "export", "cli")
@pytest.mark.parametrize("name", BAD)
def test_export_refuses_it_in_one_line(name: str, folder: Path, tmp_path: Path) -> None:
    make, said = BAD[name]
    path, out = make(folder), tmp_path / "out"
    line = refused("export", path, "--calib", samples(tmp_path / "x.npz"), "-q", "--out", out)
    assert said in line
    assert not out.exists()


@pytest.mark.kind(8, "diagnose")
@pytest.mark.parametrize("which", ["float", "quantized"])
@pytest.mark.parametrize(
    "name", ["half a file", "no nodes", "weights that are not there", "a path upwards", "a pipe"]
)
def test_diagnose_refuses_it_in_one_line(
    name: str, which: str, folder: Path, tmp_path: Path
) -> None:
    make, said = BAD[name]
    bad, good, out = make(folder), saved(two_layers(), tmp_path / "good.onnx"), tmp_path / "out"
    files = (bad, good) if which == "float" else (good, bad)
    npz = samples(tmp_path / "x.npz")
    assert said in refused("diagnose", *files, "--calib", npz, "-q", "--out", out)
    assert not out.exists()


@pytest.mark.kind(8, "models")
@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_byte_is_an_error_of_ours_or_none(seed: int, tmp_path: Path) -> None:
    """100 files each: nothing but InputError comes out, whatever the byte was."""
    whole, rng = two_layers().SerializeToString(), np.random.default_rng(seed)
    path = tmp_path / "net.onnx"
    outcomes = {"read": 0, "refused": 0}
    for _ in range(100):
        data = bytearray(whole)
        data[rng.integers(len(data))] = rng.integers(256)
        path.write_bytes(data)
        try:
            load_float_graph(path)
            outcomes["read"] += 1
        except InputError as error:
            assert "\n" not in str(error)
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 0


@pytest.mark.kind(8, "export")
def test_a_link_within_the_folder_is_followed(folder: Path, tmp_path: Path) -> None:
    path = beside(folder)
    (folder / "w.bin").rename(folder / "real.bin")
    (folder / "w.bin").symlink_to("real.bin")
    options = ("--samples", 4, "--eval-samples", 2, "-q", "--out", tmp_path / "out")
    ran("export", path, "--calib", samples(tmp_path / "x.npz"), *options)
    assert (tmp_path / "out" / "export.json").is_file()
