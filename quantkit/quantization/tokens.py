"""Queries, keys and values of attention on a grid: `[batch, heads, token, d]`.

A scale belongs to one sequence and map: to all of it, to a (key) head, or to a token of a head.
Padding never enters a range.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.errors import ProbeError
from quantkit.numerics.affine import fake_quantize
from quantkit.numerics.qtypes import QType
from quantkit.probes import AttentionLogits
from quantkit.quantization.grids import cache_grid
from quantkit.quantization.maps import grid_of
from quantkit.recipe import CacheQuant
from quantkit.results import Range

_AXES = {"tensor": (1, 2, 3), "head": (2, 3), "token": (3,)}


def on_dynamic_grid(
    x: Tensor, real: Tensor, *, bits: int, granularity: str, symmetric: bool, what: str
) -> Tensor:
    """Returns x on the grid of its own extremes.

    Args:
        real: bool `[batch, token]`, False where the token is padding.
        what: For messages.

    Raises:
        ProbeError: NaN or inf in a real token.
    """
    axes = _AXES[granularity]
    seen = x.detach().float()
    if not bool(real.all()):
        seen = seen.masked_fill(~real.to(x.device)[:, None, :, None], 0.0)  # a grid includes 0
    sides = [-seen.amin(axes, keepdim=True), seen.amax(axes, keepdim=True)]
    qtype = QType(bits=bits, narrow=symmetric)
    reach = torch.stack(sides).clamp_min_(0.0)
    scale, zero_point = grid_of(reach, qtype, symmetric=symmetric, what=what)
    return fake_quantize(x, scale, zero_point, qtype)


def on_cache_grid(
    x: Tensor, real: Tensor, quant: CacheQuant, ranges: Mapping[str, Range], name: str, what: str
) -> Tensor:
    """Returns keys or values as a quantized cache gives them back.

    Args:
        name: Of the quantizer, `cache_key/...` or `cache_value/...`.
        real, what: As of `on_dynamic_grid`.

    Raises:
        InputError: static, and no range of that name, or one that does not fit.
        ProbeError: NaN or inf in a real token.
    """
    if quant.range == "dynamic":
        return on_dynamic_grid(
            x,
            real,
            bits=quant.bits,
            granularity=quant.granularity,
            symmetric=quant.symmetric,
            what=what,
        )
    grid = cache_grid(ranges, name, quant, heads=x.shape[1])
    require_finite(x, real, what)
    scale = grid.scale.reshape(1, -1, 1, 1).to(x.device)
    if quant.symmetric:
        return fake_quantize(x, scale, 0, grid.qtype)
    return fake_quantize(x, scale, grid.zero_point.reshape(1, -1, 1, 1).to(x.device), grid.qtype)


def require_finite(x: Tensor, real: Tensor, what: str) -> None:
    """Raises ProbeError for NaN or inf in a real token; padding may hold anything."""
    finite = x.isfinite().all(-1).all(1)
    if not bool((finite | ~real.to(x.device)).all()):
        raise ProbeError(
            f"{what}, are not finite: find the layer that first makes a NaN or an inf, or try "
            "dtype float32."
        )


def without_mean(call: AttentionLogits, key: Tensor) -> Tensor:
    """Returns keys less their mean over the real tokens of their sequence, a channel at a time.

    Zhang et al. 2024, arXiv 2410.02367, section 4.2: all logits of a query's row move alike.

    Raises:
        ProbeError: the model does not go on from the logits to a softmax alone, so that it would
            see the difference.
    """
    if call.softcap is not None or call.sinks is not None:
        found = "softcaps its logits" if call.softcap is not None else "has attention sinks"
        raise ProbeError(
            f"{call.name} {found}, which sees that smooth moves the logits of a row: leave smooth "
            "out of the recipe."
        )
    real = call.real_keys().to(key.device)[:, None, :, None]
    # float64, so that the padding of a batch cannot show in the last bit
    total = key.double().masked_fill(~real, 0.0).sum(2, keepdim=True)
    mean = total / real.sum(2, keepdim=True).clamp_min(1)
    return (key.double() - mean).to(key.dtype)
