"""`compare` as a stage: every stage for every model, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from quantkit.jobs import CompareJob, ExportFormat
from quantkit.models import LoadedModel, pair_results
from quantkit.pipelines.export import How, export_into, ranges_into, require_passed, two_slices
from quantkit.pipelines.runs import running
from quantkit.pipelines.stats import stats_into
from quantkit.pipelines.sweep import recipes_of, sweep_into
from quantkit.pipelines.sweep_subjects import load_all, read_calibrated, subjects_of
from quantkit.processes import Processes
from quantkit.progress import Progress, silent
from quantkit.results.io import written_whole

ALONE: Final = Processes()


def run_compare(job: CompareJob, *, progress: Progress = silent) -> Path:
    """Returns the folder with every stage of every model and the report over all of it.

    Of the shipped pair also how it was trained. What an interrupted run has finished stays.

    Raises:
        GateError: an export's parity is outside the gates; everything is written before.
    """
    with running("compare", job) as run:
        if not run.finished:
            models = load_all(job, ALONE)
            for loaded, _ in models:
                _one_model(loaded, job, run.folder / loaded.name, progress)
            folders = tuple(str(run.folder / loaded.name) for loaded, _ in models)
            swept = job.sweep(folders if job.has_static else ())
            sweep_into(
                subjects_of(swept, read_calibrated(swept.ranges), (), ALONE, models=models),
                run.folder,
                recipes=recipes_of(swept),
                seed=job.seed,
                progress=progress,
            )
            _training_into(run.folder, [loaded for loaded, _ in models])
            run.finish()
        for folder in sorted(path.parent for path in run.folder.glob("*/export.json")):
            require_passed(folder)
        return run.folder


def _one_model(loaded: LoadedModel, job: CompareJob, folder: Path, progress: Progress) -> None:
    """Writes the model's statistics, ranges and graph; what is there is not made again."""
    calib, held = two_slices(
        loaded, job.text, job.text, job.seq_len, job.calib_samples, job.eval_samples, job.bos
    )
    stats_into(
        loaded,
        calib,
        folder,
        job.batch_size,
        progress,
        ALONE,
        both_readings=job.both_readings,
    )
    ranges = ranges_into(loaded, calib, folder, job.batch_size, progress)
    how = How(recipe=job.full_recipe, form=ExportFormat.parse(job.recipe))
    export_into(loaded, held, ranges, folder, job, progress, how=how)


def _training_into(folder: Path, models: Sequence[LoadedModel]) -> None:
    """Copies how the shipped pair was trained, where that is what was compared."""
    for path in pair_results([loaded.folder for loaded in models]):
        with written_whole(folder / path.name) as file:
            file.write(path.read_bytes())
