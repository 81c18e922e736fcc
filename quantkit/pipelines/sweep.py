"""`sweep` as a stage: a job in, a finished run folder out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantkit.calib_sets import TokenSlice, text_slice
from quantkit.calibration import WeightRanges
from quantkit.jobs import SweepJob
from quantkit.models import LoadedModel
from quantkit.pipelines.headline import headline
from quantkit.pipelines.held_out import (
    HeldOut,
    held_out,
    kept_in_float,
    read_ranges,
    require_unchanged,
)
from quantkit.pipelines.inputs import load_decoder, require_names
from quantkit.pipelines.runs import running
from quantkit.pipelines.weights import read_weights
from quantkit.progress import Progress, silent
from quantkit.recipe import Recipe
from quantkit.results import Ranges, Sweep, read_json, write_json
from quantkit.results.environment import environment
from quantkit.sweeps import digest_of, logit_recipes, run_cells


def run_sweep(job: SweepJob, *, progress: Progress = silent) -> Path:
    """Returns the folder with `sweep.json`; finished cells stand in `cells/`."""
    with running("sweep", job) as run:
        ranges, weight_ranges = None, None
        if job.ranges is not None:
            ranges = read_ranges(job.ranges)
            weight_ranges = read_weights(job.ranges, ranges)
        keep = kept_in_float(job.keep)
        if run.finished:
            path = run.folder / "sweep.json"
            require_unchanged(path, read_json(path, Sweep).ranges_sha256, digest_of(ranges, keep))
            return run.folder
        models = [load_decoder(name, job) for name in job.models]
        require_names(models)
        pairs: list[tuple[LoadedModel, TokenSlice]] = []
        held: HeldOut | None = None
        for loaded in models:
            if ranges is not None and job.ranges is not None:
                held = held_out(
                    job.eval,
                    job.ranges,
                    ranges,
                    loaded,
                    seq_len=job.seq_len,
                    samples=job.samples,
                    allow_overlap=job.allow_overlap,
                )
                pairs.append((loaded, held.text))
                continue
            text = text_slice(
                job.eval,
                loaded.tokenizer,
                seq_len=job.seq_len,
                samples=job.samples,
                skip=job.calib_samples if job.calib == job.eval else 0,
                bos=job.bos,
            )
            pairs.append((loaded, text))
        sweep_into(
            pairs,
            run.folder,
            recipes=[
                *logit_recipes(job.bits, job.granularity),
                *map(Recipe.parse, job.recipes),
            ],
            ranges=ranges,
            weight_ranges=weight_ranges,
            keep=keep,
            held=held,
            batch_size=job.batch_size,
            seed=job.seed,
            progress=progress,
        )
        run.finish()
        return run.folder


def sweep_into(
    pairs: list[tuple[LoadedModel, TokenSlice]],
    folder: Path,
    *,
    recipes: Sequence[Recipe],
    ranges: Ranges | None = None,
    weight_ranges: WeightRanges | None = None,
    keep: Sequence[str] = (),
    held: HeldOut | None = None,
    batch_size: int,
    seed: int,
    progress: Progress,
) -> Sweep:
    cells, deltas = [], []
    for loaded, text in pairs:
        more_cells, more_deltas = run_cells(
            loaded,
            text,
            recipes,
            ranges=ranges,
            weight_ranges=weight_ranges,
            keep=keep,
            batch_size=batch_size,
            seed=seed,
            store=folder / "cells",
            progress=progress,
        )
        cells += more_cells
        deltas += more_deltas
    data = pairs[0][1].info(batch_size)
    sweep = Sweep(
        models=[loaded.info() for loaded, _ in pairs],
        data=data if held is None else held.noted(data),
        environment=environment(),
        cells=cells,
        deltas=deltas,
        headline=headline(cells, deltas),
        ranges_sha256=digest_of(ranges, keep),
        kept=list(keep),
    )
    write_json(folder / "sweep.json", sweep)
    return sweep
