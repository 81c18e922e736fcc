"""What a report reads: every result file below the run folders, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from quantkit.errors import InputError
from quantkit.results import (
    AutoResult,
    Calibration,
    Curves,
    Diagnosis,
    Export,
    ModelInfo,
    Ranges,
    Sensitivity,
    Stats,
    Sweep,
    TrainingResult,
    read_curves,
    read_json,
)

T = TypeVar("T")
U = TypeVar(
    "U",
    AutoResult,
    Stats,
    Ranges,
    Calibration,
    Sensitivity,
    Sweep,
    Export,
    TrainingResult,
    Diagnosis,
)

FILE_NAMES: Final = (
    "stats.json", "ranges.json", "calibration.json", "sensitivity.json", "sweep.json",
    "export.json", "auto.json", "curves.jsonl", "training.json", "training-seeds.json",
    "sweep-seeds.json", "diagnosis.json",
)  # fmt: skip

SEARCH_FOLDER: Final = "search"
"""Where `--quantize auto` keeps what it tried on the way; what it found stands in `auto.json`."""


@dataclass(frozen=True, kw_only=True)
class Found(Generic[T]):
    """One result file: its place relative to the run folder, and what it says."""

    place: str
    result: T


AnyFound = (
    Found[Stats]
    | Found[Ranges]
    | Found[Calibration]
    | Found[Sensitivity]
    | Found[Sweep]
    | Found[Export]
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """All that was found, in the order of the folders and then of the paths.

    `seed_trainings` and `seed_sweeps` are of other models than the rest: small ones, several seeds
    of each, that say how far a pair may be off by chance.
    """

    stats: tuple[Found[Stats], ...] = ()
    ranges: tuple[Found[Ranges], ...] = ()
    calibrations: tuple[Found[Calibration], ...] = ()
    sensitivities: tuple[Found[Sensitivity], ...] = ()
    sweeps: tuple[Found[Sweep], ...] = ()
    exports: tuple[Found[Export], ...] = ()
    searches: tuple[Found[AutoResult], ...] = ()
    curves: tuple[Found[Curves], ...] = ()
    trainings: tuple[Found[TrainingResult], ...] = ()
    seed_trainings: tuple[Found[TrainingResult], ...] = ()
    seed_sweeps: tuple[Found[Sweep], ...] = ()
    diagnoses: tuple[Found[Diagnosis], ...] = ()


def collect(run_folders: Sequence[Path]) -> Run:
    """Returns every result file (a name in `FILE_NAMES`) below the folders.

    A file that two folders share is read once. A path to one such file is taken too.

    Raises:
        InputError: a folder is missing, holds none of the files, or a file cannot be read.
    """
    if not run_folders:
        raise InputError("no run folder was named; expected the folder that a command wrote.")
    files: dict[Path, tuple[str, Path]] = {}
    for folder in run_folders:
        if folder.is_file():
            found = [folder]
        elif folder.is_dir():
            found = sorted(
                path
                for name in FILE_NAMES
                for path in folder.rglob(name)
                if SEARCH_FOLDER not in path.relative_to(folder).parts
            )
        else:
            raise InputError(f"no such run folder: {folder}.")
        for path in found:
            base = folder.parent if folder.is_file() else folder
            label = f"{base.resolve().name}/{path.relative_to(base).as_posix()}"
            files.setdefault(path.resolve(), (label, path))
    if not files:
        names = ", ".join(map(str, run_folders))
        raise InputError(f"no result file below {names}; expected one of {', '.join(FILE_NAMES)}.")
    unknown = [path for _, path in files.values() if path.name not in FILE_NAMES]
    if unknown:
        raise InputError(f"{unknown[0]} is not one of {', '.join(FILE_NAMES)}.")
    return Run(
        stats=_read(files, "stats.json", Stats),
        ranges=_read(files, "ranges.json", Ranges),
        calibrations=_read(files, "calibration.json", Calibration),
        sensitivities=_read(files, "sensitivity.json", Sensitivity),
        sweeps=_read(files, "sweep.json", Sweep),
        exports=_read(files, "export.json", Export),
        searches=_read(files, "auto.json", AutoResult),
        curves=tuple(
            Found(place=label, result=read_curves(path))
            for label, path in files.values()
            if path.name == "curves.jsonl"
        ),
        trainings=_read(files, "training.json", TrainingResult),
        seed_trainings=_read(files, "training-seeds.json", TrainingResult),
        seed_sweeps=_read(files, "sweep-seeds.json", Sweep),
        diagnoses=_read(files, "diagnosis.json", Diagnosis),
    )


def _read(files: dict[Path, tuple[str, Path]], name: str, cls: type[U]) -> tuple[Found[U], ...]:
    return tuple(
        Found(place=label, result=read_json(path, cls))
        for label, path in files.values()
        if path.name == name
    )


def everything(run: Run) -> tuple[AnyFound, ...]:
    """Returns all files that name a model and a text, in the order of the stages."""
    return (
        *run.stats,
        *run.ranges,
        *run.calibrations,
        *run.sensitivities,
        *run.sweeps,
        *run.exports,
    )


def labels(models: Sequence[ModelInfo]) -> list[str]:
    """Returns one name a model: its own, with part of its hash where two models share a name."""
    hashes: dict[str, set[str]] = {}
    for model in models:
        hashes.setdefault(model.name, set()).add(model.sha256)
    names = [
        model.name if len(hashes[model.name]) == 1 else f"{model.name} ({model.sha256[:8]})"
        for model in models
    ]
    again = Counter(names)
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if again[name] == 1 else f"{name} [{seen[name]}]")
    return unique
