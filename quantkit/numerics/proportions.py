"""Shares of a few items: intervals that have a width at 0 and 1, and the test against guessing.

A bootstrap of outcomes that are all equal says that nothing can vary. Score intervals do not: with
no event among n they reach to z^2 / (n + z^2), near the "rule of three" (about 3 / n, one-sided).

Counts may be fractions, for items whose outcome lies between 0 and 1: a variable in [0, 1] varies
at most as much as one in {0, 1} of the same mean, so that the interval is too wide, if anything.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final

import numpy as np

from quantkit.errors import InputError

Z_95: Final = NormalDist().inv_cdf(0.975)
"""The normal quantile of 0.975: two-sided 95 %."""
_HALVINGS: Final = 60
"""Of an interval of width 2 at most: below the rounding of float64."""


def wilson_interval(successes: float, n: int) -> tuple[float, float]:
    """Returns (lo, hi) of a share, two-sided at 95 %: the score interval of Wilson (1927).

    Args:
        successes: Out of `n`, 0 to n.
    """
    share, z2 = successes / n, Z_95**2
    centre = share + z2 / (2 * n)
    reach = Z_95 * math.sqrt(max(share * (1 - share), 0.0) / n + z2 / (4 * n * n))
    scale = 1 + z2 / n
    return max((centre - reach) / scale, 0.0), min((centre + reach) / scale, 1.0)


def tango_interval(gained: float, lost: float, n: int) -> tuple[float, float]:
    """Returns (lo, hi) of the difference of two shares over the same items, two-sided at 95 %.

    Tango (1998), "Equivalence test and confidence interval for the difference in proportions for
    the paired-sample design", Statistics in Medicine 17: the differences that the score test does
    not reject, its nuisance share at its most likely value.

    Args:
        gained: Items that the first has right and the second wrong; `lost`: the reverse. The
            difference is (gained - lost) / n.
    """
    return -_tango_upper(lost, gained, n), _tango_upper(gained, lost, n)


def _tango_upper(gained: float, lost: float, n: int) -> float:
    """Halves [difference, 1]: the score falls as the supposed difference grows."""
    lo, hi = (gained - lost) / n, 1.0
    for _ in range(_HALVINGS):
        middle = (lo + hi) / 2
        if _score(gained, lost, n, middle) < -Z_95:
            hi = middle
        else:
            lo = middle
    return hi


def _score(gained: float, lost: float, n: int, supposed: float) -> float:
    """Returns the score statistic of a supposed difference that is above the observed one."""
    b = (2 * n - gained + lost) * supposed - gained - lost
    c = -lost * supposed * (1 - supposed)
    share_lost = (math.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)
    variance = n * (2 * share_lost + supposed * (1 - supposed))
    distance = gained - lost - n * supposed
    if distance == 0:
        return 0.0
    return distance / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, distance)


def chance_p(successes: int, trials: int, chance: float) -> float:
    """Returns the probability that guessing reaches `successes` or more: exact, one-sided.

    Sums the upper tail of the binomial distribution through logarithms of its terms, each relative
    to the one before, so that 100,000 trials neither overflow nor lose the tail.

    Raises:
        InputError: not 0 <= successes <= trials, or chance is no probability.
    """
    if not 0 <= successes <= trials:
        raise InputError(f"expected 0 to {trials} successes of {trials}, got {successes}.")
    if not 0 <= chance <= 1:
        raise InputError(f"expected a chance from 0 to 1, got {chance}.")
    if successes == 0:
        return 1.0
    if chance in (0.0, 1.0):
        return chance
    first = (
        math.lgamma(trials + 1)
        - math.lgamma(successes + 1)
        - math.lgamma(trials - successes + 1)
        + successes * math.log(chance)
        + (trials - successes) * math.log1p(-chance)
    )
    k = np.arange(successes, trials, dtype=np.float64)
    steps = np.log((trials - k) / (k + 1)) + (math.log(chance) - math.log1p(-chance))
    terms = first + np.concatenate([[0.0], np.cumsum(steps)])
    top = float(terms.max())
    total = top + math.log(float(np.exp(terms - top).sum()))
    return min(1.0, math.exp(total))
