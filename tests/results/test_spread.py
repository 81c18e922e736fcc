"""Mean and deviation of figures that need not be finite."""

from __future__ import annotations

import math
import statistics

import pytest

from quantkit.results.spread import deviation, mean

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("values", [[1.0, 2.5, -4.0], [0.1] * 3, [3.0, 3.0 + 1e-12]])
def test_of_finite_values_they_are_those_of_the_standard_library(values: list[float]) -> None:
    assert mean(values) == statistics.fmean(values)
    assert deviation(values) == statistics.stdev(values)


@pytest.mark.kind(2, "report")
@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, INF], INF), ([-INF, 1.0], -INF), ([INF, -INF], NAN), ([NAN, 1.0], NAN)],
)
def test_what_is_not_finite_is_shown_and_raises_nothing(
    values: list[float], expected: float
) -> None:
    assert mean(values) == pytest.approx(expected, nan_ok=True)
    assert math.isnan(deviation(values))


@pytest.mark.kind(2, "report")
def test_large_values_do_not_overflow_on_the_way() -> None:
    assert mean([1.7e308, 1.7e308]) == pytest.approx(1.7e308)
    assert deviation([1.5e308, 1.7e308]) == pytest.approx(math.sqrt(0.5) * 0.2e308)
