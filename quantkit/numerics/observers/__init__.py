"""Observers: what a stream of tensors looked like, as monoids over [groups, elements].

rows.py        what they share: the protocol, and the checks of what they are fed
minmax.py      extremes and counts
topk.py        the exact largest magnitudes and where they stood
moving.py      the moving average of each sample's extremes
moments.py     mean, variance, kurtosis
histogram.py   every quantile, on the floating-point grid
bundle.py      the four together, as outlier statistics carry them
"""

from quantkit.numerics.observers.bundle import Bundle, merged
from quantkit.numerics.observers.histogram import Histogram
from quantkit.numerics.observers.minmax import MinMax
from quantkit.numerics.observers.moments import Moments, MomentSummary
from quantkit.numerics.observers.moving import MovingAverage
from quantkit.numerics.observers.rows import Observer
from quantkit.numerics.observers.topk import TopK

__all__ = [
    "Bundle",
    "Histogram",
    "MinMax",
    "MomentSummary",
    "Moments",
    "MovingAverage",
    "Observer",
    "TopK",
    "merged",
]
