"""The models of a sweep, each with its items and what its quantized rows read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from quantkit.calib_sets import TokenSlice, text_slice
from quantkit.calibration import WeightRanges
from quantkit.errors import InputError
from quantkit.jobs import (
    IclSpec,
    ImageClassificationSpec,
    LmEvalSpec,
    MultipleChoiceSpec,
    NamedModel,
    NeedlesSpec,
    SweepJob,
    TaskSpec,
)
from quantkit.models import LoadedModel, load, prepare
from quantkit.pipelines.held_out import HeldOut, held_out, read_ranges, require_own
from quantkit.pipelines.inputs import load_decoder, require_names
from quantkit.pipelines.weights import read_weights
from quantkit.processes import Processes
from quantkit.results import DataInfo, Ranges
from quantkit.sweeps import Subject
from quantkit.tasks import Icl, ImageClassification, LmEval, MultipleChoice, Needles, Perplexity
from quantkit.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """A run's ranges; `run`: what the user gave."""

    run: str
    ranges: Ranges
    weights: WeightRanges | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A model before its items are made: evaluation's text is cut for it.

    Attributes:
        held: What calibration has not seen; None where no task is made from the text.
        offset: Characters of the text that calibration has seen.
    """

    loaded: LoadedModel
    group: str
    calibrated: Calibrated | None
    held: HeldOut | None
    offset: int


def read_calibrated(runs: Sequence[str]) -> list[Calibrated]:
    """Returns the ranges of each run, with those of weights beside them."""
    found = []
    for run in runs:
        ranges = read_ranges(run)
        found.append(Calibrated(run=run, ranges=ranges, weights=read_weights(run, ranges)))
    return found


def subjects_of(
    job: SweepJob,
    runs: Sequence[Calibrated],
    keep: Sequence[str],
    processes: Processes,
) -> tuple[list[Subject], list[DataInfo]]:
    """Returns each model ready to be swept, and what is to be said about its evaluation text.

    All models are loaded together, so that what is made from text begins behind what calibration
    has seen of it for any of them: items are the same for all.

    Raises:
        InputError: a model that cannot do a task, two models of one name, ranges of none of them.
    """
    models = _load_all(job, processes)
    prepared = [
        _prepared(job, loaded, group, _own(runs, loaded, alone=len(models) == 1))
        for loaded, group in models
    ]
    for found in runs:
        if not any(one.calibrated is found for one in prepared):
            raise InputError(
                f"--ranges {found.run}: ranges of {found.ranges.model.name} (sha256 "
                f"{found.ranges.model.sha256[:10]}), which is none of the models."
            )
    start = max(one.offset for one in prepared)
    subjects, notes = [], []
    for one in prepared:
        tasks = [_task(spec, job, one, start) for spec in job.specs]
        subjects.append(
            Subject(
                loaded=one.loaded,
                group=one.group,
                tasks=tasks,
                ranges=None if one.calibrated is None else one.calibrated.ranges,
                weight_ranges=None if one.calibrated is None else one.calibrated.weights,
                keep=keep,
            )
        )
        data = tasks[0].data
        notes.append(data if one.held is None else one.held.noted(data))
    return subjects, notes


def _load_all(job: SweepJob, processes: Processes) -> list[tuple[LoadedModel, str]]:
    """Returns the models under their names in results, each with its group."""
    named = job.named
    found: list[tuple[LoadedModel, str]] = []
    for index, model in enumerate(named):
        if processes.count > 1:  # one converts or downloads, the others find it done
            processes.at_first(partial(prepare, model.source))
        loaded = processes.everywhere(partial(_load, job, model.source))
        name = _name(named, index, loaded.name)
        found.append((replace(loaded, name=name), model.label or name))
    require_names([loaded for loaded, _ in found])
    return found


def _load(job: SweepJob, source: str) -> LoadedModel:
    if not job.reads_images:
        return load_decoder(source, job)
    loaded = load(source, dtype=job.dtype, device=job.device)
    if loaded.modality != "image":
        raise InputError(
            f"{source} is a {type(loaded.model).__name__}: expected a classifier of images for "
            "--task image-classification."
        )
    return loaded


def _name(named: Sequence[NamedModel], index: int, own: str) -> str:
    """Returns the label where only one model has it; its seeds are numbered otherwise."""
    label = named[index].label
    if not label:
        return own
    seeds = [n for n, model in enumerate(named) if model.label == label]
    return label if len(seeds) == 1 else f"{label}#{seeds.index(index)}"


def _own(runs: Sequence[Calibrated], loaded: LoadedModel, *, alone: bool) -> Calibrated | None:
    """Returns the model's ranges among those that were given.

    Raises:
        InputError: ranges were given, and none are of this model.
    """
    own = [found for found in runs if found.ranges.model.sha256 == loaded.sha256]
    if own or not runs:
        return own[0] if own else None
    if alone:
        require_own(runs[0].ranges, runs[0].run, loaded)
    given = ", ".join(found.ranges.model.name for found in runs)
    raise InputError(
        f"--ranges: none are of {loaded.name} (sha256 {loaded.sha256[:10]}), only of {given}: "
        "calibrate it too, or sweep it alone."
    )


def _prepared(
    job: SweepJob, loaded: LoadedModel, group: str, calibrated: Calibrated | None
) -> Prepared:
    held = None
    if job.reads_text:
        held = _evaluation(job, loaded, calibrated)
    offset = 0 if held is None else seen_characters(loaded, held.text)
    return Prepared(loaded=loaded, group=group, calibrated=calibrated, held=held, offset=offset)


def _evaluation(job: SweepJob, loaded: LoadedModel, calibrated: Calibrated | None) -> HeldOut:
    if calibrated is not None:
        return held_out(
            job.eval,
            calibrated.run,
            calibrated.ranges,
            loaded,
            seq_len=job.seq_len,
            samples=job.samples,
            allow_overlap=job.allow_overlap,
        )
    text = text_slice(
        job.eval,
        loaded.tokenizer,
        seq_len=job.seq_len,
        samples=job.samples,
        skip=job.calib_samples if job.calib == job.eval else 0,
        bos=job.bos,
    )
    return HeldOut(text=text)


def seen_characters(loaded: LoadedModel, text: TokenSlice) -> int:
    """Returns how many characters of a running text lie before the slice's first block.

    Found by decoding them, so that a tokenizer which does not give back what it was given may move
    it a little. 0 where the slice is no part of one text.
    """
    if not text.skip or not text.spans or loaded.tokenizer is None:
        return 0
    before = text_slice(
        text.source,
        loaded.tokenizer,
        seq_len=text.seq_len,
        samples=text.skip,
        bos="never",
    )
    ids = torch.cat(list(before.ids))[: text.spans[0].begin]
    return len(loaded.tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _task(spec: TaskSpec, job: SweepJob, one: Prepared, start: int) -> Task[Any]:
    """Returns the items of one task, ready for the model."""
    loaded = one.loaded
    generated: dict[str, Any] = {
        "samples": job.items,
        "seed": job.seed,
        "batch_size": job.batch_size,
        "seq_len": job.seq_len,
        "bos": job.bos,
    }
    if isinstance(spec, NeedlesSpec):
        return Needles.of(spec, loaded.tokenizer, **generated)
    if isinstance(spec, IclSpec):
        return Icl.of(spec, loaded.tokenizer, **generated)
    if isinstance(spec, MultipleChoiceSpec):
        return MultipleChoice.of(
            spec,
            loaded.tokenizer,
            text_source=job.eval,
            start=start,
            items=job.items,
            seed=job.seed,
            batch_size=job.batch_size,
            max_length=_longest(loaded),
            bos=job.bos,
        )
    if isinstance(spec, LmEvalSpec):
        return LmEval.of(
            spec,
            loaded.tokenizer,
            items=job.items,
            seed=job.seed,
            batch_size=job.batch_size,
            max_length=_longest(loaded),
            bos=job.bos,
        )
    if isinstance(spec, ImageClassificationSpec):
        return ImageClassification.of(
            spec, loaded, images=job.items, seed=job.seed, batch_size=job.batch_size
        )
    assert one.held is not None  # the specification reads text
    return Perplexity.of(one.held.text, loaded.tokenizer, batch_size=job.batch_size)


def _longest(loaded: LoadedModel) -> int | None:
    """Returns how many positions the model has, where it says."""
    return getattr(loaded.model.config, "max_position_embeddings", None)
