"""`run_sensitivity`: ranges of an earlier run and held-out text in, `sensitivity.json` out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from quantkit.jobs import SensitivityJob
from quantkit.pipelines.held_out import held_out, read_ranges
from quantkit.pipelines.inputs import load_decoder
from quantkit.pipelines.runs import running
from quantkit.pipelines.weights import read_weights
from quantkit.progress import Progress, silent
from quantkit.recipe import Recipe
from quantkit.results import write_json
from quantkit.search import sensitivity


def run_sensitivity(job: SensitivityJob, *, progress: Progress = silent) -> Path:
    """Returns the folder with `sensitivity.json`; what was measured so far stands in `cells/`.

    Raises:
        InputError: no `ranges.json`, ranges of another model, or text that calibration has seen.
    """
    ranges = read_ranges(job.ranges)
    with running("sensitivity", job) as run:
        if run.finished:
            return run.folder
        loaded = load_decoder(job.model, job)
        held = held_out(
            job.eval,
            job.ranges,
            ranges,
            loaded,
            seq_len=job.seq_len,
            samples=job.samples,
            allow_overlap=job.allow_overlap,
        )
        found = sensitivity(
            loaded,
            held.text,
            Recipe.parse(job.recipe),
            ranges,
            ranges_run=job.ranges,
            weight_ranges=read_weights(job.ranges, ranges),
            batch_size=job.batch_size,
            store=run.folder / "cells",
            progress=progress,
            modes=job.modes,
            group=job.group,
            weights=job.weights,
            target_frac=job.target_frac,
        )
        noted = dataclasses.replace(
            found, data=held.noted(found.data), warnings=[*found.warnings, *held.warnings]
        )
        write_json(run.folder / "sensitivity.json", noted)
        run.finish()
        return run.folder
