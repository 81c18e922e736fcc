"""How sure a figure over items is: the paired bootstrap, and when two figures are level.

A figure is sum(total) / sum(weight) over units (blocks of text, items, images), or exp of it. Units
are drawn with replacement (Efron 1979); the same seed and number of units draw the same ones, so
that two figures over the same units are paired by construction.
"""

from __future__ import annotations

import math
from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from quantkit.numerics.proportions import Z_95, tango_interval, wilson_interval

RESAMPLES: Final = 2000
LEAST_UNITS: Final = 6
"""Below this many units nothing is called level: with fewer not even the sample's own extremes
enclose the median at 95 % (2 * 0.5^n is above 0.05 for n = 5)."""
_DRAWS: Final = 1 << 20
"""Units drawn at a time: 8 MiB of indices, whatever the number of units."""

Values = NDArray[np.float64]
"""A figure in every resample, `[RESAMPLES]`; NaN where a unit has no finite number."""


class Ratio(Protocol):
    """sum(total) / sum(weight), or exp of it; one number a unit each, `[units]`.

    `is_share` is declared, never guessed: every unit's own figure lies in [0, 1] by definition, an
    accuracy or a rate, with a positive weight and the identity link. 0.9 bits per byte are none.
    """

    @property
    def total(self) -> NDArray[np.float64]: ...
    @property
    def weight(self) -> NDArray[np.float64]: ...
    @property
    def link(self) -> Literal["identity", "exp"]: ...
    @property
    def is_share(self) -> bool: ...
    @property
    def value(self) -> float: ...


