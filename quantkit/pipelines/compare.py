"""`compare` as a stage: every stage for every model, side by side."""

from __future__ import annotations

from pathlib import Path

from quantkit.jobs import CompareJob
from quantkit.pipelines.export import export_into, ranges_into, require_passed, two_slices
from quantkit.pipelines.inputs import load_decoder, require_names
from quantkit.pipelines.runs import running
from quantkit.pipelines.stats import stats_into
from quantkit.pipelines.sweep import sweep_into
from quantkit.processes import Processes
from quantkit.progress import Progress, silent
from quantkit.sweeps import Subject, logit_recipes
from quantkit.tasks import Perplexity


def run_compare(job: CompareJob, *, progress: Progress = silent) -> Path:
    """Returns the folder with every stage of every model and the report over all of it.

    Raises:
        GateError: an export's parity is outside the gates; everything is written before.
    """
    with running("compare", job) as run:
        if not run.finished:
            subjects: list[Subject] = []
            models = [load_decoder(name, job) for name in job.models]
            require_names(models)
            for loaded in models:
                calib, held = two_slices(
                    loaded,
                    job.text,
                    job.text,
                    job.seq_len,
                    job.calib_samples,
                    job.eval_samples,
                    job.bos,
                )
                folder = run.folder / loaded.name
                stats_into(loaded, calib, folder, job.batch_size, progress, Processes())
                ranges = ranges_into(loaded, calib, folder, job.batch_size, progress)
                export_into(loaded, held, ranges, folder, job, progress)
                task = Perplexity.of(held.text, loaded.tokenizer, batch_size=job.batch_size)
                noted = {task.name: held.noted(task.data)}
                subjects.append(Subject(loaded=loaded, group=loaded.name, tasks=[task], data=noted))
            sweep_into(
                subjects,
                run.folder,
                recipes=logit_recipes(job.bits, job.granularity),
                seed=job.seed,
                progress=progress,
            )
            run.finish()
        for folder in sorted(path.parent for path in run.folder.glob("*/export.json")):
            require_passed(folder)
        return run.folder
