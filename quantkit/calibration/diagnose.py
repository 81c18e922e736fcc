"""Observations -> `calibration.json`: what each method would choose, and what that costs.

Time: about 30 ms a tensor for each method that searches. Figures are of the tensor, its groups
pooled, on the grid of the plan's first width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from quantkit.calibration.choose import RangePlan
from quantkit.calibration.observation import Observation
from quantkit.calibration.recording import Checkpoint
from quantkit.calibration.stability import by_tensor
from quantkit.numerics.choose import choose_range
from quantkit.numerics.distortion import distortion
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
from quantkit.results import DrawnHistogram, MethodRange, TensorDiagnosis

SPAN: Final = (0.0005, 0.9995)
"""Quantiles between which the 99.9 % span lies."""
BINS: Final = 64


def diagnose(
    seen: Mapping[str, Observation],
    plan: RangePlan,
    checkpoints: Sequence[Checkpoint] = (),
    *,
    progress: Progress = silent,
) -> list[TensorDiagnosis]:
    """Returns one diagnosis a tensor, the lowest inlier SQNR of its chosen range first."""
    moved = by_tensor(checkpoints)
    distinct = list(dict.fromkeys(map(id, seen.values())))
    known: dict[int, TensorDiagnosis] = {}
    found = []
    for name, observation in seen.items():
        key = id(observation)
        if key not in known:
            progress("comparing methods", len(known), len(distinct))
            known[key] = _diagnosis(name, observation, plan, moved.get(name, []))
        same = known[key]
        found.append(same if same.name == name else _renamed(same, name))
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
    name: str, observation: Observation, plan: RangePlan, moved: list[list[float]]
) -> TensorDiagnosis:
    whole = plan.seen(observation).pool()
    lo, hi = (float(x) for x in whole.minmax.finish())
    spans = [float(whole.histogram.quantile(q)) for q in SPAN]
    # a bin's middle stands for its elements, and may lie beyond the outermost of them
    span_lo, span_hi = (min(max(x, lo), hi) for x in spans)
    symmetric, bits = plan.is_symmetric(observation.point), plan.bits[0]
    averages = observation.averages(without_first=plan.excludes_first)
    methods = []
    chosen = plan.methods.of(observation.point)
    width = math.nan
    for method in compared_methods(plan, observation.point, averages.constant):
        if method.is_order_dependent:  # over all groups: the widest one's
            low, high = averages.finish()
            pair = low.amin(0, keepdim=True), high.amax(0, keepdim=True)
        else:
            pair = choose_range(method, whole, bits, symmetric=symmetric)
        methods.append(_cost(method, whole, pair, bits, symmetric))
        if method == chosen:
            width = _width(methods[-1], symmetric)
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
        bits_wasted=_log2(width, span_hi - span_lo),
        chosen=str(chosen),
        methods=methods,
        histogram=DrawnHistogram(edges=edges, counts=counts),
        first_max_abs=_largest(observation.classes["first"]),
        others_max_abs=_largest(observation.classes["others"]),
        stability=moved,
    )


def _cost(
    method: Method, whole: Bundle, pair: tuple[Tensor, Tensor], bits: int, symmetric: bool
) -> MethodRange:
    cost = distortion(whole, *pair, bits, symmetric=symmetric)
    finite = whole.minmax.count - whole.minmax.nan_count - whole.minmax.inf_count
    return MethodRange(
        method=str(method),
        lo=float(pair[0]),
        hi=float(pair[1]),
        clipped_frac=float(cost.clipped / finite),
        sqnr_db=float(cost.sqnr_db),
        inlier_sqnr_db=float(cost.inlier_sqnr_db),
    )


def _width(found: MethodRange, symmetric: bool) -> float:
    """Returns how long the interval is that the grid spans: about 0 or up to it."""
    if symmetric:
        return 2.0 * max(abs(found.lo), abs(found.hi))
    return max(found.hi, 0.0) - min(found.lo, 0.0)


def _log2(width: float, span: float) -> float:
    """Returns log2(width / span); inf for a span of one value, NaN where nothing was seen."""
    if math.isnan(width) or math.isnan(span):
        return math.nan
    return math.log2(width / span) if span > 0.0 and width > 0.0 else math.inf


def _largest(bundle: Bundle) -> float:
    lo, hi = bundle.minmax.finish()
    sizes = torch.maximum(lo.abs(), hi.abs())
    seen = sizes[~sizes.isnan()]
    return float(seen.max()) if len(seen) else math.nan


def _renamed(found: TensorDiagnosis, name: str) -> TensorDiagnosis:
    return replace(found, name=name)


def _badness(found: TensorDiagnosis) -> tuple[bool, float, str]:
    """Returns a key that puts the worst first, and what has no figure last."""
    mine = next(m for m in found.methods if m.method == found.chosen)
    return math.isnan(mine.inlier_sqnr_db), mine.inlier_sqnr_db, found.name
