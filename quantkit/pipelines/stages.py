"""One function a command: a job in, a finished run folder out. Each skips what is already done."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from safetensors.torch import save_file

from quantkit.calib_sets import (
    DataSlice,
    TokenSlice,
    data_slice,
    require_disjoint,
    text_slice,
)
from quantkit.calibration import observation_tensors, observe, ranges_of
from quantkit.errors import GateError, InputError
from quantkit.exporting.proof import export_and_prove
from quantkit.jobs import (
    CalibrateJob,
    CompareJob,
    ExportJob,
    StatsJob,
    SweepJob,
    memory_limits,
)
from quantkit.models import LoadedModel, is_decoder_only, load, prepare
from quantkit.numerics.observers.minmax import MinMax
from quantkit.outliers import collect
from quantkit.pipelines.headline import headline
from quantkit.pipelines.runs import open_run
from quantkit.processes import Processes, joined
from quantkit.progress import Progress, silent
from quantkit.results import Export, Ranges, Stats, Sweep, read_json, write_json
from quantkit.results.environment import environment
from quantkit.sweeps import logit_recipes, run_cells

T = TypeVar("T", Stats, Ranges, Export)


def run_stats(job: StatsJob, *, progress: Progress = silent) -> Path:
    """Returns the folder with `stats.json`, or with one folder a model where there are several.

    Several processes (`accelerate launch`, torchrun) share the batches; the first one writes.
    """
    with joined() as processes:
        folders = [Path(source).expanduser().resolve() for source in job.models]
        named = [folder.name for folder in folders if folder.is_dir()]
        for name in named:
            if named.count(name) > 1:  # said before the first of them is measured
                raise InputError(_TWICE.format(name=name))
        run = processes.at_first(lambda: open_run("stats", job))
        if run.finished:
            return run.folder
        names: list[str] = []
        for source in job.models:
            if processes.count > 1:  # one converts or downloads, the others find it done
                processes.at_first(partial(prepare, source))
            loaded, data = processes.everywhere(partial(_load_with_data, source, job, processes))
            if loaded.name in names:
                raise InputError(_TWICE.format(name=loaded.name))
            names.append(loaded.name)
            folder = run.folder if len(job.models) == 1 else run.folder / loaded.name
            options: dict[str, Any] = {
                "points": job.points,
                "quantiles": job.quantiles,
                "rows": job.rows,
                "seed": job.seed,
                "count_masked": job.count_masked,
                "both_readings": job.both_readings,
                "layers": job.layers or None,
                "select": job.linear or None,
                "allow_unseen": job.allow_unseen,
            }
            _stats(loaded, data, folder, job.batch_size, progress, processes, **options)
            del loaded  # one model at a time in memory
        processes.at_first(run.finish)
        return run.folder


def _load_with_data(
    source: str, job: StatsJob, processes: Processes
) -> tuple[LoadedModel, DataSlice]:
    loaded = load(
        source,
        dtype=job.dtype,
        device=processes.own_device(job.device),
        device_map=job.device_map,
        max_memory=memory_limits(job.max_memory) or None,
    )
    data = data_slice(job.data, loaded, seq_len=job.seq_len, samples=job.samples, bos=job.bos)
    return loaded, data


def run_calibrate(job: CalibrateJob, *, progress: Progress = silent) -> Path:
    """Returns the folder with `ranges.json` and `observations.safetensors`."""
    run = open_run("calibrate", job)
    if not run.finished:
        loaded = _load_decoder(job.model, job)
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
        models = {name: _load_decoder(name, job) for name in job.models}
        _require_names(list(models.values()))
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
        loaded = _load_decoder(job.model, job)
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
        models = [_load_decoder(name, job) for name in job.models]
        _require_names(models)
        for loaded in models:
            calib, evaluation = _two_slices(
                loaded,
                job.text,
                job.text,
                job.seq_len,
                job.calib_samples,
                job.eval_samples,
                job.bos,
            )
            folder = run.folder / loaded.name
            _stats(loaded, calib, folder, job.batch_size, progress, Processes())
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


def _load_decoder(name: str, job: CalibrateJob | SweepJob | ExportJob | CompareJob) -> LoadedModel:
    """Returns the model; the stages after `stats` read language models.

    Raises:
        InputError: it is no causal language model.
    """
    loaded = load(name, dtype=job.dtype, device=job.device)
    config = getattr(loaded.model, "config", None)
    head = getattr(loaded.model, "get_output_embeddings", lambda: None)()
    if config is None or head is None or not is_decoder_only(config):
        raise InputError(
            f"{name} is a {type(loaded.model).__name__}: expected a causal language model here; "
            "`quantkit stats` takes any transformer."
        )
    return loaded


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


def _same_source(path: Path, found: T, loaded: LoadedModel, text: DataSlice) -> T:
    """Returns what an earlier run of the same config left, if model and text are still the same."""
    for what, then, now in (
        ("model", found.model.sha256, loaded.sha256),
        ("data", found.data.sha256, text.sha256),
    ):
        if then != now:
            raise InputError(
                f"{path} was made from another {what} (sha256 {then[:10]}, now {now[:10]}): the "
                f"{what} changed since. Name another --out, or --force."
            )
    return found


_TWICE: Final = (
    "two models are called {name!r}: expected different names, since results are kept by name. "
    "Rename one of the folders."
)


def _require_names(models: Sequence[LoadedModel]) -> None:
    names = [loaded.name for loaded in models]
    for name in names:
        if names.count(name) > 1:
            raise InputError(_TWICE.format(name=name))


def _stats(
    loaded: LoadedModel,
    data: DataSlice,
    folder: Path,
    batch_size: int,
    progress: Progress,
    processes: Processes,
    **options: Any,
) -> None:
    path = folder / "stats.json"

    def is_done() -> bool:
        if not path.exists():
            return False
        _same_source(path, read_json(path, Stats), loaded, data)
        return True

    if processes.at_first(is_done):
        return
    stats = collect(
        loaded, data, batch_size=batch_size, processes=processes, progress=progress, **options
    )

    def write() -> None:
        if stats is not None:  # which it is at the first process
            write_json(path, stats)

    processes.at_first(write)


def _ranges(
    loaded: LoadedModel, text: TokenSlice, folder: Path, batch_size: int, progress: Progress
) -> Ranges:
    path = folder / "ranges.json"
    if path.exists():
        return _same_source(path, read_json(path, Ranges), loaded, text)
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
        return _same_source(path, read_json(path, Export), loaded, evaluation)
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
        failed = [
            f"{name} (batch {parity.batch}, {parity.seq_len} tokens: cosine {parity.cosine:.6f}, "
            f"top-1 agreement {parity.top1_agreement:.4f})"
            for name, parities in export.parity.items()
            for parity in parities
            if not parity.passed
        ]
        raise GateError(
            f"{folder}: the exported graph is outside the parity gates: {failed[0]}; the files "
            "stay, see export.json and quantizers.json."
        )
