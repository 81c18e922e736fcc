"""SmoothQuant's scales and the search for alpha, against simulated W8A8 layers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.numerics.affine import affine_params, fake_quantize, symmetric_scale
from quantkit.numerics.qtypes import QType
from quantkit.numerics.smoothing import ALPHAS, search_alpha, smoothing_scales


def layer(seed: int, outlier: float = 60.0) -> tuple[Tensor, list[Tensor]]:
    """Returns inputs [tokens, 64] with three outlier channels, and two weights that read them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(800, 64, generator=generator)
    x[:, [3, 17, 40]] *= outlier
    spread = torch.rand(64, generator=generator) + 0.5
    return x, [torch.randn(out, 64, generator=generator) * spread * 0.1 for out in (48, 96)]


def simulated(x: Tensor, weights: list[Tensor], scales: Tensor, bits: int = 8) -> float:
    """Returns the squared error of the quantized layers' outputs over the outputs' power."""
    smooth = x / scales
    scale, zero_point = affine_params(smooth.amin(), smooth.amax(), QType(bits=bits))
    xq = fake_quantize(smooth, scale, zero_point, QType(bits=bits))
    error = power = 0.0
    for w in weights:
        narrow = QType(bits=bits, narrow=True)
        moved = w * scales
        wq = fake_quantize(moved, symmetric_scale(moved.abs().amax(1, True), narrow), 0, narrow)
        exact = x.double() @ w.double().T
        error += float(((xq.double() @ wq.double().T - exact) ** 2).sum())
        power += float((exact**2).sum())
    return error / power


def searched(x: Tensor, weights: list[Tensor], **options: object):  # type: ignore[no-untyped-def]
    return search_alpha(x.amin(0), x.amax(0), (x**2).mean(0), weights, **options)  # type: ignore[arg-type]


def test_scales_are_equation_4() -> None:
    scales = smoothing_scales(torch.tensor([16.0, 1.0, 9.0]), torch.tensor([4.0, 1.0, 0.25]), 0.5)

    assert scales.tolist() == [2.0, 1.0, 6.0]
    assert scales.dtype == torch.float32


@pytest.mark.kind(2, "numerics")
def test_scales_are_guarded() -> None:
    x = torch.tensor([0.0, 2.0, float("inf"), float("nan"), 1e-38, 3e38])
    w = torch.tensor([1.0, 0.0, 1.0, 1.0, 3e38, 1e-38])

    scales = smoothing_scales(x, w, 0.5)

    assert scales.tolist()[:4] == [1.0, 1.0, 1.0, 1.0]
    assert scales.tolist()[4:] == pytest.approx([1e-5, 1e5])


@pytest.mark.parametrize("bits", [8, 6])
@pytest.mark.parametrize("seed", range(3))
def test_expected_error_is_that_of_the_simulation(seed: int, bits: int) -> None:
    x, weights = layer(seed)
    absmax, weight_absmax = x.abs().amax(0), torch.cat(weights).abs().amax(0)
    widths = {"activation_bits": bits, "weight_bits": bits}
    expected, real = {}, {}
    for alpha in (0.25, 0.5, 0.75, 1.0):
        chosen = searched(x, weights, alphas=(alpha,), **widths)
        moved = smoothing_scales(absmax, weight_absmax, alpha)
        if chosen.alpha == alpha:  # else it is expected to be worse than none
            real[alpha] = simulated(x, weights, moved, bits)
            expected[alpha] = chosen.expected_error
            assert torch.equal(chosen.scales, moved)
            assert 1 / 1.5 < expected[alpha] / real[alpha] < 1.5
    without = simulated(x, weights, torch.ones(64), bits)
    assert 1 / 1.5 < searched(x, weights, **widths).expected_error_without / without < 1.5
    assert len(expected) >= 3
    for a, b in itertools.combinations(real, 2):
        if max(real[a], real[b]) > 1.2 * min(real[a], real[b]):
            assert (real[a] < real[b]) == (expected[a] < expected[b])


@pytest.mark.parametrize("seed", range(2))
def test_the_chosen_alpha_lowers_the_real_error(seed: int) -> None:
    x, weights = layer(seed)

    chosen = searched(x, weights)

    real = {
        alpha: simulated(
            x,
            weights,
            smoothing_scales(x.abs().amax(0), torch.cat(weights).abs().amax(0), alpha)
            if alpha
            else torch.ones(64),
        )
        for alpha in ALPHAS
    }
    assert 0.0 < chosen.alpha <= 1.0
    assert real[chosen.alpha] < real[0.0] / 5
    assert real[chosen.alpha] < min(real.values()) * 1.2
    assert chosen.expected_error < chosen.expected_error_without


