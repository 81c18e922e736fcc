"""Choosing ranges from observations: against the elements that were observed."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantkit.errors import InputError
from quantkit.numerics import choose
from quantkit.numerics.affine import affine_params, fake_quantize, symmetric_scale
from quantkit.numerics.cells import Cells
from quantkit.numerics.choose import choose_range
from quantkit.numerics.distortion import grids_of, off_grid
from quantkit.numerics.methods import (
    EntropyRange,
    Method,
    MinMaxRange,
    MovingAverageRange,
    MseRange,
    TwoSidedPercentile,
    UpperPercentile,
)
from quantkit.numerics.observers import Bundle, MovingAverage
from quantkit.numerics.qtypes import QType

CLIPPING: dict[str, Method] = {
    str(m): m for m in (UpperPercentile(), TwoSidedPercentile(), EntropyRange(), MseRange())
}
WIDTHS = (2, 3, 4, 6, 8, 12, 16)
both = pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
methods = pytest.mark.parametrize("method", CLIPPING.values(), ids=CLIPPING.keys())


def seen(x: Tensor) -> Bundle:
    return Bundle.empty(x.shape[0]).update(x, torch.arange(x.shape[1]))


def error(x: Tensor, lo: Tensor, hi: Tensor, bits: int, symmetric: bool) -> Tensor:
    """Returns the sum of (x - fq(x))^2 over the elements, float64 [groups]."""
    qtype = QType(bits=bits, narrow=symmetric)
    if symmetric:
        scale = symmetric_scale(torch.maximum(lo.abs(), hi.abs()), qtype)
        zero_point = torch.zeros_like(scale, dtype=torch.int32)
    else:
        scale, zero_point = affine_params(lo, hi, qtype)
    fq = fake_quantize(x.float(), scale[:, None], zero_point[:, None], qtype)
    return ((fq.double() - x.double()) ** 2).sum(1)


def drawn(kind: str, n: int, seed: int) -> Tensor:
    """Returns float32 [1, n] of one kind of distribution."""
    generator = torch.Generator().manual_seed(seed)
    gauss = torch.randn(n, generator=generator)
    other = torch.randn(n, generator=generator)
    match kind:
        case "gauss":
            x = gauss
        case "heavy":
            x = gauss**3
        case "cauchy":
            x = gauss / other
        case "uniform":
            x = torch.rand(n, generator=generator) - 0.3
        case "bimodal":
            x = gauss * 0.1 + torch.where(other > 1.0, 5.0, -1.0)
        case "lognormal":
            x = (gauss * 1.5).exp()
        case "far from zero":
            x = gauss - 20.0
        case "constant":
            x = torch.full((n,), 0.7)
        case "mostly zeros":
            x = (other.abs() > 2.0) * gauss
        case "pixels":
            x = torch.randint(0, 256, (n,), generator=generator) / 255.0
        case "whole numbers":
            x = (gauss**3 * 9.0).round()
        case "bfloat16 in float32":
            x = gauss.to(torch.bfloat16).float()
        case "once quantized":
            scale = (gauss**3).abs().amax() / 127
            x = fake_quantize(gauss**3, scale, 0, QType(bits=8, narrow=True))
        case _:
            raise AssertionError(kind)
    return x[None]


KINDS = (
    "gauss",
    "heavy",
    "cauchy",
    "uniform",
    "bimodal",
    "lognormal",
    "far from zero",
    "constant",
    "mostly zeros",
    "pixels",
    "whole numbers",
    "bfloat16 in float32",
    "once quantized",
)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=15)
@given(
    st.sampled_from([1, 2, 5, 40, 300, 5000]),
    st.integers(0, 1000),
    st.sampled_from(WIDTHS),
    st.booleans(),
    st.sampled_from([1e-6, 1.0, 1e4]),
)
def test_mse_is_never_worse_than_minmax_on_the_elements(
    kind: str, n: int, seed: int, bits: int, symmetric: bool, size: float
) -> None:
    x = drawn(kind, n, seed) * size
    bundle = seen(x)

    ends = choose_range(MseRange(), bundle, bits, symmetric=symmetric)

    ours = error(x, *ends, bits, symmetric)
    assert float(ours[0]) <= float(error(x, *bundle.minmax.finish(), bits, symmetric)[0])


@both
@pytest.mark.parametrize("kind", ["gauss", "heavy", "lognormal", "bimodal"])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_mse_finds_what_brute_force_finds(bits: int, kind: str, symmetric: bool) -> None:
    x = drawn(kind, 6_000, 7)
    lo, hi = x.amin(1), x.amax(1)
    best = math.inf
    shrink = torch.linspace(0.02, 1.0, 32)
    for low in [torch.ones(())] if symmetric else shrink[1::3]:
        for high in shrink:
            top = torch.maximum(lo.abs(), hi.abs()) * high
            pair = (-top, top) if symmetric else (lo * low, hi * high)
            best = min(best, float(error(x, *pair, bits, symmetric)[0]))

    ours = error(x, *choose_range(MseRange(), seen(x), bits, symmetric=symmetric), bits, symmetric)

    assert float(ours[0]) < 1.1 * best


@both
def test_mse_gains_where_there_is_a_tail(symmetric: bool) -> None:
    x = drawn("heavy", 50_000, 1)
    bundle = seen(x)
    for bits, at_most in ((4, 0.5), (6, 0.75), (8, 0.95)):
        ours = error(
            x, *choose_range(MseRange(), bundle, bits, symmetric=symmetric), bits, symmetric
        )
        assert float(ours[0]) < at_most * float(
            error(x, *bundle.minmax.finish(), bits, symmetric)[0]
        )


@functools.cache
def mixed() -> Tensor:
    return torch.cat([drawn(kind, 20_001, 3) for kind in ("gauss", "heavy", "lognormal")])


def test_minmax_is_raw() -> None:
    lo, hi = choose_range(MinMaxRange(), seen(mixed()), 8, symmetric=True)

    assert torch.equal(lo, mixed().amin(1)) and torch.equal(hi, mixed().amax(1))


@pytest.mark.parametrize("pct", [99.99, 99.9, 90.0])
def test_percentiles_against_numpy(pct: float) -> None:
    x, bundle = mixed(), seen(mixed())
    near = {"rtol": 2.0**-7, "atol": 0.0}

    def ranked(values: Tensor, percent: float) -> Tensor:
        found = np.percentile(values.numpy(), percent, axis=1, method="inverted_cdf")
        return torch.from_numpy(found)

    top = ranked(x.abs(), pct)
    lo, hi = choose_range(UpperPercentile(upper_pct=pct), bundle, 8, symmetric=False)
    torch.testing.assert_close(lo, torch.maximum(-top, x.amin(1)), **near)
    torch.testing.assert_close(hi, torch.minimum(top, x.amax(1)), **near)
    lo, hi = choose_range(UpperPercentile(upper_pct=pct), bundle, 8, symmetric=True)
    torch.testing.assert_close(hi, top, **near)
    assert torch.equal(lo, -hi)
    if pct > 99.8:  # among the hundred largest, which are known exactly
        assert torch.equal(hi, top)

    low, high = ranked(x, 100 - pct), ranked(x, pct)
    lo, hi = choose_range(TwoSidedPercentile(upper_pct=pct), bundle, 8, symmetric=False)
    torch.testing.assert_close(lo, low, **near)
    torch.testing.assert_close(hi, high, **near)
    lo, hi = choose_range(TwoSidedPercentile(upper_pct=pct), bundle, 8, symmetric=True)
    torch.testing.assert_close(hi, torch.maximum(low.abs(), high.abs()), **near)
    assert torch.equal(lo, -hi)


def test_moving_average_is_handed_through_and_must_fit() -> None:
    bundle = seen(mixed())
    moving = MovingAverage.empty(3).update(0, torch.zeros(3), torch.ones(3))

    lo, hi = choose_range(MovingAverageRange(), bundle, 8, symmetric=False, moving=moving)

    assert lo.tolist() == [0.0] * 3 and hi.tolist() == [1.0] * 3
    with pytest.raises(InputError, match="calibrate with --method moving-average"):
        choose_range(MovingAverageRange(), bundle, 8, symmetric=False)
    other = MovingAverageRange(averaging_constant=0.1)
    with pytest.raises(InputError, match=r"constant 0\.1, got 3 with 0\.01"):
        choose_range(other, bundle, 8, symmetric=False, moving=moving)


EDGES: dict[str, list[float]] = {
    "all zeros": [0.0] * 20,
    "constant": [0.75] * 20,
    "negative constant": [-3.0] * 20,
    "one element": [5.0],
    "subnormals": [1e-45, -3e-45, 1e-40, 0.0],
    "huge": [3.4e38, -3.4e38, 1.0, 2e38],
    "both ends of float32": [3.4e38, 1e-45, -1e-38, -2.0],
    "with NaN and inf": [math.nan, math.inf, -math.inf, 1.0, -2.0, 0.5],
    "positive": [5.0, 5.1, 6.0, 9.0],
    "negative": [-5.0, -5.1, -6.0, -9.0],
}


@pytest.mark.kind(2, "numerics")
@methods
@both
@pytest.mark.parametrize("values", EDGES.values(), ids=EDGES.keys())
@pytest.mark.parametrize("bits", [2, 8, 16])
def test_edges(values: list[float], bits: int, symmetric: bool, method: Method) -> None:
    x = torch.tensor([values])
    finite = [v for v in values if math.isfinite(v)]

    lo, hi = choose_range(method, seen(x), bits, symmetric=symmetric)

    assert lo.dtype == hi.dtype == torch.float32 and lo.shape == hi.shape == (1,)
    absmax = float(torch.tensor(finite).abs().amax())
    assert float(lo[0]) <= float(hi[0])
    assert max(-float(lo[0]), float(hi[0])) <= absmax
    if symmetric:
        assert float(lo[0]) == -float(hi[0])
    else:
        assert min(0.0, min(finite)) <= float(lo[0])
        assert float(hi[0]) <= max(0.0, max(finite))
    if len(set(finite)) == 1:
        assert float(hi[0]) == (absmax if symmetric else finite[0])


@pytest.mark.kind(2, "numerics")
@methods
@both
def test_nothing_seen_is_nan(symmetric: bool, method: Method) -> None:
    x = torch.full((2, 3), math.nan)
    for bundle in (Bundle.empty(2), seen(x)):
        lo, hi = choose_range(method, bundle, 8, symmetric=symmetric)
        assert bool(lo.isnan().all() and hi.isnan().all()) and lo.shape == (2,)


@pytest.mark.kind(4, "numerics")
@methods
def test_groups_do_not_see_each_other_and_batches_do_not_matter(method: Method) -> None:
    x = mixed()[:, :5000]
    together = choose_range(method, seen(x), 6, symmetric=False)

    for group in range(3):
        halves = [x[group : group + 1, :2000], x[group : group + 1, 2000:]]
        tags = [torch.arange(2000), torch.arange(2000, 5000)]
        parts = [Bundle.empty(1).update(*pair) for pair in zip(halves, tags, strict=True)]
        alone = choose_range(method, parts[1].merge(parts[0]), 6, symmetric=False)
        assert [float(end[0]) for end in alone] == [float(end[group]) for end in together]


@both
@pytest.mark.parametrize("bits", [3, 8])
def test_the_spread_of_an_error_within_a_bin_is_that_of_points_in_it(
    bits: int, symmetric: bool
) -> None:
    lower = np.array([0.1, -0.9, 0.0, 2.0, -3.0])
    upper = lower + np.array([0.05, 0.3, 1.7, 2.5, 0.001])
    grid = grids_of(np.array([-1.0]), np.array([1.3]), bits, symmetric=symmetric)
    points = lower[:, None] + (upper - lower)[:, None] * (np.arange(20_000) + 0.5) / 20_000
    errors = (off_grid(points, grid) * grid.scale) ** 2
    got = choose._deviation(_cells(lower, upper), grid)
    np.testing.assert_allclose(got, errors.std(1), rtol=1e-3, atol=1e-7)


def _cells(lower: np.ndarray, upper: np.ndarray) -> Cells:
    return Cells(
        points=np.array([0.3, -1.4]),
        point_counts=np.array([2.0, 1.0]),
        lower=lower,
        upper=upper,
        counts=np.arange(1.0, lower.size + 1.0),
        min=-3.0,
        max=4.5,
        ties=False,
    )


@both
def test_the_worst_case_of_a_bin_is_the_largest_of_points_in_it(symmetric: bool) -> None:
    lower = np.array([0.1, -0.9, 0.02, 2.0, -3.0])
    upper = lower + np.array([0.05, 0.06, 0.001, 2.5, 0.2])
    grid, reference = (
        grids_of(np.array([-end]), np.array([end]), 4, symmetric=symmetric) for end in (1.0, 1.3)
    )
    cells = _cells(lower, upper)
    points = lower[:, None] + (upper - lower)[:, None] * np.linspace(0.0, 1.0, 40_001)

    def difference(x: np.ndarray) -> np.ndarray:
        ours, its = ((off_grid(x, g) * g.scale) ** 2 for g in (grid, reference))
        return np.asarray(ours - its)

    worst = difference(points).max(1) @ cells.counts
    known = difference(cells.points) @ cells.point_counts
    got = choose._worst_difference(cells, grid, reference)
    assert got == pytest.approx(worst + known, rel=1e-4, abs=1e-6)


def test_where_a_bin_is_many_steps_wide_its_worst_case_is_a_bound() -> None:
    grid, reference = (
        grids_of(np.array([-end]), np.array([end]), 8, symmetric=True) for end in (1.0, 1.3)
    )
    cells = _cells(np.array([0.1]), np.array([0.9]))
    points = np.linspace(0.1, 0.9, 100_001)
    ours, its = ((off_grid(points, g) * g.scale) ** 2 for g in (grid, reference))
    known = ((off_grid(cells.points, grid) * grid.scale) ** 2) @ cells.point_counts
    known -= ((off_grid(cells.points, reference) * reference.scale) ** 2) @ cells.point_counts
    got = choose._worst_difference(cells, grid, reference) - known
    half = [float(g.scale[0]) / 2 for g in (grid, reference)]
    assert float((ours - its).max()) <= got <= half[0] ** 2 + half[1] ** 2


def test_a_quantile_is_exact_beside_values_that_are_no_numbers() -> None:
    x = torch.arange(1.0, 1001.0)
    odd = torch.cat([x, torch.tensor([math.nan, math.inf, -math.inf])])[None]
    for values in (x[None], odd):
        lo, hi = choose_range(UpperPercentile(upper_pct=99.0), seen(values), 8, symmetric=True)
        assert (lo.item(), hi.item()) == (-990.0, 990.0)


@pytest.mark.parametrize("flip", [1.0, -1.0], ids=["up", "down"])
@pytest.mark.parametrize("kind", ["one tail", "far tail", "positive", "tiny"])
def test_each_end_of_an_asymmetric_range_is_searched(kind: str, flip: float) -> None:
    generator = torch.Generator().manual_seed(3)
    gauss = torch.randn(4_000, generator=generator)
    tail = torch.rand(8, generator=generator)
    x = {
        "one tail": torch.cat([gauss, 15.0 + 10.0 * tail]),
        "far tail": torch.cat([0.2 * gauss.abs() - 0.1, 9.0 + 3.0 * tail, -2.0 - tail]),
        "positive": torch.cat([0.3 + gauss.abs(), 20.0 + 9.0 * tail]),
        "tiny": torch.cat([gauss, 15.0 + 10.0 * tail]) * 1e-3,
    }[kind][None] * flip
    lo, hi = choose_range(MseRange(), seen(x), 4, symmetric=False)
    got = float(error(x, lo, hi, 4, False))
    share = np.linspace(0.04, 1.0, 25)
    low, high = float(x.min().clamp_max(0.0)), float(x.max().clamp_min(0.0))
    pairs = [(a * low, b * high) for a in share for b in share]
    if low == 0.0 or high == 0.0:
        pairs = [(a * low, a * high) for a in np.linspace(0.02, 1.0, 300)]
    ends = torch.tensor(pairs, dtype=torch.float32)
    best = float(error(x.expand(len(ends), -1), *ends.T, 4, False).min())
    assert got <= 1.05 * best
