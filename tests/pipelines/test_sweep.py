"""`sweep` from a job to its file: tasks, seeds, ranges of several models, plans, processes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from quantkit.errors import InputError
from quantkit.jobs import CalibrateJob, SweepJob
from quantkit.pipelines import plan_sweep, run_calibrate, run_sweep
from quantkit.pipelines.sweep_subjects import read_calibrated, subjects_of
from quantkit.processes import Processes
from quantkit.results import Cell, Sweep, read_json

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Paragraphs of words in a fixed random order: enough for items of multiple choice."""
    draw = np.random.default_rng(5)

    def word() -> str:
        return "".join(chr(97 + letter) for letter in draw.integers(26, size=draw.integers(2, 8)))

    paragraphs = [
        " ".join(" ".join(word() for _ in range(12)).capitalize() + "." for _ in range(14))
        for _ in range(40)
    ]
    path = tmp_path / "corpus.txt"
    path.write_text("\n\n".join(paragraphs), encoding="utf-8")
    return path


@pytest.fixture
def make_model(tmp_path: Path, tokenizer: Any) -> Any:
    """Saves a tiny model: `make_model("a", seed)`, `make_model("d", seed, differential=True)`."""

    def make(name: str, seed: int, *, differential: bool = False) -> str:
        torch.manual_seed(seed)
        model: Any = (
            DiffLlamaForCausalLM(DiffLlamaConfig(**SIZES))
            if differential
            else LlamaForCausalLM(LlamaConfig(**SIZES))
        )
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "q_proj" in key or "k_proj" in key:
                    parameter.mul_(12)
        model.eval().save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return make


def sweep_of(job: SweepJob) -> Sweep:
    return read_json(run_sweep(job) / "sweep.json", Sweep)


def first_metric(sweep: Sweep, task: str) -> list[Cell]:
    metric = next(info.metrics[0] for info in sweep.tasks if info.name == task)
    return [cell for cell in sweep.cells if (cell.task, cell.metric) == (task, metric)]


def test_every_task_of_text_side_by_side(make_model: Any, corpus: Path, tmp_path: Path) -> None:
    job = SweepJob(
        models=(make_model("a", 1), make_model("d", 2, differential=True)), eval=str(corpus),
        tasks=("perplexity", "multiple-choice", "needles:queries=1:tokens=900", "icl:shots=4"),
        calib_samples=2, samples=3, items=3, seq_len=1000, bits=(16, 4), granularity=("head",),
        recipes=("w8a8:token", "qk8", "probs8", "kv4", "w4:group16"), out=str(tmp_path / "out"),
    )  # fmt: skip
    sweep = sweep_of(job)
    recipes = ["none", "logits4:head", "w8a8:token", "qk8", "probs8", "kv4", "w4:group16"]
    assert [task.name for task in sweep.tasks] == list(job.tasks)
    for task in sweep.tasks:
        cells = first_metric(sweep, task.name)
        assert [(cell.model, cell.recipe) for cell in cells] == [
            (model, recipe) for model in ("a", "d") for recipe in recipes
        ]
        for cell in cells:
            assert cell.n == 3 and np.isfinite(cell.value), cell
            assert (cell.hits > 0) == (cell.recipe != "none") == bool(cell.quantizers)
    both = {"attention_logit/0/map 1", "attention_logit/0/map 2"}
    named = next(c for c in sweep.cells if (c.model, c.recipe) == ("d", "logits4:head"))
    assert both <= set(named.quantizers)
    assert {mass.model for mass in sweep.attention_mass} == {"a", "d"}
    own = {(d.model, d.recipe) for d in sweep.deltas if not d.against_model}
    assert own == {(model, recipe) for model in ("a", "d") for recipe in recipes[1:]}
    across = [d for d in sweep.deltas if d.against_model]
    assert {(d.model, d.against_model) for d in across} == {("a", "d"), ("d", "a")}
    # random weights: nobody can retrieve, and the sweep says as much as three samples show
    said = "needles:queries=1:tokens=900: a is not shown to be above chance"
    assert said in sweep.headline
    shares = {task.name.split(":")[0]: task.shares for task in sweep.tasks}
    assert shares == {
        "perplexity": [], "multiple-choice": ["acc_norm", "acc"],
        "needles": ["exact_match", "query_accuracy"], "icl": ["accuracy"],
    }  # fmt: skip