def test_alpha_is_never_worse_than_none() -> None:
    x, weights = layer(0, outlier=1.0)
    chosen = searched(x, weights, alphas=(1.0,), activation_bits=16, weight_bits=4)

    assert chosen.alpha == 0.0 and chosen.expected_error == chosen.expected_error_without
    assert torch.equal(chosen.scales, torch.ones(64))


def test_an_alpha_that_is_given_is_taken() -> None:
    x, weights = layer(0, outlier=1.0)
    chosen = searched(x, weights, alpha=1.0, activation_bits=16, weight_bits=4)
    moved = smoothing_scales(x.abs().amax(0), torch.cat(weights).abs().amax(0), 1.0)
    assert chosen.alpha == 1.0 and torch.equal(chosen.scales, moved)
    assert chosen.expected_error > chosen.expected_error_without
    none = searched(x, weights, alpha=0.0)
    assert none.alpha == 0.0 and torch.equal(none.scales, torch.ones(64))


@pytest.mark.kind(2, "numerics")
def test_dead_channels_and_dead_weights() -> None:
    x, weights = layer(0)
    x[:, 5] = 0.0
    chosen = searched(x, [w.index_fill(1, torch.tensor([7]), 0.0) for w in weights])
    assert chosen.scales[[5, 7]].tolist() == [1.0, 1.0]

    nothing = searched(torch.zeros(4, 8), [torch.zeros(3, 8)])
    assert nothing.alpha == 0.0 and nothing.expected_error == 0.0


def test_bad_input_is_refused() -> None:
    one = torch.ones(4)
    with pytest.raises(InputError, match=r"0\.\.1"):
        smoothing_scales(one, one, 1.5)
    with pytest.raises(InputError, match="one maximum a channel"):
        smoothing_scales(one, torch.ones(3), 0.5)
    with pytest.raises(InputError, match=r"one or more weights"):
        search_alpha(one, one, one, [])
    with pytest.raises(InputError, match=r"one or more weights \[out, 4\]"):
        search_alpha(one, one, one, [torch.ones(2, 5)])
    with pytest.raises(InputError, match=r"as \[in\] each"):
        search_alpha(one, torch.ones(3), one, [torch.ones(2, 4)])
    with pytest.raises(InputError, match="NaN or inf"):
        search_alpha(-one, one * math.inf, one, [torch.ones(2, 4)])


@pytest.mark.parametrize(("activation_bits", "weight_bits"), [(8, 4), (4, 8), (2, 2)])
def test_the_expected_error_is_the_sum_that_is_documented(
    activation_bits: int, weight_bits: int
) -> None:
    lo, hi = torch.tensor([-9.0, -0.5, 0.0]), torch.tensor([1.0, 0.75, 0.01])
    power = torch.tensor([4.0, 0.02, 1e-6])
    weight = torch.tensor([[0.5, -2.0, 0.001], [0.25, 0.125, -3.0]])
    widths = {"activation_bits": activation_bits, "weight_bits": weight_bits}
    chosen = search_alpha(lo, hi, power, [weight[:1], weight[1:]], alpha=0.5, **widths)

    def expected(s: np.ndarray) -> float:
        w, p = weight.double().numpy() * s, power.double().numpy() / s**2
        low, high = lo.double().numpy() / s, hi.double().numpy() / s
        step = (high.max() - low.min()) / (2**activation_bits - 1)
        error = (np.minimum(step**2 / 12, p) * (w**2).sum(0)).sum()
        steps = np.abs(w).max(1, keepdims=True) / (2 ** (weight_bits - 1) - 1)
        error += (np.minimum(steps**2 / 12, w**2) @ p).sum()
        signal = (power.double().numpy() * (weight.double().numpy() ** 2).sum(0)).sum()
        return float(error / signal)

    scales = chosen.scales.double().numpy()
    assert not np.allclose(scales, 1.0)
    assert chosen.expected_error == pytest.approx(expected(scales), rel=1e-5)
    assert chosen.expected_error_without == pytest.approx(expected(np.ones(3)), rel=1e-5)


def test_one_channel_is_enough() -> None:
    one = torch.ones(1)
    assert search_alpha(-one, one, one, [torch.ones(2, 1)]).scales.shape == (1,)
    with pytest.raises(InputError, match=r"as \[in\] each"):
        search_alpha(one[:0], one[:0], one[:0], [torch.ones(2, 0)])
