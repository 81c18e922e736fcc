"""`sweep` as a stage: a job in, a finished run folder out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantkit.jobs import SweepJob, default_out
from quantkit.pipelines.held_out import kept_in_float, require_unchanged
from quantkit.pipelines.runs import check_run, running
from quantkit.pipelines.sweep_result import sweep_of
from quantkit.pipelines.sweep_subjects import Calibrated, read_calibrated, subjects_of
from quantkit.processes import Processes, joined
from quantkit.progress import Progress, silent
from quantkit.recipe import Recipe
from quantkit.results import Plan, Sweep, read_json, write_json
from quantkit.sweeps import (
    Subject,
    digest_of,
    logit_recipes,
    planned,
    ranges_digest,
    run_cells,
    unique,
)

ALONE = Processes()
CELLS = "cells"


def run_sweep(job: SweepJob, *, progress: Progress = silent) -> Path:
    """Returns the folder with `sweep.json`; finished cells stand in `cells/`.

    Several processes (`accelerate launch`, torchrun) share the batches; the first one writes.
    """
    with joined() as processes, running("sweep", job, processes) as run:
        calibrated = processes.everywhere(lambda: read_calibrated(job.ranges))
        keep = processes.everywhere(lambda: kept_in_float(job.keep))
        if run.finished:
            path = run.folder / "sweep.json"
            now = _digest(calibrated, keep)
            processes.everywhere(
                lambda: require_unchanged(path, read_json(path, Sweep).ranges_sha256, now)
            )
            return run.folder
        subjects = subjects_of(job, calibrated, keep, processes)
        sweep_into(
            subjects,
            run.folder,
            recipes=recipes_of(job),
            seed=job.seed,
            processes=processes,
            progress=progress,
        )
        processes.at_first(run.finish)
        return run.folder


def plan_sweep(job: SweepJob, *, progress: Progress = silent) -> Plan:
    """Returns what `run_sweep` would do, and about how long it would take; nothing is written."""
    folder = default_out("sweep", job)
    check_run("sweep", job)
    calibrated = read_calibrated(job.ranges)
    subjects = subjects_of(job, calibrated, kept_in_float(job.keep), ALONE)
    cells = [
        cell
        for subject in subjects
        for cell in planned(subject, recipes_of(job), store=folder / CELLS, progress=progress)
    ]
    return Plan(folder=str(folder), cells=cells)


def recipes_of(job: SweepJob) -> list[Recipe]:
    """Returns the rows of every model and task, the float one first."""
    swept = logit_recipes(job.bits, job.granularity, job.range, job.grid)
    return unique([*swept, *map(Recipe.parse, job.recipes)])


def sweep_into(
    subjects: Sequence[Subject],
    folder: Path,
    *,
    recipes: Sequence[Recipe],
    seed: int,
    processes: Processes = ALONE,
    progress: Progress,
) -> None:
    """Measures all cells and writes `sweep.json`."""
    for subject in subjects:  # what one lacks must not show after hours of another's cells
        subject.require(recipes)
    measured = [
        run_cells(subject, recipes, store=folder / CELLS, processes=processes, progress=progress)
        for subject in subjects
    ]

    def write() -> None:
        sweep = sweep_of(subjects, measured, seed=seed, progress=progress)
        write_json(folder / "sweep.json", sweep)

    processes.at_first(write)


def _digest(calibrated: Sequence[Calibrated], keep: Sequence[str]) -> str:
    own = [digest_of(found.ranges, keep) for found in calibrated]
    return ranges_digest(own or [digest_of(None, keep)])
