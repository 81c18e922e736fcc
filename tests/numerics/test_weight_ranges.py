"""Ranges of weights against numpy: every threshold tried again, and percentiles by sorting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit.errors import InputError
from quantkit.numerics import weight_ranges
from quantkit.numerics.affine import RangeError
from quantkit.numerics.granularity import PerAxis, PerGroup, weight_granularity
from quantkit.numerics.methods import (
    EntropyRange,
    Method,
    MinMaxRange,
    MovingAverageRange,
    MseRange,
    TwoSidedPercentile,
    UpperPercentile,
)
from quantkit.numerics.weight_ranges import absmax_scale, channel_errors, weight_absmax

CHANNEL = PerAxis(axis=0)
GRANULARITIES = [CHANNEL, PerGroup(axis=1, group_size=16), PerGroup(axis=1, group_size=25)]


def weight(rows: int = 7, columns: int = 90, seed: int = 0) -> Tensor:
    """Heavy tails in some rows, an outlier, a row of zeros, a row of one value."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(3, (rows, columns)) * rng.uniform(0.01, 3.0, (rows, 1))
    x[0, 3] = 60.0
    x[1] = 0.0
    x[2] = -0.5
    x[3, : columns // 2] = 0.0
    return torch.from_numpy(x.astype(np.float32))


def groups_of(x: NDArray[Any], granularity: PerAxis | PerGroup) -> list[list[NDArray[Any]]]:
    step = granularity.group_size if isinstance(granularity, PerGroup) else x.shape[1]
    return [[row[at : at + step] for at in range(0, len(row), step)] for row in x]


def error_of(group: NDArray[Any], absmax: np.float32, bits: int) -> float:
    """Squared error on the symmetric narrow grid, written out."""
    steps = np.float32(2 ** (bits - 1) - 1)
    scale = np.float32(absmax / steps) if absmax > 0 else np.float32(1)
    q = np.clip(np.rint(group / scale), -steps, steps)
    return float(((q * scale - group).astype(np.float64) ** 2).sum())


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_minmax_is_absmax(granularity: PerAxis | PerGroup) -> None:
    x = weight()
    found = weight_absmax(x, MinMaxRange(), 8, granularity)
    expected = [[np.abs(g).max() for g in row] for row in groups_of(x.numpy(), granularity)]
    assert found.dtype == torch.float32
    assert np.array_equal(found.numpy(), np.array(expected, np.float32))


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("percent", [99.99, 90.0, 75.0, 51.0])
def test_percentile_is_an_element(percent: float, granularity: PerAxis | PerGroup) -> None:
    x = weight()
    found = weight_absmax(x, UpperPercentile(upper_pct=percent), 8, granularity).numpy()
    for row, groups in enumerate(groups_of(x.numpy(), granularity)):
        for at, group in enumerate(groups):
            size = np.abs(group)
            expected = np.percentile(size, percent, method="inverted_cdf") or size.max()
            assert found[row, at] == expected


def test_a_percentile_of_nothing_but_zeros_keeps_the_few_others() -> None:
    x = torch.zeros(1, 100)
    x[0, 50] = 0.25
    assert float(weight_absmax(x, UpperPercentile(upper_pct=90.0), 8, CHANNEL)) == 0.25


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_search_is_never_worse_than_absmax(bits: int, granularity: PerAxis | PerGroup) -> None:
    x = weight()
    found = weight_absmax(x, MseRange(), bits, granularity).numpy()
    better = 0
    for row, groups in enumerate(groups_of(x.numpy(), granularity)):
        for at, group in enumerate(groups):
            absmax = np.abs(group).max()
            ours, plain = error_of(group, found[row, at], bits), error_of(group, absmax, bits)
            assert ours <= plain
            assert found[row, at] <= absmax
            better += ours < plain
    assert better > 0 or bits == 8  # where a step is too short for clipping to pay


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_search_is_an_exhaustive_one_over_its_candidates(
    bits: int, granularity: PerAxis | PerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All thresholds that it tries are noted, and each group's are tried again in numpy."""
    x = weight()
    tried: list[Tensor] = []
    real = weight_ranges.symmetric_scale

    def noting(absmax: Tensor, qtype: Any) -> Tensor:
        tried.append(absmax.clone())
        return real(absmax, qtype)

    whole = [g for row in groups_of(x.numpy(), granularity) for g in row]
    with monkeypatch.context() as patch:
        patch.setattr(weight_ranges, "symmetric_scale", noting)
        found = weight_absmax(x, MseRange(candidates=12), bits, granularity)
    rounds = 12 + 6
    blocks = [tried[at : at + rounds] for at in range(0, len(tried), rounds)]
    assert len(tried) == rounds * len(blocks)
    table = torch.cat([torch.stack(block) for block in blocks], dim=2)  # [rounds, out, groups]
    assert torch.equal(table[0], weight_absmax(x, MinMaxRange(), bits, granularity))
    columns = table.reshape(rounds, -1).numpy().T
    for group, thresholds, chosen in zip(whole, columns, found.reshape(-1).numpy(), strict=True):
        errors = [error_of(group, t, bits) for t in thresholds]
        assert chosen == thresholds[int(np.argmin(errors))]
        assert error_of(group, chosen, bits) == min(errors)


def test_search_comes_close_to_a_fine_one() -> None:
    """Against 4,000 thresholds down to zero: what the coarse rounds may miss."""
    x = weight(rows=4, columns=600, seed=5)[[0, 3]]
    for bits in (2, 3, 4):
        found = weight_absmax(x, MseRange(), bits, CHANNEL).numpy()[:, 0]
        for row, chosen in zip(x.numpy(), found, strict=True):
            fine = np.linspace(1e-3, 1.0, 4000, dtype=np.float32) * np.abs(row).max()
            best = min(error_of(row, t, bits) for t in fine)
            assert error_of(row, chosen, bits) <= 1.02 * best


def test_two_bits_fit_a_gaussian_where_theory_says() -> None:
    """Max 1960, table I: the three-level quantizer of a Gaussian has its levels at 1.224 sigma."""
    x = torch.randn(1, 200_000, generator=torch.Generator().manual_seed(0)) * 3.0
    found = float(weight_absmax(x, MseRange(), 2, CHANNEL))
    assert found == pytest.approx(3.0 * 1.224, rel=0.03)


@pytest.mark.kind(5, "numerics")
@pytest.mark.parametrize(("columns", "step", "groups"), [(90, 16, 6), (96, 16, 6), (10, 16, 1)])
def test_shapes_with_and_without_a_short_last_group(columns: int, step: int, groups: int) -> None:
    x, granularity = weight(columns=columns), PerGroup(axis=1, group_size=step)
    for method in (MinMaxRange(), UpperPercentile(upper_pct=80.0), MseRange(candidates=4)):
        found = weight_absmax(x, method, 4, granularity)
        assert found.shape == (7, groups)
        scale = absmax_scale(found, granularity, 4, x.shape)
        assert scale.shape == x.shape
        for at in range(columns):
            expected = np.where(found[:, at // step] == 0, 1, found[:, at // step] / 7)
            assert np.array_equal(scale[:, at].numpy(), expected.astype(np.float32))


@pytest.mark.kind(2, "numerics")
@pytest.mark.parametrize("method", [MinMaxRange(), UpperPercentile(), MseRange()], ids=str)
def test_a_channel_of_zeros_has_zero(method: Method) -> None:
    found = weight_absmax(weight(), method, 4, CHANNEL)
    assert float(found[1]) == 0.0
    assert bool((found[[0, 2, 3, 4, 5, 6]] > 0).all())


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = weight(rows=23)
    for granularity in GRANULARITIES:
        whole = weight_absmax(x, MseRange(), 3, granularity)
        sums = channel_errors(x, whole, granularity, 3)
        with monkeypatch.context() as patch:
            patch.setattr(weight_ranges, "BLOCK", 200)  # two rows
            assert torch.equal(weight_absmax(x, MseRange(), 3, granularity), whole)
            for ours, theirs in zip(channel_errors(x, whole, granularity, 3), sums, strict=True):
                assert torch.equal(ours, theirs)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_errors_of_channels(granularity: PerAxis | PerGroup) -> None:
    x = weight()
    found = weight_absmax(x, MseRange(), 4, granularity)
    power, error = channel_errors(x, found, granularity, 4)
    expected = [
        sum(error_of(g, t, 4) for g, t in zip(row, tops, strict=True))
        for row, tops in zip(groups_of(x.numpy(), granularity), found.numpy(), strict=True)
    ]
    assert error.numpy() == pytest.approx(np.array(expected), rel=1e-12)
    assert power.numpy() == pytest.approx((x.double() ** 2).sum(1).numpy(), rel=1e-12)


@pytest.mark.kind(3, "numerics")
def test_half_precision_is_searched_in_float32() -> None:
    x = weight().to(torch.bfloat16)
    for granularity in GRANULARITIES:
        found = weight_absmax(x, MseRange(), 4, granularity)
        assert torch.equal(found, weight_absmax(x.float(), MseRange(), 4, granularity))


@pytest.mark.parametrize(
    "method", [EntropyRange(), TwoSidedPercentile(), MovingAverageRange()], ids=str
)
def test_other_methods_are_refused(method: Method) -> None:
    with pytest.raises(InputError, match=rf"minmax, upper-percentile or mse, got {method}"):
        weight_absmax(weight(), method, 8, CHANNEL)


@pytest.mark.kind(2, "numerics")
@pytest.mark.parametrize(("value", "said"), [(torch.nan, "NaN"), (torch.inf, "inf")])
def test_what_is_not_finite_is_named(value: float, said: str) -> None:
    x = weight()
    x[4, 5] = value
    with pytest.raises(RangeError, match=rf"'layers.0.up.weight', got {said}"):
        weight_absmax(x, MseRange(), 8, CHANNEL, name="layers.0.up.weight")


def test_what_is_no_weight_is_refused() -> None:
    with pytest.raises(InputError, match=r"\[out, in\] for 'w', got the shape \[3\]"):
        weight_absmax(torch.ones(3), MinMaxRange(), 8, CHANNEL, name="w")
    for wrong in (PerAxis(axis=1), PerGroup(axis=0, group_size=4)):
        with pytest.raises(InputError, match="an output channel"):
            weight_absmax(weight(), MinMaxRange(), 8, wrong)


def test_words_of_granularity() -> None:
    assert weight_granularity("channel") == CHANNEL
    assert weight_granularity("group:128") == PerGroup(axis=1, group_size=128)
    for words in ("group", "group:", "group:x", "group:-1", "channel:3", "tensor", "group:1.5"):
        with pytest.raises(InputError, match="channel, or group:N"):
            weight_granularity(words)
    with pytest.raises(InputError, match="at least 1 element"):
        weight_granularity("group:0")
