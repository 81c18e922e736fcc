"""JSON in, HTML and Markdown out; never loads torch, nor what draws before a page is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantkit.reporting.calibration_terminal import calibration_text
from quantkit.reporting.diagnosis_terminal import diagnosis_text
from quantkit.reporting.plan_terminal import plan_text
from quantkit.reporting.sensitivity_terminal import sensitivity_text
from quantkit.reporting.sweep_terminal import sweep_text
from quantkit.reporting.terminal import (
    export_text,
    ranges_text,
    stats_text,
    terminal_tables,
    topk_text,
)
from quantkit.reporting.training_terminal import training_text

__all__ = [
    "calibration_text",
    "diagnosis_text",
    "export_text",
    "plan_text",
    "ranges_text",
    "sensitivity_text",
    "stats_text",
    "sweep_text",
    "terminal_tables",
    "topk_text",
    "training_text",
    "write_report",
]


def write_report(
    run_folders: Sequence[Path], out: Path, *, against: Path | None = None
) -> tuple[Path, ...]:
    """Writes the page of these runs and its Markdown twin, see `report.write_report`."""
    from quantkit.reporting.report import write_report as write

    return write(run_folders, out, against=against)
