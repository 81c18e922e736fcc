"""Which graphs `auto` tries and which it takes, with made-up measurements; and what a change is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from quantkit.numerics.resampling import resampled
from quantkit.recipe import Recipe
from quantkit.results import Trial
from quantkit.search.auto import TIED_FRAC, choose, explore, front
from quantkit.search.candidates import METHODS, Candidate, first_candidates
from quantkit.search.judge import change_of
from quantkit.tasks import Metric

BUDGET = 0.02
NAMES = tuple(f"linear_input/{index}" for index in range(40))


def trial_of(candidate: Candidate, loss: float, speed: float) -> Trial:
    return Trial(
        name=candidate.name,
        recipe=str(candidate.recipe),
        storage=candidate.storage,
        smoothing=candidate.smoothing,
        method=candidate.method,
        kept=list(candidate.keep),
        value=10.0,
        change=1.0 + loss,
        change_low=1.0,
        change_high=1.0 + loss,
        loss_high=loss,
        latency_ms=100.0 / speed,
        float_ms=100.0,
        bytes=1,
        is_within=loss <= BUDGET,
    )


class Judge:
    """Measures by formula: each input in float takes from the loss and from the speed."""

    def __init__(self, loss: Callable[[Candidate], float], speed: Callable[[Candidate], float]):
        self.loss, self.speed = loss, speed
        self.seen: list[Candidate] = []

    def __call__(self, candidate: Candidate) -> Trial:
        self.seen.append(candidate)
        return trial_of(candidate, self.loss(candidate), self.speed(candidate))


def rank(_: Candidate) -> Sequence[str]:
    return NAMES


def is_static(candidate: Candidate) -> bool:
    return str(candidate.recipe) == "w8a8"


def test_the_first_candidates() -> None:
    found = first_candidates(can_smooth=True)
    names = [one.name for one in found]
    assert len(set(names)) == len(names) == 2 * len(METHODS) + 2 + 2
    assert "w8a8:token:symmetric, smoothed 0.5" in names
    assert "w4:group32, MatMulNBits" in names
    plain = first_candidates(can_smooth=False, storage="qdq")
    assert {one.storage for one in plain} == {"qdq"}
    assert not any(one.smoothing != "none" for one in plain)


@pytest.mark.parametrize("needed", [1, 2, 3, 7, 17, 40])
def test_the_fewest_inputs_in_float_are_found(needed: int) -> None:
    judge = Judge(
        lambda c: 0.5 if len(c.keep) < needed else 0.01,
        lambda c: (2.0 if is_static(c) else 0.5) - 0.01 * len(c.keep),
    )
    tried = explore([Candidate(recipe=Recipe.parse("w8a8"), method="minmax")], judge, rank)
    best = choose(tried)
    assert best is not None
    assert best.candidate.keep == NAMES[:needed]
    assert len(judge.seen) <= 1 + 2 * math.log2(len(NAMES)) + 2


def test_none_is_enough() -> None:
    judge = Judge(lambda c: 0.5, lambda c: 2.0 - 0.01 * len(c.keep))
    tried = explore([Candidate(recipe=Recipe.parse("w8a8"), method="minmax")], judge, rank)
    assert choose(tried) is None
    assert [len(one.candidate.keep) for one in tried] == [0, 1, 2, 4, 8, 16, 32, 40]


def test_what_cannot_be_faster_is_not_searched() -> None:
    candidates = first_candidates(can_smooth=False)
    judge = Judge(
        lambda c: 0.5 if is_static(c) else 0.001,
        lambda c: 1.8 if not is_static(c) else 1.7 - 0.01 * len(c.keep),
    )
    explore(candidates, judge, rank)
    assert not any(one.keep for one in judge.seen)


def test_a_family_stops_where_it_is_no_faster() -> None:
    candidates = first_candidates(can_smooth=False)
    judge = Judge(
        lambda c: 0.5 if is_static(c) else 0.001,
        lambda c: 1.8 if not is_static(c) else 1.9 - 0.05 * len(c.keep),
    )
    explore(candidates, judge, rank)
    assert sorted(len(one.keep) for one in judge.seen if one.keep) == [1, 2]


def test_of_equally_fast_ones_the_better_is_taken() -> None:
    one, two, three = (
        Candidate(recipe=Recipe.parse(name)) for name in ("w8a8", "w8a8:token:symmetric", "w8")
    )
    judge = {
        one: trial_of(one, 0.019, 2.0),
        two: trial_of(two, 0.001, 2.0 * TIED_FRAC + 0.001),
        three: trial_of(three, 0.0, 1.0),
    }
    tried = explore([one, two, three], judge.__getitem__, rank)
    best = choose(tried)
    assert best is not None and best.candidate == two


def test_an_unknown_loss_is_never_within() -> None:
    metric = Metric(name="perplexity", total=np.array([3.0]), weight=np.array([1.0]), link="exp")
    values = resampled(metric, 0)
    change = change_of(metric, metric, values, values)
    assert change.value == 1.0
    assert math.isnan(change.high) and math.isinf(change.loss_high)


def test_the_front_by_hand() -> None:
    candidates = [Candidate(recipe=Recipe.parse(f"w{bits}")) for bits in (8, 7, 6, 5)]
    trials = [
        trial_of(c, loss, speed)
        for c, (loss, speed) in zip(
            candidates, [(0.01, 1.0), (0.02, 2.0), (0.03, 1.5), (0.00, 0.9)], strict=True
        )
    ]
    found = front(trials, higher_is_better=False)
    assert [one.speedup for one in found] == [2.0, 1.5, 1.0, pytest.approx(0.9)]
    assert [one.is_on_front for one in found] == [True, False, True, True]


def test_a_candidate_is_read_back_from_its_trial() -> None:
    one = Candidate(
        recipe=Recipe.parse("w8a8+logits8:head:static"),
        smoothing="auto",
        method="mse",
        keep=NAMES[:3],
    )
    assert Candidate.of(trial_of(one, 0.0, 1.0)) == one


@pytest.mark.parametrize("link", ["exp", "identity"])
def test_a_change_is_paired(link: str) -> None:
    generator = np.random.default_rng(0)
    weight = generator.integers(50, 100, 30).astype(float)
    base = generator.normal(3.0, 1.0, 30) * weight
    ours = base + 0.01 * weight  # every unit loses the same, however far the units lie apart
    metrics = [
        Metric(
            name="m",
            total=total,
            weight=weight,
            link="exp" if link == "exp" else "identity",
            higher_is_better=link != "exp",
        )
        for total in (ours, base)
    ]
    change = change_of(*metrics, *(resampled(metric, 7) for metric in metrics))
    expected = math.exp(0.01) if link == "exp" else 0.01
    assert change.value == pytest.approx(expected)
    assert change.low == pytest.approx(expected) and change.high == pytest.approx(expected)
    assert change.loss_high == pytest.approx(expected - 1 if link == "exp" else -0.01)
    # and by brute force where units differ
    noisy = Metric(
        name="m", total=ours + generator.normal(0, 5, 30), weight=weight, link=metrics[0].link
    )
    got = change_of(noisy, metrics[1], resampled(noisy, 3), resampled(metrics[1], 3))
    draws = np.random.default_rng(3).integers(0, 30, size=(2000, 30))
    mine, theirs = (m.total[draws].sum(1) / m.weight[draws].sum(1) for m in (noisy, metrics[1]))
    values = np.exp(mine - theirs) if link == "exp" else mine - theirs
    low, high = np.quantile(values, [0.025, 0.975])
    assert got.low <= low and got.high >= high  # Student's t may be wider, and is not by much
    assert got.high - got.low < 1.5 * (high - low)


def test_few_units_that_lose_the_same_prove_nothing() -> None:
    right = np.ones(8)
    metric = Metric(name="acc", total=right, weight=right, is_share=True)
    values = resampled(metric, 0)
    assert change_of(metric, metric, values, values).loss_high > 0.3
    few = Metric(name="perplexity", total=np.full(5, 3.0), weight=np.ones(5), link="exp")
    values = resampled(few, 0)
    assert math.isinf(change_of(few, few, values, values).loss_high)
