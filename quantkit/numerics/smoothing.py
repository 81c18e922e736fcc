"""SmoothQuant: how much of an input's outliers to move into the weights that read it.

Xiao et al. 2023 (arXiv 2211.10438): the input's channel c is divided by s_c, column c of every
weight multiplied by it, which changes nothing in floating point. How this differs from the paper:
alpha is not a setting but is searched, by the output error that both grids are expected to cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.numerics.affine import affine_params, symmetric_scale
from quantkit.numerics.qtypes import QType

ALPHAS: tuple[float, ...] = tuple(step / 20 for step in range(21))
"""0, 0.05 .. 1; 0 stands for no migration at all."""

# A channel that asks for more is all but dead, and float16 could not hold what is left of it.
_SMALLEST, _LARGEST = 1e-5, 1e5


@dataclass(frozen=True, kw_only=True, eq=False)
class SmoothingChoice:
    """What `search_alpha` found.

    `scales` float32 [in]: what to divide the channels of the input by; ones where `alpha` is 0.
    `expected_error`, `expected_error_without`: mean squared error of the outputs over their power,
    with and without the migration.
    """

    alpha: float
    scales: Tensor
    expected_error: float
    expected_error_without: float


def smoothing_scales(channel_absmax: Tensor, weight_absmax: Tensor, alpha: float) -> Tensor:
    """Returns s_c = max|x_c|^alpha / max|w_c|^(1 - alpha), float32 [in] (equation 4).

    1 where a maximum is 0 or not finite; kept within 1e-5 .. 1e5.

    Args:
        channel_absmax: max |x| of each input channel, [in].
        weight_absmax: max |w| of each input channel over all weights that read it, [in].
        alpha: Migration strength, 0 to 1: how much of the difficulty goes to the weights.

    Raises:
        InputError: alpha outside 0..1, or shapes that differ.
    """
    if not 0.0 <= alpha <= 1.0:
        raise InputError(f"Expected a migration strength alpha in 0..1, got {alpha}.")
    if channel_absmax.dim() != 1 or channel_absmax.shape != weight_absmax.shape:
        raise InputError(
            "Expected one maximum a channel of input and weight, got "
            f"{list(channel_absmax.shape)} and {list(weight_absmax.shape)}."
        )
    x, w = (t.detach().to(torch.float64) for t in (channel_absmax, weight_absmax))
    usable = (x > 0) & (w > 0) & x.isfinite() & w.isfinite()
    scales = x**alpha / w ** (1.0 - alpha)
    scales = torch.where(usable, scales, 1.0).clamp(_SMALLEST, _LARGEST)
    return scales.to(torch.float32)


def search_alpha(
    lo: Tensor,
    hi: Tensor,
    mean_square: Tensor,
    weights: Sequence[Tensor],
    *,
    activation_bits: int = 8,
    weight_bits: int = 8,
    alphas: Sequence[float] | None = None,
    alpha: float | None = None,
) -> SmoothingChoice:
    """Returns the migration of least expected output error; no migration is always a candidate.

    The grids are those of a recipe `wNaM`: one static asymmetric range for the input, one
    symmetric narrow scale for each output channel of a weight. Rounding errors count as
    independent of each other, and channels as uncorrelated: an element's error has the power
    step^2 / 12, or all of the element's own power where that is less (it is rounded to zero).

    Args:
        lo, hi: Smallest and largest value of each input channel, [in].
        mean_square: E[x^2] of each input channel, [in].
        weights: The weights that read this input, each [out, in].
        activation_bits, weight_bits: Widths of the grids, 2 to 16.
        alphas: Migration strengths to try beside none; default `ALPHAS`.
        alpha: This one is taken, whatever it costs.

    Raises:
        InputError: shapes that do not fit, no weight, or statistics that are not finite.
    """
    channels = lo.shape[0] if lo.dim() == 1 else -1
    shapes = [list(t.shape) for t in (lo, hi, mean_square)]
    if channels < 1 or any(shape != [channels] for shape in shapes):
        raise InputError(f"Expected lo, hi and mean_square as [in] each, got {shapes}.")
    if not weights or any(w.dim() != 2 or w.shape[1] != channels for w in weights):
        raise InputError(
            f"Expected one or more weights [out, {channels}], "
            f"got {[list(w.shape) for w in weights]}."
        )
    low, high, power = (t.detach().to(torch.float64) for t in (lo, hi, mean_square))
    if not all(bool(t.isfinite().all()) for t in (low, high, power)):
        raise InputError(
            "Expected finite channel statistics, got NaN or inf: was the input never seen?"
        )
    weight = torch.cat([w.detach().to(torch.float64) for w in weights])
    channel_absmax = torch.maximum(low.abs(), high.abs())
    weight_absmax = weight.abs().amax(0)
    signal = float(power @ weight.square().sum(0))

    def expected(scales: Tensor) -> float:
        s = scales.to(torch.float64)
        error = _input_error(low / s, high / s, power / s**2, weight * s, activation_bits)
        error += _weight_error(power / s**2, weight * s, weight_bits)
        return error / signal if signal > 0.0 else 0.0

    best, scales = 0.0, torch.ones(channels)
    without = least = expected(scales)
    tried = (alpha,) if alpha is not None else ALPHAS if alphas is None else alphas
    for candidate in tried:
        if candidate == 0.0:
            continue
        moved = smoothing_scales(channel_absmax, weight_absmax, candidate)
        error = expected(moved)
        if error < least or alpha is not None:
            best, scales, least = candidate, moved, error
    return SmoothingChoice(
        alpha=best, scales=scales, expected_error=least, expected_error_without=without
    )


def _input_error(lo: Tensor, hi: Tensor, power: Tensor, weight: Tensor, bits: int) -> float:
    """Returns the output power of the input's rounding errors."""
    step, _ = affine_params(lo.amin(), hi.amax(), QType(bits=bits))
    noise = torch.minimum(step.to(torch.float64) ** 2 / 12.0, power)
    return float(noise @ weight.square().sum(0))


def _weight_error(power: Tensor, weight: Tensor, bits: int) -> float:
    """Returns the output power of the weights' rounding errors."""
    step = symmetric_scale(weight.abs().amax(1), QType(bits=bits, narrow=True)).to(torch.float64)
    size = weight.square()
    noise = torch.minimum((step**2 / 12.0)[:, None].expand_as(size), size)
    return float(noise.sum(0) @ power)
