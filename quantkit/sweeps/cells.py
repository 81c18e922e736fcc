"""Finished cells on disk: rows of items, what the quantizers did, and what all of it came from."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from quantkit.errors import InputError
from quantkit.results import Fired, to_plain
from quantkit.results.io import read_plain, write_json
from quantkit.tasks import Rows

CELL_SCHEMA: Final = "quantkit.cell/2"
_OLDER: Final = ("quantkit.cell/1",)
_LABEL: Final = 80
"""Characters of a file's name that are for people; the hash behind them tells cells apart."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Finished:
    """One recipe and task.

    Attributes:
        rows: Numbers of each item, `[items, width]`.
        fired: What each quantizer did.
        details: Figures that do not come from the items: those of the quantizers.
    """

    rows: Rows
    fired: Mapping[str, Fired]
    details: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CellStore:
    """A folder with one file a finished cell of one model.

    Attributes:
        identity: What cells of the folder were made from beside recipe and task; a cell that says
            something else is not taken, and written anew.
    """

    folder: Path
    model: str
    identity: Mapping[str, str]

    def read(self, recipe: str, task: str, **identity: str) -> Finished | None:
        """Returns a finished cell, or None where there is none of this identity.

        Raises:
            InputError: the file is of another program or version.
        """
        path = self._path(recipe, task)
        if not path.exists():
            return None
        try:
            plain = read_plain(path)
        except InputError as error:
            raise InputError(f"{error} Remove the file.") from error
        schema = plain.get("schema") if isinstance(plain, dict) else None
        if schema in _OLDER:  # it lacks what is needed now: computed again
            return None
        if not isinstance(plain, dict) or schema != CELL_SCHEMA:
            raise InputError(
                f"{path.name}: expected a cell of schema {CELL_SCHEMA}; remove the file."
            )
        if plain.get("identity") != self._identity(recipe, task, identity):
            return None
        if plain.get("sha256") != digest(_content(plain)):
            raise InputError(f"{path.name} was changed since it was written; remove the file.")
        rows = np.array(plain["rows"], dtype=np.float64).reshape(len(plain["rows"]), -1)
        fired = {
            name: Fired(hits=hits, elements=elements)
            for name, (hits, elements) in plain["fired"].items()
        }
        return Finished(rows=rows, fired=fired, details=plain["details"])

    def write(self, recipe: str, task: str, found: Finished, **identity: str) -> None:
        """Keeps a finished cell."""
        path = self._path(recipe, task)
        path.parent.mkdir(parents=True, exist_ok=True)
        plain = {
            "schema": CELL_SCHEMA,
            "identity": self._identity(recipe, task, identity),
            "rows": found.rows.tolist(),
            "fired": {name: [f.hits, f.elements] for name, f in found.fired.items()},
            "details": dict(found.details),
        }
        write_json(path, {**plain, "sha256": digest(_content(plain))})

    def _identity(self, recipe: str, task: str, more: Mapping[str, str]) -> dict[str, str]:
        return {"recipe": recipe, "task": task, **self.identity, **more}

    def _path(self, recipe: str, task: str) -> Path:
        label = re.sub(r"[^A-Za-z0-9._+-]+", "-", f"{self.model}_{recipe}_{task}")[:_LABEL]
        own = json.dumps([self.model, recipe, task])
        digest = hashlib.sha256(own.encode()).hexdigest()[:8]
        return self.folder / f"{label.strip('-.')}_{digest}.json"


def _content(plain: Mapping[str, Any]) -> list[Any]:
    """Returns what the hash of a cell is over."""
    return [plain.get(name) for name in ("identity", "rows", "fired", "details")]


def digest(value: object) -> str:
    """Returns the sha256 of plain data or results, hexadecimal."""
    return hashlib.sha256(json.dumps(to_plain(value), sort_keys=True).encode()).hexdigest()
