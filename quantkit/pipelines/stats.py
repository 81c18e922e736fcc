"""`stats` as a stage: a job in, a finished run folder out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from quantkit.calib_sets import DataSlice, data_slice
from quantkit.errors import InputError
from quantkit.jobs import StatsJob, memory_limits
from quantkit.models import LoadedModel, load, prepare
from quantkit.outliers import collect
from quantkit.pipelines.inputs import TWICE, same_source
from quantkit.pipelines.runs import running
from quantkit.processes import Processes, joined
from quantkit.progress import Progress, silent
from quantkit.results import Stats, read_json, write_json


def run_stats(job: StatsJob, *, progress: Progress = silent) -> Path:
    """Returns the folder with `stats.json`, or with one folder a model where there are several.

    Several processes (`accelerate launch`, torchrun) share the batches; the first one writes.
    """
    folders = [Path(source).expanduser().resolve() for source in job.models]
    named = [folder.name for folder in folders if folder.is_dir()]
    for name in named:
        if named.count(name) > 1:  # said before the first of them is measured
            raise InputError(TWICE.format(name=name))
    with joined() as processes, running("stats", job, processes) as run:
        if not run.finished:
            _run(job, run.folder, processes, progress)
            processes.at_first(run.finish)
        return run.folder


def _run(job: StatsJob, root: Path, processes: Processes, progress: Progress) -> None:
    names: list[str] = []
    for source in job.models:
        if processes.count > 1:  # one converts or downloads, the others find it done
            processes.at_first(partial(prepare, source))
        loaded, data = processes.everywhere(partial(_load_with_data, source, job, processes))
        if loaded.name in names:
            raise InputError(TWICE.format(name=loaded.name))
        names.append(loaded.name)
        folder = root if len(job.models) == 1 else root / loaded.name
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
        stats_into(loaded, data, folder, job.batch_size, progress, processes, **options)
        del loaded  # one model at a time in memory


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


def stats_into(
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
        same_source(path, read_json(path, Stats), loaded, data)
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