def test_seeds_of_one_label_are_one_group(make_model: Any, corpus: Path, tmp_path: Path) -> None:
    paths = [make_model(f"seed{n}", n) for n in range(3)]
    models = (*(f"base={path}" for path in paths), f"diff={make_model('d', 4, differential=True)}")
    job = SweepJob(
        models=models, eval=str(corpus), calib=None, samples=4, seq_len=64, bits=(16, 4),
        granularity=("row",), out=str(tmp_path / "out"),
    )  # fmt: skip
    sweep = sweep_of(job)
    assert [info.name for info in sweep.models] == ["base#0", "base#1", "base#2", "diff"]
    groups = {cell.model: cell.group for cell in sweep.cells}
    assert groups == {"base#0": "base", "base#1": "base", "base#2": "base", "diff": "diff"}
    spreads = {(s.recipe, s.metric): s for s in sweep.spreads}
    assert set(spreads) == {
        (recipe, metric)
        for recipe in ("none", "logits4:row")
        for metric in ("perplexity", "bits_per_byte")
    }
    for (recipe, metric), spread in spreads.items():
        seeds = [
            c.value for c in sweep.cells
            if (c.recipe, c.metric, c.group) == (recipe, metric, "base")
        ]  # fmt: skip
        assert spread.mean == pytest.approx(np.mean(seeds))
        assert spread.sd == pytest.approx(np.std(seeds, ddof=1))
        assert (spread.low, spread.high) == (min(seeds), max(seeds))
    assert "base (3 seeds)" in sweep.headline


def test_one_label_stands_for_one_model(make_model: Any, corpus: Path, tmp_path: Path) -> None:
    models = (f"m={make_model('a', 1)}", f"m={make_model('d', 2, differential=True)}")
    job = SweepJob(models=models, eval=str(corpus), calib=None, out=str(tmp_path / "out"))
    with pytest.raises(InputError, match=r"label 'm' .*LlamaForCausalLM.*DiffLlamaForCausalLM"):
        run_sweep(job)


