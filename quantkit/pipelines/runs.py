"""Run folders: who owns one, whether it is finished, and what may go on in it.

`run.json` holds the config that made the folder. The same config unfinished goes on, finished is
reported as done; another config is refused without `force`. `config.toml` beside it says the same
as a person would, for `--config`.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from quantkit.calib_sets.toml_text import toml_text
from quantkit.errors import InputError
from quantkit.jobs import ARMS, NOT_CONFIG, Job, config_hash, default_out
from quantkit.jobs.config_file import CONFIG_FILE, config_fields
from quantkit.models import PAIR_RESULTS
from quantkit.processes import Processes
from quantkit.results import read_plain, write_json
from quantkit.results.io import written_whole

ALONE: Final = Processes()
RUN_FILE: Final = "run.json"
_OF_A_RUN: Final = (CONFIG_FILE, RUN_FILE)
"""What a folder has when a run of it begins. The file that owns the folder goes last."""
_TEMPORARY: Final = re.compile(r"\.[^/]+\.(json|toml|safetensors|npy|html|md|svg)\.[a-z0-9_]{8}")
_LEAVING: Final = ".leaving-"
_BUILDING: Final = (".building-*", ".writing-*", ".prepared-*", f"{_LEAVING}*")
"""Folders that graphs are written in before they are moved, or that are being removed; a killed
process leaves them."""
SEARCH_FOLDER: Final = "search"
"""What `--quantize auto` tried, below a run."""
_ABANDONED_S: Final = 600.0
"""Age of a temporary file that nobody is writing any more; a younger one may be another process's,
which trains other arms in the same folder."""
_TRAINED: Final = re.compile(rf"({'|'.join(map(re.escape, ARMS))})-seed\d+")
RUN_SCHEMA: Final = "quantkit.run/1"
RESULTS: Final = {
    "calibrate": "ranges.json",
    "sensitivity": "sensitivity.json",
    "sweep": "sweep.json",
    "export": "export.json",
    "diagnose": "diagnosis.json",
    "train": "training.json",
}
"""The file without which a run of that command is not finished, whatever `run.json` says."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """An opened run folder; `finished` means that there is nothing left to do."""

    command: str
    job: Job
    folder: Path
    finished: bool

    def withdraw(self) -> None:
        """Leaves no trace of a job that failed before it wrote anything, over a mistyped word."""
        if not self.finished and {p.name for p in self.folder.iterdir()} <= set(_OF_A_RUN):
            for name in _OF_A_RUN:
                (self.folder / name).unlink(missing_ok=True)
            self.folder.rmdir()

    def finish(self) -> None:
        """Marks the folder as done."""
        _write(self.folder, self.command, self.job, finished=True)


def open_run(command: str, job: Job) -> Run:
    """Returns the job's folder, made or taken up again.

    Raises:
        InputError: as `check_run`, or a name in the job is no Unicode text, or `force` would
            remove what the job reads.
    """
    folder = default_out(command, job)
    config = toml_text(config_fields(command, job))  # refuses what no file can say, at no cost
    state = check_run(command, job)
    for path in folder.rglob(".*"):
        if _TEMPORARY.fullmatch(path.name) and path.is_file() and _age_s(path) > _ABANDONED_S:
            path.unlink(missing_ok=True)
    for path in (path for name in _BUILDING for path in folder.rglob(name)):
        if _age_s(path) > _ABANDONED_S:
            shutil.rmtree(path, ignore_errors=True)
    if state == "theirs":
        _require_kept(folder, job)
        _clear(folder)
    if state != "finished":
        _write(folder, command, job, finished=False)
        with written_whole(folder / CONFIG_FILE) as file:
            file.write(config.encode())
    return Run(command=command, job=job, folder=folder, finished=state == "finished")


def check_run(command: str, job: Job) -> Literal["new", "begun", "finished", "theirs"]:
    """Returns what the job's folder holds; `theirs` is to be cleared, and changes nothing.

    Raises:
        InputError: the folder holds another run, or something that is not a run, and `force` was
            not given.
    """
    folder = default_out(command, job)
    known = folder / RUN_FILE
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out {folder} is a file; expected a folder.")
    if known.is_file():
        plain = read_plain(known)
        theirs = plain.get("config_hash") if isinstance(plain, dict) else None
        if not isinstance(plain, dict) or "config_hash" not in plain:
            raise InputError(f"{known} is no run of quantkit: remove it, or name another --out.")
        if theirs != config_hash(job) or plain.get("command") != command:
            if not job.force:
                raise InputError(
                    f"{folder} holds another run ({plain.get('command', '?')}, config {theirs}): "
                    "expected an empty folder or the same config. Name another --out, or --force."
                )
            return "theirs"
        if job.force:
            return "theirs"
        result = folder / RESULTS.get(command, RUN_FILE)
        return "finished" if plain.get("finished") and result.is_file() else "begun"
    if folder.is_dir() and set(folder.iterdir()) - set(_temporaries(folder)):
        raise InputError(
            f"{folder} is not empty and holds no run of quantkit, so nothing in it is touched: "
            "name another --out."
        )
    return "new"


def _temporaries(folder: Path) -> list[Path]:
    """Returns files of names as `write_json` gives: being written, or left by a killed process."""
    found = folder.iterdir() if folder.is_dir() else ()
    return [path for path in found if _TEMPORARY.fullmatch(path.name)]


def _age_s(path: Path) -> float:
    """Returns how long ago a file was written to; 0 where it has gone to its place meanwhile."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


