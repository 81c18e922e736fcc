"""What cells say of themselves: whether they may be guessing, and how far seeds are apart."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from quantkit.results import Cell, ChanceVerdict, SeedSpread


def cell(value: float = 0.3, **more: Any) -> Cell:
    plain: dict[str, Any] = {
        "model": "m", "recipe": "none", "bits": 16, "granularity": None, "range": None,
        "weights": None, "activations": None, "task": "t", "metric": "acc", "stderr": 0.01,
        "ci_low": 0.2, "ci_high": 0.35, "n": 8, "seed": 0, "hits": 0,
    }  # fmt: skip
    return Cell(value=value, **{**plain, **more})


@pytest.mark.parametrize(
    ("chance", "p", "ci_high", "verdict"),
    [
        pytest.param(0.25, 1e-9, 0.35, "above", id="the test rejects guessing"),
        pytest.param(0.25, 0.05, 0.35, "above", id="at 5 % sharp"),
        pytest.param(0.25, 0.051, 0.34, "at", id="and the interval ends near chance"),
        pytest.param(0.25, 1.0, 0.04, "at", id="and it ends below chance"),
        pytest.param(0.25, 0.051, 0.36, "open", id="and the interval reaches far above"),
        pytest.param(0.25, 0.4, math.nan, "open", id="and there is no interval"),
        pytest.param(0.25, None, 0.35, None, id="no test"),
        pytest.param(None, None, 0.35, None, id="no chance"),
    ],
)
def test_a_test_that_rejects_nothing_needs_an_interval_to_say_chance(
    chance: float | None, p: float | None, ci_high: float, verdict: ChanceVerdict | None
) -> None:
    one = cell(chance=chance, chance_p=p, ci_high=ci_high)
    assert one.chance_verdict == verdict
    assert one.may_guess == (verdict in ("at", "open"))


def test_a_coin_is_at_chance_only_with_enough_items() -> None:
    """Exactly half right, p > 0.5: the score interval decides, as the sweep's cells have it."""
    found = {}
    for n in (4, 20, 80, 100, 400):
        z = NormalDist().inv_cdf(0.975)
        high = 0.5 + z * math.sqrt(0.25 / n + z * z / (4 * n * n)) / (1 + z * z / n)
        found[n] = cell(0.5, n=n, chance=0.5, chance_p=0.55, ci_high=high).chance_verdict
    assert found == {4: "open", 20: "open", 80: "open", 100: "at", 400: "at"}


def test_the_spread_of_seeds() -> None:
    seeds = [cell(v, model=f"m{v}", group="g", stderr=e) for v, e in ((0.5, 0.03), (0.6, 0.04))]
    spread = SeedSpread.of(seeds)
    assert (spread.group, spread.models) == ("g", ["m0.5", "m0.6"])
    assert (spread.recipe, spread.task, spread.metric) == ("none", "t", "acc")
    assert (spread.mean, spread.sd) == pytest.approx((0.55, np.std([0.5, 0.6], ddof=1)))
    assert (spread.low, spread.high) == (0.5, 0.6)
    assert spread.sampling_stderr == pytest.approx(math.sqrt((0.03**2 + 0.04**2) / 2))
