"""The tables on calibration: which ranges can be trusted, and what was done to them."""

from __future__ import annotations

import math
from typing import Final

from quantkit.reporting.calibration_groups import (
    WORST,
    best_other,
    calibrations,
    chosen,
    highest,
    lowest,
    median,
    ranges,
    worst_first,
)
from quantkit.reporting.collect import Run
from quantkit.reporting.text import (
    NOT_AVAILABLE,
    Table,
    decibels,
    interval,
    number,
    small_share,
    without,
)
from quantkit.results import Calibration, MethodRange, Ranges, TensorDiagnosis

FIRST_TOKENS: Final = 10
"""Rows of the table on first tokens."""


def worst_table(run: Run) -> Table:
    """Returns the tensors whose inliers the range in force serves worst, and what would be better.

    One row a tensor, `WORST` a calibration.
    """
    rows = []
    for name, calibration in calibrations(run):
        for tensor in worst_first(calibration)[:WORST]:
            ours, other = chosen(tensor), best_other(tensor)
            rows.append(
                (
                    name, tensor.name, ours.method, interval(ours.lo, ours.hi),
                    interval(tensor.span_lo, tensor.span_hi), _bits(tensor.bits_wasted),
                    small_share(ours.clipped_frac), decibels(ours.sqnr_db),
                    decibels(ours.inlier_sqnr_db), other.method if other else NOT_AVAILABLE,
                    decibels(other.sqnr_db if other else math.nan), tensor.point, _grid(tensor),
                )
            )  # fmt: skip
    table = Table(
        title=f"{WORST} worst tensors",
        columns=(
            "model", "tensor", "chosen by", "range", "99.9 % span", "bits wasted", "clipped",
            "SQNR, dB", "inlier SQNR, dB", "best other method", "its SQNR, dB", "point", "grid",
        ),
        rows=tuple(rows),
        text_columns=3,
        note="Lowest inlier SQNR first. The best other method is the one with the highest SQNR of "
        "all elements, which need not be above that of the method in force.",
    )  # fmt: skip
    return _of_models(run, table)


def point_table(run: Run) -> Table:
    """Returns median and worst of the tensors of each point, the worst point first."""
    rows = []
    for name, calibration in calibrations(run):
        points: dict[str, list[TensorDiagnosis]] = {}
        for tensor in worst_first(calibration):
            points.setdefault(tensor.point, []).append(tensor)
        for point, tensors in points.items():
            ours = [chosen(tensor) for tensor in tensors]
            wasted = [tensor.bits_wasted for tensor in tensors]
            cut = [found.clipped_frac for found in ours]
            whole = [found.sqnr_db for found in ours]
            inliers = [found.inlier_sqnr_db for found in ours]
            rows.append(
                (
                    name, point, tensors[0].name, number(len(tensors)),
                    _bits(median(wasted)), _bits(highest(wasted)),
                    small_share(median(cut)), small_share(highest(cut)),
                    decibels(median(whole)), decibels(lowest(whole)),
                    decibels(median(inliers)), decibels(lowest(inliers)),
                )
            )  # fmt: skip
    table = Table(
        title="Calibration by point",
        columns=(
            "model", "point", "worst tensor", "tensors", "bits wasted: median", "worst",
            "clipped: median", "worst", "SQNR, dB: median", "worst", "inlier SQNR, dB: median",
            "worst",
        ),
        rows=tuple(rows),
        text_columns=3,
    )  # fmt: skip
    return _of_models(run, table)


def method_tables(run: Run) -> tuple[Table, ...]:
    """Returns every method's range on the worst tensors, one table a calibration."""
    return tuple(
        Table(
            title=f"Every method on the {WORST} worst tensors{_of(run, name)}",
            columns=(
                "tensor", "method", "in force", "range", "clipped", "SQNR, dB", "inlier SQNR, dB"
            ),
            rows=tuple(
                _method_row(tensor, found)
                for tensor in worst_first(calibration)[:WORST]
                for found in tensor.methods
            ),
            text_columns=3,
        )
        for name, calibration in calibrations(run)
    )  # fmt: skip


def _method_row(tensor: TensorDiagnosis, found: MethodRange) -> tuple[str, ...]:
    return (
        tensor.name,
        found.method,
        "yes" if found.method == tensor.chosen else "",
        interval(found.lo, found.hi),
        small_share(found.clipped_frac),
        decibels(found.sqnr_db),
        decibels(found.inlier_sqnr_db),
    )


def other_tables(run: Run) -> tuple[Table, ...]:
    """Returns the tensors below the worst, one table a calibration."""
    return tuple(
        Table(
            title=f"The other tensors{_of(run, name)}",
            columns=(
                "tensor", "chosen by", "range", "bits wasted", "clipped", "SQNR, dB",
                "inlier SQNR, dB",
            ),
            rows=tuple(_short_row(tensor) for tensor in worst_first(calibration)[WORST:]),
            text_columns=2,
        )
        for name, calibration in calibrations(run)
    )  # fmt: skip


