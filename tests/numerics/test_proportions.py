"""Score intervals against brute-force likelihoods, exact coverage, and the test against chance."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from quantkit.errors import InputError
from quantkit.numerics.proportions import Z_95, chance_p, tango_interval, wilson_interval


@pytest.mark.parametrize("n", [1, 30, 400])
@pytest.mark.parametrize("event", [0, 1], ids=["no event", "only events"])
def test_a_share_without_variation_still_has_an_interval(n: int, event: int) -> None:
    lo, hi = wilson_interval(event * n, n)
    width = Z_95**2 / (n + Z_95**2)
    assert (lo, hi) == pytest.approx((event * (1 - width), event + (1 - event) * width))


@pytest.mark.parametrize(("successes", "n"), [(3, 20), (10, 20), (441, 1000)])
def test_wilson_ends_where_the_score_test_stops_rejecting(successes: int, n: int) -> None:
    for end in wilson_interval(successes, n):
        score = (successes / n - end) / math.sqrt(end * (1 - end) / n)
        assert abs(score) == pytest.approx(Z_95)


def profile_score(gained: int, lost: int, n: int, supposed: float) -> float:
    """The score statistic, the share lost at the maximum of the likelihood over a grid."""
    ends = (max(0.0, -supposed), (1 - supposed) / 2)
    lost_share = np.linspace(*ends, 400_001)[1:-1]
    gained_share = lost_share + supposed
    same = np.maximum(1 - lost_share - gained_share, 1e-300)
    likely = (
        gained * np.log(np.maximum(gained_share, 1e-300))
        + lost * np.log(lost_share)
        + (n - gained - lost) * np.log(same)
    )
    best = lost_share[int(np.argmax(likely))]
    variance = (2 * best + supposed - supposed**2) / n
    return ((gained - lost) / n - supposed) / math.sqrt(variance)


@pytest.mark.parametrize(
    ("gained", "lost", "n"), [(4, 9, 44), (40, 20, 160), (0, 3, 25), (12, 12, 2000), (7, 0, 50)]
)
def test_tango_ends_where_the_score_test_stops_rejecting(gained: int, lost: int, n: int) -> None:
    lo, hi = tango_interval(gained, lost, n)
    assert lo < (gained - lost) / n < hi
    assert profile_score(gained, lost, n, lo) == pytest.approx(Z_95, abs=2e-3)
    assert profile_score(gained, lost, n, hi) == pytest.approx(-Z_95, abs=2e-3)
    assert tango_interval(lost, gained, n) == pytest.approx((-hi, -lo))


def test_items_without_a_difference_prove_little_where_they_are_few() -> None:
    bound = Z_95**2 / (30 + Z_95**2)
    assert tango_interval(0, 0, 30) == pytest.approx((-bound, bound))
    assert bound == pytest.approx(0.1135, abs=1e-4)
    assert tango_interval(1, 0, 1)[1] == 1.0


@pytest.mark.parametrize(
    ("n", "gained"),
    [(400, 0.0), (400, 0.01), (800, 0.02), (1500, 0.02)],
    ids=["only losses", "gains and losses", "800 items", "1500 items"],
)
def test_a_loss_of_the_margin_is_rarely_taken_for_none(n: int, gained: float) -> None:
    """Exact: the probability, over all outcomes, that the bound is within a margin just broken."""
    lost, margin = gained + 0.01, 0.01
    same, wrong, total = 1 - gained - lost, 0.0, 0.0
    most = int(n * (gained + lost) + 9 * math.sqrt(n * (gained + lost))) + 1
    for b in range(most if gained else 1):
        for c in range(most):
            log = math.lgamma(n + 1) - math.lgamma(b + 1) - math.lgamma(c + 1)
            log += c * math.log(lost) - math.lgamma(n - b - c + 1) + (n - b - c) * math.log(same)
            chance = math.exp(log + (b * math.log(gained) if b else 0.0))
            total += chance
            if chance > 1e-9 and -tango_interval(b, c, n)[0] <= margin:
                wrong += chance
    assert total == pytest.approx(1.0, abs=1e-6)
    assert wrong <= 0.03


@pytest.mark.parametrize("chance", [Fraction(1, 4), Fraction(1, 2), Fraction(1, 1000)], ids=str)
@pytest.mark.parametrize("trials", [1, 7, 60])
def test_chance_equals_a_sum_of_fractions(trials: int, chance: Fraction) -> None:
    for successes in range(trials + 1):
        wanted = sum(
            math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k)
            for k in range(successes, trials + 1)
        )
        found = chance_p(successes, trials, float(chance))
        assert found == pytest.approx(float(wanted), rel=1e-10), successes


def test_chance_is_stable_for_many_trials() -> None:
    n = 100_000
    sd = math.sqrt(n * 0.25 * 0.75)
    for away in (-3, 0, 5):
        successes = round(n * 0.25 + away * sd)
        term = total = math.comb(n, successes) * 3 ** (n - successes)  # whole numbers over 4^n
        for k in range(successes, round(n * 0.25 + 9 * sd)):
            term = term * (n - k) // (3 * (k + 1))
            total += term
        wanted = float(Fraction(total, 4**n))
        assert chance_p(successes, n, 0.25) == pytest.approx(wanted, rel=1e-8)
    assert chance_p(n, n, 0.25) == 0.0
    assert chance_p(0, n, 0.25) == 1.0
    assert chance_p(1, n, 1e-7) == pytest.approx(-math.expm1(n * math.log1p(-1e-7)), rel=1e-9)


@pytest.mark.parametrize(("chance", "wanted"), [(0.0, 0.0), (1.0, 1.0)])
def test_chance_that_is_none(chance: float, wanted: float) -> None:
    assert chance_p(1, 5, chance) == wanted
    assert chance_p(0, 5, chance) == 1.0


@pytest.mark.parametrize(
    ("successes", "trials", "chance", "said"),
    [
        (6, 5, 0.5, "expected 0 to 5 successes of 5, got 6"),
        (-1, 5, 0.5, "expected 0 to 5 successes of 5, got -1"),
        (1, 5, 1.5, "expected a chance from 0 to 1, got 1.5"),
    ],
    ids=["more than all", "fewer than none", "no probability"],
)
def test_chance_refuses(successes: int, trials: int, chance: float, said: str) -> None:
    with pytest.raises(InputError, match=said):
        chance_p(successes, trials, chance)
