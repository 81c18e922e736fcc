"""What a stage takes over from an earlier run, on a tiny random model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from quantkit.errors import InputError
from quantkit.jobs import CompareJob, StatsJob, SweepJob
from quantkit.pipelines import run_compare, run_stats, run_sweep
from quantkit.pipelines.runs import RUN_FILE, open_run
from quantkit.results import Stats, read_json, read_plain, write_json


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 200, encoding="utf-8")
    return path


def unfinished(folder: Path) -> None:
    plain = read_plain(folder / RUN_FILE)
    write_json(folder / RUN_FILE, {**plain, "finished": False})


@pytest.mark.kind(4, "stats")
def test_a_finished_run_is_not_computed_again(
    tiny_folder: Path, text: Path, tmp_path: Path
) -> None:
    job = StatsJob(
        models=(str(tiny_folder),), data=str(text), seq_len=16, samples=2, out=str(tmp_path / "out")
    )
    folder = run_stats(job)
    stats = read_json(folder / "stats.json", Stats)
    assert stats.summary.attention_logit.count > 0
    before = (folder / "stats.json").stat().st_mtime_ns
    assert open_run("stats", job).finished
    assert run_stats(job) == folder
    assert (folder / "stats.json").stat().st_mtime_ns == before


def test_results_of_a_model_that_changed_since_are_refused(
    tiny_folder: Path, text: Path, tmp_path: Path
) -> None:
    job = StatsJob(
        models=(str(tiny_folder),), data=str(text), seq_len=16, samples=2, out=str(tmp_path / "out")
    )
    unfinished(run_stats(job))
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_folder)
    with torch.no_grad():
        model.model.norm.weight += 1
    model.save_pretrained(tiny_folder)
    with pytest.raises(InputError, match="made from another model"):
        run_stats(job)
    run_stats(dataclasses.replace(job, force=True))


def test_two_models_of_one_name_are_refused(tiny_folder: Path, text: Path, tmp_path: Path) -> None:
    again = tmp_path / "other" / tiny_folder.name
    again.parent.mkdir()
    again.symlink_to(tiny_folder)
    models = (str(tiny_folder), str(again))
    sweep = SweepJob(
        models=models, eval=str(text), calib=None, seq_len=16, samples=2, out=str(tmp_path / "s")
    )
    with pytest.raises(InputError, match="two models are called"):
        run_sweep(sweep)
    compare = CompareJob(
        models=models,
        text=str(text),
        seq_len=16,
        calib_samples=2,
        eval_samples=2,
        out=str(tmp_path / "c"),
    )
    with pytest.raises(InputError, match="two models are called"):
        run_compare(compare)
