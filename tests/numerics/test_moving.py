"""The moving average: equal to its recursion, whatever the order and the number of processes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantkit.errors import InputError
from quantkit.numerics.observers import MovingAverage

NAN, INF = float("nan"), float("inf")
numbers = st.floats(-1e6, 1e6, width=32)
samples = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20)
constants = st.sampled_from([0.01, 0.1, 0.5, 1.0])


def recursion(values: list[float], c: float) -> float:
    r = values[0]
    for x in values[1:]:
        r = (1 - c) * r + c * x
    return r


def fed(values: list[tuple[float, float]], numbers: list[int], c: float) -> MovingAverage:
    seen = MovingAverage.empty(1, constant=c)
    for number in numbers:
        lo, hi = values[number]
        seen = seen.update(number, torch.tensor([lo]), torch.tensor([hi]))
    return seen


def close(found: Tensor, expected: float, size: float) -> bool:
    return math.isclose(float(found[0]), expected, rel_tol=1e-5, abs_tol=1e-6 * size)


@pytest.mark.kind(4, "numerics")
@settings(deadline=None, max_examples=80)
@given(samples, constants, st.randoms(use_true_random=False))
def test_any_order_and_any_split_equal_the_recursion(values, c, random) -> None:  # type: ignore[no-untyped-def]
    order = list(range(len(values)))
    random.shuffle(order)
    parts = [fed(values, order[i::3], c) for i in range(3)]

    size = max(abs(x) for pair in values for x in pair)
    lows, highs = (recursion([pair[end] for pair in values], c) for end in (0, 1))
    a, b, d = parts
    for whole in (a.merge(b).merge(d), d.merge(b.merge(a)), fed(values, order, c)):
        lo, hi = whole.finish()
        assert close(lo, lows, size) and close(hi, highs, size)
    empty = MovingAverage.empty(1, constant=c)
    assert torch.equal(empty.merge(a).lo_sum, a.lo_sum)
    assert torch.equal(a.merge(empty).weight, a.weight)


def test_equals_torchs_observer() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 64, generator=generator)
    theirs = torch.ao.quantization.MovingAverageMinMaxObserver()
    ours = MovingAverage.empty(1)
    for number, row in enumerate(x):
        theirs(row)
        ours = ours.update(number, row.amin()[None], row.amax()[None])

    torch.testing.assert_close(ours.finish()[0][0], theirs.min_val, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.finish()[1][0], theirs.max_val, rtol=1e-5, atol=0)


def test_a_group_that_was_absent_keeps_the_others_weights() -> None:
    # Sample 1 has nothing in group 1: weights 0.25, 0.25, 0.5 become 0.25 : 0.5.
    seen = MovingAverage.empty(3, constant=0.5)
    rows = [[0.0, 0.0, NAN], [4.0, NAN, INF], [8.0, 6.0, -INF]]
    for number, row in enumerate(rows):
        seen = seen.update(number, torch.tensor(row), torch.tensor(row))

    lo, hi = seen.finish()

    assert lo.tolist()[:2] == [5.0, 4.0] and hi.tolist()[:2] == [5.0, 4.0]
    assert math.isnan(lo[2]) and math.isnan(hi[2])


def test_a_long_absence_does_not_wear_a_group_away() -> None:
    seen = MovingAverage.empty(1).update(0, torch.tensor([-3.0]), torch.tensor([5.0]))

    seen = seen.update(1_000_000, torch.tensor([NAN]), torch.tensor([NAN]))

    assert [float(end) for end in seen.finish()] == [-3.0, 5.0]


def test_state_round_trip_and_groups() -> None:
    seen = MovingAverage.empty(2, constant=0.1)
    seen = seen.update(3, torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 2.0]))

    again = MovingAverage.from_state(seen.state())

    assert again.constant == 0.1
    assert all(torch.equal(again.state()[k], v) for k, v in seen.state().items())
    assert [float(end) for end in seen.select(1, 2).finish()] == [-2.0, 2.0]


def test_bad_input_is_refused() -> None:
    seen = MovingAverage.empty(2)
    pair = torch.zeros(2)
    with pytest.raises(InputError, match="sample number from 0"):
        seen.update(-1, pair, pair)
    with pytest.raises(InputError, match=r"extremes \[2\]"):
        seen.update(0, torch.zeros(3), torch.zeros(3))
    with pytest.raises(InputError, match="one constant"):
        seen.merge(MovingAverage.empty(2, constant=0.1))
    with pytest.raises(InputError, match="equal groups"):
        seen.merge(MovingAverage.empty(1))
    with pytest.raises(InputError, match="averaging constant"):
        MovingAverage.empty(1, constant=1.5)
