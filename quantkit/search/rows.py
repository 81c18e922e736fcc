"""From the cells of a search to its rows: means, standard errors over blocks, ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quantkit.results import UnitSensitivity
from quantkit.search.cells import Cells
from quantkit.search.units import Unit

ALL: Final = "all"
"""The setting in which everything is quantized."""


class Sums:
    """KL and predicted tokens of each block, under one setting."""

    def __init__(self, kl: NDArray[np.float64], tokens: NDArray[np.int64]) -> None:
        self.kl, self.tokens = kl, tokens

    @classmethod
    def of(cls, cells: Cells, mode: str, unit: str) -> Sums:
        found = list(cells.of(mode, unit))
        return cls(
            np.array([kl for cell in found for kl in cell.kl]),
            np.array([n for cell in found for n in cell.tokens], dtype=np.int64),
        )

    @property
    def mean(self) -> float:
        """Over all tokens, each weighted the same."""
        return math.fsum(self.kl) / int(self.tokens.sum())

    def stderr(self) -> float:
        """Of the mean, over blocks of unequal length: that of a ratio; NaN for one block."""
        blocks = len(self.kl)
        if blocks < 2:
            return math.nan
        apart = self.kl - self.mean * self.tokens
        variance = float((apart**2).sum()) * blocks / (blocks - 1)
        return math.sqrt(variance) / int(self.tokens.sum())


def rows_of(units: Sequence[Unit], modes: Sequence[str], cells: Cells) -> list[UnitSensitivity]:
    """Returns the units, the worst first."""
    total = Sums.of(cells, ALL, "")
    rows = []
    for unit in units:
        enable_kl = enable_stderr = disable_kl = removed = removed_stderr = math.nan
        if "enable-one" in modes:
            enabled = Sums.of(cells, "enable-one", unit.name)
            enable_kl, enable_stderr = enabled.mean, enabled.stderr()
        if "disable-one" in modes:
            disabled = Sums.of(cells, "disable-one", unit.name)
            disable_kl = disabled.mean
            if total.mean > 0:
                removed = 1 - disable_kl / total.mean
                paired = Sums(total.kl - disabled.kl, total.tokens)
                removed_stderr = paired.stderr() / total.mean
        rows.append(
            UnitSensitivity(
                name=unit.name,
                point=unit.point,
                quantizers=list(unit.quantizers),
                rank=0,
                enable_one_kl=enable_kl,
                enable_one_stderr=enable_stderr,
                disable_one_kl=disable_kl,
                removed_frac=removed,
                removed_stderr_frac=removed_stderr,
                tokens=int(total.tokens.sum()),
            )
        )

    def badness(row: UnitSensitivity) -> float:
        return row.enable_one_kl if "enable-one" in modes else -row.disable_one_kl

    rows.sort(key=badness, reverse=True)
    return [replace(row, rank=rank) for rank, row in enumerate(rows, 1)]
