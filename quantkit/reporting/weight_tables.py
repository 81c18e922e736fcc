"""The table of the ranges of weights: what each module's cost, by absmax and as chosen."""

from __future__ import annotations

from quantkit.reporting.calibration_groups import ranges, weight_granularity
from quantkit.reporting.collect import Run
from quantkit.reporting.text import Table, decibels
from quantkit.results import WeightFigures


def weight_tables(run: Run) -> tuple[Table, ...]:
    """Returns the modules by their worst channel, the lowest first, one table a file."""
    many = len(run.ranges) > 1
    return tuple(
        Table(
            title=f"Ranges of weights{f' of {name}' if many else ''}: {info.method} at "
            f"{info.bits} bits by {weight_granularity(info)}",
            columns=(
                "module", "SQNR, dB: absmax", "chosen", "worst channel, dB: absmax", "chosen"
            ),
            rows=tuple(
                _row(module, found)
                for module, found in sorted(
                    info.modules.items(), key=lambda item: item[1].worst_channel_sqnr_db
                )
            ),
            note="Of the weight itself, not of what it multiplies; worst channel: the output "
            "channel that keeps least.",
        )
        for name, result in ranges(run)
        if (info := result.weights) is not None
    )  # fmt: skip


def _row(module: str, found: WeightFigures) -> tuple[str, ...]:
    figures = (
        found.absmax_sqnr_db,
        found.sqnr_db,
        found.worst_channel_absmax_sqnr_db,
        found.worst_channel_sqnr_db,
    )
    return (module, *map(decibels, figures))
