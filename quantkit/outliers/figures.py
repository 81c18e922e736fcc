"""From a bundle to the figures that a result file says of each of its groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quantkit.numerics.observers import Bundle
from quantkit.results import TOP_RANKS

SPAN_FRAC = 0.999
"""The middle share of the values whose span is compared with the whole range."""


def figures(bundle: Bundle, quantiles: Sequence[float] = ()) -> list[dict[str, Any]]:
    """Returns, for each group, the fields that `GroupStats` and `PointSummary` share.

    Quantiles are held to the largest |x|: the middle of its bin may lie beyond. `abs_top` at a rank
    beyond the number of finite elements is NaN.
    """
    minmax, histogram = bundle.minmax, bundle.histogram
    low, high = minmax.finish()
    top = bundle.topk.finish()
    kurtosis = bundle.moments.finish().kurtosis
    medians = histogram.quantile_abs(0.5)
    further = {_fraction(q): histogram.quantile_abs(q) for q in quantiles}
    ranks = [rank for rank in TOP_RANKS if rank <= bundle.topk.k]
    return [
        {
            "abs_top": {str(rank): float(top[group, rank - 1]) for rank in ranks},
            "abs_median": float(torch.minimum(medians[group], top[group, 0])),
            "abs_quantiles": {
                name: float(torch.minimum(value[group], top[group, 0]))
                for name, value in further.items()
            },
            "max": float(high[group]),
            "min": float(low[group]),
            "abs_max": float(top[group, 0]),
            "count": int(minmax.count[group]),
            "nan_count": int(minmax.nan_count[group]),
            "inf_count": int(minmax.inf_count[group]),
            "kurtosis": float(kurtosis[group]),
        }
        for group in range(minmax.groups)
    ]


def span_shares(bundle: Bundle) -> list[float]:
    """Returns, for each group, the share of [min, max] that the middle 99.9 % of the values take.

    (Q(0.9995) - Q(0.0005)) / (max - min), signed quantiles off the histogram; log2 of its inverse
    is the bits that a min-max range gives to one value in a thousand. NaN where all are equal.
    """
    low, high = bundle.minmax.finish()
    tail = (1.0 - SPAN_FRAC) / 2.0
    inner = bundle.histogram.quantile(round(1.0 - tail, 6)) - bundle.histogram.quantile(
        round(tail, 6)
    )
    width = high - low
    share = torch.where(width > 0, inner / width, torch.full_like(width, torch.nan))
    return [float(value) for value in share.clamp_max(1.0)]


def _fraction(q: float) -> str:
    return f"{q:g}"
