"""What observers know of a group's elements: values that are known, and counts between two edges.

A histogram's bin says how many elements lie between two edges, not where. What is known exactly
enters as points: zeros, the largest magnitudes (top-k), and every element of a histogram that is
known to be lossless (`Histogram.update` of bfloat16; `RowScan` sees float32 and does not know).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantkit.numerics.observers.bundle import Bundle

Floats = NDArray[np.float64]

_DISTINCT = 0.95  # of the largest magnitudes; chance makes a few of them equal, in float32 too


@dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    """What is known of one group's finite elements; all float64, in no order.

    `points` with `point_counts`: elements whose value is known. `lower` < `upper` with `counts`:
    elements somewhere between two edges. `ties`: many of the largest magnitudes are equal, a sign
    of values that are not spread evenly.
    """

    points: Floats
    point_counts: Floats
    lower: Floats
    upper: Floats
    counts: Floats
    min: float
    max: float
    ties: bool

    @property
    def total(self) -> float:
        """How many elements there are."""
        return float(self.point_counts.sum() + self.counts.sum())

    def coarsened(self, width: float) -> Cells:
        """Returns the cells with all that lies in one slot of `width` drawn together: for a search.

        A slot's elements count as spread over what they occupy of it. Cells wider than the slots
        stay, and so do the points where they are few.
        """
        keep = self.upper - self.lower > width
        few = self.points.size <= 256
        lower = self.lower[~keep] if few else np.concatenate([self.lower[~keep], self.points])
        upper = self.upper[~keep] if few else np.concatenate([self.upper[~keep], self.points])
        count = (
            self.counts[~keep] if few else np.concatenate([self.counts[~keep], self.point_counts])
        )
        slot = np.floor((lower + upper) * (0.5 / width))
        order = np.argsort(slot, kind="stable")
        first = np.flatnonzero(np.diff(slot[order], prepend=-np.inf))
        if first.size:
            lower = np.minimum.reduceat(lower[order], first)
            upper = np.maximum.reduceat(upper[order], first)
            count = np.add.reduceat(count[order], first)
        single = lower == upper
        points = [lower[single], *([self.points] if few else [])]
        point_counts = [count[single], *([self.point_counts] if few else [])]
        return Cells(
            points=np.concatenate(points),
            point_counts=np.concatenate(point_counts),
            lower=np.concatenate([self.lower[keep], lower[~single]]),
            upper=np.concatenate([self.upper[keep], upper[~single]]),
            counts=np.concatenate([self.counts[keep], count[~single]]),
            min=self.min,
            max=self.max,
            ties=self.ties,
        )


def cells_of(seen: Bundle) -> Iterator[Cells]:
    """Yields what is known of each group, NaN and inf left out."""
    histogram, topk = seen.histogram, seen.topk
    m = histogram.mantissa_bits
    low = histogram.edges().cpu().numpy().astype(np.float64)
    top_edge = 2.0 ** (histogram.first_octave + histogram.octaves - 127)
    high = np.append(low[1:], top_edge)
    first_code = histogram.first_octave << m
    all_counts = histogram.counts.flatten(2).cpu().numpy()
    zeros = histogram.zeros.cpu().numpy()
    signed = topk.signed.cpu().numpy()
    present = topk.values.cpu().numpy() >= 0
    finite = (seen.minmax.count - seen.minmax.nan_count - seen.minmax.inf_count).cpu().numpy()
    minima, maxima = (bound.cpu().numpy().astype(np.float64) for bound in seen.minmax.finish())

    for group in range(seen.minmax.groups):
        counts = all_counts[group].astype(np.float64)
        known = signed[group][present[group]]
        values, repeats = np.unique(known, return_counts=True)
        sizes = np.abs(known[known != 0])
        points, point_counts = [np.zeros(1)], [zeros[group : group + 1].astype(np.float64)]
        floor = np.inf
        # Only where the bins hold every element are the largest ones in them, to be taken out.
        if not histogram.lossless and counts.sum() + zeros[group] == finite[group] and sizes.size:
            repeats, values = repeats[values != 0], values[values != 0]
            code = np.abs(values).view(np.int32) >> (23 - m)
            np.subtract.at(counts, ((values < 0).astype(int), code - first_code), repeats)
            points.append(values.astype(np.float64))
            point_counts.append(repeats.astype(np.float64))
            floor = float(sizes.min())  # what is left is no larger
        sign, bin_ = np.nonzero(counts > 0)
        a = np.where(sign == 0, low[bin_], -high[bin_])
        b = np.where(sign == 0, high[bin_], -low[bin_])
        count = counts[sign, bin_]
        if histogram.lossless:
            points.append(np.where(sign == 0, a, b))
            point_counts.append(count)
            a, b, count = a[:0], b[:0], count[:0]
        a = np.maximum(a, max(float(minima[group]), -floor))
        b = np.minimum(b, min(float(maxima[group]), floor))
        thin = a >= b
        x = np.concatenate([*points, a[thin]])
        n = np.concatenate([*point_counts, count[thin]])
        yield Cells(
            points=x[n > 0],
            point_counts=n[n > 0],
            lower=a[~thin],
            upper=b[~thin],
            counts=count[~thin],
            min=float(minima[group]),
            max=float(maxima[group]),
            ties=bool(np.unique(sizes).size < _DISTINCT * sizes.size),
        )
