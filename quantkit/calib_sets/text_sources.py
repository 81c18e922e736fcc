"""Texts of installed Python modules and packages, and of data sets by their id."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from quantkit.calib_sets.documents import data_of, decoded
from quantkit.calib_sets.source import Source
from quantkit.errors import InputError


def module_texts(source: Source) -> list[str]:
    """Returns the source code of modules, or the text in a module's variable.

    A dict's texts come in the order of their keys.

    Raises:
        InputError: no such module or variable, no source code, or a variable that holds no text.
    """
    if not source.field:
        return [_code(name) for name in source.names]
    found = []
    for name in source.names:
        _origin(name)
        value = getattr(importlib.import_module(name), source.field, None)
        if isinstance(value, dict):
            value = [value[key] for key in sorted(value, key=str)]
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(t, str) for t in texts):
            raise InputError(
                f"{source}: {name}.{source.field} is {type(value).__name__}; expected a string, or "
                "a list or dict of strings."
            )
        # one variable is one text, whose parts an empty line separates
        found.append("\n\n".join(texts))
    return found


def is_standard(source: Source) -> bool:
    """Returns whether it is of the standard library, which differs between versions of Python."""
    if source.type == "stdlib":
        return True
    tops = {name.partition(".")[0] for name in source.names}
    return source.type == "module" and tops <= set(sys.stdlib_module_names)


def package_path(name: str) -> Path:
    """Returns the path of `PACKAGE/path/in/package`.

    Raises:
        InputError: the package is not installed.
    """
    package, _, below = name.partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places:
        raise InputError(f"{name}: no package {package!r} is installed.")
    candidates = [Path(place) / below for place in places]
    return next((path for path in candidates if path.exists()), candidates[0])


def dataset_texts(source: Source) -> list[str]:
    """Returns one column of a split of a data set, all of it in memory.

    Raises:
        InputError: the package `datasets` is missing, or cannot get the data set (no network, no
            such id, config, split or column), or the column holds no text.
    """
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise InputError(
            f"{source} is read with the package datasets, which is missing: pip install datasets."
        ) from None
    name, config = source.names[0], source.config or None
    try:
        rows = datasets.load_dataset(name, config, split=source.split)
    except Exception as error:  # its own kinds, the network's, and those of files: all alike here
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"{source} cannot be loaded: {first:.300}") from error
    if source.field not in rows.column_names:
        raise InputError(
            f"{source}: no column {source.field!r}; expected one of "
            f"{', '.join(map(str, rows.column_names))}."
        )
    texts = list(rows[source.field])
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"{source}: row {index} holds {type(text).__name__}; expected text.")
    return texts


def _code(name: str) -> str:
    path = Path(_origin(name))
    if path.suffix != ".py":
        raise InputError(f"module {name!r} has no source code at hand: {path.name}.")
    return decoded(data_of(path), path.name)


def _origin(name: str) -> str:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is None:
        raise InputError(f"no module {name!r} is installed.")
    return spec.origin or ""
