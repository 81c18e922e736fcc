"""What a folder may hold after a kill, and what a finished one must.

A name that begins with a dot is a temporary one. Every other file says that it is whole.
"""

from __future__ import annotations

import json
import os
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import numpy as np

VOLATILE: Final = frozenset({"seconds", "tokens_per_second"})
"""Fields that are left out of a comparison: how long a training took. Whatever else is measured by
a clock or a meter stands still, see `forks`."""
_AGE_S: Final = 3600.0


def half_written(folder: Path) -> list[str]:
    """Returns one sentence for each file below the folder that has its name and is not whole."""
    found = []
    for path in whole_names(folder):
        read = _READERS.get(path.suffix)
        try:
            if read is None:
                raise ValueError("no reader is known for such files")
            read(path)
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            found.append(f"{path.relative_to(folder)}: {type(error).__name__}: {first[:200]}")
    return found


def differences(folder: Path, reference: Path) -> list[str]:
    """Returns one sentence for each file that is not as in the reference, temporary ones aside."""
    ours, theirs = (
        {path.relative_to(base).as_posix() for path in whole_names(base)}
        for base in (folder, reference)
    )
    found = [f"{name}: missing" for name in sorted(theirs - ours)]
    found += [f"{name}: not in the reference" for name in sorted(ours - theirs)]
    for name in sorted(ours & theirs):
        one, other = folder / name, reference / name
        content = _CONTENTS.get(one.suffix, Path.read_bytes)
        if content(one) != content(other):
            found.append(f"{name}: differs")
    return found


def whole_names(folder: Path) -> list[Path]:
    """Returns the files below a folder that do not have a temporary name."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not _is_temporary(path.relative_to(folder))
    ]


def litter(folder: Path) -> list[str]:
    """Returns what has a temporary name, files and folders, the outermost ones."""
    names = [path.relative_to(folder) for path in sorted(folder.rglob("*"))]
    return [
        name.as_posix() for name in names if _is_temporary(name) and not _is_temporary(name.parent)
    ]


def make_old(folder: Path) -> None:
    """Makes what has a temporary name an hour old, so that nobody can be writing it any more."""
    then = time.time() - _AGE_S
    for path in folder.rglob("*"):
        if _is_temporary(path.relative_to(folder)):
            os.utime(path, (then, then))


def _is_temporary(name: Path) -> bool:
    return any(part.startswith(".") for part in name.parts)


def _read_json(path: Path) -> None:
    from quantkit.api.folders import FILES
    from quantkit.results import read_json, read_plain

    if path.name in FILES:
        read_json(path, FILES[path.name])
    else:
        read_plain(path)


def _read_lines(path: Path) -> None:
    """Reads lines, of which the last may be cut off: every reader of such files drops it."""
    *ended, _tail = path.read_bytes().split(b"\n")
    for line in ended:
        json.loads(line)


def _read_onnx(path: Path) -> None:
    import onnx

    onnx.checker.check_model(str(path))
    for tensor in onnx.load(str(path)).graph.initializer:
        onnx.numpy_helper.to_array(tensor)


def _read_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def _read_checkpoint(path: Path) -> Any:
    import torch

    return torch.load(path, map_location="cpu", weights_only=True)


def _read_end(*ends: str) -> Callable[[Path], None]:
    def read(path: Path) -> None:
        text = path.read_text(encoding="utf-8").rstrip()
        if not text.endswith(ends):
            raise ValueError(f"ends with {text[-20:]!r}")

    return read


def _read_svg(path: Path) -> None:
    ElementTree.parse(path)
    _read_end("-->")(path)


def _read_toml(path: Path) -> None:
    if "schema" not in tomllib.loads(path.read_text(encoding="utf-8")):
        raise ValueError("has no schema")


def _read_data(path: Path) -> None:
    """Weights may stand alone for a moment, before their graph; with it they are read by it."""


_READERS: Final[Mapping[str, Callable[[Path], Any]]] = {
    ".json": _read_json,
    ".jsonl": _read_lines,
    ".onnx": _read_onnx,
    ".data": _read_data,
    ".safetensors": _read_safetensors,
    ".pt": _read_checkpoint,
    ".npy": np.load,
    ".html": _read_end("</html>"),
    ".md": _read_end("", "\n"),
    ".svg": _read_svg,
    ".toml": _read_toml,
}


def _plain(value: Any) -> Any:
    """Returns plain data without what may differ; tensors as their bytes."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if key not in VOLATILE}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    if hasattr(value, "numpy"):
        array = value.numpy()
        return (str(array.dtype), array.shape, array.tobytes())
    return value


def _lines(path: Path) -> Any:
    """Returns records in any order; of a step that stands there twice the later one."""
    records = [_plain(json.loads(line)) for line in path.read_bytes().splitlines()]
    return {_key(record): record for record in records}


def _key(record: Mapping[str, Any]) -> str:
    names = ("schema", "step", "mode", "unit", "first_sequence")
    return json.dumps([record.get(name) for name in names])


_CONTENTS: Final[Mapping[str, Callable[[Path], Any]]] = {
    ".json": lambda path: _plain(json.loads(path.read_text(encoding="utf-8"))),
    ".jsonl": _lines,
    ".pt": lambda path: _plain(_read_checkpoint(path)),
}
