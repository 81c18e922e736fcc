"""What the stages ask of the models they are given, and of what a folder already holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

from quantkit.calib_sets import DataSlice
from quantkit.errors import InputError
from quantkit.jobs import CompareJob, ExportJob, SensitivityJob, SweepJob
from quantkit.models import LoadedModel, is_decoder_only, load
from quantkit.results import Export, Ranges, Stats

T = TypeVar("T", Stats, Ranges, Export)


TWICE: Final = (
    "two models are called {name!r}: expected different names, since results are kept by name. "
    "Rename one of the folders; a sweep also takes LABEL=MODEL."
)


def load_decoder(name: str, job: SweepJob | ExportJob | CompareJob | SensitivityJob) -> LoadedModel:
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


def require_names(models: Sequence[LoadedModel]) -> None:
    names = [loaded.name for loaded in models]
    for name in names:
        if names.count(name) > 1:
            raise InputError(TWICE.format(name=name))


def same_source(path: Path, found: T, loaded: LoadedModel, text: DataSlice) -> T:
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
