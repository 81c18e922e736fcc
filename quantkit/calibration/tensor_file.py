"""Tensors and plain data in one `.safetensors` file: written whole or not at all, read strictly."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from quantkit.errors import InputError

_KEY = "quantkit"


def write_tensors(path: Path, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
    """Writes a file that a reader sees whole, or not at all.

    Args:
        plain: JSON data, with a field `schema`.

    Raises:
        InputError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}.") from error
    os.close(handle)
    try:
        # a tensor may be a view, or stand under two names: a file holds each on its own
        own = {name: x.contiguous().clone() for name, x in tensors.items()}
        save_file(own, temporary, metadata={_KEY: json.dumps(plain)})
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except (SafetensorError, OSError) as error:
        Path(temporary).unlink(missing_ok=True)
        raise InputError(f"cannot write {path}: {error}.") from error
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_tensors(path: Path, schema: str, again: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns what `write_tensors` wrote.

    Args:
        again: What to do where it cannot be read, e.g. "calibrate again".

    Raises:
        InputError: it is cut short, or of another schema.
    """
    try:
        with safe_open(path, framework="pt") as file:
            plain = json.loads((file.metadata() or {}).get(_KEY, "null"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, OSError, RecursionError) as error:
        raise InputError(f"{path} cannot be read ({error}): {again}.") from error
    if not isinstance(plain, dict) or plain.get("schema") != schema:
        found = plain.get("schema") if isinstance(plain, dict) else None
        raise InputError(
            f"{path}: expected schema {schema}, got {found or 'an older file'}: {again}."
        )
    return tensors, plain
