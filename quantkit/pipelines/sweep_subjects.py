"""The models of a sweep, each with its items and what its quantized rows read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from quantkit.calib_sets import text_slice
from quantkit.calib_sets.plain_text import documents_of
from quantkit.calibration import WeightRanges
from quantkit.errors import InputError
from quantkit.jobs import (
    CompareJob,
    IclSpec,
    ImageClassificationSpec,
    LmEvalSpec,
    MultipleChoiceSpec,
    NamedModel,
    NeedlesSpec,
    SweepJob,
    TaskSpec,
    reads_text,
)
from quantkit.models import LoadedModel, load, prepare
from quantkit.pipelines.held_out import HeldOut, held_out, read_ranges, require_own
from quantkit.pipelines.inputs import load_decoder, require_names
from quantkit.pipelines.weights import read_weights
from quantkit.processes import Processes
from quantkit.results import ModelInfo, Ranges
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
    """A model before its items are made.

    Attributes:
        held: Evaluation's blocks, which calibration has not seen; None where no task needs them.
        seen: The text that calibration has read.
    """

    loaded: LoadedModel
    group: str
    calibrated: Calibrated | None
    held: HeldOut | None
    seen: str


def read_calibrated(runs: Sequence[str]) -> list[Calibrated]:
    """Returns the ranges of each run, with those of weights beside them."""
    found: list[Calibrated] = []
    for run in runs:
        ranges = read_ranges(run)
        for other in found:
            if other.ranges.model.sha256 == ranges.model.sha256:
                raise InputError(
                    f"--ranges {other.run},{run}: both are of {ranges.model.name}: give one run "
                    "for each model."
                )
        found.append(Calibrated(run=run, ranges=ranges, weights=read_weights(run, ranges)))
    return found


def subjects_of(
    job: SweepJob,
    runs: Sequence[Calibrated],
    keep: Sequence[str],
    processes: Processes,
    *,
    models: Sequence[tuple[LoadedModel, str]] = (),
) -> list[Subject]:
    """Returns each model ready to be swept.

    All models are loaded together: items that are made from text leave out what calibration has
    read for any of them, so that they are the same for all.

    Args:
        models: What `load_all` has returned; empty: they are loaded here.

    Raises:
        InputError: a model that cannot do a task, two models of one name, ranges of none of them.
    """
    models = models or load_all(job, processes)
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
    seen = "\n\n".join(dict.fromkeys(one.seen for one in prepared if one.seen))
    return [_subject(job, one, keep, seen) for one in prepared]


def _subject(job: SweepJob, one: Prepared, keep: Sequence[str], seen: str) -> Subject:
    tasks = [task_of(spec, job, one, seen) for spec in job.specs]
    data = {}
    if one.held is not None:
        data = {
            task.name: one.held.noted(task.data)
            for spec, task in zip(job.specs, tasks, strict=True)
            if reads_text(spec)
        }
    return Subject(
        loaded=one.loaded,
        group=one.group,
        tasks=tasks,
        ranges=None if one.calibrated is None else one.calibrated.ranges,
        weight_ranges=None if one.calibrated is None else one.calibrated.weights,
        keep=keep,
        data=data,
    )


def load_all(job: SweepJob | CompareJob, processes: Processes) -> list[tuple[LoadedModel, str]]:
    """Returns the models under their names in results, each with its group.

    Raises:
        InputError: two models of one name, seeds that are not of one model.
    """
    named = job.named
    found: list[tuple[LoadedModel, str]] = []
    for index, model in enumerate(named):
        if processes.count > 1:  # one converts or downloads, the others find it done
            processes.at_first(partial(prepare, model.source))
        loaded = processes.everywhere(partial(_load, job, model.source))
        name = _name(named, index, loaded.name)
        found.append((replace(loaded, name=name), model.label or name))
    require_names([loaded for loaded, _ in found])
    _require_seeds(named, [loaded for loaded, _ in found])
    labels = {model.label for model in named if model.label}
    for model, (loaded, _) in zip(named, found, strict=True):
        if not model.label and loaded.name in labels:
            raise InputError(
                f"label {loaded.name!r} is also the name of {model.source}, which would be taken "
                "for one of its seeds: choose another label, or give that one a label too."
            )
    return found


def _require_seeds(named: Sequence[NamedModel], models: Sequence[LoadedModel]) -> None:
    """Raises InputError for models of one label that cannot be seeds of one model."""
    first: dict[str, ModelInfo] = {}
    for model, loaded in zip(named, models, strict=True):
        info = loaded.info()
        known = first.setdefault(model.label, info) if model.label else info
        sizes = [(one.architecture, one.parameters) for one in (known, info)]
        if sizes[0] != sizes[1]:
            said = [f"{name} of {count:,} parameters" for name, count in sizes]
            raise InputError(
                f"label {model.label!r} stands for a {said[0]} and, as {model.source}, for a "
                f"{said[1]}: expected seeds of one model. Give it another label."
            )


def _load(job: SweepJob | CompareJob, source: str) -> LoadedModel:
    if isinstance(job, CompareJob) or not job.reads_images:
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
    # ranges must be proven apart from the text, also where no block of it is scored
    needs_blocks = job.reads_blocks or (job.reads_text and calibrated is not None)
    return Prepared(
        loaded=loaded,
        group=group,
        calibrated=calibrated,
        held=_evaluation(job, loaded, calibrated) if needs_blocks else None,
        seen=seen_text(job, loaded, calibrated) if job.reads_text else "",
    )


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
    _require_positions(loaded, max(map(len, text.ids)))
    return HeldOut(text=text)


def _require_positions(loaded: LoadedModel, tokens: int) -> None:
    """Raises InputError for blocks that the model has no positions for, or was not made for."""
    most = _longest(loaded)
    if most is not None and tokens > most:
        raise InputError(
            f"{loaded.name} takes {most} positions, and a block has {tokens} tokens: lower "
            "--seq-len."
        )


def seen_text(job: SweepJob, loaded: LoadedModel, calibrated: Calibrated | None) -> str:
    """Returns the text that calibration has read, up to the end of its last paragraph.

    That of the ranges' run, else of the blocks that the job sets aside; empty where there is none,
    or where it was no text (which `held_out` refuses without --allow-overlap). Whole documents are
    taken where it read the beginning of each. Where blocks of a running text end is found by
    decoding them, so that a tokenizer which does not give back what it was given may move it a
    little.
    """
    if calibrated is not None:
        data = calibrated.ranges.data
        source, seq_len, blocks = data.source, data.seq_len, data.skipped_blocks + data.sequences
        if data.modality != "text":
            return ""
    elif job.calib == job.eval:
        source, seq_len, blocks = job.eval, job.seq_len, job.calib_samples
    else:
        return ""
    try:
        documents = documents_of(source)
    except InputError:
        return ""
    if not blocks:
        return ""
    if not documents.whole:
        return "\n\n".join([text for text in documents.documents if text.strip()][:blocks])
    text = documents.documents[0]
    read = text_slice(source, loaded.tokenizer, seq_len=seq_len, samples=blocks, bos="never")
    ids = torch.cat(list(read.ids))
    end = len(loaded.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    paragraph = text.find("\n\n", end)
    return text if paragraph < 0 else text[:paragraph]


def task_of(spec: TaskSpec, job: SweepJob, one: Prepared, seen: str) -> Task[Any]:
    """Returns the items of one task, ready for the model."""
    loaded = one.loaded
    if isinstance(spec, ImageClassificationSpec):
        return ImageClassification.of(
            spec, loaded, images=job.items, seed=job.seed, batch_size=job.batch_size
        )
    common: dict[str, Any] = {
        "seed": job.seed,
        "batch_size": job.batch_size,
        "max_length": _longest(loaded),
        # one for all tasks, and the one that the ranges were made with
        "bos": job.bos if one.calibrated is None else one.calibrated.ranges.data.bos,
    }
    if isinstance(spec, NeedlesSpec):
        return Needles.of(spec, loaded.tokenizer, samples=job.items, seq_len=job.seq_len, **common)
    if isinstance(spec, IclSpec):
        return Icl.of(spec, loaded.tokenizer, samples=job.items, seq_len=job.seq_len, **common)
    if isinstance(spec, MultipleChoiceSpec):
        return MultipleChoice.of(
            spec, loaded.tokenizer, text_source=job.eval, seen=seen, items=job.items, **common
        )
    if isinstance(spec, LmEvalSpec):
        return LmEval.of(spec, loaded.tokenizer, items=job.items, **common)
    assert one.held is not None  # the specification reads blocks
    return Perplexity.of(one.held.text, loaded.tokenizer, batch_size=job.batch_size)


def _longest(loaded: LoadedModel) -> int | None:
    """Returns how many positions the model has, where it says."""
    return getattr(loaded.model.config, "max_position_embeddings", None)
