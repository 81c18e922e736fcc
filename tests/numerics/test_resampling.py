"""The bootstrap against a loop, its coverage by simulation, and what may be called level."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from quantkit.numerics import resampling
from quantkit.numerics.proportions import tango_interval, wilson_interval
from quantkit.numerics.resampling import (
    LEAST_UNITS,
    RESAMPLES,
    interval,
    is_level,
    paired_change,
    paired_interval,
    resampled,
)

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Figure:
    total: Array
    weight: Array
    link: Literal["identity", "exp"] = "identity"
    is_share: bool = False

    @property
    def value(self) -> float:
        mean = float(self.total.sum() / self.weight.sum())
        return math.exp(mean) if self.link == "exp" else mean


def texts(n: int, seed: int, *, factor: float = 1.0) -> Figure:
    """Blocks of different lengths; their loss per token is skewed."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(50, 512, n).astype(np.float64)
    loss = 2.5 + rng.lognormal(-1.0, 0.8, n)
    return Figure(tokens * loss * factor, tokens, "exp")


def outcomes(right: Array) -> Figure:
    return Figure(right.astype(np.float64), np.ones(len(right)), is_share=True)


def level(a: Figure, b: Figure, *, margin: float, higher_is_better: bool = True) -> bool:
    bounds = paired_interval(a, b, resampled(a, 0), resampled(b, 0))
    return is_level(a, b, bounds, margin=margin, higher_is_better=higher_is_better)


@pytest.mark.parametrize("seed", [0, 7])
def test_resamples_equal_a_loop_for_any_chunk(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = texts(13, 1)
    chosen = np.random.default_rng(seed).integers(0, 13, size=(RESAMPLES, 13))
    wanted = [
        math.exp(sum(figure.total[i] for i in row) / sum(figure.weight[i] for i in row))
        for row in chosen
    ]
    for draws in (1, 13 * 7 + 5, 1 << 20):
        monkeypatch.setattr(resampling, "_DRAWS", draws)
        np.testing.assert_allclose(resampled(figure, seed), wanted, rtol=1e-12)
    stderr, lo, hi = interval(figure, resampled(figure, seed))
    assert (lo, hi) == pytest.approx(tuple(np.percentile(wanted, [2.5, 97.5])))
    assert stderr == pytest.approx(np.std(wanted, ddof=1))


def test_equal_weights_take_the_same_draws() -> None:
    rng = np.random.default_rng(5)
    total = rng.random(40)
    chosen = np.random.default_rng(3).integers(0, 40, size=(RESAMPLES, 40))
    wanted = [float(np.mean(total[row])) / 2 for row in chosen]
    np.testing.assert_allclose(resampled(Figure(total, np.full(40, 2.0)), 3), wanted, rtol=1e-12)


def test_a_difference_is_paired() -> None:
    a, b = texts(40, 2, factor=1.001), texts(40, 2)
    lo, hi = paired_interval(a, b, resampled(a, 0), resampled(b, 0))
    own = interval(b, resampled(b, 0))
    assert lo < a.value - b.value < hi
    assert hi - lo < (own[2] - own[1]) / 100


@pytest.mark.parametrize("n", [64, 200])
def test_the_interval_of_a_skewed_perplexity_covers(n: int) -> None:
    """With 16 blocks of such a text the percentiles cover 86 %, which is why n stands beside."""
    truth = math.exp(2.5 + math.exp(-1.0 + 0.8**2 / 2))
    runs, inside = 400, 0
    for run in range(runs):
        figure = texts(n, 1000 + run)
        _, lo, hi = interval(figure, resampled(figure, run))
        inside += lo <= truth <= hi
    assert 0.90 <= inside / runs <= 0.98


@pytest.mark.parametrize("share", [0.02, 0.25, 0.6])
def test_the_interval_of_an_accuracy_covers(share: float) -> None:
    runs, inside = 400, 0
    rng = np.random.default_rng(9)
    for run in range(runs):
        figure = outcomes(rng.random(60) < share)
        _, lo, hi = interval(figure, resampled(figure, run))
        inside += lo <= share <= hi
    assert inside / runs >= 0.93


def test_the_interval_of_a_difference_of_accuracies_covers() -> None:
    """6 % of the items are lost, 3 % gained: a loss of 3 points."""
    runs, inside = 250, 0
    rng = np.random.default_rng(11)
    for run in range(runs):
        drawn = rng.random(200)
        base = outcomes(drawn < 0.56)
        other = outcomes((drawn < 0.50) | (drawn > 0.97))
        lo, hi = paired_interval(other, base, resampled(other, run), resampled(base, run))
        inside += lo <= -0.03 <= hi
    assert 0.93 <= inside / runs <= 0.99


def test_outcomes_that_are_all_equal_have_an_interval() -> None:
    right = outcomes(np.ones(30))
    stderr, lo, hi = interval(right, resampled(right, 0))
    assert (stderr, lo, hi) == (0.0, wilson_interval(30, 30)[0], 1.0)
    bounds = paired_interval(right, right, resampled(right, 0), resampled(right, 0))
    assert bounds == pytest.approx(tango_interval(0, 0, 30))


@pytest.mark.parametrize("scale", [0.9, 1.0, 1.1])
def test_a_share_is_declared_and_not_seen_in_the_figures(scale: float) -> None:
    """Bits per byte that lie below 1 have the percentiles alone, as those above it."""
    n = 30
    bits = np.random.default_rng(6).normal(scale, 0.02 * scale, n)
    figure, other = Figure(bits, np.ones(n)), Figure(bits * 1.001, np.ones(n))
    values, others = resampled(figure, 0), resampled(other, 0)
    chosen = np.random.default_rng(0).integers(0, n, size=(RESAMPLES, n))
    means = bits[chosen].mean(1)
    assert interval(figure, values)[1:] == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])))
    bounds = paired_interval(other, figure, others, values)
    assert bounds == pytest.approx(tuple(0.001 * np.percentile(means, [2.5, 97.5])))
    for margin, wanted in ((0.002 * scale, True), (0.0009 * scale, False)):
        found = is_level(other, figure, bounds, margin=margin, higher_is_better=False)
        assert found == wanted


