"""The shipped weights still give what `reports/pair` says: extremes, counts, and item by item."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantkit.jobs import SHIPPED_PAIR, CompareJob, StatsJob
from quantkit.models.shipped import pair_folder, sha256_of
from quantkit.pipelines import run_stats, run_sweep
from quantkit.results import Stats, Sweep, TrainingResult, read_json

REFERENCE = Path(__file__).parents[2] / "reports" / "pair"
RELATIVE = 1e-3
EQUAL_ITEMS = 0.99
LARGEST_BYTES = 40_000_000
TASKS = (
    "perplexity",
    "needles:needles=1:queries=1:tokens=256",
    "needles:tokens=256",
    "icl:shots=16:orders=2",
)


@cache
def reference_job() -> CompareJob:
    """The comparison that wrote the reference, from its own `run.json`."""
    config = json.loads((REFERENCE / "run.json").read_text(encoding="utf-8"))["config"]
    listed = {name: tuple(v) if isinstance(v, list) else v for name, v in config.items()}
    return CompareJob(**listed)


@pytest.fixture(scope="module")
def stats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stats]:
    job = reference_job()
    out = tmp_path_factory.mktemp("stats") / "run"
    run_stats(
        StatsJob(
            models=SHIPPED_PAIR,
            data=job.text,
            seq_len=job.seq_len,
            samples=job.calib_samples,
            batch_size=job.batch_size,
            out=str(out),
        )
    )
    return {name: read_json(out / name / "stats.json", Stats) for name in SHIPPED_PAIR}


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = dataclasses.replace(
        reference_job(), bits=(16, 4), granularity=("tensor",), range=("dynamic",), tasks=TASKS
    )
    out = tmp_path_factory.mktemp("sweep") / "run"
    return run_sweep(dataclasses.replace(job.sweep(), out=str(out)))


@pytest.mark.parametrize("model", SHIPPED_PAIR)
@pytest.mark.parametrize("point", ("attention_logit", "hidden_state"))
def test_extremes_and_counts(stats: dict[str, Stats], model: str, point: str) -> None:
    ours = getattr(stats[model].summary, point)
    theirs = getattr(read_json(REFERENCE / model / "stats.json", Stats).summary, point)

    assert (ours.count, ours.excluded) == (theirs.count, theirs.excluded)
    for name in ("max", "min"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=RELATIVE)
    assert ours.abs_top.keys() == theirs.abs_top.keys()
    for rank, value in theirs.abs_top.items():
        assert ours.abs_top[rank] == pytest.approx(value, rel=RELATIVE)


def _rows(folder: Path) -> dict[tuple[str, str, str], np.ndarray[Any, Any]]:
    found = {}
    for path in (folder / "cells").glob("*.json"):
        cell = json.loads(path.read_text(encoding="utf-8"))
        own = cell["identity"]
        found[own["model_sha256"], own["recipe"], own["task"]] = np.array(cell["rows"])
    return found


def test_items_one_by_one(cells: Path) -> None:
    ours, theirs = _rows(cells), _rows(REFERENCE)

    assert len(ours) == len(SHIPPED_PAIR) * 2 * len(TASKS)
    for which, rows in ours.items():
        assert which in theirs, which
        same = np.isclose(rows, theirs[which], rtol=RELATIVE, atol=1e-6).all(1)
        assert rows.shape == theirs[which].shape
        assert same.mean() >= EQUAL_ITEMS, which


def test_values_of_the_reference(cells: Path) -> None:
    ours = read_json(cells / "sweep.json", Sweep)
    theirs = read_json(REFERENCE / "sweep.json", Sweep)
    known = {(cell.model, cell.recipe, cell.task, cell.metric): cell.value for cell in theirs.cells}

    for cell in ours.cells:
        value = known[cell.model, cell.recipe, cell.task, cell.metric]
        if cell.metric == "perplexity":
            assert cell.value == pytest.approx(value, rel=RELATIVE)
        else:
            assert cell.value == pytest.approx(value, abs=1 - EQUAL_ITEMS)


def test_weights_are_those_of_the_training() -> None:
    trained = read_json(pair_folder() / "training.json", TrainingResult)
    size = 0
    for model in trained.models:
        weights = pair_folder() / model.folder / "model.safetensors"
        assert sha256_of(weights) == model.sha256
        size += weights.stat().st_size

    assert [model.arm for model in trained.models] == list(SHIPPED_PAIR)
    assert size <= LARGEST_BYTES
    counts = [model.parameters for model in trained.models]
    assert abs(counts[1] - counts[0]) / counts[0] <= 0.001
    assert all(3e6 <= count <= 9e6 for count in counts)
