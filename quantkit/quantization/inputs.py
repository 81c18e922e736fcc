"""The callback that puts the inputs of linear layers on their grids.

One range belongs to one sequence and layer, or to one token, never to a batch; padding never enters
one. Asymmetric grids are all integers of the signed type over lo, hi and 0; shifted by half of them
they are those of ONNX DynamicQuantizeLinear. Symmetric ones are narrow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from quantkit.errors import ProbeError
from quantkit.numerics.affine import QParams, fake_quantize
from quantkit.probes import Activation
from quantkit.quantization.fired import Counter
from quantkit.quantization.grids import linear_input_grid, spanning_grid
from quantkit.recipe import ActivationQuant
from quantkit.results import Range


def input_quantizer(
    quant: ActivationQuant, ranges: Mapping[str, Range], fired: Counter
) -> Callable[[Activation], Tensor]:
    """Returns a `linear_input` callback: the grid of `quant`, counted as `linear_input/<module>`.

    Elements are those of real tokens. A module that is given no token at all has no hit.

    Raises:
        InputError: when called, static only: a module without a range or with an unusable one.
        ProbeError: when called, NaN or inf in a real token, by name.
    """
    static: dict[str, QParams] = {}

    def quantizer(visit: Activation) -> Tensor:
        x = visit.tensor
        if x.numel() == 0:  # an expert that no token was sent to
            return x
        if quant.range == "dynamic":
            grid = _dynamic_grid(visit, quant)
        else:
            require_finite(visit)
            if visit.name not in static:
                static[visit.name] = static_input_grid(ranges, visit.name, quant)
            grid = static[visit.name]
        zero_point: Tensor | int = 0 if quant.symmetric else grid.zero_point.to(x.device)
        quantized = fake_quantize(x, grid.scale.to(x.device), zero_point, grid.qtype)
        fired.add(f"linear_input/{visit.name}", int(visit.real.sum()) * x.shape[-1])
        return quantized

    return quantizer


def static_input_grid(ranges: Mapping[str, Range], module: str, quant: ActivationQuant) -> QParams:
    """Returns the grid of a linear layer's input that `ranges.json` gives: one scale, one zero.

    Raises:
        InputError: no range of that name, one that carries no grid, or one for another grid.
    """
    return linear_input_grid(ranges, module, quant.bits, symmetric=quant.symmetric)


def require_finite(visit: Activation) -> None:
    """Raises ProbeError for NaN or inf in a real token; padding may hold anything."""
    x = visit.tensor
    # a sum is one cheap pass; only what it cannot vouch for is looked at element by element
    if bool(x.sum(dtype=torch.float32).isfinite()):
        return
    if not bool(x[visit.real].isfinite().all()):
        raise _not_finite(visit)


def _dynamic_grid(visit: Activation, quant: ActivationQuant) -> QParams:
    """Returns a grid for each sequence, `[batch, 1, 1]`, or token, `[batch, sequence, 1]`."""
    x, real = visit.tensor, visit.real
    # a grid includes 0, so that 0 in place of padding leaves its range alone
    seen = x if bool(real.all()) else x.masked_fill(~real[..., None], 0.0)
    axes = (-1,) if quant.granularity == "token" else (-2, -1)
    lo, hi = seen.amin(axes, keepdim=True), seen.amax(axes, keepdim=True)
    if not bool((lo.isfinite() & hi.isfinite()).all()):
        raise _not_finite(visit)
    return spanning_grid(lo, hi, quant.bits, symmetric=quant.symmetric)


def _not_finite(visit: Activation) -> ProbeError:
    return ProbeError(
        f"the input of {visit.name} is not finite: find the layer that first makes a NaN or an "
        "inf, or try dtype float32."
    )
