"""The integer grid, bit for bit as ONNX QuantizeLinear and DequantizeLinear in float32.

    q = saturate(round_half_even(x / scale) + zero_point)          x' = (q - zero_point) * scale

Rules of this file:
1. The division is a float32 division by `scale`, never a product with 1 / scale: the two differ
   in the last bit, and at a tie that is a whole step.
2. Saturation happens before the zero point is added; the bounds are integers, so this is the
   same number, and it stays exact where x / scale is beyond any integer type (or is infinite).
3. A quantized zero comes back as +0.0, as it does from an integer.
4. `scale` and `zero_point` broadcast against `x`. No argument but `out` is changed.
5. NaN has no place on the grid. `check_range` refuses it in a range, by name; `quantize` sends it
   to qmin, as ONNX Runtime does on x86 (ONNX itself leaves it open).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.numerics.granularity import (
    Granularity,
    PerAxis,
    PerGroup,
    PerHead,
    PerRow,
    PerSequence,
    PerTensor,
)
from quantkit.numerics.qtypes import QType

# The smallest normal float32. A smaller scale loses bits, and kernels that flush subnormals to
# zero would divide by it; a range that small is nothing but rounding noise.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_LARGEST = torch.finfo(torch.float32).max


class RangeError(InputError):
    """A range, or a scale made from one, that no grid can be laid over."""


@dataclass(frozen=True, kw_only=True, eq=False)
class QParams:
    """A grid: what `quantize` and `dequantize` need besides the tensor.

    The following hold, and are checked:
    - `scale` is float32, positive and finite;
    - `zero_point` is int32, lies within the type, and broadcasts with `scale`.

    Raises:
        RangeError: one of them does not hold.
    """

    scale: Tensor
    zero_point: Tensor
    qtype: QType

    def __post_init__(self) -> None:
        if self.scale.dtype != torch.float32 or self.zero_point.dtype != torch.int32:
            raise RangeError(
                "Expected a float32 scale and an int32 zero point, got "
                f"{self.scale.dtype} and {self.zero_point.dtype}."
            )
        if not bool(((self.scale > 0) & self.scale.isfinite()).all()):
            raise RangeError("A scale must be positive and finite; check the range it came from.")
        qtype = self.qtype
        if not bool(((self.zero_point >= qtype.qmin) & (self.zero_point <= qtype.qmax)).all()):
            raise RangeError(
                f"A zero point must lie in [{qtype.qmin}, {qtype.qmax}], the range of {qtype}."
            )
        try:
            _ = self.scale * self.zero_point
        except RuntimeError as error:
            raise RangeError(
                f"A scale {list(self.scale.shape)} and a zero point "
                f"{list(self.zero_point.shape)} do not broadcast."
            ) from error


def _steps(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | int,
    qtype: QType,
    out: Tensor | None = None,
) -> Tensor:
    """Returns q - zero_point as float32 whole numbers (NaN stays NaN), fresh or in `out`."""
    steps = torch.div(x.to(torch.float32), scale.to(torch.float32), out=out)
    steps.round_()  # half to even
    if isinstance(zero_point, int):
        return steps.clamp_(qtype.qmin - zero_point, qtype.qmax - zero_point)
    offset = zero_point.to(torch.float32)  # exact: at most 16 bits
    low, high = qtype.qmin - offset, qtype.qmax - offset
    if out is None:
        return torch.clamp(steps, low, high)
    # the same numbers as clamp, which takes two broadcast bounds one element at a time
    torch.maximum(steps, low, out=steps)
    return torch.minimum(steps, high, out=steps)


def quantize(x: Tensor, scale: Tensor, zero_point: Tensor | int, qtype: QType) -> Tensor:
    """Returns the int32 tensor of grid indices of `x`, in [qmin, qmax].

    Computes in float32 whatever the dtype of `x`.
    """
    steps = _steps(x, scale, zero_point, qtype)
    q = (steps + zero_point).nan_to_num_(nan=float(qtype.qmin))
    return q.to(torch.int32)


def dequantize(q: Tensor, scale: Tensor, zero_point: Tensor | int) -> Tensor:
    """Returns the float32 values at grid indices `q` (any integer dtype)."""
    return (q.to(torch.int32) - zero_point).to(torch.float32) * scale.to(torch.float32)


def fake_quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | int,
    qtype: QType,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Returns `dequantize(quantize(x))` in the dtype of `x`, without the integers in between.

    The same bits as the two calls, except that a NaN stays NaN: a simulation should not hide one.
    For a bfloat16 or float16 `x` the grid is float32's and the result is rounded once at the end,
    to a finite number.
    `out`, float32 and shaped as `x`, takes the result and may be `x` itself.
    """
    steps = _steps(x, scale, zero_point, qtype, out)
    steps += 0.0  # -0.0 becomes +0.0
    if out is not None:
        return steps.mul_(scale.to(torch.float32))
    steps *= scale.to(torch.float32)
    if x.dtype in (torch.float16, torch.bfloat16):  # half a step beyond the range may be infinite
        largest = torch.finfo(x.dtype).max
        steps.clamp_(-largest, largest)
    return steps.to(x.dtype)


