"""Sweeps that must not start, or must not claim what they did not measure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
)

from quantkit.errors import InputError, QuantkitError
from quantkit.jobs import CalibrateJob, SweepJob
from quantkit.pipelines import plan_sweep, run_calibrate, run_sweep

MAPS = ("attention_logit/0/map 1", "attention_logit/1/map 1")


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"Line {n} says {n * n}. " for n in range(300)), encoding="utf-8")
    return str(path)


def job_of(model: str, text: str, tmp_path: Path, **options: Any) -> SweepJob:
    usual: dict[str, Any] = {
        "models": (model,), "eval": text, "calib": None, "seq_len": 32, "samples": 3, "bits": (8,),
        "granularity": ("tensor",), "out": str(tmp_path / "out"),
    }  # fmt: skip
    return SweepJob(**usual | options)


@pytest.mark.parametrize("task", ["perplexity", "needles", "icl:shots=8"])
def test_a_prompt_beyond_the_models_positions(
    task: str, tmp_path: Path, text: str, tokenizer: Any
) -> None:
    config = GPT2Config(vocab_size=257, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    read: dict[str, Any] = {"eval": text, "samples": 1} if task == "perplexity" else {"items": 1}
    job = SweepJob(
        models=(str(tmp_path / "gpt2"),), tasks=(task,), seq_len=600, bits=(16,),
        out=str(tmp_path / "out"), **read,
    )  # fmt: skip
    with pytest.raises(InputError, match="64"):
        run_sweep(job)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"keep": MAPS}, id="bits of the logits"),
        pytest.param(
            {
                "bits": (16,),
                "recipes": ("kv4",),
                "keep": tuple(f"cache_{x}" for x in ("key/0/map 1", "key/1/map 1", "value/0",
                                                    "value/1")),
            },
            id="cache",
        ),
    ],
)  # fmt: skip
def test_a_recipe_of_which_all_is_kept_quantizes_nothing(
    options: dict[str, Any], tiny_folder: Path, text: str, tmp_path: Path
) -> None:
    with pytest.raises(QuantkitError, match="keep"):
        run_sweep(job_of(str(tiny_folder), text, tmp_path, **options))


def test_smoothed_keys_under_a_softcap_are_refused_before_any_cell(
    tmp_path: Path, text: str, tokenizer: Any
) -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "gemma")
    tokenizer.save_pretrained(tmp_path / "gemma")
    with pytest.raises(QuantkitError, match="softcap"):
        run_sweep(job_of(str(tmp_path / "gemma"), text, tmp_path, recipes=("qk4:smooth",)))
    assert not list((tmp_path / "out").glob("cells/*"))


def test_ranges_that_no_row_reads() -> None:
    with pytest.raises(InputError, match="range"):
        SweepJob(models=("m",), ranges=("r",), range=("static",), bits=(16,))


def test_two_runs_of_one_model_are_named_as_such(
    tiny_folder: Path, text: str, tmp_path: Path
) -> None:
    runs = []
    for method in ("minmax", "mse"):
        calibration = CalibrateJob(
            model=str(tiny_folder), calib=text, samples=2, seq_len=32, method=method,
            out=str(tmp_path / method),
        )  # fmt: skip
        runs.append(str(run_calibrate(calibration)))
    job = SweepJob(
        models=(str(tiny_folder),), eval=text, ranges=tuple(runs), range=("static",), bits=(8,),
        granularity=("tensor",), seq_len=32, samples=2, out=str(tmp_path / "out"),
    )  # fmt: skip
    with pytest.raises(InputError) as caught:
        run_sweep(job)
    assert "none of the models" not in str(caught.value)


def test_a_label_that_is_another_models_own_name(
    tiny_folder: Path, tiny_llama: LlamaForCausalLM, tokenizer: Any, text: str, tmp_path: Path
) -> None:
    for name in ("x", "y"):
        with torch.no_grad():
            tiny_llama.lm_head.weight.add_(0.1)
        tiny_llama.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    seeds = tuple(f"{tiny_folder.name}={tmp_path / name}" for name in ("x", "y"))
    with pytest.raises(InputError, match=tiny_folder.name):
        run_sweep(job_of("", text, tmp_path, models=(*seeds, str(tiny_folder)), bits=(16,)))


def test_a_kept_cell_with_a_column_less(tiny_folder: Path, text: str, tmp_path: Path) -> None:
    job = job_of(str(tiny_folder), text, tmp_path)
    folder = run_sweep(job)
    (folder / "sweep.json").unlink()
    cell = next((folder / "cells").glob("*logits8*"))
    plain = json.loads(cell.read_text("utf-8"))
    plain["rows"] = [row[:-1] for row in plain["rows"]]
    cell.write_text(json.dumps(plain), encoding="utf-8")
    with pytest.raises(InputError, match=cell.name):
        run_sweep(job)


def test_a_plan_is_refused_where_its_run_would_be(
    tiny_folder: Path, text: str, tmp_path: Path
) -> None:
    (tmp_path / "out").write_text("", encoding="utf-8")
    with pytest.raises(InputError, match="is a file"):
        plan_sweep(job_of(str(tiny_folder), text, tmp_path))


def test_a_folder_in_which_a_write_was_killed(tiny_folder: Path, text: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / ".run.json.q_s87dr5").write_text("", encoding="utf-8")  # as kill -9 leaves it
    run_sweep(job_of(str(tiny_folder), text, tmp_path, bits=(16,)))
    assert (out / "sweep.json").is_file()
