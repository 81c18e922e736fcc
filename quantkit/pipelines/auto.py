"""`--quantize auto`: calibration, trials and choice, and then the export of what was chosen.

Three parts of the text, proven apart: ranges and smoothing come from the first, the choice is made
on the second, the third measures what was chosen. Which inputs may stay in float is ranked on the
first blocks of the second. Items of another task are made from text behind the second part; every
other one is left to the report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from quantkit.calib_sets import TokenSlice, require_disjoint, text_slice
from quantkit.errors import GateError, InputError
from quantkit.exporting import LATENCY_TOKENS, float_path
from quantkit.jobs import (
    ExportJob,
    Storage,
    SweepJob,
    config_hash,
    parse_task,
)
from quantkit.jobs.tasks import PerplexitySpec, reads_text
from quantkit.models import LoadedModel
from quantkit.models.smoothing_groups import smoothing_groups
from quantkit.pipelines.auto_sources import WORDS, Sources
from quantkit.pipelines.held_out import HeldOut
from quantkit.pipelines.runs import SEARCH_FOLDER
from quantkit.pipelines.sweep_subjects import Prepared, seen_text, task_of
from quantkit.progress import Progress
from quantkit.results import AutoResult, Ranges, Trial, read_json, write_json
from quantkit.results.environment import environment
from quantkit.search import sensitivity
from quantkit.search.auto import Tried, choose, explore, front
from quantkit.search.candidates import METHODS, Candidate, first_candidates
from quantkit.search.judge import TrialBench, task_accuracy
from quantkit.tasks import Perplexity
from quantkit.tasks.task import Task

AUTO_FILE: Final = "auto.json"
RANKED_BLOCKS: Final = 2
"""Blocks that inputs are ranked on: the worst ones stand out after a few."""
MORE_TASKS: Final = 2
"""A task that is no text is measured whole, and every other item is left to the report."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """The three parts of the text; `shared`: blocks that the last one has of the others."""

    calib: TokenSlice
    search: TokenSlice
    report: TokenSlice
    shared: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Chosen:
    """What the export is made of."""

    candidate: Candidate
    ranges: Ranges
    held: HeldOut
    finish: Callable[[Path], None]


def parts_of(job: ExportJob, loaded: LoadedModel) -> Parts:
    """Returns the parts, proven apart.

    Raises:
        InputError: too little text, or text of one part in another.
    """
    calib = text_slice(
        job.calib, loaded.tokenizer, seq_len=job.seq_len, samples=job.samples, bos=job.bos
    )
    skip = job.samples if job.calib == job.eval else 0

    def after(blocks: int, samples: int) -> TokenSlice:
        return text_slice(
            job.eval,
            loaded.tokenizer,
            seq_len=job.seq_len,
            samples=samples,
            skip=skip + blocks,
            bos=job.bos,
        )

    parts = Parts(
        calib=calib,
        search=after(0, job.search_samples),
        report=after(job.search_samples, job.eval_samples),
    )
    shared = 0
    for one, other, what in (
        (parts.calib, parts.search, "calibration and the search"),
        (parts.calib, parts.report, "calibration and evaluation"),
        (parts.search, parts.report, "the search and evaluation"),
    ):
        found = require_disjoint(one, other, what, allow=job.allow_overlap)
        shared += found if other is parts.report else 0
    return replace(parts, shared=shared)


def search_export(job: ExportJob, loaded: LoadedModel, folder: Path, progress: Progress) -> Chosen:
    """Returns the fastest export within the budget; everything tried is in `auto.json`.

    An interrupted search goes on with the trials that it has; a finished one is read.

    Raises:
        GateError: nothing is within the budget; the nearest is said.
        InputError: as `parts_of`.
    """
    assert job.max_drop is not None  # the job has checked it
    parts = parts_of(job, loaded)
    sources = Sources(job=job, loaded=loaded, calib=parts.calib, folder=folder, progress=progress)
    task, units = _task(job, loaded, parts.search)
    path = folder / AUTO_FILE
    if path.is_file():
        found = _same(path, read_json(path, AutoResult), loaded, task)
    else:
        found = _search(job, loaded, parts.search, sources, task, units)
        write_json(path, found)
    trial = next((one for one in found.trials if one.name == found.chosen), None)
    if trial is None:
        raise GateError(
            f"{folder}: {found.reason}; see {AUTO_FILE}. Allow more, or measure on more text."
        )
    candidate = Candidate.of(trial)
    ranges = sources.source_ranges(candidate)
    sources.hand_over(candidate.smoothing)

    def finish(graph: Path) -> None:
        """Measures what was chosen on what the choice has not seen, where that is no text."""
        if not isinstance(task, Perplexity):
            rest = slice(1, None, MORE_TASKS)
            reported = task_accuracy(graph, float_path(folder), task, rest, job.seed)
            write_json(path, replace(found, reported=reported))

    return Chosen(candidate=candidate, ranges=ranges, held=_held(parts), finish=finish)


def _held(parts: Parts) -> HeldOut:
    said = f"this text shares {parts.shared} blocks with what was calibrated or chosen on."
    return HeldOut(text=parts.report, shared=parts.shared, warnings=(said,) if parts.shared else ())


def _search(
    job: ExportJob,
    loaded: LoadedModel,
    text: TokenSlice,
    sources: Sources,
    task: Task[Any],
    units: slice,
) -> AutoResult:
    assert job.max_drop is not None
    progress = sources.progress
    prompt = text.ids[0][:LATENCY_TOKENS][None]
    bench = TrialBench(
        loaded=loaded,
        task=task,
        units=units,
        graph=sources.float_graph("none"),
        ids=prompt,
        max_drop=job.max_drop,
        seed=job.seed,
        store=sources.folder / SEARCH_FOLDER / "trials",
        identity={
            "model": loaded.sha256,
            "calib": sources.calib.sha256,
            "data": task.data.sha256,
            "task": task.name,
            "budget": repr(job.max_drop),
            "config": config_hash(job),
            "versions": " ".join(
                f"{name} {version}"
                for name, version in environment().items()
                if name in ("quantkit", "onnxruntime", "torch")
            ),
        },
        source=sources.source,
    )
    count = 0

    def judge(candidate: Candidate) -> Any:
        nonlocal count
        count += 1
        progress(f"trying {candidate.name}", 0, 1)
        return bench.judge(candidate)

    candidates = first_candidates(
        can_smooth=bool(smoothing_groups(loaded.model)),
        methods=tuple(dict.fromkeys((job.method, *METHODS))),
        storage=_storage(job),
        logits=job.full_recipe.logits,
    )
    tried = explore(candidates, judge, lambda c: _ranked(sources, text, c, job))
    best = choose(tried)
    _, base, _ = bench.base()
    found = AutoResult(
        model=loaded.info(),
        data=task.data,
        calibration=sources.calib.info(job.batch_size),
        chosen_on=len(base.total),
        ranked_on=RANKED_BLOCKS,
        environment=environment(),
        task=task.name,
        metric=base.name,
        units=task.unit,
        max_drop=job.max_drop,
        prefill_tokens=prompt.shape[1],
        seed=job.seed,
        float_value=base.value,
        trials=front([one.trial for one in tried], higher_is_better=base.higher_is_better),
        chosen="" if best is None else best.trial.name,
        reason="",
    )
    return replace(found, reason=_reason(best, [one.trial for one in tried], job.max_drop))


def _reason(best: Tried | None, trials: Sequence[Trial], max_drop: float) -> str:
    if best is None:
        nearest = min(trials, key=lambda trial: trial.loss_high)
        return (
            f"none of {len(trials)} graphs stays within {max_drop:.4g}: the nearest is "
            f"{nearest.name}, whose loss may be {nearest.loss_high:.4g} at 95 %"
        )
    if best.trial.speedup < 1:
        return (
            f"no graph within {max_drop:.4g} is faster than float: of {len(trials)}, "
            f"{best.trial.name} is the fastest, {best.trial.speedup:.2f} times as fast"
        )
    return (
        f"{best.trial.name} is the fastest of {len(trials)} graphs within {max_drop:.4g}: "
        f"{best.trial.speedup:.2f} times as fast as float, loss at most "
        f"{best.trial.loss_high:.4g} at 95 %"
    )


def _same(path: Path, found: AutoResult, loaded: LoadedModel, task: Task[Any]) -> AutoResult:
    """Returns what an earlier run chose, if model and items are still the same."""
    for what, then, now in (
        ("task", found.task, task.name),
        ("model", found.model.sha256, loaded.sha256),
        ("data", found.data.sha256, task.data.sha256),
    ):
        if then != now:
            raise InputError(
                f"{path} was made from another {what} (sha256 {then[:10]}, now {now[:10]}): name "
                "another --out, or --force."
            )
    return found


def _storage(job: ExportJob) -> Storage:
    return "qdq" if job.storage == "qdq" else "matmulnbits"


def _ranked(
    sources: Sources, text: TokenSlice, candidate: Candidate, job: ExportJob
) -> Sequence[str]:
    """Returns the inputs of linear layers, the one that costs most alone first."""
    found = sensitivity(
        sources.loaded,
        text.first(RANKED_BLOCKS),
        replace(candidate.recipe, logits=None),
        sources.source(candidate).ranges,
        ranges_run=AUTO_FILE,
        batch_size=1,
        store=sources.folder / SEARCH_FOLDER / f"ranking-{WORDS[candidate.smoothing]}",
        progress=sources.progress,
        modes=("enable-one",),
        target_frac=1.0,
    )
    return [name for row in found.rows for name in row.quantizers]


def _task(job: ExportJob, loaded: LoadedModel, text: TokenSlice) -> tuple[Task[Any], slice]:
    """Returns what the choice is made on, and which of its units that are."""
    spec = parse_task(job.task)
    if isinstance(spec, PerplexitySpec):
        return Perplexity.of(text, loaded.tokenizer, job.batch_size), slice(None)
    text_of: dict[str, Any] = {}
    if reads_text(spec):  # what a task does not read, a sweep refuses
        read = job.samples + job.search_samples
        text_of = {"eval": job.eval, "calib": job.calib, "calib_samples": read}
    sweep = SweepJob(
        models=(job.model,),
        tasks=(job.task,),
        **text_of,
        seq_len=job.seq_len,
        items=MORE_TASKS * job.eval_samples,
        batch_size=job.batch_size,
        bos=job.bos,
        seed=job.seed,
    )
    if sweep.reads_images:
        raise InputError("--quantize auto measures language models: expected a task of text.")
    seen = seen_text(sweep, loaded, None) if sweep.reads_text else ""
    one = Prepared(loaded=loaded, group="", calibrated=None, held=None, seen=seen)
    return task_of(spec, sweep, one, seen), slice(0, None, MORE_TASKS)
