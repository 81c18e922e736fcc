"""The symmetric range of each channel or group of a weight, judged on the weight itself.

Time: min-max one look; the percentile a selection in each group; MSE `candidates` and half as many
again fake quantizations of the weight: about 0.5 s a million elements on one core.
Memory: `BLOCK` elements of temporaries at a time, below 64 MB, whatever the size of the weight.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.numerics.affine import check_range, expand_groups, fake_quantize, symmetric_scale
from quantkit.numerics.granularity import PerAxis, PerGroup
from quantkit.numerics.methods import (
    Method,
    MseRange,
    UpperPercentile,
    check_weight_method,
)
from quantkit.numerics.qtypes import QType

WeightGranularity: TypeAlias = PerAxis | PerGroup

BLOCK: Final = 1 << 18
"""Elements looked at together; a longer row is a block of its own."""
LEAST: Final = 2.0**-10
"""The smallest threshold that a search tries, as a share of absmax."""


def weight_absmax(
    weight: Tensor,
    method: Method,
    bits: int,
    granularity: WeightGranularity,
    *,
    name: str = "weight",
) -> Tensor:
    """Returns the largest magnitude that the grid reaches, float32 `[out, 1]` or `[out, groups]`.

    The grid is the symmetric narrow one, in float32. The last group may be short. Where all is
    zero, 0.

    Args:
        weight: `[out, in]`, of any floating type.
        method: min-max: absmax. Upper percentile: that of |w| in each channel or group, an element
            of it (numpy's `inverted_cdf`); absmax where it would be 0 and the group is not. MSE:
            the threshold of least squared error of those tried, absmax first: never worse.
        granularity: `PerAxis(axis=0)`, or `PerGroup(axis=1)`.
        name: Of the tensor, for errors.

    Raises:
        InputError: another method or granularity, or a weight that is no matrix.
        RangeError: NaN or inf.
    """
    check_weight_method(method)
    _check(weight, granularity, name)
    qtype = QType(bits=bits, narrow=True)
    rows = []
    for part in _rows(weight):
        found = [_absmax(block, method, qtype) for block in _blocks(part.float(), granularity)]
        rows.append(torch.cat(found, dim=1))
    return torch.cat(rows)


def absmax_scale(
    absmax: Tensor, granularity: WeightGranularity, bits: int, shape: torch.Size
) -> Tensor:
    """Returns the symmetric narrow scale, `[out, 1]`, or by element `[out, in]` for groups."""
    scale = symmetric_scale(absmax, QType(bits=bits, narrow=True))
    return expand_groups(scale, granularity, shape) if isinstance(granularity, PerGroup) else scale


def channel_errors(
    weight: Tensor, absmax: Tensor, granularity: WeightGranularity, bits: int
) -> tuple[Tensor, Tensor]:
    """Returns (power, squared error) of each output channel, sums, float64 `[out]`."""
    qtype = QType(bits=bits, narrow=True)
    power, error = [], []
    for part, tops in zip(_rows(weight), _rows(absmax, like=weight), strict=True):
        exact = part.float()
        scale = absmax_scale(tops, granularity, bits, exact.shape)
        power.append(_energy(exact))
        error.append(_energy(fake_quantize(exact, scale, 0, qtype) - exact))
    return torch.cat(power), torch.cat(error)


def _check(weight: Tensor, granularity: WeightGranularity, name: str) -> None:
    if weight.ndim != 2 or not weight.numel():
        raise InputError(
            f"Expected a weight [out, in] for {name!r}, got the shape {list(weight.shape)}."
        )
    if granularity.axis != (1 if isinstance(granularity, PerGroup) else 0):
        raise InputError(
            "Expected one range an output channel, PerAxis(axis=0), or a group of inputs, "
            f"PerGroup(axis=1), got {granularity}."
        )
    check_range(weight.min(), weight.max(), name)


def _rows(x: Tensor, like: Tensor | None = None) -> tuple[Tensor, ...]:
    """Returns `x` by rows, as many together as fit a block (of `like`)."""
    return torch.split(x.detach(), max(1, BLOCK // (x if like is None else like).shape[1]))


def _blocks(rows: Tensor, granularity: WeightGranularity) -> list[Tensor]:
    """Returns `[rows, groups, elements]`: the whole groups, then the short one."""
    if not isinstance(granularity, PerGroup):
        return [rows[:, None]]
    step, length = granularity.group_size, rows.shape[1]
    whole = length - length % step
    blocks = [rows[:, :whole].reshape(len(rows), -1, step)] if whole else []
    return blocks + ([rows[:, None, whole:]] if whole < length else [])


def _energy(x: Tensor) -> Tensor:
    """Returns the sum of squares along the last axis, in float64."""
    wide = x.double()
    return wide.mul_(wide).sum(-1)


def _absmax(block: Tensor, method: Method, qtype: QType) -> Tensor:
    """Returns the threshold of every group of `block`, `[rows, groups]`."""
    size = block.abs()
    top = size.amax(-1)
    match method:
        case UpperPercentile():
            # in whole numbers: q n is often one, and float rounding would take the next element
            share = round(method.upper_pct / 100.0 * 10**12)
            rank = max(1, -(-share * size.shape[-1] // 10**12))
            found = size.kthvalue(rank, -1).values
            return torch.where(found > 0, found, top)
        case MseRange():
            return _least_error(block, size, top, method.candidates, qtype)
        case _:
            return top


def _least_error(block: Tensor, size: Tensor, top: Tensor, candidates: int, qtype: QType) -> Tensor:
    """Returns the threshold of least squared error: a coarse round, then one about its best.

    Thresholds fall geometrically from absmax to the median magnitude, which is low enough: 2 bits,
    the coarsest grid, have their best threshold on a Gaussian at 1.8 times its median.
    """
    floor = torch.maximum(size.kthvalue((size.shape[-1] + 1) // 2, -1).values, top * LEAST)
    ratio = (floor / top).nan_to_num_(nan=1.0)  # 0 / 0, where all is zero
    best, least = top, torch.full_like(top, torch.inf, dtype=torch.float64)
    place = torch.zeros_like(top)  # from 0, absmax, to 1, the floor

    def attempt(where: Tensor) -> None:
        nonlocal best, least, place
        tried = top * ratio**where
        scale = symmetric_scale(tried, qtype)[..., None]
        error = _energy(fake_quantize(block, scale, 0, qtype) - block)
        better = error < least  # where it is as good, what was tried earlier stays
        best = torch.where(better, tried, best)
        least = torch.where(better, error, least)
        place = torch.where(better, where, place)

    step = 1.0 / (candidates - 1)
    for index in range(candidates):
        attempt(torch.full_like(top, index * step))
    middle, finer = place, candidates // 2
    for index in range(finer):
        attempt((middle + step * (2.0 * (index + 1) / (finer + 1) - 1.0)).clamp(0.0, 1.0))
    return best