def _short_row(tensor: TensorDiagnosis) -> tuple[str, ...]:
    ours = chosen(tensor)
    return (
        tensor.name,
        ours.method,
        interval(ours.lo, ours.hi),
        _bits(tensor.bits_wasted),
        small_share(ours.clipped_frac),
        decibels(ours.sqnr_db),
        decibels(ours.inlier_sqnr_db),
    )


def first_token_table(run: Run) -> Table:
    """Returns the tensors whose first tokens stand out most, and what they would cost."""
    rows = []
    for name, calibration in calibrations(run):
        known = [
            (tensor.first_max_abs / tensor.others_max_abs, tensor)
            for tensor in calibration.tensors
            if math.isfinite(tensor.first_max_abs) and tensor.others_max_abs > 0
        ]
        for times, tensor in sorted(known, key=lambda pair: -pair[0])[:FIRST_TOKENS]:
            rows.append(
                (
                    name, tensor.name, "no" if calibration.excludes_first else "yes",
                    number(tensor.first_max_abs), number(tensor.others_max_abs),
                    number(times, 3), _bits(max(0.0, math.log2(times)) if times > 0 else 0.0),
                )
            )  # fmt: skip
    table = Table(
        title="What the first token does to a range",
        columns=(
            "model", "tensor", "first token in the range", "max |x|: first token", "other tokens",
            "times", "bits it takes",
        ),
        rows=tuple(rows),
        text_columns=3,
        note=f"The {FIRST_TOKENS} tensors where it stands out most. bits it takes: log2 of the "
        "largest magnitude with it over that without it, the bits that a symmetric min-max range "
        "spends on it; 0 where other tokens are as large.",
    )  # fmt: skip
    return _of_models(run, table)


def stability_table(run: Run) -> Table:
    """Returns how far ranges moved at growing sample counts."""
    rows = [
        (
            name, point.worst, number(point.samples), number(point.before),
            small_share(point.moved_max_frac), small_share(point.moved_median_frac),
        )
        for name, result in _files(run)
        for point in result.stability
    ]  # fmt: skip
    return Table(
        title="Stability against the number of samples",
        columns=(
            "model",
            "tensor that moved most",
            "samples",
            "compared with",
            "moved: most",
            "median",
        ),
        rows=tuple(dict.fromkeys(rows)),  # calibration.json repeats what ranges.json says
        text_columns=2,
    )


def set_table(run: Run) -> Table:
    """Returns the data that the ranges were fixed on."""
    rows = [
        (
            name, data.source, data.named_set or NOT_AVAILABLE,
            data.set_sha256[:16] or NOT_AVAILABLE, data.licence or NOT_AVAILABLE,
            number(data.sequences), number(data.tokens),
        )
        for name, result in _files(run)
        for data in [result.data]
    ]  # fmt: skip
    return Table(
        title="Calibration data",
        columns=(
            "model", "source", "named set", "sha256 of the set", "licence", "samples", "tokens",
        ),
        rows=tuple(dict.fromkeys(rows)),
        text_columns=5,
    )  # fmt: skip


def smoothing_table(run: Run) -> Table:
    """Returns the groups whose outliers move into the weights, the largest gain first."""
    rows = []
    for name, result in ranges(run):
        gains = sorted(
            result.smoothing.items(),
            key=lambda item: item[1].expected_error - item[1].expected_error_without,
        )
        for group, found in gains:
            rows.append(
                (
                    name, group, found.producer, number(len(found.linears)), f"{found.alpha:.2f}",
                    number(highest(found.scales)), number(found.expected_error),
                    number(found.expected_error_without),
                )
            )  # fmt: skip
    return Table(
        title="Smoothing groups",
        columns=(
            "model", "group", "folded into", "linear layers", "alpha", "largest scale",
            "expected error", "without",
        ),
        rows=tuple(rows),
        text_columns=3,
        note="Expected error of the group's outputs, relative to their power.",
    )  # fmt: skip


def waived_table(run: Run) -> Table:
    """Returns the tensors that failed a guard which was waived."""
    return Table(
        title="Waived guards",
        columns=("model", "tensor", "point", "failed"),
        rows=tuple(
            (name, tensor, found.point, ", ".join(found.waived))
            for name, result in ranges(run)
            for tensor, found in result.tensors.items()
            if found.waived
        ),
        text_columns=4,
    )


def _files(run: Run) -> list[tuple[str, Calibration | Ranges]]:
    return [*calibrations(run), *ranges(run)]


def _bits(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else number(value)


def _grid(tensor: TensorDiagnosis) -> str:
    return f"{tensor.bits} bits {'symmetric' if tensor.symmetric else 'asymmetric'}"


def _of(run: Run, name: str) -> str:
    return f" of {name}" if len(run.calibrations) > 1 else ""


def _of_models(run: Run, table: Table) -> Table:
    """Returns the table without the column `model` where there is one calibration."""
    return table if len(run.calibrations) > 1 else without(table, "model")