@contextmanager
def running(command: str, job: Job, processes: Processes = ALONE) -> Iterator[Run]:
    """Yields the job's folder, opened by the first process; see `Run.withdraw`.

    Raises:
        InputError: as `open_run`.
    """
    run = processes.at_first(lambda: open_run(command, job))
    try:
        yield run
    except InputError:
        if processes.is_first:
            run.withdraw()
        raise


def _clear(folder: Path) -> None:
    """Removes what earlier runs of quantkit wrote, and nothing else.

    A process that is killed here leaves a folder that is still the earlier run's, unfinished, and
    in which every file is whole: whoever gives that run's command again goes on with the rest.
    """
    before = read_plain(folder / RUN_FILE)
    write_json(folder / RUN_FILE, {**before, "finished": False})
    for path in _ours(folder):
        if path.is_dir() and not path.is_symlink():
            # a folder of which a half is gone would be read as what is there
            leaving = path.with_name(f"{_LEAVING}{path.name}-{os.getpid()}")
            path.rename(leaving)
            shutil.rmtree(leaving)
        else:
            path.unlink(missing_ok=True)


def _ours(folder: Path) -> list[Path]:
    """Returns the files and folders that runs of quantkit wrote, but for `RUN_FILE`."""
    results = (
        "stats", "ranges", "calibration", "smoothing", "sensitivity", "sweep", "export",
        "diagnosis", "auto", "config", "generation_config", "tokenizer", "tokenizer_config",
        "special_tokens_map", "preprocessor_config", "processor_config",
    )  # fmt: skip
    names = [*(f"{name}.json" for name in results), "quantizers.json", *PAIR_RESULTS]
    names += ["report.html", "report.md", CONFIG_FILE, "weights.safetensors"]
    folders = [folder / "cells", folder / "float", folder / SEARCH_FOLDER]
    trained = [path for path in folder.iterdir() if _TRAINED.fullmatch(path.name)]
    folders += [path.parent for path in folder.glob("data/tokenizer")]
    graphs = sorted(folder.glob("model*.onnx*"))  # a graph before its weights
    found = [*(folder / name for name in names), *folder.glob("observations.*")]
    found += [*folders, *trained, *graphs, *_model_folders(folder)]
    return [path for path in found if path.exists() or path.is_symlink()]


def _require_kept(folder: Path, job: Job) -> None:
    """Raises InputError where the job reads what `_clear` would remove."""
    gone = {path.resolve() for path in _ours(folder)}
    for word in _words(job):
        for name in {word, word.partition("=")[2]} - {""}:  # LABEL=MODEL, TASK=FILE
            path = Path(name).expanduser()
            place = path.resolve() if _exists(path) else None
            if place is not None and (place == folder.resolve() or gone & {place, *place.parents}):
                raise InputError(
                    f"--force would remove {name}, which this command reads: name another --out."
                )


def _words(value: Any) -> Iterator[str]:
    """Yields every text of a job but where it writes."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _words(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            if name != "out":
                yield from _words(getattr(value, name))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or with a zero byte: no path
        return False


def _model_folders(folder: Path) -> list[Path]:
    """Returns the models' folders of a `compare` run; a folder with its own run is not one."""
    found = [path.parent for path in folder.glob("*/stats.json")]
    return [path for path in found if not (path / RUN_FILE).exists()]


def _write(folder: Path, command: str, job: Job, *, finished: bool) -> None:
    config: dict[str, Any] = {
        name: getattr(job, name) for name in job.__dataclass_fields__ if name not in NOT_CONFIG
    }
    config = {k: list(v) if isinstance(v, tuple) else v for k, v in config.items()}
    plain = {
        "schema": RUN_SCHEMA,
        "command": command,
        "config_hash": config_hash(job),
        "finished": finished,
        "config": config,
    }
    write_json(folder / RUN_FILE, plain)
