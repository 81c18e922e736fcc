"""Observe once, choose many: a range by any method, at any width, from one `Bundle`.

The searching methods (MSE, entropy) go from coarse to fine: first both ends together, clipping
magnitudes at thresholds that fall geometrically from the largest one; then each end alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.numerics.cells import Cells, Floats, cells_of
from quantkit.numerics.distortion import (
    Grids,
    error_bounds,
    first_midpoint,
    grids_of,
    off_grid,
    squared_error,
)
from quantkit.numerics.divergence import divergence
from quantkit.numerics.methods import (
    EntropyRange,
    Method,
    MinMaxRange,
    MovingAverageRange,
    MseRange,
    TwoSidedPercentile,
    UpperPercentile,
)
from quantkit.numerics.observers.bundle import Bundle
from quantkit.numerics.observers.moving import MovingAverage

_Objective = Callable[[Cells, Grids], Floats]
Interval = tuple[float, float]

_SHORTLIST = 6  # searched intervals that are looked at with all bins
_NATS = 1e-12  # a smaller gain in divergence is rounding
_FLOAT32 = 2.0**-22  # of step x |x|: what float32 rounding can add to or take off a squared error


def choose_range(
    method: Method,
    seen: Bundle,
    bits: int,
    *,
    symmetric: bool,
    moving: MovingAverage | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (lo, hi), float32 [groups]; NaN where a group has no finite element.

    Min-max and the moving average come as they were observed; of the clipping methods a symmetric
    range is (-t, t). Where the bundle's bins hold a sample of the elements, they are judged by it.

    Args:
        method: What is asked for.
        seen: The observed groups. NaN and inf have no part in a range.
        bits: Width of the signed grid, 2 to 16.
        symmetric: Whether the grid is the symmetric narrow one; else the asymmetric full one.
        moving: The moving average of the same groups, for that method.

    Raises:
        InputError: a moving average that is missing, or has another constant or other groups.
    """
    lo, hi = seen.minmax.finish()
    match method:
        case MinMaxRange():
            return lo, hi
        case MovingAverageRange():
            return _moving(method, seen, moving)
        case UpperPercentile():
            top = _magnitude(seen, method.upper_pct / 100.0)
            low, high = torch.maximum(lo, -top), torch.minimum(hi, top)
        case TwoSidedPercentile():
            ends = 100.0 - method.upper_pct, method.upper_pct
            # Rounded as people write it: 100 - 99.99 is 0.0100000000000051.
            below, above = (seen.histogram.quantile(round(end / 100.0, 12)) for end in ends)
            low, high = (torch.minimum(torch.maximum(q, lo), hi) for q in (below, above))
        case MseRange() | EntropyRange():
            found = [_searched(method, cells, bits, symmetric) for cells in cells_of(seen)]
            table = torch.tensor(found, dtype=torch.float32).reshape(-1, 2)
            return table[:, 0].clone(), table[:, 1].clone()
    low = torch.minimum(low, high)  # a bin's middle may lie below the one value in it
    if not symmetric:
        return low, high
    top = torch.maximum(low.abs(), high.abs())
    return -top, top


def _moving(
    method: MovingAverageRange, seen: Bundle, moving: MovingAverage | None
) -> tuple[Tensor, Tensor]:
    if moving is None:
        raise InputError(
            f"{method} needs each sample's extremes in their order, and they were not observed: "
            f"calibrate with --method {method}."
        )
    if moving.constant != method.averaging_constant or moving.groups != seen.minmax.groups:
        raise InputError(
            f"Expected a moving average of {seen.minmax.groups} groups with the constant "
            f"{method.averaging_constant}, got {moving.groups} with {moving.constant}: observe it "
            "again with the other one."
        )
    return moving.finish()


def _magnitude(seen: Bundle, q: float) -> Tensor:
    """Returns the q-quantile of |x|, float32 [groups]; exact where it is among the top-k."""
    coarse = seen.histogram.quantile_abs(round(q, 12))
    lo, hi = seen.minmax.finish()
    top = torch.maximum(lo.abs(), hi.abs())
    total = seen.histogram.counts.flatten(1).sum(1) + seen.histogram.zeros
    every = seen.minmax.count - seen.minmax.nan_count - seen.minmax.inf_count
    rank = torch.tensor([_rank_from_top(q, int(n)) for n in total.tolist()], dtype=torch.int64)
    in_top = (rank < seen.topk.k) & (total == every) & (total > 0)
    exact = seen.topk.values.cpu().gather(1, rank.clamp(0, seen.topk.k - 1)[:, None])[:, 0]
    return torch.minimum(torch.where(in_top.cpu(), exact, coarse.cpu()), top.cpu())


