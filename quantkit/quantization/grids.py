"""The grid of each quantizer, from a weight or from a range of `ranges.json`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.calibration import WeightRanges
from quantkit.errors import InputError
from quantkit.numerics.affine import (
    QParams,
    affine_params,
    check_range,
    reduce_absmax,
    symmetric_scale,
)
from quantkit.numerics.granularity import PerAxis
from quantkit.numerics.qtypes import QType
from quantkit.recipe import CacheQuant, LogitQuant, ProbabilityQuant
from quantkit.results import Range


def weight_scale(
    weight: Tensor, bits: int, *, module: str = "", ranges: WeightRanges | None = None
) -> Tensor:
    """Returns the symmetric narrow scale of each output channel, `[out, 1]`, or of each element.

    Args:
        module: Name of what holds the weight; asked for in `ranges`.
        ranges: Calibrated ones; by group they make a scale an element. None: absmax of a channel.

    Raises:
        InputError: `ranges` has none of this module, or was chosen for another width.
    """
    if ranges is not None:
        return ranges.scale(module, weight.shape, bits).to(weight.device)
    qtype = QType(bits=bits, signed=True, narrow=True)
    return symmetric_scale(reduce_absmax(weight, PerAxis(axis=0)), qtype)


def spanning_grid(lo: Tensor, hi: Tensor, bits: int, *, symmetric: bool) -> QParams:
    """Returns the signed grid of each range: narrow of the absmax, or full over lo, hi and 0."""
    qtype = QType(bits=bits, narrow=symmetric)
    if symmetric:
        scale = symmetric_scale(torch.maximum(lo.abs(), hi.abs()), qtype)
        zero_point = torch.zeros_like(scale, dtype=torch.int32)
    else:
        scale, zero_point = affine_params(lo, hi, qtype)
    return QParams(scale=scale, zero_point=zero_point, qtype=qtype)


def linear_input_grid(
    ranges: Mapping[str, Range], module: str, bits: int, *, symmetric: bool = False
) -> QParams:
    """Returns the signed grid of a linear layer's input: one scale, one zero point.

    Raises:
        InputError: no range of that name, one that carries no grid, or one for another width.
    """
    name = f"linear_input/{module}"
    lo, hi = _bounds(ranges, name, bits, symmetric=symmetric)
    if lo.numel() != 1:
        raise InputError(f"range {name!r} has {lo.numel()} groups; linear inputs take one.")
    return spanning_grid(lo.reshape(()), hi.reshape(()), bits, symmetric=symmetric)


def logit_qtype(quant: LogitQuant) -> QType:
    """Returns the integers of the logits: narrow where symmetric, else all of the signed type."""
    return QType(bits=quant.bits, narrow=quant.symmetric)


def static_logit_grid(
    ranges: Mapping[str, Range], layer: int, map_: int, quant: LogitQuant
) -> QParams:
    """Returns the grid of one map's logits, `[heads]` or one number `[1]`.

    Raises:
        InputError: no range of that map, one that carries no grid, or one for another width.
    """
    qtype = logit_qtype(quant)
    if quant.symmetric:
        scale = static_logit_scale(ranges, layer, map_, quant)
        zero_point = torch.zeros_like(scale, dtype=torch.int32)
    else:
        lo, hi = _bounds(ranges, f"attention_logit/{layer}/map {map_}", quant.bits, symmetric=False)
        if quant.granularity == "tensor":
            lo, hi = lo.amin().reshape(1), hi.amax().reshape(1)
        scale, zero_point = affine_params(lo, hi, qtype)
    return QParams(scale=scale, zero_point=zero_point, qtype=qtype)


def static_logit_scale(
    ranges: Mapping[str, Range], layer: int, map_: int, quant: LogitQuant
) -> Tensor:
    """Returns the symmetric scale of one map's logits, `[heads]` or one number `[1]`.

    Raises:
        InputError: no range of that map, one that carries no grid, or one for another width.
    """
    lo, hi = _bounds(
        ranges, f"attention_logit/{layer}/map {map_}", quant.bits, symmetric=quant.symmetric
    )
    absmax = torch.maximum(lo.abs(), hi.abs())
    if quant.granularity == "tensor":
        absmax = absmax.amax().reshape(1)
    return symmetric_scale(absmax, QType(bits=quant.bits, narrow=True))


def probability_qtype(quant: ProbabilityQuant) -> QType:
    """Returns the integers of softmax outputs: all of the unsigned type, since none is negative."""
    return QType(bits=quant.bits, signed=False)


def probability_grid(
    ranges: Mapping[str, Range], layer: int, map_: int, quant: ProbabilityQuant
) -> QParams:
    """Returns the unit or static grid of one map's softmax outputs, `[heads]` or `[1]`.

    Raises:
        InputError: static, and no range of that map, or one for another width.
    """
    hi = torch.ones(1)
    if quant.range == "static":
        name = f"attention_probability/{layer}/map {map_}"
        hi = _bounds(ranges, name, quant.bits, symmetric=False)[1]
        if quant.granularity == "tensor":
            hi = hi.amax().reshape(1)
    qtype = probability_qtype(quant)
    scale, zero_point = affine_params(torch.zeros_like(hi), hi, qtype)
    return QParams(scale=scale, zero_point=zero_point, qtype=qtype)


def cache_range_name(name: str) -> str:
    """Returns the name in `ranges.json` of the range of a cache's quantizer.

    What a cache holds are the keys and values of attention: `cache_key/0/map 1` has the range
    `attention_key/0/map 1`.
    """
    return "attention_" + name.removeprefix("cache_")


def cache_grid(
    ranges: Mapping[str, Range], name: str, quant: CacheQuant, *, heads: int | None = None
) -> QParams:
    """Returns the static grid of a quantizer of the cache, `[heads]` or `[1]`.

    Args:
        name: `cache_key/<layer>/map <n>` or `cache_value/<layer>`.
        heads: How many key heads there are, where that is known.

    Raises:
        InputError: no range of that name, one for another grid, or one of other heads.
    """
    source = cache_range_name(name)
    lo, hi = _bounds(ranges, source, quant.bits, symmetric=quant.symmetric)
    if quant.granularity == "tensor":
        lo, hi = lo.amin().reshape(1), hi.amax().reshape(1)
    if heads is not None and lo.numel() not in (1, heads):
        raise InputError(
            f"range {source!r} has {lo.numel()} groups, and the model has {heads} key heads there: "
            "calibrate this model."
        )
    return spanning_grid(lo, hi, quant.bits, symmetric=quant.symmetric)


def _bounds(
    ranges: Mapping[str, Range], name: str, bits: int, *, symmetric: bool
) -> tuple[Tensor, Tensor]:
    """Returns (lo, hi), float32 `[groups]`, of a range that was chosen for this grid."""
    if name not in ranges:
        point = name.partition("/")[0]
        points = "kv_cache" if point in ("attention_key", "attention_value") else point
        raise InputError(
            f"no range for {name!r} ({len(ranges)} ranges are known): calibrate this model first, "
            f"with {points} among its --points."
        )
    interval = ranges[name].at(bits, name, symmetric=symmetric)
    lo = torch.tensor(interval.lo, dtype=torch.float32).reshape(-1)
    hi = torch.tensor(interval.hi, dtype=torch.float32).reshape(-1)
    check_range(lo, hi, name)
    return lo, hi