def symmetric_scale(absmax: Tensor, qtype: QType) -> Tensor:
    """Returns the float32 scale `absmax / qmax` that puts `absmax` on the outermost step.

    Where absmax is 0 the scale is 1 (an all-zero tensor stays exactly zero). A scale below the
    smallest normal float32 is raised to it, and one whose outermost step is beyond the largest is
    lowered. Elementwise; NaN and inf pass through: see `check_range`.
    """
    top = absmax.to(torch.float32)
    scale = (top / float(qtype.qmax)).clamp_min(_SMALLEST_SCALE)
    scale = _finite_outside(scale, torch.full_like(scale, float(qtype.qmax)))
    return torch.where(top == 0, torch.ones_like(scale), scale)


def _finite_outside(scale: Tensor, steps: Tensor) -> Tensor:
    """Returns the scale, lowered where it times `steps` overflows a finite range to inf.

    A range that ends where float32 does (a mask's stand-in for -inf) would come back as infinite.
    """
    beyond = scale.isfinite() & (scale * steps).isinf()
    if not bool(beyond.any()):
        return scale
    largest = _LARGEST / steps
    # rounded up, the quotient is one step of the last bit too large
    below = torch.nextafter(largest, torch.zeros_like(largest))
    return torch.where(beyond, torch.where((largest * steps).isinf(), below, largest), scale)


def affine_params(lo: Tensor, hi: Tensor, qtype: QType) -> tuple[Tensor, Tensor]:
    """Returns (scale float32, zero_point int32) of the grid that spans [lo, hi] and 0.

    The range is first widened to include 0, so that zero is exact (ONNX DynamicQuantizeLinear,
    whose numbers these are for uint8). Where lo = hi = 0: scale 1, zero point 0. Elementwise.
    """
    lo = lo.to(torch.float32).clamp_max(0.0)
    hi = hi.to(torch.float32).clamp_min(0.0)
    steps = float(qtype.qmax - qtype.qmin)
    scale = (hi - lo) / steps
    # hi - lo can overflow where neither does; the quotients then have no such trouble.
    scale = torch.where((hi - lo).isinf(), hi / steps - lo / steps, scale)
    scale = scale.clamp_min(_SMALLEST_SCALE)
    zero_point = (qtype.qmin - lo / scale).clamp(qtype.qmin, qtype.qmax).round().to(torch.int32)
    outermost = torch.maximum(qtype.qmax - zero_point, zero_point - qtype.qmin)
    scale = _finite_outside(scale, outermost.to(torch.float32))
    empty = (lo == 0) & (hi == 0)
    return (
        torch.where(empty, torch.ones_like(scale), scale),
        torch.where(empty, torch.zeros_like(zero_point), zero_point),
    )


