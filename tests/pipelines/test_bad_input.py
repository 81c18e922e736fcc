"""Bad input through the command line: exit code 2 and one line on stderr that says what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from quantkit.cli import app
from quantkit.models.shipped import dequantized, smollm2_gguf


def refused(*arguments: str | Path) -> str:
    """Returns the one line on stderr."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    lines = result.stderr.splitlines()
    assert result.exit_code == 2, result.stderr
    assert result.stdout == ""
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with SmolLM2's tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    shipped, _ = dequantized(smollm2_gguf())
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for path in shipped.glob("*token*"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs write below the current folder; nothing is fetched."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("A loop repeats a statement as long as an expression is true. " * 40)
    return path


SMALL = ("--seq-len", "16", "--samples", "2")


def test_the_model_of_these_tests_works(model: Path, corpus: Path, tmp_path: Path) -> None:
    arguments = ["stats", model, "--text", corpus, *SMALL, "--out", tmp_path / "run", "-q"]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "run" / "stats.json").is_file()


@pytest.mark.parametrize("command", ["stats", "calibrate", "sweep", "export", "compare"])
def test_missing_model_path(command: str) -> None:
    line = refused(command, "./no/such/model")
    assert "./no/such/model" in line
    assert "no such folder or file" in line


def test_a_misspelt_shipped_model_is_suggested() -> None:
    assert "Did you mean 'smollm2'?" in refused("stats", "smolm2")


def test_empty_text(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n\n")
    line = refused("stats", model, "--text", "empty.txt")
    assert "empty.txt is empty" in line


def test_text_shorter_than_one_block(model: Path, corpus: Path) -> None:
    line = refused("calibrate", model, "--calib", corpus, "--seq-len", "4096")
    assert "too short" in line
    assert "block of 4096 tokens" in line
    assert "--seq-len" in line


def test_text_that_calibration_uses_up(model: Path, corpus: Path) -> None:
    line = refused("sweep", model, "--eval", corpus, "--calib", corpus, *SMALL)
    assert "too short" in line
    assert "after 128" in line


@pytest.mark.kind(8, "models", "cli")
def test_folder_without_weights(model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    line = refused("stats", bare)
    assert "holds no weights (*.safetensors)" in line
    (bare / "config.json").unlink()
    assert "has no config.json" in refused("stats", bare)


@pytest.mark.kind(8, "models", "stats", "export", "cli")
@pytest.mark.parametrize("command", ["stats", "export"])
def test_nan_weights_name_the_tensor(model: Path, tmp_path: Path, command: str) -> None:
    broken: Any = LlamaForCausalLM.from_pretrained(model)
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[2, 3] = float("nan")
    shutil.copytree(model, tmp_path / "broken")
    broken.save_pretrained(tmp_path / "broken")
    line = refused(command, tmp_path / "broken")
    assert "'model.layers.1.mlp.up_proj.weight'" in line
    assert "NaN" in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("sweep", "smollm2", "--granularity", "tensr"), "Did you mean 'tensor'?"),
        (("stats", "smollm2", "--dtype", "float23"), "Did you mean 'float32'?"),
        (("stats", "smollm2", "--bos", "allways"), "Did you mean 'always'?"),
        (("export", "smollm2", "--quantize", "w8b8"), "Did you mean 'w8a8'?"),
        (("export", "smollm2", "--opset", "12"), "Available: 21, 22."),
        (("sweep", "smollm2", "--bits", "16,99"), "2 to 15"),
        (("stats", "smollm2", "--samples", "0"), "at least 1, got 0"),
        (("stats", "smollm2", "--sampels", "4"), "--samples"),
    ],
)
def test_unknown_option_value_suggests(arguments: tuple[str, ...], says: str) -> None:
    assert says in refused(*arguments)


def test_output_folder_of_another_run(model: Path, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    common = ["stats", str(model), "--text", str(corpus), "--seq-len", "16", "--out", str(out)]
    assert CliRunner().invoke(app, [*common, "--samples", "2", "-q"]).exit_code == 0
    before = (out / "stats.json").read_bytes()
    line = refused(*common, "--samples", "3")
    assert "holds another run (stats" in line
    assert "--force" in line
    assert (out / "stats.json").read_bytes() == before


@pytest.mark.kind(6, "stats", "cli")
def test_output_folder_that_is_not_ours(model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    assert "holds no run of quantkit" in refused("stats", model, "--out", tmp_path / "mine")


def test_as_a_process_too(tmp_path: Path) -> None:
    """No traceback, no warning, nothing on stdout, from a process of its own."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "quantkit", "stats", "./no/such/model"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert len([x for x in done.stderr.splitlines() if not x.startswith("loading")]) == 1
