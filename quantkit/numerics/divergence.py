"""How far quantized data is from the data: Kullback-Leibler divergence over observed bins.

Migacz 2017, "8-bit inference with TensorRT" (GTC S7310): P is the histogram inside the range, with
what is clipped added to its outermost bins; Q is what the levels of the grid keep of it, each
level's count (what is clipped is in none) spread again over the bins that it came from. The range
of least KL(P || Q) loses least information.

How this differs from it. There, bins are equally wide and a level owns a whole number of them.
Here they widen with magnitude, so a count is not a density, and spreading a level's count over
bins as equals would draw it towards zero, where the bins are many. So a level's count is spread
by *width* over the part of the level that bins with elements cover, and a bin that reaches into
several levels gives each its share of width. Where bins are wider than levels there is then no
loss to be seen but clipping, as it should be: the observed bins know no more. (Bins of more than
`_WIDE` levels are taken to lose nothing at all.)

Exact zeros are left out: zero is on every grid. The others of known value are spread over `_NEAR`
of their own size to either side, what bfloat16's rounding has hidden.
"""

from __future__ import annotations

import numpy as np

from quantkit.numerics.cells import Cells, Floats
from quantkit.numerics.distortion import Grids

_NEAR = 2.0**-9
_WIDE = 8


def divergence(cells: Cells, grids: Grids) -> Floats:
    """Returns KL(P || Q) in nats for each grid, float64 [candidates].

    0 where there is nothing but zeros; inf where nothing of the data lies in the range.
    """
    lower, upper, counts = _spread(cells)
    if not counts.size:
        return np.zeros(grids.scale.size)
    found = [
        _one(lower, upper, counts, float(scale), float(kmin), float(kmax))
        for scale, kmin, kmax in zip(grids.scale, grids.kmin, grids.kmax, strict=True)
    ]
    return np.array(found)


def _spread(cells: Cells) -> tuple[Floats, Floats, Floats]:
    """Returns (lower, upper, counts) of disjoint bins, ascending, without the zeros."""
    x, n = (part[cells.points != 0] for part in (cells.points, cells.point_counts))
    near = np.abs(x) * _NEAR
    lower = np.concatenate([cells.lower, x - near])
    upper = np.concatenate([cells.upper, x + near])
    density = np.concatenate([cells.counts, n]) / (upper - lower)
    # A known value may lie in another bin or near another value: cut at every edge, and add up.
    edges = np.unique(np.concatenate([lower, upper]))
    rise = np.zeros(edges.size)
    np.add.at(rise, np.searchsorted(edges, lower), density)
    np.subtract.at(rise, np.searchsorted(edges, upper), density)
    width = np.diff(edges)
    count = np.cumsum(rise)[:-1] * width
    # Rounding leaves crumbs where bins end; an element weighs 1 in all, so a bin of 1e-9 is none.
    kept = count > 1e-9
    return edges[:-1][kept], edges[1:][kept], count[kept]


def _one(
    lower: Floats, upper: Floats, counts: Floats, scale: float, kmin: float, kmax: float
) -> float:
    total = counts.sum()
    lo, hi = (kmin - 0.5) * scale, (kmax + 0.5) * scale
    inside = (upper > lo) & (lower < hi)
    if not inside.any():
        return np.inf
    a, b = np.maximum(lower[inside], lo), np.minimum(upper[inside], hi)
    density = counts[inside] / (upper[inside] - lower[inside])
    # Cut the bins at the borders between levels: every piece has one bin and one level.
    first, last = (np.floor(edge / scale + 0.5) for edge in (a, b))
    wide = last - first >= _WIDE
    pieces = np.where(wide, 1.0, last - first + 1.0).astype(np.int64)
    bin_ = np.repeat(np.arange(a.size), pieces)
    step = np.arange(bin_.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    level = first[bin_] + step
    whole = wide[bin_]
    start = np.where(whole, a[bin_], np.maximum(a[bin_], (level - 0.5) * scale))
    stop = np.where(whole, b[bin_], np.minimum(b[bin_], (level + 0.5) * scale))
    width = np.maximum(stop - start, 0.0)
    mass = density[bin_] * width
    # Pieces are in ascending order; a wide bin is a level of its own.
    new = (np.diff(level, prepend=np.nan) != 0) | whole
    new[1:] |= whole[:-1]
    number = np.cumsum(new) - 1
    level_mass, level_width = np.bincount(number, mass), np.bincount(number, width)
    level_density = level_mass / np.where(level_width > 0, level_width, 1.0)
    p = mass.copy()
    kept = np.flatnonzero(mass > 0)
    p[kept[0]] += counts[upper <= lo].sum() + (counts[inside] - density * (b - a))[0]
    p[kept[-1]] += total - p.sum()
    q = level_density[number] * width
    p, q = p[kept] / total, q[kept] / mass.sum()
    return float(max(0.0, p @ np.log(p / q)))