def check_range(lo: Tensor | float, hi: Tensor | float, name: str) -> None:
    """Returns if every range [lo, hi] can carry a grid.

    Raises:
        RangeError: a NaN, an infinity, or lo above hi; says which tensor and what was found.
    """
    low = torch.as_tensor(lo, dtype=torch.float32).detach()
    high = torch.as_tensor(hi, dtype=torch.float32).detach()
    for bound, values in (("lower", low), ("upper", high)):
        bad = int(values.numel() - values.isfinite().sum())
        if bad:
            kind = "NaN" if bool(values.isnan().any()) else "inf"
            raise RangeError(
                f"Expected a finite range for {name!r}, got {kind} in {bad} of {values.numel()} "
                f"{bound} bounds; find the layer that first produces it, or try dtype float32."
            )
    if bool((low > high).any()):
        raise RangeError(
            f"Expected lo <= hi in the range of {name!r}, got the reverse in "
            f"{int((low > high).sum())} places; was nothing observed for it?"
        )


def _reduced_axes(rank: int, granularity: Granularity) -> tuple[int, ...]:
    match granularity:
        case PerTensor():
            return tuple(range(rank))
        case PerAxis(axis=axis):
            if not -rank <= axis < rank:
                raise InputError(f"Expected an axis of a tensor of rank {rank}, got axis={axis}.")
            return tuple(a for a in range(rank) if a != axis % rank)
        case PerSequence():
            kept = 1
        case PerHead():
            kept = 2
        case PerRow():
            kept = 3
        case PerGroup():
            raise AssertionError("groups are reduced in reduce_absmax")
    if rank != 4:
        raise InputError(
            f"{type(granularity).__name__} is for logits [batch, heads, query, key], "
            f"got a tensor of rank {rank}."
        )
    return tuple(range(kept, 4))


def reduce_absmax(x: Tensor, granularity: Granularity, valid: Tensor | None = None) -> Tensor:
    """Returns max |x| of everything that shares a scale, float32, with every axis of `x` kept.

    Reduced axes have size 1, so the result broadcasts against `x`; with `PerGroup` the axis has
    one entry per group and `expand_groups` makes it fit.

    Args:
        x: any floating tensor.
        granularity: what shares a scale.
        valid: bool, broadcastable to `x`; where False the entry does not count (not even a NaN).
            A set without a valid entry has 0. Default: everything counts.

    Raises:
        InputError: the granularity does not fit the shape of `x`.
    """
    size = x.detach().abs()
    if valid is not None:
        size = size.masked_fill(~valid, 0.0)
    if isinstance(granularity, PerGroup):
        rank = x.dim()
        if not -rank <= granularity.axis < rank:
            raise InputError(
                f"Expected an axis of a tensor of rank {rank}, got axis={granularity.axis}."
            )
        axis = granularity.axis % rank
        length, step = x.shape[axis], granularity.group_size
        groups = math.ceil(length / step)
        size = size.movedim(axis, -1)
        size = torch.nn.functional.pad(size, (0, groups * step - length))
        reduced = size.reshape(*size.shape[:-1], groups, step).amax(-1).movedim(-1, axis)
    else:
        axes = _reduced_axes(x.dim(), granularity)
        if not axes:  # a scalar, or one axis that is kept: every entry is its own set
            return size.to(torch.float32)
        if any(x.shape[a] == 0 for a in axes):
            shape = [1 if a in axes else n for a, n in enumerate(x.shape)]
            return torch.zeros(shape, dtype=torch.float32, device=x.device)
        reduced = size.amax(axes, keepdim=True)
    return reduced.to(torch.float32)


def expand_groups(per_group: Tensor, granularity: PerGroup, shape: torch.Size) -> Tensor:
    """Returns `per_group` (from `reduce_absmax` with `PerGroup`) repeated to `shape`."""
    axis = granularity.axis % len(shape)
    return per_group.repeat_interleave(granularity.group_size, dim=axis).narrow(
        axis, 0, shape[axis]
    )
