"""What was measured so far, a line a batch and unit, so that an interrupted search goes on.

The first line says of what: other lines are taken only for the same model, text, ranges, recipe and
batches. A last line that a killed process left half-written is dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quantkit.errors import InputError
from quantkit.results.io import decode, to_plain

CELLS_SCHEMA: Final = "quantkit.sensitivity-cells/1"
CELLS_FILE: Final = "sensitivity.jsonl"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """KL of one batch under one setting.

    Attributes:
        mode: `all`, `enable-one`, `disable-one` or `keep`.
        unit: Name of the unit; empty for `all`.
        first_sequence: The batch's first block.
        kl: Summed over each block's predicted tokens, in nats; `tokens`: how many those are.
    """

    mode: str
    unit: str
    first_sequence: int
    kl: list[float]
    tokens: list[int]


class Cells:
    """The cells of one search, in memory and in a file; each is written when it is measured."""

    def __init__(self, folder: Path, key: Mapping[str, str]) -> None:
        """Takes up the cells of the same key; those of another one are replaced.

        Raises:
            InputError: a line that is no cell, or a folder that cannot be written to.
        """
        self.path = folder / CELLS_FILE
        self._cells: dict[tuple[str, str, int], Cell] = {}
        header = {"schema": CELLS_SCHEMA, **key}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            kept = self._read(header) if self.path.exists() else 0
            if kept:
                os.truncate(self.path, kept)
            else:
                self.path.write_text(_line(header), encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror or error}.") from error

    def get(self, mode: str, unit: str, first_sequence: int) -> Cell | None:
        """Returns a measured cell, None where there is none yet."""
        return self._cells.get((mode, unit, first_sequence))

    def of(self, mode: str, unit: str) -> Iterator[Cell]:
        """Yields the cells of one setting, in the order of the text."""
        for key in sorted(key for key in self._cells if key[:2] == (mode, unit)):
            yield self._cells[key]

    def add(self, cell: Cell) -> None:
        """Keeps a cell.

        Raises:
            InputError: the file cannot be written to.
        """
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(to_plain(cell)))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror or error}.") from error
        self._cells[cell.mode, cell.unit, cell.first_sequence] = cell

    def _read(self, header: dict[str, str]) -> int:
        """Reads what is whole; returns where it ends, 0 where nothing of this search is there."""
        end = 0
        for number, line in enumerate(self.path.read_bytes().splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                break
            try:
                plain = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f"{self.path}, line {number}: not a whole record ({error}). Only the last "
                    "line may be cut off: remove the line."
                ) from error
            if number == 1:
                if plain != header:
                    return 0
            else:
                cell: Cell = decode(plain, Cell, f"{self.path}, line {number}: ", "", False)
                self._cells[cell.mode, cell.unit, cell.first_sequence] = cell
            end += len(line)
        return end


def _line(plain: Any) -> str:
    return json.dumps(plain, allow_nan=False, separators=(",", ":")) + "\n"
