"""What a range would cost, computed from observed bins: no element is looked at again.

A bin says how many elements lie between two edges, not where (`cells.py`). Three figures come of
it: the error if they are spread evenly (in closed form), and the least and the most that it can be
wherever they lie.

In units of the step, t = x / scale, the error of the grid with steps kmin..kmax is

    e(t) = (t - k)^2,  k = clamp(round(t), kmin, kmax),  and  ∫_0^t e = k / 12 + (t - k)^3 / 3,

also where t is clipped. The grid itself comes from `affine.py`, so its rounded zero point and its
float32 scale count too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from quantkit.numerics.affine import affine_params, symmetric_scale
from quantkit.numerics.cells import Cells, Floats, cells_of
from quantkit.numerics.observers.bundle import Bundle
from quantkit.numerics.qtypes import QType

_CHUNK = 1 << 17  # candidates x cells at a time: a temporary is 1 MiB and stays in the cache
INLIERS: Final = (0.0005, 0.9995)
"""Quantiles between which the 99.9 % span lies."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Grids:
    """Grids to compare, float64 [candidates]: the values k * scale, kmin <= k <= kmax."""

    scale: Floats
    kmin: Floats
    kmax: Floats

    def __getitem__(self, at: slice) -> Grids:
        return Grids(scale=self.scale[at], kmin=self.kmin[at], kmax=self.kmax[at])

    def chunks(self, cells: int) -> Iterator[tuple[slice, Grids]]:
        """Yields runs of candidates, as columns, such that a temporary over cells stays small."""
        width = max(1, _CHUNK // max(1, cells))
        for start in range(0, self.scale.size, width):
            part = self[slice(start, start + width)]
            columns = Grids(
                scale=part.scale[:, None], kmin=part.kmin[:, None], kmax=part.kmax[:, None]
            )
            yield slice(start, start + width), columns


def qtype_of(bits: int, symmetric: bool) -> QType:
    """Returns the type of the grids that ranges are chosen for: signed, narrow where symmetric."""
    return QType(bits=bits, narrow=symmetric)


def grids_of(lo: Floats, hi: Floats, bits: int, *, symmetric: bool) -> Grids:
    """Returns the grids over the intervals [lo, hi], each [candidates], exactly as `affine.py`."""
    qtype = qtype_of(bits, symmetric)
    low = torch.from_numpy(np.ascontiguousarray(lo, dtype=np.float32))
    high = torch.from_numpy(np.ascontiguousarray(hi, dtype=np.float32))
    if symmetric:
        scale = symmetric_scale(torch.maximum(low.abs(), high.abs()), qtype)
        zero_point = torch.zeros_like(scale)
    else:
        scale, zero_point = affine_params(low, high, qtype)
    offset = zero_point.numpy().astype(np.float64)
    return Grids(
        scale=scale.numpy().astype(np.float64), kmin=qtype.qmin - offset, kmax=qtype.qmax - offset
    )


def off_grid(x: Floats, grid: Grids) -> Floats:
    """Returns x / scale minus its nearest step of the grid, by broadcasting."""
    t = x / grid.scale
    nearest = np.rint(t)
    np.clip(nearest, grid.kmin, grid.kmax, out=nearest)
    return np.subtract(t, nearest, out=t)


def _integral(x: Floats, grid: Grids) -> Floats:
    """Returns the integral of e(t) from 0 to x / scale."""
    t = x / grid.scale
    nearest = np.rint(t)
    np.clip(nearest, grid.kmin, grid.kmax, out=nearest)
    t -= nearest
    cube = t * t
    cube *= t
    cube /= 3.0
    nearest /= 12.0
    cube += nearest
    return cube


def squared_error(cells: Cells, grids: Grids) -> Floats:
    """Returns the expected sum of (x - fq(x))^2, float64 [candidates]."""
    found = np.zeros(grids.scale.size)
    density = cells.counts / (cells.upper - cells.lower)
    # Neighbouring cells share an edge, whose integral is needed once.
    edges, at = np.unique(np.concatenate([cells.lower, cells.upper]), return_inverse=True)
    per_edge = np.zeros(edges.size)
    np.add.at(per_edge, at[cells.lower.size :], density)
    np.subtract.at(per_edge, at[: cells.lower.size], density)
    for where, grid in grids.chunks(edges.size + cells.points.size):
        spread = _between(edges, per_edge, cells, grid)
        near = off_grid(cells.points, grid)
        known = np.square(near, out=near) @ cells.point_counts
        scale = grid.scale[:, 0]
        found[where] = scale * scale * (scale * spread + known)
    return found


def _between(edges: Floats, per_edge: Floats, cells: Cells, grid: Grids) -> Floats:
    return np.asarray(_integral(edges, grid) @ per_edge)


def error_bounds(lower: Floats, upper: Floats, grids: Grids) -> tuple[Floats, Floats]:
    """Returns (least, most) of (x - fq(x))^2 over each cell, by broadcasting grids as columns."""
    a, b = off_grid(lower, grids), off_grid(upper, grids)
    ends = np.abs(a), np.abs(b)
    first_value = np.clip(np.ceil(lower / grids.scale), grids.kmin, grids.kmax)
    holds_value = (first_value >= lower / grids.scale) & (first_value <= upper / grids.scale)
    middle = first_midpoint(lower, grids)
    holds_middle = (middle <= upper) & (middle < (grids.kmax * grids.scale))
    least = np.where(holds_value, 0.0, np.minimum(*ends))
    most = np.maximum(np.maximum(*ends), np.where(holds_middle, 0.5, 0.0))
    square = grids.scale * grids.scale
    return least * least * square, most * most * square


def first_midpoint(x: Floats, grids: Grids) -> Floats:
    """Returns the first place >= x halfway between two values of an endless grid, broadcasting.

    Below the grid: the first that the grid has.
    """
    step = np.maximum(np.ceil(x / grids.scale - 0.5), grids.kmin)
    return np.asarray((step + 0.5) * grids.scale)


@dataclass(frozen=True, kw_only=True, eq=False)
class Distortion:
    """What a range costs, all float64 [groups]; NaN where a group has no element.

    `mse`: mean of (x - fq(x))^2 if elements are spread evenly within their bins; `mse_low`,
    `mse_high`: the bounds wherever they lie. `clipped`: expected number of elements outside the
    interval (widened to hold 0). `sqnr_db`: 10 log10(sum x^2 / sum (x - fq(x))^2), and
    `inlier_sqnr_db` of the elements within the 99.9 % span alone; inf where there is no error.

    `noise`, `power`: sum (x - fq(x))^2 and sum x^2; `inlier_noise`, `inlier_power`: of the inliers.

    Where the bins hold a sample of the elements, the figures are that sample's, and `clipped` is
    scaled up to all.
    """

    mse: Tensor
    mse_low: Tensor
    mse_high: Tensor
    clipped: Tensor
    sqnr_db: Tensor
    inlier_sqnr_db: Tensor
    noise: Tensor
    power: Tensor
    inlier_noise: Tensor
    inlier_power: Tensor

    def pooled(self) -> tuple[float, float]:
        """Returns the SQNR and the inlier SQNR of all groups together, in decibels.

        NaN where no group has an element. An inlier is one of its group's own 99.9 % span.
        """
        sums = (self.power, self.noise, self.inlier_power, self.inlier_noise)
        if all(bool(x.isnan().all()) for x in sums):
            return float("nan"), float("nan")
        power, noise, inlier_power, inlier_noise = (float(x.nansum()) for x in sums)
        return _decibels(power, noise), _decibels(inlier_power, inlier_noise)


def distortion(seen: Bundle, lo: Tensor, hi: Tensor, bits: int, *, symmetric: bool) -> Distortion:
    """Returns what the intervals [lo, hi], each [groups], cost the elements that were seen."""
    rows = []
    power = (seen.moments.m2 + seen.moments.count * seen.moments.mean**2).tolist()
    spans = (seen.histogram.quantile(q).tolist() for q in INLIERS)
    every = (seen.minmax.count - seen.minmax.nan_count - seen.minmax.inf_count).tolist()
    ends = zip(lo.tolist(), hi.tolist(), *spans, power, every, strict=True)
    for cells, (low, high, span_lo, span_hi, signal, count) in zip(
        cells_of(seen), ends, strict=True
    ):
        if not cells.total or not np.isfinite([low, high]).all():
            rows.append([np.nan] * 10)
            continue
        grid = grids_of(np.array([low]), np.array([high]), bits, symmetric=symmetric)
        noise = float(squared_error(cells, grid)[0])
        known = (off_grid(cells.points, grid) * grid.scale) ** 2 @ cells.point_counts
        least, most = (
            (b @ cells.counts + known) / cells.total
            for b in error_bounds(cells.lower, cells.upper, grid)
        )
        if symmetric:
            high = max(abs(low), abs(high))
            low = -high
        outside = _outside(cells, min(low, 0.0), max(high, 0.0))
        inliers = _within(cells, span_lo, span_hi)
        inlier_noise, inlier_power = float(squared_error(inliers, grid)[0]), _power(inliers)
        rows.append(
            [
                noise / cells.total,
                float(least),
                float(most),
                outside * count / cells.total,
                _decibels(signal, noise),
                _decibels(inlier_power, inlier_noise),
                noise,
                signal,
                inlier_noise,
                inlier_power,
            ]
        )
    table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 10)
    return Distortion(
        mse=table[:, 0],
        mse_low=table[:, 1],
        mse_high=table[:, 2],
        clipped=table[:, 3],
        sqnr_db=table[:, 4],
        inlier_sqnr_db=table[:, 5],
        noise=table[:, 6],
        power=table[:, 7],
        inlier_noise=table[:, 8],
        inlier_power=table[:, 9],
    )


