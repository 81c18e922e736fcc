"""What the tables, pictures and sentences on calibration read out of a `calibration.json`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Final

from quantkit.reporting.collect import Run, labels
from quantkit.results import Calibration, MethodRange, Ranges, TensorDiagnosis, WeightsInfo

WORST: Final = 20
"""Tensors or units that a page shows of each ranking; the others are in a folded table."""


def calibrations(run: Run) -> list[tuple[str, Calibration]]:
    """Returns (label, calibration) of every file; no two labels are equal."""
    names = labels([found.result.model for found in run.calibrations])
    return [(name, found.result) for name, found in zip(names, run.calibrations, strict=True)]


def ranges(run: Run) -> list[tuple[str, Ranges]]:
    """Returns (label, ranges) of every file; no two labels are equal."""
    names = labels([found.result.model for found in run.ranges])
    return [(name, found.result) for name, found in zip(names, run.ranges, strict=True)]


def worst_first(calibration: Calibration) -> list[TensorDiagnosis]:
    """Returns the tensors by the inlier SQNR of the method in force, the lowest first.

    What has none (nothing was seen) comes last; ties keep the order of the file.
    """

    def key(tensor: TensorDiagnosis) -> tuple[bool, float]:
        level = chosen(tensor).inlier_sqnr_db
        return (True, 0.0) if math.isnan(level) else (False, level)

    return sorted(calibration.tensors, key=key)


def chosen(tensor: TensorDiagnosis) -> MethodRange:
    """Returns what the method in force chose; NaN throughout where the file does not say."""
    for found in tensor.methods:
        if found.method == tensor.chosen:
            return found
    nan = math.nan
    return MethodRange(
        method=tensor.chosen, lo=nan, hi=nan, clipped_frac=nan, sqnr_db=nan, inlier_sqnr_db=nan
    )


def best_other(tensor: TensorDiagnosis) -> MethodRange | None:
    """Returns the other method with the highest SQNR, or None where none is known.

    Of all elements: by that of the inliers whoever clips most would win, and what is clipped may be
    what the model stands on.
    """
    known = [
        found
        for found in tensor.methods
        if found.method != tensor.chosen and not math.isnan(found.sqnr_db)
    ]
    return max(known, key=lambda found: found.sqnr_db, default=None)


def weight_granularity(info: WeightsInfo) -> str:
    """Returns what one range of weights is for, as --weights has it."""
    return info.granularity if info.group_size is None else f"{info.granularity}:{info.group_size}"


def methods(run: Run) -> list[str]:
    """Returns every method in one order for all pictures: a method keeps its mark."""
    return list(
        dict.fromkeys(
            found.method
            for _, calibration in calibrations(run)
            for tensor in calibration.tensors
            for found in tensor.methods
        )
    )


def median(values: Iterable[float]) -> float:
    """Returns the median of the values that are numbers, NaN where there is none."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


def lowest(values: Iterable[float]) -> float:
    """Returns the lowest of the values that are numbers, NaN where there is none."""
    return min((value for value in values if not math.isnan(value)), default=math.nan)


def highest(values: Iterable[float]) -> float:
    """Returns the highest of the values that are numbers, NaN where there is none."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)