def resampled(ratio: Ratio, seed: int) -> Values:
    """Returns the figure in each of `RESAMPLES` bootstrap resamples of its units.

    The draws are those of one `integers(0, units, size=(RESAMPLES, units))`, in bounded memory.
    """
    total, weight = ratio.total, ratio.weight
    units = len(total)
    if not (np.isfinite(total).all() and np.isfinite(weight).all()):
        return np.full(RESAMPLES, np.nan)
    generator = np.random.default_rng(seed)
    is_even = bool((weight == weight[0]).all())
    at_once = max(1, _DRAWS // units)
    values = np.empty(RESAMPLES)
    for start in range(0, RESAMPLES, at_once):
        rows = min(at_once, RESAMPLES - start)
        chosen = generator.integers(0, units, size=(rows, units))
        below = weight.sum() if is_even else weight[chosen].sum(1)
        with np.errstate(divide="ignore", invalid="ignore"):
            values[start : start + rows] = total[chosen].sum(1) / below
    with np.errstate(over="ignore"):
        return np.exp(values) if ratio.link == "exp" else values


def interval(ratio: Ratio, values: Values) -> tuple[float, float, float]:
    """Returns (standard error, lo, hi) of a figure: percentiles, two-sided at 95 %.

    For shares the wider of the percentiles and Wilson's score interval on either side, since the
    bootstrap of outcomes that are all equal has no width. NaN where there is no interval: of one
    unit that is no share, or of figures that are not finite.

    Args:
        values: `resampled` of the ratio.
    """
    units = len(ratio.total)
    if not np.isfinite(values).all():
        return math.nan, math.nan, math.nan
    stderr = float(values.std(ddof=1)) if units > 1 else math.nan
    lo, hi = _percentiles(values)
    if not ratio.is_share:
        return (stderr, lo, hi) if units > 1 else (math.nan, math.nan, math.nan)
    most = float(ratio.weight.max())
    scale = units * most / float(ratio.weight.sum())
    low, high = wilson_interval(float(ratio.total.sum()) / most, units)
    return stderr, min(lo, low * scale), max(hi, min(high * scale, 1.0))


def paired_interval(a: Ratio, b: Ratio, values_a: Values, values_b: Values) -> tuple[float, float]:
    """Returns (lo, hi) of `a` minus `b` over the same units: percentiles, two-sided at 95 %.

    For shares the wider of the percentiles and Tango's score interval on either side, so that few
    items without a difference are not taken for equality: 30 of them leave 11 points. NaN as in
    `interval`.

    Args:
        values_a, values_b: `resampled` of each, with one seed.
    """
    units = len(a.total)
    difference = _difference(values_a, values_b)
    if not np.isfinite(difference).all():
        return math.nan, math.nan
    lo, hi = _percentiles(difference)
    if not _are_shares(a, b):
        return (lo, hi) if units > 1 else (math.nan, math.nan)
    # A unit's difference is at most the greatest weight; of equal weights, scale is 1.
    most = float(a.weight.max())
    scale = units * most / float(a.weight.sum())
    change = (a.total - b.total) / most
    gained, lost = float(change[change > 0].sum()), float(-change[change < 0].sum())
    low, high = tango_interval(gained, lost, units)
    return min(lo, low * scale), max(hi, high * scale)


def paired_change(a: Ratio, b: Ratio, values_a: Values, values_b: Values) -> tuple[float, float]:
    """Returns (lo, hi) of what `a` changed against `b` over the same units, two-sided at 95 %.

    Of exponentials the ratio, else the difference as `paired_interval`. Both ends are the wider of
    the percentiles and Student's t (see `is_level`), so that a few units that happen to lose the
    same are not taken for certainty. NaN with fewer than `LEAST_UNITS` units, or where a figure is
    not finite.
    """
    units = len(a.total)
    if units < LEAST_UNITS:
        return math.nan, math.nan
    if a.link != "exp":
        lo, hi = paired_interval(a, b, values_a, values_b)
        if _are_shares(a, b):
            return lo, hi
        middle, reach = a.value - b.value, _student_reach(a, b)
        return min(lo, middle - reach), max(hi, middle + reach)
    with np.errstate(all="ignore"):
        ratios = values_a / values_b
    if not np.isfinite(ratios).all():
        return math.nan, math.nan
    lo, hi = _percentiles(ratios)
    pull = _influence(a) / a.value - _influence(b) / b.value
    reach = math.exp(_student_quantile(units - 1) * float(pull.std(ddof=1)) / math.sqrt(units))
    middle = a.value / b.value
    return min(lo, middle / reach), max(hi, middle * reach)


def is_level(
    a: Ratio,
    b: Ratio,
    bounds: tuple[float, float],
    *,
    margin: float,
    higher_is_better: bool,
) -> bool:
    """Returns whether `a` is non-inferior to `b`: it loses at most `margin` at 95 %.

    One-sided in meaning (a gain of any size is level), while the end that must be within the margin
    is that of the two-sided 95 % interval: the error is 2.5 %, not 5 %. Figures that are no shares
    must pass by Student's t, too, since percentiles of a few units are too narrow (Hesterberg 2015,
    "What teachers should know about the bootstrap", The American Statistician 69). Never with fewer
    than `LEAST_UNITS` units, nor where there is no interval.

    Args:
        bounds: `paired_interval` of a and b.
        margin: In the figure's units, fixed beforehand.
    """
    units = len(a.total)
    lo, hi = bounds
    if units < LEAST_UNITS or not (math.isfinite(lo) and math.isfinite(hi)):
        return False
    loss = -lo if higher_is_better else hi
    if not _are_shares(a, b):
        difference = b.value - a.value if higher_is_better else a.value - b.value
        loss = max(loss, difference + _student_reach(a, b))
    return loss <= margin


def _are_shares(a: Ratio, b: Ratio) -> bool:
    return a.is_share and b.is_share and np.array_equal(a.weight, b.weight)


def _percentiles(values: Values) -> tuple[float, float]:
    lo, hi = np.quantile(values, [0.025, 0.975])
    return float(lo), float(hi)


def _difference(a: Values, b: Values) -> Values:
    with np.errstate(invalid="ignore"):
        return a - b


def _student_reach(a: Ratio, b: Ratio) -> float:
    """Returns half the width of Student's 95 % interval of the difference, by the delta method."""
    units = len(a.total)
    pull = _influence(a) - _influence(b)
    return _student_quantile(units - 1) * float(pull.std(ddof=1)) / math.sqrt(units)


def _influence(ratio: Ratio) -> NDArray[np.float64]:
    """Returns how far each unit pulls the figure, times the number of units."""
    weight = ratio.weight / ratio.weight.mean()
    plain = float(ratio.total.sum() / ratio.weight.sum())
    slope = ratio.value if ratio.link == "exp" else 1.0
    pull: NDArray[np.float64] = slope * (ratio.total / ratio.weight.mean() - plain * weight)
    return pull


def _student_quantile(freedom: int) -> float:
    """Returns the 0.975 quantile of Student's t: Abramowitz and Stegun 26.7.5.

    Within 0.001 from 5 degrees of freedom on, which is `LEAST_UNITS`.
    """
    z = Z_95
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / float(freedom) ** (i + 1) for i, term in enumerate(terms))
