"""Mean and deviation of a few figures, some of which may be infinite or unknown.

`statistics` raises for those, AttributeError among others, where a report should show that one seed
of several has no finite perplexity.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float:
    """Returns the arithmetic mean; NaN, or an infinity, where the values have no finite one."""
    if all(map(math.isfinite, values)) and max(map(abs, values)) < 1e300:
        return statistics.fmean(values)
    return sum(value / len(values) for value in values)


def deviation(values: Sequence[float]) -> float:
    """Returns the sample standard deviation; NaN where a value is not finite."""
    if not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values)
