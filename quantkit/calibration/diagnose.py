"""Observations -> `calibration.json`: what each method would choose, and what that costs.

Each range is judged as it is in force: a head by its own, and the heads' errors added up, on the
grid of the plan's first width. Time: about 30 ms a range for each method that searches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from quantkit.calibration.choose import RangePlan, range_by
from quantkit.calibration.observation import Observation
from quantkit.calibration.recording import Checkpoint
from quantkit.calibration.stability import by_tensor
from quantkit.numerics.distortion import INLIERS, distortion
from quantkit.numerics.drawing import even_bins
from quantkit.numerics.methods import (
    EntropyRange,
    Method,
    MinMaxRange,
    MovingAverageRange,
    MseRange,
    TwoSidedPercentile,
    UpperPercentile,
)
from quantkit.numerics.observers import Bundle
from quantkit.progress import Progress, silent
from quantkit.results import DrawnHistogram, MethodRange, Range, TensorDiagnosis

BINS: Final = 64


def diagnose(
    seen: Mapping[str, Observation],
    plan: RangePlan,
    checkpoints: Sequence[Checkpoint] = (),
    *,
    ranges: Mapping[str, Range] | None = None,
    progress: Progress = silent,
) -> list[TensorDiagnosis]:
    """Returns one diagnosis a tensor, the lowest inlier SQNR of its chosen range first.

    Args:
        ranges: What `choose_ranges` returned for this plan; None: chosen here.
    """
    moved, chosen = by_tensor(checkpoints), ranges or {}
    distinct = set(map(id, seen.values()))
    known: dict[int, TensorDiagnosis] = {}
    found = []
    for name, observation in seen.items():
        key = id(observation)
        if key not in known:
            progress("comparing methods", len(known), len(distinct))
            in_force = _ends(chosen[name], plan.bits[0]) if name in chosen else None
            known[key] = _diagnosis(name, observation, plan, moved.get(name, []), in_force)
        found.append(replace(known[key], name=name))
    progress("comparing methods", len(distinct), len(distinct))
    return sorted(found, key=_badness)


def compared_methods(plan: RangePlan, point: str, constant: float) -> list[Method]:
    """Returns every method, and the one in force; `constant`: of the moving averages."""
    chosen = plan.methods.of(point)
    every: list[Method] = [
        MinMaxRange(),
        MovingAverageRange(averaging_constant=constant),
        UpperPercentile(),
        TwoSidedPercentile(),
        EntropyRange(),
        MseRange(),
    ]
    return every if chosen in every else [*every, chosen]


def _diagnosis(
    name: str,
    observation: Observation,
    plan: RangePlan,
    moved: list[list[float]],
    in_force: tuple[Tensor, Tensor] | None,
) -> TensorDiagnosis:
    own = plan.seen(observation)  # a group a range
    whole = own.pool()
    lo, hi = (float(x) for x in whole.minmax.finish())
    span_lo, span_hi = (float(x) for x in _span(whole))
    symmetric, bits = plan.is_symmetric(observation.point), plan.bits[0]
    chosen = plan.methods.of(observation.point)
    methods, wasted = [], math.nan
    for method in compared_methods(plan, observation.point, observation.moving.constant):
        if in_force is not None and method == chosen:
            pair = in_force
        else:
            pair = range_by(method, observation, plan, bits)
        methods.append(_cost(method, own, pair, bits, symmetric))
        if method == chosen:
            wasted = _bits_wasted(own, pair, symmetric)
    edges, counts = even_bins(whole.histogram, lo, hi, BINS) if lo <= hi else ([], [])
    return TensorDiagnosis(
        name=name,
        point=observation.point,
        count=int(whole.minmax.count.sum()),
        bits=bits,
        symmetric=symmetric,
        min=lo,
        max=hi,
        mean=float(whole.moments.mean),
        std=math.sqrt(float(whole.moments.m2 / whole.moments.count)) if edges else math.nan,
        span_lo=span_lo,
        span_hi=span_hi,
        bits_wasted=wasted,
        chosen=str(chosen),
        methods=methods,
        histogram=DrawnHistogram(edges=edges, counts=counts),
        first_max_abs=_largest(observation.classes["first"]),
        others_max_abs=_largest(observation.classes["others"]),
        stability=moved,
    )


def _ends(chosen: Range, bits: int) -> tuple[Tensor, Tensor]:
    """Returns (lo, hi), float32 `[groups]`, of a range as it was chosen."""
    interval = chosen.at(bits)
    lo, hi = (torch.tensor(x, dtype=torch.float32).reshape(-1) for x in (interval.lo, interval.hi))
    return lo, hi


def _span(seen: Bundle) -> tuple[Tensor, Tensor]:
    """Returns the ends of the 99.9 % span, float32 `[groups]`."""
    lo, hi = seen.minmax.finish()
    low, high = (seen.histogram.quantile(q) for q in INLIERS)
    # a bin's middle stands for its elements, and may lie beyond the outermost of them
    return low.clamp(lo, hi), high.clamp(lo, hi)


def _cost(
    method: Method, own: Bundle, pair: tuple[Tensor, Tensor], bits: int, symmetric: bool
) -> MethodRange:
    """Returns what the ranges, one a group, cost the tensor; its interval is the outermost."""
    cost = distortion(own, *pair, bits, symmetric=symmetric)
    finite = own.minmax.count - own.minmax.nan_count - own.minmax.inf_count
    sqnr, inlier_sqnr = cost.pooled()
    return MethodRange(
        method=str(method),
        lo=float(pair[0].min()),
        hi=float(pair[1].max()),
        clipped_frac=float(cost.clipped.nansum() / finite.sum()),
        sqnr_db=sqnr,
        inlier_sqnr_db=inlier_sqnr,
    )


def _bits_wasted(own: Bundle, pair: tuple[Tensor, Tensor], symmetric: bool) -> float:
    """Returns log2 of the range over the 99.9 % span: the mean over groups, each its own.

    Inf where a span is one value; NaN where nothing was seen.
    """
    lo, hi = (x.double() for x in pair)
    if symmetric:  # the grid spans as much on either side of 0
        width = 2.0 * torch.maximum(lo.abs(), hi.abs())
    else:
        width = hi.clamp_min(0.0) - lo.clamp_max(0.0)
    low, high = (x.double() for x in _span(own))
    bits = torch.log2(width / (high - low))
    known = bits[~bits.isnan() | (width == 0)]
    if not len(known):
        return math.nan
    return float(known.nan_to_num(nan=math.inf, posinf=math.inf).mean())


def _largest(bundle: Bundle) -> float:
    lo, hi = bundle.minmax.finish()
    sizes = torch.maximum(lo.abs(), hi.abs())
    seen = sizes[~sizes.isnan()]
    return float(seen.max()) if len(seen) else math.nan


def _badness(found: TensorDiagnosis) -> tuple[bool, float, str]:
    """Returns a key that puts the worst first, and what has no figure last."""
    mine = next(m for m in found.methods if m.method == found.chosen)
    return math.isnan(mine.inlier_sqnr_db), mine.inlier_sqnr_db, found.name
