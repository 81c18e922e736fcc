"""Ultralytics' `data.yaml`: which images its splits name. `data.yaml` is its `val`, as there.

A split is a folder, a `.txt` with a path a line, or a list of both, relative to `path`, which is
relative to the file itself. Nothing of it is run or fetched (`download:` is not read).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped]

from quantkit.calib_sets.image_files import IMAGE_SUFFIXES, image_files
from quantkit.errors import InputError, suggest

SUFFIXES: Final = (".yaml", ".yml")
SPLITS: Final = ("train", "val", "test")
DEFAULT_SPLIT: Final = "val"
_MOST_BYTES: Final = 1 << 20
"""Of such a file: names of classes and three paths."""
_UP: Final = "../"


def is_dataset_yaml(source: str) -> bool:
    """Returns whether the text is `FILE.yaml` or `FILE.yaml#SPLIT`."""
    return Path(_parts(source)[0]).suffix.lower() in SUFFIXES


def dataset_images(source: str) -> list[Path]:
    """Returns the images of the split that `FILE.yaml[#SPLIT]` names, folder by folder.

    Raises:
        InputError: no such file, no YAML, no such split, a path without an image, or one of a list
            that is not there, by name.
    """
    name, split = _parts(source)
    if split not in SPLITS:
        raise InputError(
            f"{source}: expected a split behind #, {', '.join(SPLITS)}.{suggest(split, SPLITS)}"
        )
    path = Path(name).expanduser()
    plain = _read(path)
    named = plain.get(split)
    entries = [named] if isinstance(named, str) else named
    if not (isinstance(entries, list) and entries and all(isinstance(x, str) for x in entries)):
        known = [x for x in SPLITS if plain.get(x)]
        raise InputError(
            f"{path}: {split}: expected a folder, a .txt or a list of them, got {named!r:.80}; "
            f"it names {', '.join(known) or 'no split'}."
        )
    root = path.parent / Path(str(plain.get("path") or "")).expanduser()
    found = [file for entry in entries for file in _images(path, root, entry)]
    return list(dict.fromkeys(found))


def _parts(source: str) -> tuple[str, str]:
    name, mark, split = source.partition("#")
    return name, split if mark else DEFAULT_SPLIT


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InputError(f"{path} has more than 1 MiB: expected the data.yaml of a data set.")
        plain = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"data {str(path)!r}: {error.strerror or error}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"{path} is no YAML: {first:.200}") from error
    if not isinstance(plain, dict):
        raise InputError(
            f"{path}: expected the keys path, train and val, got {type(plain).__name__}."
        )
    return plain


def _images(path: Path, root: Path, entry: str) -> list[Path]:
    """Returns the images of one entry of a split."""
    place = root / Path(entry).expanduser()
    if not place.exists() and entry.startswith(_UP):
        # as many tools write it, from a folder deeper than where the file is
        place = root / entry.removeprefix(_UP)
    if not place.exists():
        raise InputError(f"{path} names {entry!r}, and there is no {place}.")
    if place.suffix.lower() == ".txt":
        return _listed(place, root)
    found = image_files(place)
    if not found:
        raise InputError(f"{place} holds no image: expected {', '.join(IMAGE_SUFFIXES)}.")
    return found


def _listed(path: Path, root: Path) -> list[Path]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as a list of images: {error}.") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        name = Path(line.strip())
        file = next((x for x in (path.parent / name, root / name) if x.is_file()), None)
        if file is None or file.suffix.lower() not in IMAGE_SUFFIXES:
            raise InputError(
                f"{path}, line {number}: no image {line.strip()!r:.200}, relative to "
                f"{path.parent} or {root}."
            )
        found.append(file)
    if not found:
        raise InputError(f"{path} is empty: expected the path of an image a line.")
    return found
