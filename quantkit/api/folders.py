"""`load(PATH)`: any result file or run folder; and what two of the commands write together."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from quantkit.errors import InputError
from quantkit.results import (
    AutoResult,
    Calibration,
    Curves,
    Diagnosis,
    Export,
    Ranges,
    Sensitivity,
    Stats,
    Sweep,
    TrainingResult,
    read_curves,
    read_json,
    read_plain,
    schema_of,
)
from quantkit.results.notebook import Shown, html_of
from quantkit.results.shown import shown

RUN_FILE: Final = "run.json"
FILES: Final[dict[str, type[Any]]] = {
    "stats.json": Stats,
    "ranges.json": Ranges,
    "calibration.json": Calibration,
    "sensitivity.json": Sensitivity,
    "sweep.json": Sweep,
    "export.json": Export,
    "auto.json": AutoResult,
    "diagnosis.json": Diagnosis,
    "training.json": TrainingResult,
}
_CURVES: Final = "curves.jsonl"
_OF_COMMAND: Final = {
    "stats": "stats.json",
    "calibrate": "ranges.json",
    "sensitivity": "sensitivity.json",
    "sweep": "sweep.json",
    "export": "export.json",
    "diagnose": "diagnosis.json",
    "train": "training.json",
}
"""The file that a run of a command is about; other files may lie beside it."""
_REPORTS: Final = ("report.html", "report.md")


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """What `calibrate` writes: the ranges, and whether to trust them.

    Attributes:
        folder: Where both lie, with what was observed; other verbs take it as `ranges`.
    """

    ranges: Ranges
    calibration: Calibration = field(repr=False)
    folder: Path = field(repr=False)

    def _repr_html_(self) -> str:
        """What notebooks show: the tensors, the worst first."""
        return html_of(shown(self.calibration))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What `compare` writes, the models side by side.

    Attributes:
        folder: The run; each model has a folder of its own in it.
        stats, ranges, exports: By the models' names, in the order of the sweep.
        training: How the shipped pair was trained, where that is what was compared.
        report: Paths of the report: the page, its Markdown twin, and the charts of it.
    """

    folder: Path
    sweep: Sweep
    stats: dict[str, Stats]
    ranges: dict[str, Ranges]
    exports: dict[str, Export]
    training: TrainingResult | None = None
    report: tuple[Path, ...] = field(default=())

    def _repr_html_(self) -> str:
        """What notebooks show: outliers, accuracy and exports."""
        parts: list[Shown] = [shown(found) for found in self.stats.values()]
        parts += [shown(self.sweep), *(shown(found) for found in self.exports.values())]
        return html_of(*parts)


Loaded = (
    Stats | Calibrated | Ranges | Calibration | Sensitivity | Sweep | Export | AutoResult
    | Diagnosis | TrainingResult | Curves | Comparison
)  # fmt: skip


def load(path: str | os.PathLike[str]) -> Loaded:
    """Returns what a result file says, or a run folder; nothing is computed or written.

    Of a folder of `calibrate` both files, of `compare` all; of `export` the export, whose search
    with `quantize="auto"` is `load(FOLDER / "auto.json")`.

    Raises:
        InputError: nothing there, no result, several of which none is the run's own, or a file
            that cannot be read.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return _of_folder(path)
    if path.suffix == ".jsonl":
        return read_curves(path)
    plain = read_plain(path)
    schema = str(plain.get("schema")) if isinstance(plain, dict) else ""
    for cls in FILES.values():
        if schema.partition("/")[0] == schema_of(cls).partition("/")[0]:
            found: Loaded = read_json(path, cls)
            return found
    raise InputError(
        f"{path} is no result file: expected a run folder, or one of {', '.join(FILES)}, {_CURVES}."
    )


def _of_folder(folder: Path) -> Loaded:
    plain = read_plain(folder / RUN_FILE) if (folder / RUN_FILE).is_file() else {}
    command = plain.get("command") if isinstance(plain, dict) else None
    found = [name for name in (*FILES, _CURVES) if (folder / name).is_file()]
    if command == "compare" or (command is None and _is_comparison(folder)):
        return read_comparison(folder)
    if command in _OF_COMMAND and _OF_COMMAND[command] in found:
        found = [name for name in found if name == _OF_COMMAND[command]]
        if command == "calibrate" and (folder / "calibration.json").is_file():
            return read_calibrated(folder)
    if found == ["ranges.json", "calibration.json"]:
        return read_calibrated(folder)
    if len(found) == 1:
        return load(folder / found[0])
    if found:
        raise InputError(
            f"{folder} holds {', '.join(found)}: expected one of them, e.g. {folder / found[0]}."
        )
    below = sorted(path for name in (*FILES, _CURVES) for path in folder.glob(f"*/{name}"))
    if below:
        shown_paths = ", ".join(map(str, below[:3]))
        raise InputError(f"{folder} holds no result itself: expected one below it, {shown_paths}.")
    state = "a run that has not finished" if plain else "no result file"
    raise InputError(f"{folder} holds {state}: expected one of {', '.join(FILES)}, {_CURVES}.")


def _is_comparison(folder: Path) -> bool:
    return (folder / "sweep.json").is_file() and any(folder.glob("*/stats.json"))


def read_calibrated(folder: Path) -> Calibrated:
    """Returns what a run of `calibrate` wrote.

    Raises:
        InputError: as `read_json`.
    """
    return Calibrated(
        ranges=read_json(folder / "ranges.json", Ranges),
        calibration=read_json(folder / "calibration.json", Calibration),
        folder=folder,
    )


def read_comparison(folder: Path) -> Comparison:
    """Returns what a run of `compare` wrote.

    Raises:
        InputError: as `read_json`; it has not come to its sweep yet.
    """
    if not (folder / "sweep.json").is_file():
        raise InputError(f"{folder} holds a comparison that has not finished: run it again.")
    sweep = read_json(folder / "sweep.json", Sweep)
    folders = {model.name: folder / model.name for model in sweep.models}
    training = folder / "training.json"
    figures = sorted((folder / "figures").glob("*.svg"))
    return Comparison(
        folder=folder,
        sweep=sweep,
        stats=_each(folders, "stats.json", Stats),
        ranges=_each(folders, "ranges.json", Ranges),
        exports=_each(folders, "export.json", Export),
        training=read_json(training, TrainingResult) if training.is_file() else None,
        report=tuple(
            path for path in (*(folder / name for name in _REPORTS), *figures) if path.is_file()
        ),
    )


def _each(folders: dict[str, Path], name: str, cls: type[Any]) -> dict[str, Any]:
    return {
        model: read_json(folder / name, cls)
        for model, folder in folders.items()
        if (folder / name).is_file()
    }
