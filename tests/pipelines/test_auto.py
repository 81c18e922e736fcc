"""`export --quantize auto` on a tiny model with a planted outlier: from text to proven graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from quantkit.errors import GateError, InputError
from quantkit.jobs import ExportJob
from quantkit.pipelines import auto, run_export
from quantkit.pipelines.runs import RUN_FILE
from quantkit.results import AutoResult, Export, read_json, read_plain, write_json
from quantkit.search import judge
from tests.conftest import byte_tokenizer
from tests.search.conftest import plant


@pytest.fixture(scope="module", autouse=True)
def equally_fast() -> Iterator[None]:
    """Every graph is timed as twice as fast as float: what is chosen then hangs on no clock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "paired_latency", lambda *_: (2.0, 1.0))
        yield


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose second down_proj reads one channel that is far out."""
    from transformers import LlamaConfig

    from tests.conftest import make_tiny

    folder = tmp_path_factory.mktemp("planted") / "planted"
    model: LlamaForCausalLM = make_tiny(LlamaForCausalLM, LlamaConfig)
    plant(model)
    model.save_pretrained(folder)
    tokenizer: PreTrainedTokenizerFast = byte_tokenizer(add_bos=False)
    tokenizer.save_pretrained(folder)
    return folder


def job_of(folder: Path, out: Path, **changes: Any) -> ExportJob:
    fields: dict[str, Any] = {
        "model": str(folder),
        "recipe": "auto",
        "max_drop": 0.5,
        "seq_len": 32,
        "samples": 8,
        "search_samples": 8,
        "eval_samples": 8,
        "out": str(out),
    }
    return ExportJob(**fields | changes)


@pytest.fixture(scope="module")
def finished(planted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_export(job_of(planted, tmp_path_factory.mktemp("run") / "out"))


def test_what_was_tried_is_what_was_taken(finished: Path) -> None:
    found = read_json(finished / "auto.json", AutoResult)
    export = read_json(finished / "export.json", Export)
    chosen = next(trial for trial in found.trials if trial.name == found.chosen)
    assert export.passed and export.searched == "auto.json"
    assert export.recipe == chosen.recipe and export.storage == chosen.storage
    assert sorted(export.kept) == sorted(chosen.kept)
    assert bool(export.smoothed) == (chosen.smoothing != "none")
    assert chosen.is_within and chosen.loss_high <= found.max_drop
    within = [trial for trial in found.trials if trial.is_within]
    assert chosen.loss_high == min(trial.loss_high for trial in within)
    recipes = {trial.recipe for trial in found.trials}
    assert recipes >= {"w8a8", "w8a8:token:symmetric", "w8:group32", "w4:group32"}
    assert {trial.smoothing for trial in found.trials} == {"none", "auto", "0.5"}


def test_the_four_parts_of_the_text_are_apart(finished: Path) -> None:
    found = read_json(finished / "auto.json", AutoResult)
    export = read_json(finished / "export.json", Export)
    parts = [set(data.block_hashes) for data in (found.calibration, found.data, export.data)]
    assert all(len(part) == 8 for part in parts)
    assert len(set.union(*parts)) == 24


def test_smoothing_takes_the_planted_outlier_away(finished: Path) -> None:
    found = read_json(finished / "auto.json", AutoResult)
    width = {trial.name: trial.change_high - trial.change_low for trial in found.trials}
    assert width["w8a8:token:symmetric, smoothed 0.5"] < 0.5 * width["w8a8:token:symmetric"]
    assert width["w8a8, minmax, smoothed"] < 0.5 * width["w8a8, minmax"]


def test_only_the_chosen_float_graph_is_left(finished: Path) -> None:
    graphs = sorted(path.relative_to(finished).as_posix() for path in finished.rglob("*.onnx"))
    assert graphs == ["float/model.onnx", "model.onnx"]


@pytest.mark.kind(4, "auto")
def test_an_interrupted_search_goes_on(
    planted: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, count = job_of(planted, tmp_path / "out"), 0
    build = judge.build

    def stops(*args: Any, **named: Any) -> Path:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return build(*args, **named)

    monkeypatch.setattr(judge, "build", stops)
    with pytest.raises(KeyboardInterrupt):
        run_export(job)
    monkeypatch.setattr(judge, "build", build)
    assert len(list((tmp_path / "out/search/trials").glob("*.json"))) == 3
    assert not list((tmp_path / "out/search/trials").glob(".building-*"))
    folder = run_export(job)
    ours, theirs = (read_json(run / "auto.json", AutoResult) for run in (folder, finished))
    first = {trial.name: trial.change for trial in theirs.trials if not trial.kept}
    again = {trial.name: trial.change for trial in ours.trials if not trial.kept}
    assert again == first


def test_a_finished_search_is_not_made_again(
    planted: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (finished / "auto.json").read_bytes()
    write_json(finished / RUN_FILE, {**read_plain(finished / RUN_FILE), "finished": False})
    (finished / "export.json").unlink()

    def fails(*_: Any, **__: Any) -> Path:
        raise AssertionError("tried again")

    monkeypatch.setattr(judge, "build", fails)
    run_export(job_of(planted, finished))
    assert (finished / "auto.json").read_bytes() == before


def test_nothing_within_the_budget_is_said_in_one_line(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "choose", lambda tried: None)
    monkeypatch.setattr(auto, "explore", lambda first, judge, rank: _two(first, judge))
    with pytest.raises(GateError, match=r"none of 2 graphs stays within 0\.5.*nearest is w8a8"):
        run_export(job_of(planted, tmp_path / "out"))
    assert read_json(tmp_path / "out/auto.json", AutoResult).chosen == ""


def _two(first: Any, judge: Any) -> list[Any]:
    from quantkit.search.auto import Tried

    return [Tried(candidate=one, trial=judge(one)) for one in first[:2]]


def test_another_task_is_reported_on_other_items(planted: Path, tmp_path: Path) -> None:
    job = job_of(
        planted, tmp_path / "out", task="icl:shots=4", max_drop=0.9, eval_samples=6, seq_len=100
    )
    folder = run_export(dataclasses.replace(job, search_samples=4, samples=4))
    found = read_json(folder / "auto.json", AutoResult)
    assert found.task == "icl:shots=4" and found.reported is not None
    assert found.reported.units == 6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_drop": None}, "needs a budget"),
        ({"max_drop": 2.0}, "between 0 and 1"),
        ({"recipe": "w8a8", "max_drop": 0.1}, "not read with --quantize w8a8"),
        ({"model": "model.onnx"}, "a graph has no layers to smooth"),
        ({"task": "perplexityy"}, "perplexity"),
    ],
    ids=["no-budget", "percent-forgotten", "budget-without-auto", "onnx", "unknown-task"],
)
def test_bad_words_cost_no_model(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        job_of(tmp_path, tmp_path, **changes)


def test_too_little_text_is_said(planted: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("word " * 100, encoding="utf-8")
    job = job_of(planted, tmp_path / "out", calib=str(text), eval=str(text))
    with pytest.raises(InputError, match="too short: expected one more block"):
        run_export(job)
