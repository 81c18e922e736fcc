"""The commands that repeat each file of a report, from what the run folders say of themselves."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from quantkit.errors import InputError
from quantkit.jobs import (
    CalibrateJob,
    CompareJob,
    DiagnoseJob,
    ExportJob,
    SensitivityJob,
    StatsJob,
    SweepJob,
)
from quantkit.jobs.config_file import CONFIG_FILE, NOTHING, option_of
from quantkit.reporting.collect import FILE_NAMES, SEARCH_FOLDER
from quantkit.reporting.text import Table
from quantkit.results import read_plain

RUN_FILE: Final = "run.json"
_JOBS: Final[dict[str, type[Any]]] = {
    "stats": StatsJob,
    "calibrate": CalibrateJob,
    "sensitivity": SensitivityJob,
    "sweep": SweepJob,
    "export": ExportJob,
    "diagnose": DiagnoseJob,
    "compare": CompareJob,
}
_ARGUMENTS: Final = ("models", "model", "float_graph", "quantized_graph")
"""Fields that a command takes without an option's name, in the order of the job."""


_UNSAID: Final = f"no command line can say it: its {RUN_FILE} has the options"


def commands_table(run_folders: Sequence[Path]) -> Table:
    """Returns a row a run below the folders: its files, and the command that makes them again.

    Options that have their default now are left out; a run that saved its `config.toml` is
    repeated exactly by that, whatever the defaults of another version are.
    """
    rows = []
    for folder, plain in _runs(run_folders):
        files = [name for name in FILE_NAMES if any(_own(folder, name))]
        if files:
            has_config = (folder / CONFIG_FILE).is_file()
            exactly = f"--config {shlex.quote(str(folder / CONFIG_FILE))}" if has_config else ""
            rows.append((", ".join(files), command_of(plain, folder) or _UNSAID, exactly))
    return Table(
        title="Commands that make these files again",
        columns=("files", "command", "or exactly, by its saved config"),
        rows=tuple(rows),
        text_columns=3,
        note="--out is where the files are now; name another folder to compare with them.",
    )


def command_of(plain: dict[str, Any], folder: Path) -> str:
    """Returns the command line of a `run.json`, quoted for a shell.

    What no command line can say, such as a name with a comma in a list, is left to the saved
    config; so is a training, whose argument that file is. "" where that was not saved. Options
    that this version does not have are left out.
    """
    command = str(plain.get("command", ""))
    config: dict[str, Any] = plain.get("config", {})
    end = ["--out", str(folder)]
    saved = folder / CONFIG_FILE
    if command == "train":
        return shlex.join(["quantkit", "train", *end, "--", str(saved)]) if saved.is_file() else ""
    job = _JOBS.get(command)
    if job is None:
        return ""
    known = {field.name for field in dataclasses.fields(job)}
    defaults = _defaults(job)
    words: list[str] = []
    places: list[str] = []
    for name, value in config.items():
        if name in _ARGUMENTS:
            places += map(
                str, value if isinstance(value, list) else [] if value is None else [value]
            )
        elif name not in known or (name in defaults and defaults[name] == value):
            continue
        elif isinstance(value, bool):
            words += [f"--{option_of(name)}"] if value else []
        elif isinstance(value, list) and any("," in str(part) for part in value):
            again = ["quantkit", command, "--config", str(saved), *end]
            return shlex.join(again) if saved.is_file() else ""
        else:
            words += [f"--{option_of(name)}", _value(value)]
    # what looks like an option is none behind the dashes
    dashes = ["--"] if any(place.startswith("-") for place in places) else []
    return shlex.join(["quantkit", command, *words, *end, *dashes, *places])


def _value(value: object) -> str:
    if value is None or value == []:
        return NOTHING
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _defaults(job: type[Any]) -> dict[str, Any]:
    """Returns field -> its default as JSON holds it."""
    return {
        field.name: list(field.default) if isinstance(field.default, tuple) else field.default
        for field in dataclasses.fields(job)
        if field.default is not dataclasses.MISSING
    }


def _runs(run_folders: Sequence[Path]) -> list[tuple[Path, dict[str, Any]]]:
    """Returns (folder, what its `run.json` says), each once; a file that cannot be read is none."""
    found: dict[Path, tuple[Path, dict[str, Any]]] = {}
    for given in run_folders:
        base = given if given.is_dir() else given.parent
        for path in sorted(base.rglob(RUN_FILE)):
            if SEARCH_FOLDER in path.relative_to(base).parts:
                continue
            try:
                plain = read_plain(path)
            except InputError:
                continue
            if isinstance(plain, dict) and isinstance(plain.get("config"), dict):
                found.setdefault(path.resolve(), (path.parent, plain))
    return list(found.values())


def _own(folder: Path, name: str) -> list[Path]:
    """Returns the files of that name that the run in `folder` wrote, not another run below it."""
    return [
        path
        for path in folder.rglob(name)
        if not any((parent / RUN_FILE).is_file() for parent in _between(path.parent, folder))
    ]


def _between(inner: Path, outer: Path) -> list[Path]:
    """Returns the folders from `inner` up to, but without, `outer`."""
    found = []
    while inner not in (outer, inner.parent):
        found.append(inner)
        inner = inner.parent
    return found
