"""`quantkit diagnose` from two files to its table, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import typer
from onnx import TensorProto, helper
from typer.testing import CliRunner

from quantkit.cli.diagnose import diagnose
from quantkit.cli.doctor import doctor
from quantkit.cli.group import OneLineErrors
from quantkit.results import Diagnosis, read_json
from tests.exporting.planted_graphs import Block, block, quantized, saved

app = typer.Typer(cls=OneLineErrors, pretty_exceptions_enable=False, rich_markup_mode=None)
for command in (diagnose, doctor):
    app.command()(command)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def made() -> Block:
    return block()


@pytest.fixture
def files(made: Block, tmp_path: Path) -> tuple[Path, Path, Path]:
    """The float graph, one with a planted fault, and samples."""
    npz = tmp_path / "x.npz"
    np.savez(npz, x=np.concatenate([feeds["x"] for feeds in made.batches]))
    grids = made.clean() | {"act": (0.2 / 255, 128)}
    return (
        saved(made.model, tmp_path / "float.onnx"),
        saved(quantized(made, grids), tmp_path / "int8.onnx"),
        npz,
    )


def invoke(*arguments: Any) -> tuple[int, str, str]:
    words = ["diagnose", *(str(a) for a in arguments)]
    result = CliRunner().invoke(app, words, prog_name="quantkit")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def refused(*arguments: Any) -> str:
    code, out, err = invoke(*arguments)
    assert (code, out) == (2, ""), err
    assert re.fullmatch(r"error: [^\n]+\n", err), err
    return err


def test_a_run(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    one, other, npz = files
    code, out, err = invoke(one, other, "--calib", npz, "--out", "run")
    assert code == 0, err
    assert out.startswith(f"Diagnosis: {other} against {one}\n3 samples; ")
    assert re.search(r"^  1\. input of down: \d+\.\d % of the damage, saturation \(costly\)$", out,
                     re.MULTILINE)  # fmt: skip
    assert "try: calibrate on data like these" in out
    assert all(len(line) <= 100 for line in out.splitlines()[2:])
    result = read_json(tmp_path / "run" / "diagnosis.json", Diagnosis)
    assert result.data.sequences == 3 and len(set(result.data.block_hashes)) == 3
    date = (tmp_path / "run" / "diagnosis.json").stat().st_mtime_ns
    code, out, err = invoke(one, other, "--calib", npz, "--out", "run", "--json", "--quiet")
    assert (code, err) == (0, "")
    assert out == (tmp_path / "run" / "diagnosis.json").read_text()
    assert (tmp_path / "run" / "diagnosis.json").stat().st_mtime_ns == date


def test_the_default_folder_is_called_after_the_quantized_file(
    files: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    one, other, npz = files
    assert invoke(one, other, "--calib", npz, "--samples", 1, "--quiet") == (0, "", "")
    (folder,) = (tmp_path / "reports").iterdir()
    assert re.fullmatch(r"diagnose-int8-[0-9a-f]{10}", folder.name)
    assert read_json(folder / "diagnosis.json", Diagnosis).data.sequences == 1


def test_a_file_that_changed_since_is_refused(files: tuple[Path, Path, Path], made: Block) -> None:
    one, other, npz = files
    arguments = (one, other, "--calib", npz, "--samples", 1, "--out", "run")
    assert invoke(*arguments, "--quiet")[0] == 0
    saved(quantized(made, made.clean()), other)
    assert "it changed since" in refused(*arguments)
    assert invoke(*arguments, "--quiet", "--force")[0] == 0


def test_nothing_to_blame(files: tuple[Path, Path, Path], made: Block, tmp_path: Path) -> None:
    one, _, npz = files
    good = saved(quantized(made, made.clean()), tmp_path / "good.onnx")
    code, out, _ = invoke(one, good, "--calib", npz, "--out", "run")
    assert code == 0
    assert "Nothing to blame" in out and "the graphs part nowhere by 10 % or more" in out


@pytest.mark.kind(8, "diagnose", "cli")
def test_bad_input(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    one, other, npz = files
    assert "Swap them" in refused(other, one, "--calib", npz)
    assert "same graph" in refused(one, one, "--calib", npz)
    assert "no ONNX file" in refused(one, "none.onnx", "--calib", npz)
    assert "two .onnx files" in refused(one, "model.gguf")
    assert "give --calib a .npz" in refused(one, other)
    assert "no such file" in refused(one, other, "--calib", "none.npz")
    np.savez(tmp_path / "other.npz", z=np.zeros((2, 3), np.float32))
    assert "the graph has no input 'z'" in refused(one, other, "--calib", tmp_path / "other.npz")
    np.savez(tmp_path / "wide.npz", x=np.zeros((2, 48, 17), np.float32))
    assert "cannot run" in refused(one, other, "--calib", tmp_path / "wide.npz")
    (tmp_path / "broken.onnx").write_bytes(b"no graph")
    assert "ONNX" in refused(one, tmp_path / "broken.onnx", "--calib", npz)
    assert "--samples" in refused(one, other, "--samples", 0)
    assert "--top" in refused(one, other, "--top", 0)
    assert not list((tmp_path / "reports").iterdir())  # nothing is left of what cannot run


def scorer(weight: np.ndarray[Any, Any], path: Path, *, bias: float = 0.0) -> Path:
    """Logits = table[input_ids] * mask @ weight + bias, `[batch, sequence, 6]`."""
    table = np.random.default_rng(0).normal(size=(300, 8)).astype(np.float32)
    offset = np.full(6, bias, np.float32)
    constants = {"table": table, "w": weight, "axes": np.array([-1]), "offset": offset}
    integers = {name: (TensorProto.INT64, ["batch", "sequence"]) for name in ("ids", "mask")}
    names = {"ids": "input_ids", "mask": "attention_mask"}
    node = helper.make_node
    nodes = [
        node("Gather", ["table", "input_ids"], ["rows"]),
        node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["mask", "axes"], ["column"]),
        node("Mul", ["rows", "column"], ["seen"]),
    ]
    read = "w"
    if weight.dtype == np.int8:
        nodes.append(node("DequantizeLinear", ["w", "scale"], ["w_real"]))
        read, constants["scale"] = "w_real", np.float32(0.05)
    nodes.append(node("MatMul", ["seen", read], ["product"], name="head"))
    nodes.append(node("Add", ["product", "offset"], ["logits"]))
    graph = helper.make_graph(
        nodes,
        "scorer",
        [helper.make_tensor_value_info(names[n], *kind) for n, kind in integers.items()],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", 6])],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 21)]
    return saved(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)


@pytest.fixture
def scorers(tmp_path: Path) -> tuple[Path, Path]:
    """A float graph and one whose weight is on a grid, in two folders, and text beside them."""
    weight = np.random.default_rng(1).normal(size=(8, 6)).astype(np.float32)
    integers = np.clip(np.round(weight / 0.05), -127, 127).astype(np.int8)
    for name in ("float", "int8"):
        (tmp_path / name).mkdir()
    (tmp_path / "text.txt").write_text("0123456789" * 8)
    one = scorer(weight, tmp_path / "float" / "model.onnx")
    return one, scorer(integers, tmp_path / "int8" / "model.onnx")


def test_text_through_the_tokenizer_above_either_file(
    scorers: tuple[Path, Path], tokenizer: Any, tmp_path: Path
) -> None:
    arguments = (*scorers, "--calib", "text.txt", "--seq-len", 20, "--out", "run", "--quiet")
    assert "no tokenizer beside the file" in refused(*arguments)
    tokenizer.save_pretrained(tmp_path)
    assert invoke(*arguments) == (0, "", "")
    found = read_json(tmp_path / "run" / "diagnosis.json", Diagnosis)
    assert (found.data.sequences, found.data.seq_len, found.metric) == (4, 20, "kl")
    assert 0.0 < found.total < 1e-2


def test_arrays_need_no_mask_and_may_be_narrow_integers(
    scorers: tuple[Path, Path], tmp_path: Path
) -> None:
    ids = np.random.default_rng(2).integers(0, 300, (3, 12))
    padded = np.pad(ids, ((0, 0), (0, 4)), constant_values=299)
    mask = np.pad(np.ones_like(ids), ((0, 0), (0, 4)))
    np.savez(tmp_path / "int32.npz", input_ids=ids.astype(np.int32))
    np.savez(tmp_path / "padded.npz", input_ids=padded, attention_mask=mask)
    totals = []
    for name in ("int32", "padded"):
        options = ("--calib", f"{name}.npz", "--out", name, "--alone-samples", 3, "--quiet")
        assert invoke(*scorers, *options) == (0, "", "")
        totals.append(read_json(tmp_path / name / "diagnosis.json", Diagnosis).total)
    assert totals[0] > 0.0
    assert totals[1] == pytest.approx(totals[0], rel=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
def test_a_float_graph_that_is_not_finite_is_refused(
    scorers: tuple[Path, Path], tmp_path: Path, value: float
) -> None:
    weight = np.random.default_rng(1).normal(size=(8, 6)).astype(np.float32)
    broken = scorer(weight, tmp_path / "broken.onnx", bias=value)
    np.savez(tmp_path / "ids.npz", input_ids=np.arange(12).reshape(1, 12))
    said = refused(broken, scorers[1], "--calib", "ids.npz", "--out", "run", "--quiet")
    assert "the float graph's output 'logits' holds" in said