def test_a_path_that_exists_is_no_label(make_model: Any, corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "x=y"
    Path(make_model("a", 1)).rename(folder)
    job = SweepJob(
        models=(str(folder),), eval=str(corpus), calib=None, samples=1, seq_len=32, bits=(16,),
        out=str(tmp_path / "out"),
    )  # fmt: skip
    assert [info.name for info in sweep_of(job).models] == ["x=y"]


def ranges_of(model: str, corpus: Path, out: Path) -> str:
    job = CalibrateJob(
        model=model, calib=str(corpus), seq_len=64, samples=4, out=str(out), bits=(8, 4),
        points=("linear_input", "attention_logit", "attention_probability", "attention_key",
                "attention_value"),
    )  # fmt: skip
    return str(run_calibrate(job))


def test_each_model_has_its_own_ranges(make_model: Any, corpus: Path, tmp_path: Path) -> None:
    models = (make_model("a", 1), make_model("b", 2))
    runs = [ranges_of(model, corpus, tmp_path / f"r{n}") for n, model in enumerate(models)]
    job = SweepJob(
        models=models, eval=str(corpus), samples=2, seq_len=64, ranges=(runs[1], runs[0]),
        range=("dynamic", "static"), grid=("symmetric", "asymmetric"), bits=(16, 8),
        granularity=("tensor", "head", "row"), recipes=("w8a8", "probs8:static", "kv8:static"),
        tasks=("perplexity", "multiple-choice"), items=4, out=str(tmp_path / "both"),
    )  # fmt: skip
    sweep = sweep_of(job)
    names = [cell.recipe for cell in first_metric(sweep, "perplexity") if cell.model == "a"]
    assert len(names) == 1 + 6 + 4 + 3 and "logits8:head:static:asymmetric" in names
    assert sweep.data.skipped_blocks == 4  # both begin behind what calibration has seen
    alone = dataclasses.replace(
        job, models=(models[0],), ranges=(runs[0],), out=str(tmp_path / "alone")
    )
    both = {c.recipe: c.value for c in first_metric(sweep, "perplexity") if c.model == "a"}
    one = {c.recipe: c.value for c in first_metric(sweep_of(alone), "perplexity")}
    assert both == one
    with pytest.raises(InputError, match=r"none are of b .*only of a"):
        run_sweep(dataclasses.replace(job, ranges=(runs[0],), out=str(tmp_path / "x")))
    with pytest.raises(InputError, match=r"ranges of b .*none of the models"):
        run_sweep(dataclasses.replace(job, models=(models[0],), out=str(tmp_path / "y")))


def paragraphs(text: str) -> set[str]:
    return {" ".join(part.split()) for part in text.split("\n\n")}


@pytest.mark.parametrize("kind", ["running text", "documents", "inside another text"])
def test_no_item_is_made_of_what_calibration_has_read(
    make_model: Any, corpus: Path, tmp_path: Path, kind: str
) -> None:
    model = make_model("a", 1)
    parts = corpus.read_text(encoding="utf-8").split("\n\n")
    source = evaluation = corpus
    if kind == "documents":
        source = evaluation = tmp_path / "texts.jsonl"
        lines = [json.dumps({"text": "\n\n".join(parts[n : n + 4])}) for n in range(0, 40, 4)]
        source.write_text("\n".join(lines), encoding="utf-8")
    if kind == "inside another text":
        source = tmp_path / "calibration.txt"
        source.write_text("\n\n".join(parts[10:20]), encoding="utf-8")
    # 4 blocks of 700 bytes: the first paragraphs, or the first four documents
    job = CalibrateJob(
        model=model, calib=str(source), seq_len=700, samples=4, out=str(tmp_path / "ranges")
    )
    run = str(run_calibrate(job))
    read = (
        parts[:16] if kind == "documents" else parts[10:13] if source != evaluation else parts[:3]
    )
    for ranges in ((), (run,)):
        if not ranges and source != evaluation:
            continue  # nothing says that it is a calibration's
        more: dict[str, Any] = {"ranges": ranges} if ranges else {"calib": str(source)}
        asked = SweepJob(
            models=(model,), eval=str(evaluation), tasks=("multiple-choice",), items=20,
            bits=(16,), recipes=("w8a8",) if ranges else ("w8",), seq_len=700, allow_overlap=True,
            out=str(tmp_path / f"out{len(ranges)}"),
            **(more if ranges else more | {"calib_samples": 4}),
        )  # fmt: skip
        subject = subjects_of(asked, read_calibrated(ranges), (), Processes())[0]
        task: Any = subject.tasks[0]
        assert len(task.items) == 20
        used = " ".join(item.ctx + " " + item.endings[item.label] for item in task.items)
        for paragraph in paragraphs("\n\n".join(read)):
            for sentence in paragraph.split(". "):
                assert sentence.rstrip(".") not in used


def test_what_is_said_of_the_text_stands_at_its_tasks(
    make_model: Any, corpus: Path, tmp_path: Path
) -> None:
    models = (make_model("a", 1), make_model("b", 2))
    runs = tuple(ranges_of(model, corpus, tmp_path / f"r{n}") for n, model in enumerate(models))
    copy = tmp_path / "copy.txt"
    copy.write_bytes(corpus.read_bytes())
    job = SweepJob(
        models=models, eval=str(copy), samples=4, seq_len=64, ranges=runs, bits=(16,),
        recipes=("w8a8",), tasks=("icl:shots=4", "perplexity"), items=2, allow_overlap=True,
        out=str(tmp_path / "out"),
    )  # fmt: skip
    sweep = sweep_of(dataclasses.replace(job, seq_len=700, samples=2))
    shared = {task.name: task.data.shared_blocks for task in sweep.tasks}
    assert shared["icl:shots=4"] == 0 and shared["perplexity"] > 0
    assert any(note.startswith("b, perplexity: ") for note in sweep.notes)


@pytest.mark.kind(4, "sweep")
def test_a_finished_sweep_is_not_computed_again_and_cells_outlive_a_stop(
    make_model: Any, corpus: Path, tmp_path: Path
) -> None:
    job = SweepJob(
        models=(make_model("a", 1),), eval=str(corpus), calib=None, samples=3, seq_len=48,
        bits=(16, 4, 3), granularity=("tensor",), out=str(tmp_path / "out"),
    )  # fmt: skip
    seen: list[str] = []

    def stop(what: str, done: int, total: int) -> None:
        seen.append(what)
        if "cell 3 of 3" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(job, progress=stop)
    assert len(list((tmp_path / "out" / "cells").iterdir())) == 2
    again: list[str] = []
    run_sweep(job, progress=lambda what, *_: again.append(what))
    assert {what for what in again if "cell" in what} == {"a logits3, perplexity (cell 3 of 3)"}
    before = (tmp_path / "out" / "sweep.json").read_bytes()
    again.clear()
    run_sweep(job, progress=lambda what, *_: again.append(what))
    assert again == [] and (tmp_path / "out" / "sweep.json").read_bytes() == before


def test_a_plan_writes_nothing_and_knows_what_is_done(
    make_model: Any, corpus: Path, tmp_path: Path
) -> None:
    job = SweepJob(
        models=(make_model("a", 1),), eval=str(corpus), calib=None, samples=3, seq_len=48,
        bits=(16, 4), granularity=("tensor", "row"), out=str(tmp_path / "out"),
    )  # fmt: skip
    plan = plan_sweep(job)
    assert not (tmp_path / "out").exists()
    assert [(c.recipe, c.finished) for c in plan.cells] == [
        ("none", False), ("logits4", False), ("logits4:row", False)
    ]  # fmt: skip
    assert plan.seconds == pytest.approx(sum(c.seconds for c in plan.cells)) and plan.seconds > 0
    run_sweep(job)
    assert all(c.finished for c in plan_sweep(job).cells)


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
@pytest.mark.kind(4, "sweep", "cli")
def test_two_processes_write_the_file_of_one(
    make_model: Any, corpus: Path, tmp_path: Path, launcher: str
) -> None:
    model = make_model("a", 1)
    options = [
        "sweep", model, "--eval", str(corpus), "--samples", "5", "--items", "5", "--seq-len", "64",
        "--task", "perplexity,multiple-choice", "--bits", "16,4", "--granularity", "tensor",
        "--quantize", "w8a8:token", "--batch-size", "2", "--calib-samples", "2", "--quiet",
    ]  # fmt: skip
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    binary = Path(sys.executable).parent
    start = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
        "accelerate": [str(binary / "accelerate"), "launch", "--num_processes", "2", "--cpu",
                       "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"],
    }[launcher]  # fmt: skip
    found = []
    for name, command in (("one", [sys.executable, "-m"]), ("two", [*start, "-m"])):
        done = subprocess.run(
            [*command, "quantkit", *options, "--out", str(tmp_path / name)],
            env=environ, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        plain = json.loads((tmp_path / name / "sweep.json").read_text())
        found.append({key: value for key, value in plain.items() if key != "environment"})
    assert found[0] == found[1]


def test_a_vision_model_and_a_task_of_images(tmp_path: Path) -> None:
    from PIL import Image

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        image_size=32, patch_size=8, id2label={0: "red", 1: "blue"}, label2id={"red": 0, "blue": 1},
    )  # fmt: skip
    ViTForImageClassification(config).eval().save_pretrained(tmp_path / "vit")
    for label, colour in (("red", (200, 20, 20)), ("blue", (20, 20, 200))):
        (tmp_path / "images" / label).mkdir(parents=True)
        for n in range(3):
            image = Image.new("RGB", (40 + n, 36), tuple(c + n for c in colour))
            image.save(tmp_path / "images" / label / f"{n}.png")
    job = SweepJob(
        models=(str(tmp_path / "vit"),), tasks=(f"image-classification={tmp_path / 'images'}",),
        bits=(16, 4), granularity=("head",), recipes=("w4a8:token",), out=str(tmp_path / "out"),
    )  # fmt: skip
    sweep = sweep_of(job)
    cells = first_metric(sweep, job.tasks[0])
    assert [cell.recipe for cell in cells] == ["none", "logits4:head", "w4a8:token"]
    assert all(cell.n == 6 and cell.chance == 0.5 for cell in cells)
    with pytest.raises(InputError, match="expected a classifier of images"):
        language = dataclasses.replace(job, models=("smollm2",), out=str(tmp_path / "no"))
        run_sweep(language)
    with pytest.raises(InputError, match="expected a causal language model"):
        run_sweep(dataclasses.replace(job, tasks=("icl",), out=str(tmp_path / "no")))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"tasks": ("perplexity", "image-classification=x")}, "one by one", id="both"),
        pytest.param({"tasks": ("icl", "icl:shots=32")}, "named twice", id="one task twice"),
        pytest.param({"tasks": ()}, "--task is empty", id="no task"),
        pytest.param({"tasks": ("perplexiti",)}, "Did you mean 'perplexity'", id="mistyped task"),
        pytest.param({"range": ("static",)}, "give --ranges RUN", id="static without ranges"),
        pytest.param(
            {"range": ("static",), "granularity": ("row",)}, "Add --granularity", id="static row"
        ),
        pytest.param({"range": ("fixed",)}, "--range does not take", id="range"),
        pytest.param({"grid": ("odd",)}, "--grid does not take", id="grid"),
        pytest.param({"items": 0}, "--items takes", id="no items"),
        pytest.param({"items": 3}, "--items is not read", id="items of perplexity"),
        pytest.param(
            {"tasks": ("icl",), "samples": 3}, "--samples is not read", id="blocks of icl"
        ),
        pytest.param({"tasks": ("icl",), "eval": "x"}, "--eval is not read", id="text of icl"),
        pytest.param(
            {"bits": (16,), "range": ("static",)}, "--range is not read", id="range of no logits"
        ),
        pytest.param(
            {"tasks": ("image-classification=x",), "bos": "never"}, "--bos", id="BOS of images"
        ),
        pytest.param({"ranges": ("r",)}, "neither is given", id="ranges that nothing reads"),
        pytest.param({"recipes": ("kv4:static",)}, "kv4:static reads", id="static cache"),
        pytest.param({"recipes": ("w8x",)}, "is not `none`", id="recipe"),
    ],
)
def test_a_job_refuses_what_cannot_be(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        SweepJob(**{"models": ("m",), **change})
