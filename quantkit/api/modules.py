"""`stats` of a model that a program holds: an nn.Module and what it is to be run on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from quantkit.api.options import Source, taken
from quantkit.calib_sets import data_slice
from quantkit.errors import InputError
from quantkit.jobs import StatsJob
from quantkit.models import LoadedModel
from quantkit.outliers import collect, record
from quantkit.progress import Progress
from quantkit.results import Stats, write_json

_OF_LOADING: Final = ("dtype", "device", "device_map", "max_memory")
_OF_TEXT: Final = ("seq_len", "samples", "batch_size", "bos", "paper")
_FILE: Final = "stats.json"


def stats_of_module(
    model: nn.Module,
    data: Source | Iterable[Any] | None,
    job: StatsJob,
    *,
    given: Iterable[str],
    name: str,
    tokenizer: Any,
    progress: Progress,
) -> Stats:
    """Returns the statistics; the model runs in eval mode, and is as it was afterwards.

    Args:
        data: A source of text or images as of the command; or batches: tensors, or what the model
            takes by keyword as mappings, or by position as tuples.
        given: Keywords that were given, to refuse those that say nothing here.
        tokenizer: Of a model that reads text.

    Raises:
        InputError: an option that is not read, no data, or a file in the way.
    """
    folder = None if job.out is None else Path(job.out).expanduser()
    if folder is not None and (folder / _FILE).exists() and not job.force:
        raise InputError(f"{folder / _FILE} is there already: name another out, or force=True.")
    is_source = data is None or (isinstance(data, str) or hasattr(data, "__fspath__"))
    for option in (*_OF_LOADING, *(() if is_source else _OF_TEXT)):
        if option in given:
            what = "a model that is loaded" if option in _OF_LOADING else "batches of your own"
            raise InputError(f"stats does not read {option} with {what}: leave it out.")
    with evaluating(model):
        if is_source:
            source = None if data is None else str(taken("data", data, str))
            found = _of_source(model, source, job, name, tokenizer, progress)
        else:
            assert data is not None and not isinstance(data, str)
            found = _of_batches(model, data, job, name, progress)  # type: ignore[arg-type]
    if folder is None:
        return found
    write_json(folder / _FILE, found)
    return found.in_folder(folder)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model and all in it are in eval mode: dropout would be in the figures."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _options(job: StatsJob) -> dict[str, Any]:
    return {
        "points": job.points,
        "quantiles": job.quantiles,
        "rows": job.rows,
        "seed": job.seed,
        "count_masked": job.count_masked,
        "layers": job.layers or None,
        "select": job.linear or None,
        "allow_unseen": job.allow_unseen,
    }


def _of_source(
    model: nn.Module,
    source: str | None,
    job: StatsJob,
    name: str,
    tokenizer: Any,
    progress: Progress,
) -> Stats:
    loaded = LoadedModel(name=name, source="a program", model=model, tokenizer=tokenizer, sha256="")
    if tokenizer is None and loaded.modality == "text":
        said = "no data" if source is None else f"text ({source})"
        raise InputError(
            f"stats of a {type(model).__name__}: got {said} and no tokenizer; expected batches of "
            "what the model takes, or a text with tokenizer=..."
        )
    data = data_slice(source, loaded, seq_len=job.seq_len, samples=job.samples, bos=job.bos)
    found = collect(
        loaded,
        data,
        batch_size=job.batch_size,
        both_readings=job.both_readings,
        progress=progress,
        **_options(job),
    )
    assert found is not None  # this process is the only one
    return found


def _of_batches(
    model: nn.Module, data: Iterable[Any], job: StatsJob, name: str, progress: Progress
) -> Stats:
    batches = [data] if isinstance(data, Tensor | Mapping) else data
    total = len(batches) if isinstance(batches, Sized) else 0
    what, done = f"statistics of {name}", 0
    with torch.inference_mode(), record(model, name=name, **_options(job)) as recording:
        for done, batch in enumerate(batches, 1):
            progress(what, done - 1, max(total, done))
            if isinstance(batch, Mapping):
                model(**batch)
            elif isinstance(batch, tuple | list):
                model(*batch)
            else:
                model(batch)
        if not done:
            raise InputError("stats: data is empty; expected at least one batch.")
    progress(what, done, done)
    source = f"{done} batch{'' if done == 1 else 'es'} of a program"
    found = recording.stats()
    return dataclasses.replace(found, data=dataclasses.replace(found.data, source=source))