def _decibels(signal: float, noise: float) -> float:
    if noise == 0.0:
        return np.inf
    return float(10.0 * (np.log10(signal) - np.log10(noise))) if signal > 0.0 else -np.inf


def _outside(cells: Cells, lo: float, hi: float) -> float:
    """Returns the expected number of elements outside [lo, hi]."""
    width = cells.upper - cells.lower
    inside = np.clip(np.minimum(cells.upper, hi) - np.maximum(cells.lower, lo), 0.0, None)
    out = (cells.points < lo) | (cells.points > hi)
    return float((1.0 - inside / width) @ cells.counts + cells.point_counts[out].sum())


def _within(cells: Cells, lo: float, hi: float) -> Cells:
    """Returns the cells whose middles lie in [lo, hi], and the points in it."""
    middle = 0.5 * (cells.lower + cells.upper)
    cell, point = ((x >= lo) & (x <= hi) for x in (middle, cells.points))
    return Cells(
        points=cells.points[point],
        point_counts=cells.point_counts[point],
        lower=cells.lower[cell],
        upper=cells.upper[cell],
        counts=cells.counts[cell],
        min=cells.min,
        max=cells.max,
        ties=cells.ties,
    )


def _power(cells: Cells) -> float:
    a, b = cells.lower, cells.upper
    return float(
        ((a * a + a * b + b * b) / 3.0) @ cells.counts + cells.points**2 @ cells.point_counts
    )
