"""Seeded whole numbers that are the same on every version of Python and numpy."""

from __future__ import annotations

import numpy as np


class Draw:
    """Whole numbers from the raw stream of PCG64, which numpy keeps.

    Its `Generator` may change how it draws from that stream. The same seed and index draw the same.
    """

    def __init__(self, seed: int, index: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence([seed, index]))

    def below(self, limit: int) -> int:
        """Returns a number of `range(limit)`; the bias is below limit / 2^64."""
        return (int(self._bits.random_raw()) * limit) >> 64

    def several(self, limit: int, count: int) -> list[int]:
        """Returns `count` different numbers of `range(limit)`."""
        found: dict[int, None] = {}
        while len(found) < count:
            found.setdefault(self.below(limit))
        return list(found)
