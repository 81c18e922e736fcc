"""A histogram on the floating-point grid as one with equal bins, for a figure."""

from __future__ import annotations

import numpy as np

from quantkit.numerics.observers.histogram import Histogram


def even_bins(seen: Histogram, lo: float, hi: float, bins: int) -> tuple[list[float], list[int]]:
    """Returns (`bins + 1` edges from lo to hi, whole counts that add up to all finite elements).

    The elements of a bin of the floating-point grid count as spread evenly over it; zeros lie in
    the bin that holds 0. Takes the groups together.

    Args:
        lo, hi: The extremes of what was seen; equal ones make one bin.
    """
    pooled = seen.pool()
    total = int(pooled.count.sum())
    if lo == hi:
        return [lo, hi], [total]
    edges = np.linspace(lo, hi, bins + 1)
    below = np.zeros(bins + 1)  # elements below each edge
    low = pooled.edges().numpy().astype(np.float64)
    top = 2.0 ** (pooled.first_octave + pooled.octaves - 127)
    high = np.append(low[1:], top)
    for sign, counts in enumerate(pooled.counts[0].flatten(1).numpy()):
        used = counts > 0
        a, b, n = (low[used], high[used], counts[used].astype(np.float64))
        if sign:
            a, b = -b, -a
        a, b = np.clip(a, lo, hi), np.clip(b, lo, hi)
        width = np.where(b > a, b - a, 1.0)
        for index, edge in enumerate(edges):
            share = np.where(b > a, np.clip((edge - a) / width, 0.0, 1.0), edge > a)
            below[index] += float((n * share).sum())
    below += np.where(edges > 0.0, float(pooled.zeros.sum()), 0.0)
    below[0], below[-1] = 0.0, total
    whole = np.round(below).astype(np.int64)
    return edges.tolist(), np.diff(whole).tolist()
