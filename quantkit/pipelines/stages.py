"""One function a command: a job in, a finished run folder out. Each skips what is already done."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from safetensors.torch import save_file

from quantkit.calib_sets import TokenSlice, require_disjoint, text_slice
from quantkit.calibration import observation_tensors, observe, ranges_of
from quantkit.errors import GateError, InputError
from quantkit.exporting.proof import export_and_prove
from quantkit.jobs import CalibrateJob, CompareJob, ExportJob, StatsJob, SweepJob
from quantkit.models import LoadedModel, load
from quantkit.numerics.observers.minmax import MinMax
from quantkit.outliers import collect
from quantkit.pipelines.headline import headline
from quantkit.pipelines.runs import open_run
from quantkit.progress import Progress, silent
from quantkit.results import Export, Ranges, Stats, Sweep, read_json, write_json
from quantkit.results.environment import environment
from quantkit.sweeps import logit_recipes, run_cells


def run_stats(job: StatsJob, *, progress: Progress = silent) -> Path:
    """Returns the folder with `stats.json`."""
    run = open_run("stats", job)
    if not run.finished:
        loaded = load(job.model, dtype=job.dtype, device=job.device)
        text = text_slice(
            job.data, loaded.tokenizer, seq_len=job.seq_len, samples=job.samples, bos=job.bos
        )
        _stats(loaded, text, run.folder, job.batch_size, progress, count_masked=job.count_masked)
        run.finish()
    return run.folder


def run_calibrate(job: CalibrateJob, *, progress: Progress = silent) -> Path:
    """Returns the folder with `ranges.json` and `observations.safetensors`."""
    run = open_run("calibrate", job)
    if not run.finished:
        loaded = load(job.model, dtype=job.dtype, device=job.device)
        text = text_slice(
            job.calib, loaded.tokenizer, seq_len=job.seq_len, samples=job.samples, bos=job.bos
        )
        _ranges(loaded, text, run.folder, job.batch_size, progress)
        run.finish()
    return run.folder


def run_sweep(job: SweepJob, *, progress: Progress = silent) -> Path:
    """Returns the folder with `sweep.json`; finished cells stand in `cells/`."""
    run = open_run("sweep", job)
    if not run.finished:
        skip = job.calib_samples if job.calib == job.eval else 0
        models = {}
        for name in job.models:
            loaded = load(name, dtype=job.dtype, device=job.device)
            models[name] = loaded
        texts = {
            name: text_slice(
                job.eval,
                loaded.tokenizer,
                seq_len=job.seq_len,
                samples=job.samples,
                skip=skip,
                bos=job.bos,
            )
            for name, loaded in models.items()
        }
        _sweep(
            [(models[name], texts[name]) for name in job.models],
            run.folder,
            bits=job.bits,
            granularity=job.granularity,
            batch_size=job.batch_size,
            seed=job.seed,
            progress=progress,
        )
        run.finish()
    return run.folder


def run_export(job: ExportJob, *, progress: Progress = silent) -> Path:
    """Returns the folder with `model.onnx` and `export.json`.

    Raises:
        GateError: parity outside the gates; the files stay, as evidence.
    """
    run = open_run("export", job)
    if not run.finished:
        loaded = load(job.model, dtype=job.dtype, device=job.device)
        calib, evaluation = _two_slices(
            loaded, job.calib, job.eval, job.seq_len, job.samples, job.eval_samples, job.bos
        )
        ranges = _ranges(loaded, calib, run.folder, job.batch_size, progress)
        _export(loaded, evaluation, ranges, run.folder, job, progress)
        run.finish()
    _require_passed(run.folder)
    return run.folder


def run_compare(job: CompareJob, *, progress: Progress = silent) -> Path:
    """Returns the folder with every stage of every model and the report over all of it.

    Raises:
        GateError: an export's parity is outside the gates; everything is written before.
    """
    run = open_run("compare", job)
    if not run.finished:
        pairs: list[tuple[LoadedModel, TokenSlice]] = []
        for name in job.models:
            loaded = load(name, dtype=job.dtype, device=job.device)
            calib, evaluation = _two_slices(
                loaded,
                job.text,
                job.text,
                job.seq_len,
                job.calib_samples,
                job.eval_samples,
                job.bos,
            )
            if any(loaded.name == other.name for other, _ in pairs):
                raise InputError(
                    f"two models are called {loaded.name!r}: expected different folder names, "
                    "since each has its own folder in the run. Rename one."
                )
            folder = run.folder / loaded.name
            _stats(loaded, calib, folder, job.batch_size, progress)
            ranges = _ranges(loaded, calib, folder, job.batch_size, progress)
            _export(loaded, evaluation, ranges, folder, job, progress)
            pairs.append((loaded, evaluation))
        _sweep(
            pairs,
            run.folder,
            bits=job.bits,
            granularity=job.granularity,
            batch_size=job.batch_size,
            seed=job.seed,
            progress=progress,
        )
        run.finish()
    for folder in sorted(path.parent for path in run.folder.glob("*/export.json")):
        _require_passed(folder)
    return run.folder


def _two_slices(
    loaded: LoadedModel,
    calib: str,
    evaluation: str,
    seq_len: int,
    calib_samples: int,
    eval_samples: int,
    bos: str,
) -> tuple[TokenSlice, TokenSlice]:
    """Returns calibration's blocks and evaluation's; of one source, the later ones."""
    first = text_slice(calib, loaded.tokenizer, seq_len=seq_len, samples=calib_samples, bos=bos)
    second = text_slice(
        evaluation,
        loaded.tokenizer,
        seq_len=seq_len,
        samples=eval_samples,
        skip=calib_samples if calib == evaluation else 0,
        bos=bos,
    )
    require_disjoint(first, second, "calibration and evaluation")
    return first, second


def _stats(
    loaded: LoadedModel,
    text: TokenSlice,
    folder: Path,
    batch_size: int,
    progress: Progress,
    *,
    count_masked: bool = False,
) -> Stats:
    path = folder / "stats.json"
    if path.exists():
        return read_json(path, Stats)
    stats = collect(
        loaded, text, batch_size=batch_size, count_masked=count_masked, progress=progress
    )
    write_json(path, stats)
    return stats


def _ranges(
    loaded: LoadedModel, text: TokenSlice, folder: Path, batch_size: int, progress: Progress
) -> Ranges:
    path = folder / "ranges.json"
    if path.exists():
        return read_json(path, Ranges)
    observed = observe(loaded, text, batch_size=batch_size, progress=progress)
    ranges = ranges_of(observed, loaded, text, batch_size=batch_size)
    folder.mkdir(parents=True, exist_ok=True)
    _save_tensors(folder / "observations.safetensors", observed)
    write_json(path, ranges)
    return ranges


def _save_tensors(path: Path, observed: dict[str, MinMax]) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file(observation_tensors(observed), temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _sweep(
    pairs: list[tuple[LoadedModel, TokenSlice]],
    folder: Path,
    *,
    bits: tuple[int, ...],
    granularity: tuple[str, ...],
    batch_size: int,
    seed: int,
    progress: Progress,
) -> Sweep:
    cells, deltas = [], []
    for loaded, text in pairs:
        more_cells, more_deltas = run_cells(
            loaded,
            text,
            logit_recipes(bits, granularity),
            batch_size=batch_size,
            seed=seed,
            store=folder / "cells",
            progress=progress,
        )
        cells += more_cells
        deltas += more_deltas
    sweep = Sweep(
        models=[loaded.info() for loaded, _ in pairs],
        data=pairs[0][1].info(batch_size),
        environment=environment(),
        cells=cells,
        deltas=deltas,
        headline=headline(cells, deltas),
    )
    write_json(folder / "sweep.json", sweep)
    return sweep


def _export(
    loaded: LoadedModel,
    evaluation: TokenSlice,
    ranges: Ranges,
    folder: Path,
    job: ExportJob | CompareJob,
    progress: Progress,
) -> Export:
    path = folder / "export.json"
    if path.exists():
        return read_json(path, Export)
    exported = export_and_prove(
        loaded,
        evaluation,
        ranges,
        folder,
        recipe=job.full_recipe,
        opset=job.opset,
        batch_size=job.batch_size,
        progress=progress,
    )
    write_json(path, exported)
    return exported


def _require_passed(folder: Path) -> None:
    export = read_json(folder / "export.json", Export)
    if not export.passed:
        worst = min(
            (parity for parities in export.parity.values() for parity in parities),
            key=lambda parity: parity.cosine,
        )
        raise GateError(
            f"{folder}: the exported graph is outside the parity gates (worst cosine "
            f"{worst.cosine:.6f}, top-1 agreement {worst.top1_agreement:.4f} against "
            f"{worst.reference}); the files stay, see export.json."
        )