def test_unequal_weights_widen_the_bound() -> None:
    weight = np.array([1.0, 3.0] * 15)
    right = Figure(weight, weight, is_share=True)
    lo, hi = paired_interval(right, right, resampled(right, 0), resampled(right, 0))
    scale = 30 * 3 / 60
    wanted = tuple(scale * bound for bound in tango_interval(0, 0, 30))
    assert (lo, hi) == pytest.approx(wanted)
    assert interval(right, resampled(right, 0))[1] < wilson_interval(30, 30)[0]


def test_one_unit_has_no_interval_but_a_share() -> None:
    text = texts(1, 0)
    values = resampled(text, 0)
    assert all(map(math.isnan, interval(text, values)))
    assert all(map(math.isnan, paired_interval(text, text, values, values)))
    one = outcomes(np.ones(1))
    stderr, lo, hi = interval(one, resampled(one, 0))
    assert math.isnan(stderr)
    assert (lo, hi) == (wilson_interval(1, 1)[0], 1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "inf"])
def test_a_figure_that_is_not_finite_has_no_interval(bad: float) -> None:
    good = texts(20, 0)
    total = good.total.copy()
    total[3] = bad
    broken = Figure(total, good.weight, "exp")
    values = resampled(broken, 0)
    assert all(map(math.isnan, interval(broken, values)))
    bounds = paired_interval(broken, good, values, resampled(good, 0))
    assert all(map(math.isnan, bounds))
    assert not is_level(broken, good, bounds, margin=1e9, higher_is_better=False)


def test_a_planted_loss_of_three_points_is_never_level() -> None:
    rng = np.random.default_rng(0)
    for _ in range(15):
        drawn = rng.random(2000)
        base, worse = outcomes(drawn < 0.5), outcomes(drawn < 0.47)
        assert not level(worse, base, margin=0.01)
        assert level(base, worse, margin=0.01)  # a gain of any size


def test_the_same_model_is_level_from_enough_items_on() -> None:
    right = np.random.default_rng(1).random(2000) < 0.5
    assert level(outcomes(right), outcomes(right), margin=0.01)
    assert not level(outcomes(right[:300]), outcomes(right[:300]), margin=0.01)
    assert not level(outcomes(right[:30]), outcomes(right[:30]), margin=0.01)


def test_few_blocks_are_never_level() -> None:
    few, enough = texts(LEAST_UNITS - 1, 0), texts(LEAST_UNITS, 0)
    assert not level(few, few, margin=0.2, higher_is_better=False)
    assert level(enough, enough, margin=0.2, higher_is_better=False)


