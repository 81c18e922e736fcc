"""`calibration.json`: whether the ranges can be trusted, tensor by tensor.

Everything a report draws about calibration: what each method would choose, what that clips and
costs, and how the tensor is distributed. Figures are per tensor: where each head has a range of its
own, the costs are those of all heads under their own ranges.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

from quantkit.results.info import DataInfo, ModelInfo
from quantkit.results.ranges import StabilityPoint
from quantkit.results.result import Result

CALIBRATION_SCHEMA: Final = "quantkit.calibration/1"


@dataclass(frozen=True, kw_only=True)
class MethodRange:
    """What one method chooses for one tensor, and what that costs.

    Attributes:
        method: E.g. `minmax`, `mse`.
        lo, hi: The interval on the real line; of several heads the outermost ends.
        clipped_frac: Share of the elements outside of it.
        sqnr_db: Signal to quantization noise of all elements, in decibels:
            10 log10(sum x^2 / sum (x - fq(x))^2). NaN where nothing was seen.
        inlier_sqnr_db: The same over the elements inside the 99.9 % span alone.
    """

    method: str
    lo: float
    hi: float
    clipped_frac: float
    sqnr_db: float
    inlier_sqnr_db: float


@dataclass(frozen=True, kw_only=True)
class DrawnHistogram:
    """Counts for drawing: bin i is `edges[i] <= x < edges[i + 1]`, the last one closed."""

    edges: list[float]
    counts: list[int]


@dataclass(frozen=True, kw_only=True)
class TensorDiagnosis:
    """One tensor.

    Attributes:
        name: As in `ranges.json`; `point`: its probe point.
        count: Elements seen.
        bits, symmetric: The grid the methods are compared on.
        min, max, mean, std: Of all elements.
        span_lo, span_hi: The 99.9 % span: quantiles 0.0005 and 0.9995.
        bits_wasted: log2 of the chosen range over the 99.9 % span: bits that only outliers use. The
            mean over heads, each its own.
        chosen: The method in force; one of `methods`.
        methods: Every method, in the order in which they are explained.
        histogram: Of all elements, linear bins from min to max.
        first_max_abs: max |x| of first tokens; NaN where classes are not told apart.
        others_max_abs: max |x| of all other tokens.
        stability: max(|d lo|, |d hi|) / (hi - lo) of this tensor at growing sample counts, as
            [samples, moved_frac] pairs.
    """

    name: str
    point: str
    count: int
    bits: int
    symmetric: bool
    min: float
    max: float
    mean: float
    std: float
    span_lo: float
    span_hi: float
    bits_wasted: float
    chosen: str
    methods: list[MethodRange]
    histogram: DrawnHistogram
    first_max_abs: float
    others_max_abs: float
    stability: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, repr=False)
class Calibration(Result):
    """The whole of `calibration.json`; `tensors` has the worst first (lowest inlier SQNR)."""

    schema: str = CALIBRATION_SCHEMA
    model: ModelInfo
    data: DataInfo
    environment: dict[str, str]
    method: str
    excludes_first: bool
    tensors: list[TensorDiagnosis]
    stability: list[StabilityPoint] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    OLDER: ClassVar[tuple[str, ...]] = ()
