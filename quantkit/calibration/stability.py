"""How far ranges still move as samples are added, and where that is looked at.

A range has moved by `max(|d lo|, |d hi|) / (hi - lo)`, between a sample count and three quarters of
it: what the last quarter of the samples changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Final

import torch
from torch import Tensor

from quantkit.calibration.recording import Checkpoint
from quantkit.results import StabilityPoint

FEWEST: Final = 8
"""Samples below which ranges are not compared."""
_GROWTH: Final = 4 / 3


def checkpoints_before(samples: int, batch_size: int) -> list[int]:
    """Returns the batches after which to look at the ranges, the last of them the end.

    Each but the first has three quarters as many samples as the next, as far as batches allow.
    """
    last = math.ceil(samples / batch_size)
    found = {last}
    count = samples / _GROWTH
    while count >= FEWEST:
        found.add(max(1, round(count / batch_size)))
        count /= _GROWTH
    return sorted(found)


def checkpoints_until(samples: int, batch_size: int) -> list[int]:
    """Returns the batches after which to look where one may stop early: 16 samples and 4/3 on.

    The last is the end of the data; the one before it leaves it a quarter of the samples at least.
    """
    last = math.ceil(samples / batch_size)
    found = set()
    count = 2.0 * FEWEST
    while count < samples:
        found.add(math.ceil(count / batch_size))
        count *= _GROWTH
    return sorted({stop for stop in found if stop <= last / _GROWTH} | {last})


def moved(before: Checkpoint, after: Checkpoint) -> dict[str, float]:
    """Returns how far each tensor's range moved, that of its worst group; NaN never seen before."""
    found = {}
    for name, (lo, hi) in after.ranges.items():
        known = before.ranges.get(name)
        if known is None or known[0].shape != lo.shape:
            found[name] = math.nan
            continue
        found[name] = _moved(known, (lo, hi))
    return found


def _moved(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> float:
    (lo0, hi0), (lo1, hi1) = (tuple(x.double() for x in pair) for pair in (before, after))
    step = torch.maximum((lo1 - lo0).abs(), (hi1 - hi0).abs())
    span = hi1 - lo1
    share = torch.where(step == 0, 0.0, step / span)  # 0 / 0 of a constant has not moved
    return float(share.max()) if share.numel() else 0.0


def stability(checkpoints: Sequence[Checkpoint]) -> list[StabilityPoint]:
    """Returns one point for each pair of neighbouring checkpoints."""
    points = []
    for before, after in pairwise(checkpoints):
        by_name = {name: x for name, x in moved(before, after).items() if not math.isnan(x)}
        if not by_name:
            continue
        worst = max(by_name, key=lambda name: by_name[name])
        points.append(
            StabilityPoint(
                samples=after.samples,
                before=before.samples,
                moved_max_frac=by_name[worst],
                moved_median_frac=median(by_name.values()),
                worst=worst,
            )
        )
    return points


def is_stable(checkpoints: Sequence[Checkpoint], within: float) -> bool:
    """Returns whether no range moved by more than `within` between the last two checkpoints.

    A tensor that the earlier one lacks has moved.
    """
    if len(checkpoints) < 2:
        return False
    shares = moved(checkpoints[-2], checkpoints[-1]).values()
    return all(share <= within for share in shares)  # NaN is not


def by_tensor(checkpoints: Sequence[Checkpoint]) -> dict[str, list[list[float]]]:
    """Returns for each tensor [samples, moved] pairs."""
    found: dict[str, list[list[float]]] = {}
    for before, after in pairwise(checkpoints):
        for name, share in moved(before, after).items():
            found.setdefault(name, []).append([float(after.samples), share])
    return found
