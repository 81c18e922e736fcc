"""`quantkit diagnose` from two files to its table, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import typer
from onnx import TensorProto, helper
from typer.testing import CliRunner

from quantkit.cli.diagnose import diagnose
from quantkit.cli.doctor import doctor
from quantkit.cli.group import OneLineErrors
from quantkit.errors import InputError
from quantkit.pipelines.graph_samples import graph_samples
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


def test_bad_input(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    one, other, npz = files
    assert "Swap them" in refused(other, one, "--calib", npz)
    assert "same graph" in refused(one, one, "--calib", npz)
    assert "no ONNX file" in refused(one, "none.onnx", "--calib", npz)
    assert "two .onnx files" in refused(one, "model.gguf")
    assert "--calib FILE.npz" in refused(one, other)
    assert "no such file" in refused(one, other, "--calib", "none.npz")
    np.savez(tmp_path / "other.npz", z=np.zeros((2, 3), np.float32))
    assert "lacks the graph's input 'x'" in refused(one, other, "--calib", tmp_path / "other.npz")
    np.savez(tmp_path / "wide.npz", x=np.zeros((2, 48, 17), np.float32))
    assert "cannot run" in refused(one, other, "--calib", tmp_path / "wide.npz")
    (tmp_path / "broken.onnx").write_bytes(b"no graph")
    assert "ONNX" in refused(one, tmp_path / "broken.onnx", "--calib", npz)
    assert "--samples" in refused(one, other, "--samples", 0)
    assert "--top" in refused(one, other, "--top", 0)
    assert not list((tmp_path / "reports").iterdir())  # nothing is left of what cannot run


def decoder_inputs(extra: str = "") -> ir.Model:
    """A graph that reads what decoders read, and nothing of it matters."""
    kinds = {
        "input_ids": (TensorProto.INT64, ["batch", "sequence"]),
        "attention_mask": (TensorProto.INT64, ["batch", "total"]),
        "position_ids": (TensorProto.INT64, ["batch", "sequence"]),
        "past_key_values.0.key": (TensorProto.FLOAT, ["batch", 2, "past", 8]),
    }
    if extra:
        kinds[extra] = (TensorProto.FLOAT, ["batch", 3])
    graph = helper.make_graph(
        [helper.make_node("Identity", ["input_ids"], ["y"])],
        "decoder",
        [helper.make_tensor_value_info(name, *kind) for name, kind in kinds.items()],
        [helper.make_tensor_value_info("y", TensorProto.INT64, ["batch", "sequence"])],
    )
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]))


def test_text_fills_what_a_decoder_reads(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "text.txt").write_text("0123456789" * 8)
    options: dict[str, Any] = {"tokenizer": None, "seq_len": 20, "samples": 3, "bos": "auto"}
    found = graph_samples(
        decoder_inputs(), "text.txt", folders=[tmp_path, tmp_path / "tokenizer"], **options
    )
    assert (found.data.sequences, found.data.seq_len, len(found.batches)) == (3, 20, 3)
    batch = found.batches[0]
    assert tokenizer.decode(batch["input_ids"][0]) == "01234567890123456789"
    assert batch["attention_mask"].tolist() == [[1] * 20]
    assert batch["position_ids"].tolist() == [list(range(20))]
    assert batch["past_key_values.0.key"].shape == (1, 2, 0, 8)
    with pytest.raises(InputError, match=r"'pixels' FLOAT .* is neither tokens"):
        graph_samples(
            decoder_inputs("pixels"), "text.txt", folders=[tmp_path / "tokenizer"], **options
        )
    with pytest.raises(InputError, match=r"no tokenizer in .* --tokenizer"):
        graph_samples(decoder_inputs(), "text.txt", folders=[tmp_path], **options)