@pytest.mark.parametrize("n", [6, 12, 64])
def test_a_perplexity_that_loses_the_margin_is_rarely_level(n: int) -> None:
    """The percentiles alone would take some 7 % of runs with six blocks."""
    runs, wrong, percentiles = 400, 0, 0
    rng = np.random.default_rng(4)
    for run in range(runs):
        tokens = np.full(n, 100.0)
        base = Figure(tokens * (3.0 + 0.3 * rng.standard_normal(n)), tokens, "exp")
        loss = math.log(1.01) + 0.01 * rng.standard_normal(n)
        other = Figure(base.total + tokens * loss, tokens, "exp")
        margin = 0.01 * base.value
        bounds = paired_interval(other, base, resampled(other, run), resampled(base, run))
        wrong += is_level(other, base, bounds, margin=margin, higher_is_better=False)
        percentiles += bounds[1] <= margin
    assert wrong / runs <= 0.05
    assert wrong <= percentiles


def test_student_quantiles_are_those_of_the_tables() -> None:
    table = {5: 2.5706, 7: 2.3646, 10: 2.2281, 30: 2.0423, 120: 1.9799}
    for freedom, wanted in table.items():
        assert resampling._student_quantile(freedom) == pytest.approx(wanted, abs=3e-4)


def test_direction_follows_the_metric() -> None:
    base, higher = texts(30, 3), texts(30, 3, factor=1.02)
    margin = 0.01 * base.value
    assert not level(higher, base, margin=margin, higher_is_better=False)
    assert level(base, higher, margin=margin, higher_is_better=False)
    assert level(higher, base, margin=margin, higher_is_better=True)


def test_many_units_stay_in_bounded_memory() -> None:
    n = 20_000
    figure = outcomes(np.arange(n) % 3 == 0)
    tracemalloc.start()
    values = resampled(figure, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20  # all draws at once would take 320 MB
    assert values.std() == pytest.approx(math.sqrt(2 / 9 / n), rel=0.1)


T_11 = 2.201
"""Student's t, 0.975, 11 degrees of freedom (any table)."""


def test_a_change_is_no_narrower_than_students_of_the_differences() -> None:
    draw = np.random.default_rng(5)
    a, b = (Figure(draw.normal(size=12) + shift, np.ones(12)) for shift in (0.4, 0.0))
    difference = a.total - b.total
    half = T_11 * difference.std(ddof=1) / math.sqrt(12)
    bootstrap = draw.normal(a.value, 0.01, 1000), np.full(1000, b.value)
    lo, hi = paired_change(a, b, *bootstrap)
    assert (lo, hi) == pytest.approx((difference.mean() - half, difference.mean() + half), rel=1e-3)
    wide = np.linspace(-9.0, 9.0, 1001), np.zeros(1001)
    assert paired_change(a, b, *wide) == pytest.approx((-8.55, 8.55), rel=0.01)


def test_a_change_of_perplexities_is_a_ratio() -> None:
    draw = np.random.default_rng(6)
    tokens = draw.integers(50, 90, 12).astype(np.float64)
    nats = draw.normal(3.0, 0.2, 12)
    a = Figure(tokens * (nats + draw.normal(0.1, 0.05, 12)), tokens, "exp")
    b = Figure(tokens * nats, tokens, "exp")
    ratio = a.value / b.value
    narrow = np.full(1000, a.value), np.full(1000, b.value)
    lo, hi = paired_change(a, b, *narrow)
    # the delta method by hand: log ratio = a weighted mean of the units' differences of nats
    unit = (a.total - b.total) / tokens
    pull = tokens / tokens.mean() * (unit - math.log(ratio))
    half = math.exp(T_11 * pull.std(ddof=1) / math.sqrt(12))
    assert (lo, hi) == pytest.approx((ratio / half, ratio * half), rel=1e-4)
    wide = np.linspace(0.5, 3.0, 1001), np.ones(1001)
    assert paired_change(a, b, *wide) == pytest.approx((0.5625, 2.9375), rel=0.01)


@pytest.mark.parametrize("link", ["identity", "exp"])
def test_a_change_of_few_units_or_without_a_finite_figure_is_unknown(
    link: Literal["identity", "exp"],
) -> None:
    few = Figure(np.ones(LEAST_UNITS - 1), np.ones(LEAST_UNITS - 1), link)
    values = np.ones(100)
    assert all(map(math.isnan, paired_change(few, few, values, values)))
    enough = Figure(np.ones(LEAST_UNITS), np.ones(LEAST_UNITS), link)
    assert not any(map(math.isnan, paired_change(enough, enough, values, values)))
    if link == "exp":
        for odd in (np.array([1.0, math.inf]), np.array([1.0, math.nan])):
            assert all(map(math.isnan, paired_change(enough, enough, odd, np.ones(2))))
            assert all(map(math.isnan, paired_change(enough, enough, np.ones(2), np.zeros(2))))
