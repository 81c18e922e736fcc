"""Streaming figures: how far a tensor is from another, and what a grid does to a tensor.

Sums are float64 and add up over batches; extremes are exact. An inlier lies between the 0.05 % and
the 99.95 % quantile of its batch; the span that is reported is the outermost over batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from quantkit.exporting.diagnosis.padding import Mask, only

Reals = NDArray[np.float32]
_INLIERS: Final = (0.0005, 0.9995)
NEGLIGIBLE: Final = 40.0
"""A logit so far below its row's largest weighs less than 1e-17 in its Softmax."""
_MASKED_ROW: Final = -1e3
"""A row whose largest logit is below it is masked as a whole: padding."""
_LARGE: Final = 1e30
"""Nothing but a mask is as large; its square would be all of every sum."""


def visible_logits(logits: Reals) -> NDArray[np.bool_]:
    """Returns which logits can matter to a Softmax over the last axis."""
    top = logits.max(-1, keepdims=True)
    seen: NDArray[np.bool_] = (logits > top - NEGLIGIBLE) & (top > _MASKED_ROW)
    return seen


def decibels(signal: float, noise: float) -> float:
    """Returns 10 log10(signal / noise): inf without noise, -inf where it is not finite."""
    if math.isnan(noise) or math.isinf(noise):
        return -math.inf
    if noise == 0.0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal > 0.0 else -math.inf


@dataclass(kw_only=True, eq=False)
class ErrorSums:
    """What `a` (the truth) and `b` are to each other."""

    count: int = 0
    aa: float = 0.0
    bb: float = 0.0
    ab: float = 0.0
    noise: float = 0.0
    inlier_signal: float = 0.0
    inlier_noise: float = 0.0
    lo: float = math.inf
    hi: float = -math.inf
    span_lo: float = math.inf
    span_hi: float = -math.inf
    medians: float = 0.0

    def add(self, a: NDArray[Any], b: NDArray[Any]) -> None:
        """Adds a batch; non-finite values of `a` are left out, of `b` they are infinite error."""
        a, b = a.reshape(-1).astype(np.float64), b.reshape(-1).astype(np.float64)
        kept = np.abs(a) < _LARGE
        if not kept.all():
            a, b = a[kept], b[kept]
        if not a.size:
            return
        wrong = ~np.isfinite(b) | (np.abs(b) >= _LARGE)
        error = np.where(wrong, np.inf, a - np.where(wrong, 0.0, b))
        square = error * error
        low, high = quantiles(a)
        inlier = (a >= low) & (a <= high)
        self.count += a.size
        self.medians += a.size * float(np.median(np.abs(a)))
        self.aa += float(a @ a)
        finite = np.where(wrong, 0.0, b)
        self.bb += float(finite @ finite)
        self.ab += float(a @ finite)
        self.noise += float(square.sum())
        self.inlier_signal += float((a * a)[inlier].sum())
        self.inlier_noise += float(square[inlier].sum())
        self.lo, self.hi = min(self.lo, float(a.min())), max(self.hi, float(a.max()))
        self.span_lo, self.span_hi = min(self.span_lo, low), max(self.span_hi, high)

    @property
    def sqnr_db(self) -> float:
        return decibels(self.aa, self.noise) if self.count else math.nan

    @property
    def inlier_sqnr_db(self) -> float:
        return decibels(self.inlier_signal, self.inlier_noise) if self.count else math.nan

    @property
    def median_abs(self) -> float:
        """Median |a| of a batch, the mean over batches."""
        return self.medians / self.count if self.count else math.nan

    @property
    def relative(self) -> float:
        """sqrt(noise / signal) of the inliers."""
        if not self.count:
            return math.nan
        if self.inlier_signal <= 0.0:
            return 0.0 if self.inlier_noise == 0.0 else math.inf
        return math.sqrt(self.inlier_noise / self.inlier_signal)

    @property
    def cosine(self) -> float:
        size = math.sqrt(self.aa * self.bb)
        return self.ab / size if size else math.nan


@dataclass(kw_only=True, eq=False)
class GridSums:
    """What a static grid does to a tensor, channel by channel where it has more than one scale.

    Attributes:
        scale, zero_point: float64 and int64, `[1]` or `[channels]` on `axis`.
        qmin, qmax: Both 0 for a grid of floats: then nothing is counted.
    """

    scale: NDArray[np.float64]
    zero_point: NDArray[np.int64]
    qmin: int
    qmax: int
    axis: int | None
    errors: ErrorSums = field(default_factory=ErrorSums)
    below: int = 0
    above: int = 0
    hidden: int = 0
    lo: float = math.inf
    hi: float = -math.inf
    rank: int = 0
    used: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.used = np.zeros(self.qmax - self.qmin + 1, np.bool_)

    def add(self, x: Reals, visible: Mask | None = None, real: Mask | None = None) -> None:
        """Adds a batch.

        Args:
            visible: Where given, figures are of these elements, and the others are hidden.
            real: Elements of positions that are no padding; the others count in nothing.
        """
        seen = only(x, real)
        if not seen.size:
            return
        self.rank = x.ndim
        shape = [1] * x.ndim
        if self.axis is not None and x.ndim:
            shape[self.axis] = -1
        scale, zero = self.scale.reshape(shape), self.zero_point.reshape(shape)
        self.lo, self.hi = min(self.lo, float(seen.min())), max(self.hi, float(seen.max()))
        with np.errstate(all="ignore"):
            steps = np.round(x.astype(np.float64) / scale) + zero
            integers = np.clip(np.nan_to_num(steps, nan=self.qmin), self.qmin, self.qmax)
            back = (integers - zero) * scale
        kept = real
        if visible is not None and visible.shape == x.shape:
            kept = visible if real is None else visible & real
            self.hidden += seen.size - int(kept.sum())
        steps, integers = only(steps, kept), only(integers, kept)
        self.below += int((steps < self.qmin).sum())
        self.above += int((steps > self.qmax).sum())
        self.used[np.unique(integers.astype(np.int64)) - self.qmin] = True
        self.errors.add(only(x, kept), only(back, kept))

    @property
    def ends(self) -> tuple[float, float]:
        """The grid in real numbers, the outermost over channels."""
        with np.errstate(all="ignore"):
            low = (self.qmin - self.zero_point) * self.scale
            high = (self.qmax - self.zero_point) * self.scale
        return float(low.min()), float(high.max())


def quantiles(values: NDArray[np.float64]) -> tuple[float, float]:
    """Returns the ends of the 99.9 % span, each an element of the values."""
    last = values.size - 1
    low, high = (round(share * last) for share in _INLIERS)
    parted = np.partition(values, (low, high))
    return float(parted[low]), float(parted[high])
