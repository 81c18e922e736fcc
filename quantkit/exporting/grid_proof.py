"""Numpy's grids, and how far from them the numbers of a graph are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from quantkit.exporting.output_agreement import OutputSums

Array = NDArray[Any]
ROUNDING: Final = 4.0 * float(np.finfo(np.float32).eps)
"""What float32 may round away, of a number of steps."""
_FLOOR: Final = 0.1


@dataclass(kw_only=True, eq=False)
class GridProof:
    """What was proven of all weights, inputs or products.

    Attributes:
        off: Name -> how far it is from what it should be, in `unit`; at most `most` passes.
        sums: What numpy expects beside what the graph has.
    """

    what: str
    unit: str
    most: float
    off: dict[str, float] = field(default_factory=dict)
    sums: OutputSums = field(default_factory=OutputSums)

    def add(self, name: str, expected: Array, found: Array, off: float) -> None:
        """Adds one; `expected` and `found` are `[rows, columns]`."""
        self.off[name] = off if np.isfinite(off) else np.inf
        if expected.size:
            self.sums.add(expected, found)

    @property
    def failed(self) -> list[str]:
        """Names, the worst one first."""
        names = [name for name, off in self.off.items() if not off <= self.most]
        return sorted(names, key=lambda name: -self.off[name])

    @property
    def passed(self) -> bool:
        """Whether there is anything, all finite and where it should be."""
        return bool(self.off) and not self.failed and self.sums.is_finite

    @property
    def said(self) -> str:
        """One clause, with the worst one's name."""
        if not self.off:
            return f"no {self.what} quantized"
        name = max(self.off, key=lambda name: self.off[name])
        far = f"{name} by {self.off[name]:.2g} {self.unit}"
        if self.failed:
            return f"{len(self.failed)} of {len(self.off)} {self.what} are off: {far}"
        return f"{len(self.off)} {self.what}, the farthest {far}"


def on_grid(x: Array, scale: Array, zero: int, qmin: int, qmax: int) -> Array:
    """Returns the nearest points of a grid, float32."""
    with np.errstate(all="ignore"):
        steps = np.clip(np.rint(x / scale) + zero, qmin, qmax)
    return np.asarray((steps - zero) * scale, np.float32)


def steps_off(x: Array, real: Array, scale: Array, zero: int, qmin: int, qmax: int) -> float:
    """Returns how far `real` is from being the nearest point of the grid, in steps.

    Either neighbour is right at a tie, so the distance to `x` is measured and not to one of them.
    """
    if x.shape != real.shape:
        return np.inf
    if not x.size:
        return 0.0
    with np.errstate(all="ignore"):
        exact = x.astype(np.float64) / scale + zero
        steps = real.astype(np.float64) / scale + zero
        slack = ROUNDING * (np.abs(np.clip(exact, qmin, qmax)) + abs(zero) + 1.0)
        far = np.abs(steps - np.clip(exact, qmin, qmax)) - 0.5
        between = np.abs(steps - np.rint(steps))
        return float(np.max(np.maximum(far, between) - slack, initial=0.0))


def channels_off(expected: Array, found: Array) -> float:
    """Returns the largest error of a column, over its norm and a part of the largest one's."""
    if expected.shape != found.shape:
        return np.inf
    if not expected.size:
        return 0.0
    a, b = expected.astype(np.float64), found.astype(np.float64)
    norms, errors = np.linalg.norm(a, axis=0), np.linalg.norm(a - b, axis=0)
    size = norms + _FLOOR * norms.max()
    return float(np.max(errors / np.where(size > 0, size, 1.0)))


def as_rows(x: Array) -> Array:
    """Returns `[rows, last axis]`."""
    return x.reshape(-1, x.shape[-1] if x.ndim and x.shape[-1] else 1)
