"""`.npz` and `.npy` files as arrays of numbers, without a model that reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from quantkit.errors import InputError

ARRAY_SUFFIXES: Final = (".npz", ".npy")
Array = np.ndarray[Any, Any]


def read_arrays(path: Path, source: str, main: str) -> dict[str, Array]:
    """Returns the arrays of a `.npz`, or that of a `.npy` by the name `main`.

    Raises:
        InputError: no such file, or one that numpy cannot read as numbers.
    """
    if not path.is_file():
        raise InputError(f"{source}: no such file.")
    try:
        # opened here, since numpy leaves a broken .npz open
        with path.open("rb") as file:
            found = np.load(file, allow_pickle=False)
            if isinstance(found, np.ndarray):
                return {main: found}
            with found:
                return {name: found[name] for name in found.files}
    except Exception as error:  # of a broken file: zipfile's, zlib's, tokenize's, MemoryError, ...
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"{source} cannot be read as numpy arrays of numbers: {first}") from error


def common_length(arrays: dict[str, Array], source: str) -> int:
    """Returns the number of samples, the first axis of every array.

    Raises:
        InputError: axes that differ.
    """
    lengths = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise InputError(f"{source}: expected one first axis, the samples, in every array; {said}.")
    return next(iter(lengths.values()), 0)


def check_numbers(arrays: dict[str, Array], source: str) -> None:
    """Raises InputError for an array that holds no numbers, or NaN or inf; it is named."""
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf":
            raise InputError(f"{source}: {name} holds {array.dtype}; expected numbers.")
        if array.dtype.kind == "f" and not bool(np.isfinite(array).all()):
            raise InputError(
                f"{source}: {name} holds {int((~np.isfinite(array)).sum())} NaN or inf values; "
                "expected finite ones."
            )
