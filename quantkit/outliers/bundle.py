"""The observers that every reported group carries, updated together; a monoid like its parts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Self

from torch import Tensor

from quantkit.numerics.observers.histogram import Histogram
from quantkit.numerics.observers.minmax import MinMax
from quantkit.numerics.observers.moments import Moments
from quantkit.numerics.observers.topk import TopK
from quantkit.results import TOP_RANKS


@dataclass(frozen=True, kw_only=True, eq=False)
class Bundle:
    """Extremes, exact top-100 with tags, float64 moments and an integer histogram, per group."""

    minmax: MinMax
    topk: TopK
    moments: Moments
    histogram: Histogram

    @classmethod
    def empty(cls, groups: int) -> Self:
        """Returns the identity of `merge` for that many groups."""
        return cls(
            minmax=MinMax.empty(groups),
            topk=TopK.empty(groups, k=max(TOP_RANKS)),
            moments=Moments.empty(groups),
            histogram=Histogram.empty(groups),
        )

    def update(self, x: Tensor, tags: Tensor) -> Self:
        """Returns the bundle with `x` `[groups, elements]` added; `tags` `[elements]` is int64."""
        if x.shape[1] == 0:
            return self
        return type(self)(
            minmax=self.minmax.update(x),
            topk=self.topk.update(x, tags.expand(x.shape)),
            moments=self.moments.update(x),
            histogram=self.histogram.update(x),
        )

    def merge(self, other: Self) -> Self:
        """Returns the bundle of both parts' elements."""
        return type(self)(
            minmax=self.minmax.merge(other.minmax),
            topk=self.topk.merge(other.topk),
            moments=self.moments.merge(other.moments),
            histogram=self.histogram.merge(other.histogram),
        )

    def pool(self) -> Self:
        """Returns one group that holds the elements of all."""
        return type(self)(
            minmax=self.minmax.pool(),
            topk=self.topk.pool(),
            moments=self.moments.pool(),
            histogram=self.histogram.pool(),
        )


def merged(bundles: list[Bundle]) -> Bundle:
    """Returns the merge of one or more bundles with the same number of groups."""
    return reduce(lambda left, right: left.merge(right), bundles)


def figures(bundle: Bundle, group: int) -> dict[str, object]:
    """Returns the fields that `GroupStats` and `PointSummary` share, of one group.

    `abs_top` at a rank beyond the number of elements is NaN.
    """
    values = bundle.topk.values[group]
    count = int(bundle.minmax.count[group])
    return {
        "abs_top": {
            str(rank): float(values[rank - 1]) if rank <= count else float("nan")
            for rank in TOP_RANKS
        },
        "abs_median": float(bundle.histogram.quantile_abs(0.5)[group]),
        "max": float(bundle.minmax.max[group]),
        "min": float(bundle.minmax.min[group]),
        "count": count,
        "kurtosis": float(bundle.moments.finish().kurtosis[group]),
    }
