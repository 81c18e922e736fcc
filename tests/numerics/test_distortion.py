"""The error of a range, from bins: against the error on the elements themselves."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit.numerics.affine import affine_params, fake_quantize, symmetric_scale
from quantkit.numerics.cells import Cells, cells_of
from quantkit.numerics.distortion import distortion, error_bounds, grids_of, squared_error
from quantkit.numerics.observers import Bundle
from quantkit.numerics.qtypes import QType


def seen(x: Tensor) -> Bundle:
    return Bundle.empty(x.shape[0]).update(x, torch.arange(x.shape[1]))


def errors(x: Tensor, lo: Tensor, hi: Tensor, bits: int, symmetric: bool) -> Tensor:
    """Returns (x - fq(x))^2 of the elements [groups, elements], float64."""
    qtype = QType(bits=bits, narrow=symmetric)
    if symmetric:
        scale = symmetric_scale(torch.maximum(lo.abs(), hi.abs()), qtype)
        zero_point = torch.zeros_like(scale, dtype=torch.int32)
    else:
        scale, zero_point = affine_params(lo, hi, qtype)
    fq = fake_quantize(x.float(), scale[:, None], zero_point[:, None], qtype)
    return (fq.double() - x.double()) ** 2


@functools.cache
def draws(n: int = 30_000) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    gauss = torch.randn(n, generator=generator)
    return torch.stack(
        [gauss, gauss**3 - 1.0, 20.0 + gauss, gauss.exp(), gauss.clamp_min(0.0), -gauss.abs()]
    )


@functools.cache
def drawn() -> Bundle:
    return seen(draws())


WIDTHS = (2, 3, 4, 6, 8, 12, 16)
both = pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
shrunk = pytest.mark.parametrize("shrink", [1.0, 0.6, 0.1])


@both
@shrunk
@pytest.mark.parametrize("bits", WIDTHS)
def test_estimate_and_bounds_hold_on_the_elements(
    bits: int, shrink: float, symmetric: bool
) -> None:
    x = draws()
    lo, hi = x.amin(1) * shrink, x.amax(1) * shrink
    lo = torch.minimum(lo, hi)
    real = errors(x, lo, hi, bits, symmetric).mean(1)

    found = distortion(drawn(), lo, hi, bits, symmetric=symmetric)

    # float32 rounding of q * scale, which the bins do not model
    slack = 2.0**-20 * (x.double().abs().amax(1) * real.sqrt()) + 1e-30
    assert bool((found.mse_low <= real * (1 + 1e-9) + slack).all())
    assert bool((found.mse_high >= real * (1 - 1e-9) - slack).all())
    torch.testing.assert_close(found.mse, real, rtol=0.03, atol=float(slack.max()))


@both
def test_sqnr_and_clipped_are_those_of_the_elements(symmetric: bool) -> None:
    x = draws()
    lo, hi = x.amin(1) * 0.5, x.amax(1) * 0.5
    lo = torch.minimum(lo, hi)
    error, power = errors(x, lo, hi, 6, symmetric), x.double() ** 2
    if symmetric:
        hi = torch.maximum(lo.abs(), hi.abs())
        lo = -hi
    out = (x < lo.clamp_max(0)[:, None]) | (x > hi.clamp_min(0)[:, None])
    ends = np.quantile(x.numpy(), [0.0005, 0.9995], axis=1, method="inverted_cdf")[:, :, None]
    inlier = torch.from_numpy((x.numpy() >= ends[0]) & (x.numpy() <= ends[1]))

    found = distortion(seen(x), lo, hi, 6, symmetric=symmetric)

    expected = 10 * torch.log10(power.sum(1) / error.sum(1))
    torch.testing.assert_close(found.sqnr_db, expected, rtol=0, atol=0.1)
    expected = 10 * torch.log10((power * inlier).sum(1) / (error * inlier).sum(1))
    torch.testing.assert_close(found.inlier_sqnr_db, expected, rtol=0, atol=0.2)
    torch.testing.assert_close(found.clipped, out.sum(1).double(), rtol=0.05, atol=3.0)


@both
@pytest.mark.parametrize("bits", [3, 8, 16])
def test_bfloat16_is_exact(bits: int, symmetric: bool) -> None:
    x = draws(20_000).to(torch.bfloat16)
    lo, hi = x.amin(1).float() * 0.7, x.amax(1).float() * 0.7
    lo = torch.minimum(lo, hi)
    real = errors(x, lo, hi, bits, symmetric)

    found = distortion(seen(x), lo, hi, bits, symmetric=symmetric)

    torch.testing.assert_close(found.mse, real.mean(1), rtol=1e-4, atol=1e-14)
    assert torch.equal(found.mse_low, found.mse_high)


def test_the_largest_hundred_and_zeros_are_exact() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.cat([torch.randn(100, generator=generator), torch.zeros(5000)])[None]
    lo, hi = x.amin(1) * 0.8, x.amax(1) * 0.8
    real = errors(x, lo, hi, 4, False).mean(1)

    found = distortion(seen(x), lo, hi, 4, symmetric=False)

    torch.testing.assert_close(found.mse, real, rtol=1e-5, atol=0)
    assert torch.equal(found.mse_low, found.mse_high)
    assert float(found.clipped[0]) == float(((x < lo) | (x > hi)).sum())


def test_bins_that_hold_a_sample_keep_every_count() -> None:
    x = draws(4000)[:1]
    sampled = torch.arange(4000)[None] % 4 == 0
    bundle = Bundle.empty(1).update(x, torch.arange(4000), sampled=sampled)

    (cells,) = cells_of(bundle)

    assert cells.total == 1000.0  # the hundred largest are not taken out of a sample
    assert cells.max == float(x.max())


def cells(**parts: list[float]) -> Cells:
    arrays = {
        name: np.array(parts.get(name, []))
        for name in ("points", "point_counts", "lower", "upper", "counts")
    }
    return Cells(**arrays, min=-1.0, max=1.0, ties=False)


@both
def test_closed_form_against_dense_sampling(symmetric: bool) -> None:
    lower = np.array([-9.0, -3.2, -0.4, 0.1, 0.3, 2.0, 6.9])
    upper = np.array([-4.0, -1.1, 0.1, 0.2, 1.9, 2.01, 30.0])
    some = cells(lower=lower.tolist(), upper=upper.tolist(), counts=[1.0, 2, 3, 4, 5, 6, 7])
    lo, hi = np.array([-4.0, -1.0, -7.0]), np.array([7.0, 2.0, 7.0])
    grids = grids_of(lo, hi, 4, symmetric=symmetric)
    dense = lower + (upper - lower) * (np.arange(20_001) / 20_000)[:, None]

    found = squared_error(some, grids)

    for at in range(3):
        values = np.arange(grids.kmin[at], grids.kmax[at] + 1) * grids.scale[at]
        near = np.abs(dense[..., None] - values).min(-1) ** 2
        assert found[at] == pytest.approx(float(near.mean(0) @ some.counts), rel=1e-3)
        least, most = error_bounds(lower, upper, grids[slice(at, at + 1)])
        np.testing.assert_allclose(least, near.min(0), atol=2e-3)
        np.testing.assert_allclose(most, near.max(0), rtol=1e-3, atol=2e-3)


def test_coarsening_keeps_every_element_where_it_is() -> None:
    (fine,) = cells_of(seen(draws()[:1]))

    coarse = fine.coarsened(0.05)

    assert coarse.total == fine.total
    assert coarse.lower.size < fine.lower.size / 4
    assert bool((coarse.upper - coarse.lower <= 0.05 + 1 / 64).all())
    size = [((c.lower + c.upper) / 2) ** 2 @ c.counts for c in (fine, coarse)]
    assert size[0] == pytest.approx(size[1], rel=0.01)


@pytest.mark.kind(2, "numerics")
def test_nothing_and_zeros() -> None:
    empty = distortion(Bundle.empty(2), torch.zeros(2), torch.ones(2), 8, symmetric=True)
    assert all(math.isnan(v) for v in empty.mse.tolist() + empty.sqnr_db.tolist())

    zero = torch.zeros(1, 50)
    found = distortion(seen(zero), zero[:, 0], zero[:, 0], 8, symmetric=False)
    assert [float(found.mse[0]), float(found.mse_high[0]), float(found.clipped[0])] == [0, 0, 0]
    assert float(found.sqnr_db[0]) == math.inf


@pytest.mark.kind(2, "numerics")
def test_the_ends_of_float32_do_not_overflow() -> None:
    x = torch.tensor([[3.4e38, -3.4e38, 1e-45, 1.0], [1e-45, -1e-44, 1e-40, 0.0]])
    lo, hi = x.amin(1), x.amax(1)
    for symmetric in (True, False):
        found = distortion(seen(x), lo, hi, 8, symmetric=symmetric)
        assert bool(found.mse.isfinite().all() and found.mse_high.isfinite().all())
