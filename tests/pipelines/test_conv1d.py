"""GPT-2, whose linear layers are `Conv1D`, through every stage that reads ranges of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.pytorch_utils import Conv1D

from quantkit.jobs import CalibrateJob, ExportJob, SweepJob
from quantkit.pipelines import run_calibrate, run_export, run_sweep
from quantkit.results import Export, Ranges, Sweep, read_json


@pytest.fixture
def folder(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A tiny GPT-2 whose weights are large enough for their grids to be felt."""
    torch.manual_seed(2)
    config = GPT2Config(
        vocab_size=257, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2,
        bos_token_id=256, eos_token_id=256,
    )  # fmt: skip
    model: Any = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Conv1D):
                module.bias.normal_(std=0.1)  # a new model's are 0
    model.save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    letters = np.random.default_rng(0).integers(97, 123, 20_000)  # so that no block comes twice
    path = tmp_path / "corpus.txt"
    path.write_text("".join(map(chr, letters)), encoding="utf-8")
    return path


def calibrated(folder: Path, corpus: Path, words: str) -> Path:
    job = CalibrateJob(
        model=str(folder), calib=str(corpus), seq_len=24, samples=8, weights=words,
        weight_method="minmax", out=str(folder.parent / f"calibrate-{words.replace(':', '-')}"),
    )  # fmt: skip
    return run_calibrate(job)


def perplexities(
    folder: Path, corpus: Path, out: Path, *recipes: str, ranges: tuple[str, ...] = ()
) -> list[float]:
    text: dict[str, Any] = {} if ranges else {"calib": str(corpus), "calib_samples": 8}
    job = SweepJob(
        models=(str(folder),), eval=str(corpus), bits=(16,), seq_len=24, samples=4,
        recipes=recipes, ranges=ranges, out=str(out), **text,
    )  # fmt: skip
    cells = read_json(run_sweep(job) / "sweep.json", Sweep).cells
    return [cell.value for cell in cells if cell.metric == "perplexity"]


def rounded(stored: Any, bits: int, step: int) -> Any:
    """A weight [in, out] on the symmetric narrow grid of each output and `step` inputs."""
    found = np.empty_like(stored)
    for at in range(0, len(stored), step):
        part = stored[at : at + step]
        scale = np.abs(part).max(0) / np.float32(2 ** (bits - 1) - 1)
        found[at : at + step] = np.rint(part / scale) * scale
    return found


@pytest.mark.parametrize(("words", "step"), [("channel", 10**6), ("group:8", 8)])
def test_a_sweep_computes_with_the_calibrated_grids(
    words: str, step: int, folder: Path, corpus: Path, tmp_path: Path
) -> None:
    run = calibrated(folder, corpus, words)
    info = read_json(run / "ranges.json", Ranges).weights
    assert info is not None and len(info.modules) == 8
    whole, quantized = perplexities(folder, corpus, tmp_path / "a", "w4", ranges=(str(run),))

    model: Any = GPT2LMHeadModel.from_pretrained(folder)
    with torch.no_grad():
        for name in info.modules:
            weight = model.get_parameter(f"{name}.weight")
            weight.copy_(torch.from_numpy(rounded(weight.detach().numpy(), 4, step)))
    model.save_pretrained(folder)
    (expected,) = perplexities(folder, corpus, tmp_path / "b")
    assert quantized == pytest.approx(expected, rel=1e-6)
    assert abs(quantized / whole - 1) > 1e-3


@pytest.mark.parametrize("recipe", ["w8", "w8a8"])
def test_an_export_holds_them_and_proves_it(
    recipe: str, folder: Path, corpus: Path, tmp_path: Path
) -> None:
    run = calibrated(folder, corpus, "channel")
    job = ExportJob(
        model=str(folder), recipe=recipe, ranges=str(run), eval=str(corpus), seq_len=24,
        eval_samples=4, out=str(tmp_path / "export"),
    )  # fmt: skip
    found = read_json(run_export(job) / "export.json", Export)
    assert found.passed
    names = [info.name for info in found.quantizers]
    assert sum(name.startswith("weight/") for name in names) == 8
    assert sum(name.startswith("linear_input/") for name in names) == (8 if "a" in recipe else 0)
    sizes = {file.name: file.bytes for file in found.files}
    assert sizes["model.onnx.data"] < 0.6 * sizes["float/model.onnx.data"]