def _rank_from_top(q: float, n: int) -> int:
    """Returns how many elements are larger than that of rank ceil(q n), counted from 1."""
    return n - max(1, -(-round(q * 10**12) * n // 10**12))


def _searched(
    method: MseRange | EntropyRange, cells: Cells, bits: int, symmetric: bool
) -> Interval:
    """Returns the interval that a search finds for one group."""
    if not cells.total:
        return np.nan, np.nan
    absmax = max(-cells.min, cells.max)
    whole = (-absmax, absmax) if symmetric else (cells.min, cells.max)
    if absmax == 0.0 or cells.min == cells.max:
        return whole
    if isinstance(method, MseRange):
        # Below the median no threshold is worth a try, but on the coarsest grids.
        floor = _nonzero_quantile(cells, 0.5)
        tried = _search(squared_error, cells, whole, floor, method.candidates, bits, symmetric)
        return _proven(cells, whole, tried, bits, symmetric)
    floor = _nonzero_quantile(cells, 0.9)
    tried = _search(divergence, cells, whole, floor, method.candidates, bits, symmetric)
    lo, hi = (np.array(end) for end in zip(whole, *tried[:_SHORTLIST], strict=True))
    values = divergence(cells, grids_of(lo, hi, bits, symmetric=symmetric))
    least = int(values.argmin())
    if not values[least] < values[0] - _NATS:
        return whole
    return float(lo[least]), float(hi[least])


def _nonzero_quantile(cells: Cells, q: float) -> float:
    """Returns about the q-quantile of |x| over what is not zero."""
    size = np.abs(np.concatenate([cells.points, 0.5 * (cells.lower + cells.upper)]))
    count = np.concatenate([cells.point_counts, cells.counts]) * (size > 0)
    order = np.argsort(size)
    until = np.cumsum(count[order])
    return float(size[order][min(size.size - 1, int(np.searchsorted(until, q * until[-1])))])


def _search(
    objective: _Objective,
    cells: Cells,
    whole: Interval,
    floor: float,
    candidates: int,
    bits: int,
    symmetric: bool,
) -> list[Interval]:
    """Returns the intervals tried, the best first, by an objective over coarsened cells."""
    absmax = max(-whole[0], whole[1])
    floor = max(floor, absmax * 2.0**-20)
    tried: dict[Interval, float] = {}

    def coarsened(top: float) -> Cells:
        return cells.coarsened(top / (1 << (bits - 1)) / 8.0)  # an eighth of about a step

    def attempt(lo: Floats, hi: Floats, coarse: Cells) -> None:
        low, high = (end.astype(np.float32).astype(np.float64) for end in (lo, hi))
        # Data on one side of zero, clipped below its nearest value: only the far end counts.
        if whole[0] > 0.0:
            low = np.minimum(low, high)
        else:
            high = np.maximum(low, high)
        some = (low != 0.0) | (high != 0.0)  # the smallest numbers vanish in float32
        low, high = low[some], high[some]
        values = objective(coarse, grids_of(low, high, bits, symmetric=symmetric))
        pairs = zip(low.tolist(), high.tolist(), strict=True)
        tried.update(zip(pairs, values.tolist(), strict=True))

    def both(top: Floats, coarse: Cells) -> None:
        if symmetric:
            attempt(-top, top, coarse)
        else:
            attempt(np.maximum(whole[0], -top), np.minimum(whole[1], top), coarse)

    def best() -> Interval:
        return min(tried, key=lambda ends: (tried[ends], ends[0] - ends[1]))

    ratio = (floor / absmax) ** (1.0 / (candidates - 1))
    both(absmax * ratio ** np.arange(candidates), coarsened(floor))
    near = coarsened(max(floor, 0.3 * max(-best()[0], best()[1])))
    for _ in range(2):
        middle = max(-best()[0], best()[1])
        both(np.minimum(absmax, middle * ratio ** np.linspace(-1.0, 1.0, 9)), near)
        ratio **= 0.25
    if not symmetric:
        for reach in (4.0, 1.5, 1.1, 1.025):
            around = reach ** np.linspace(-1.0, 1.0, 12)
            for end in (0, 1):
                lo, hi = best()
                if whole[end] == 0.0 or (whole[end] > 0) != bool(end):
                    continue  # the data does not reach across zero: that end is zero's
                moved = np.clip((lo, hi)[end] * around, min(0.0, whole[end]), max(0.0, whole[end]))
                moved = moved[np.abs(moved) > 0.0]
                kept = np.full(moved.size, (hi, lo)[end])
                lows, highs = (moved, kept) if end == 0 else (kept, moved)
                attempt(lows, highs, near)
    return sorted(tried, key=lambda ends: (tried[ends], ends[0] - ends[1]))


def _proven(
    cells: Cells, whole: Interval, tried: list[Interval], bits: int, symmetric: bool
) -> Interval:
    """Returns the best interval whose squared error on the elements is no larger than min-max's.

    It is proven where no arrangement of the elements within their bins makes it larger. Else it is
    taken where the gain is beyond doubt for elements spread at random within their bins
    (`_beyond_doubt`): a proof needs bins far narrower than a step, which they are not for the
    large magnitudes from about 8 bits on.
    """
    options: list[Interval] = [whole, *(ends for ends in tried[:_SHORTLIST] if ends != whole)]
    lo, hi = (np.array(ends) for ends in zip(*options, strict=True))
    grids = grids_of(lo, hi, bits, symmetric=symmetric)
    errors = squared_error(cells, grids)
    reference = grids[slice(0, 1)]
    size = np.abs(np.concatenate([cells.points, cells.lower, cells.upper]))
    count = np.concatenate([cells.point_counts, cells.counts, cells.counts])
    rounding = _FLOAT32 * (grids.scale + grids.scale[0]) * float(size @ count)
    for at in np.argsort(errors, kind="stable"):
        if at == 0 or errors[at] >= errors[0]:
            break
        grid = grids[slice(int(at), int(at) + 1)]
        if _worst_difference(cells, grid, reference) + rounding[at] <= 0.0:
            return options[int(at)]
        if _beyond_doubt(cells, grid, reference, errors[[at, 0]], float(rounding[at])):
            return options[int(at)]
    return whole


def _worst_difference(cells: Cells, grid: Grids, reference: Grids) -> float:
    """Returns the most that the error sum can exceed the reference's, wherever elements lie.

    In a cell the difference of two errors (x - g)^2 - (x - h)^2 is linear between the midpoints of
    the two grids: its maximum lies on one of them, or on an edge.
    """
    lower, upper = cells.lower, cells.upper

    def difference(x: Floats) -> Floats:
        ours, its = (off_grid(x, g) * g.scale for g in (grid, reference))
        return np.asarray((ours - its) * (ours + its))

    worst = np.maximum(difference(lower), difference(upper))
    many = np.zeros(lower.size, dtype=bool)
    for g in (grid, reference):
        middle = first_midpoint(lower, g)
        for _ in range(2):
            inside = np.clip(middle, lower, upper)
            worst = np.maximum(worst, difference(inside))
            middle = middle + g.scale
        many |= (middle < upper) & (middle < g.kmax * g.scale)
    loose = error_bounds(lower, upper, grid)[1] - error_bounds(lower, upper, reference)[0]
    worst = np.where(many, loose, worst)
    return float(worst @ cells.counts + difference(cells.points) @ cells.point_counts)


def _beyond_doubt(
    cells: Cells, grid: Grids, reference: Grids, errors: Floats, rounding: float
) -> bool:
    """Returns whether the gain is certain enough for elements that lie anywhere in their bins.

    It must exceed six standard deviations of what chance can do within the bins, and 3 % of the
    error (a density falls within a bin, too). Values that are not spread at all, such as pixels or
    what was quantized before, are refused: they show as ties among the largest, or as bins that
    are wider than a step.
    """
    width = cells.upper - cells.lower
    wide = cells.counts[width > grid.scale].sum()
    if cells.ties or wide > 0.01 * cells.total:
        return False
    spread = sum(_deviation(cells, g) for g in (grid, reference))
    chance = float(np.sqrt(spread**2 @ cells.counts))
    return bool(errors[0] + 6.0 * chance + 0.03 * errors[1] + rounding < errors[1])


def _deviation(cells: Cells, grid: Grids) -> Floats:
    """Returns the standard deviation of (x - fq(x))^2 for x uniform in each cell."""

    def moments(x: Floats) -> tuple[Floats, Floats]:
        off = off_grid(x, grid)
        nearest = x / grid.scale - off
        return nearest / 12.0 + off**3 / 3.0, nearest / 80.0 + off**5 / 5.0

    width = (cells.upper - cells.lower) / grid.scale
    (first_a, second_a), (first_b, second_b) = moments(cells.lower), moments(cells.upper)
    mean, square = (first_b - first_a) / width, (second_b - second_a) / width
    return np.asarray(np.sqrt(np.maximum(square - mean * mean, 0.0)) * grid.scale**2)
