"""`train` as a stage: a pair in, trained models and `training.json` out."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

from accelerate import Accelerator  # type: ignore[import-untyped]
from transformers import AutoTokenizer

from quantkit.errors import InputError
from quantkit.jobs import PairSpec, TrainJob, flat
from quantkit.models import cache_dir
from quantkit.models.shipped import sha256_of
from quantkit.pipelines.runs import running
from quantkit.processes import Processes, joined
from quantkit.progress import Progress, silent
from quantkit.results import TrainedModel, TrainingResult, read_json, write_json
from quantkit.results.environment import environment
from quantkit.training.arms import require_matched
from quantkit.training.corpus import Corpus, prepare_corpus
from quantkit.training.loop import WEIGHTS, ArmTraining
from quantkit.training.measure import Gauge

if sys.platform != "win32":
    import fcntl

DATA: Final = "data"
MODEL_FILE: Final = "model.json"
RESULT: Final = "training.json"


def run_train(job: TrainJob, *, progress: Progress = silent) -> Path:
    """Returns the folder with a model's folder for each arm and seed, and `training.json`.

    Several processes (`accelerate launch`, torchrun) share each batch; the first one writes. With
    `job.arms` the process that trains the last of the arms finishes the run. A model that is
    finished is left alone, with its checkpoint or without.

    Raises:
        InputError: parameter counts that do not match, text that cannot be had or is too short,
            no such device.
    """
    pair = job.pair
    require_matched(pair)
    # before the group is joined: on GPUs it has to be one of NCCL
    accelerator: Any = Accelerator(cpu=job.device == "cpu")
    if accelerator.device.type != job.device:
        raise InputError(f"--device {job.device}: torch sees none here; expected --device cpu.")
    with joined() as processes, running("train", job, processes) as run:
        if run.finished:
            return run.folder
        corpus = _corpus(pair, run.folder, processes, progress)
        tokenizer: Any = AutoTokenizer.from_pretrained(corpus.tokenizer)
        gauge = Gauge(pair, corpus.held_out, tokenizer)
        for seed, arm in pair.runs:
            if job.arms and arm not in job.arms:
                continue
            if processes.at_first(partial(_is_finished, run.folder, seed, arm)):
                continue
            folder = run.folder / f"{arm}-seed{seed}"
            processes.at_first(partial(folder.mkdir, exist_ok=True))
            training = ArmTraining(pair, arm, seed, corpus, folder, accelerator)
            keep = partial(_keep, training, pair, corpus, run.folder, processes.count)
            training.run(gauge, keep, progress)

        def finish() -> None:
            is_finished = all(_is_finished(run.folder, *which) for which in pair.runs)
            if is_finished or not (run.folder / RESULT).is_file():
                # once more: another process's last file may have been read before this one's
                _write_result(pair, corpus, run.folder, processes.count)
            if is_finished:
                run.finish()

        processes.at_first(finish)
        return run.folder


def _corpus(pair: PairSpec, folder: Path, processes: Processes, progress: Progress) -> Corpus:
    """Returns the rows: the first process makes them, all read them."""
    make = partial(
        prepare_corpus, pair, folder / DATA, cache=cache_dir() / "texts", progress=progress
    )
    with _alone(folder) if processes.is_first else nullcontext():
        if processes.count > 1:
            processes.at_first(lambda: make() and None)
        return processes.everywhere(make)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits until no other process makes the rows of this folder: one that trains other arms."""
    if sys.platform == "win32":
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _keep(
    training: ArmTraining, pair: PairSpec, corpus: Corpus, folder: Path, processes: int
) -> None:
    """Writes how far one model is, and the result with what is known of all."""
    write_json(training.folder / MODEL_FILE, training.info())
    _write_result(pair, corpus, folder, processes)


def _write_result(pair: PairSpec, corpus: Corpus, folder: Path, processes: int) -> None:
    found = [_known(folder, *which) for which in pair.runs]
    write_json(
        folder / RESULT,
        TrainingResult(
            name=pair.name,
            pair=flat(pair),
            corpus=corpus.info,
            models=[model for model in found if model is not None],
            processes=processes,
            environment=environment(),
        ),
    )


def _known(folder: Path, seed: int, arm: str) -> TrainedModel | None:
    path = folder / f"{arm}-seed{seed}" / MODEL_FILE
    return read_json(path, TrainedModel) if path.is_file() else None


def _is_finished(folder: Path, seed: int, arm: str) -> bool:
    """Returns whether a model went through all steps and its weights are those it ended with."""
    model = _known(folder, seed, arm)
    if model is None or not model.finished:
        return False
    weights = folder / model.folder / WEIGHTS
    return weights.is_file() and sha256_of(weights) == model.sha256
