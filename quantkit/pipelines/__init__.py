"""Pipelines: what each command does, from a job to a finished run folder."""

from quantkit.pipelines.stages import (
    run_calibrate,
    run_compare,
    run_export,
    run_stats,
    run_sweep,
)

__all__ = ["run_calibrate", "run_compare", "run_export", "run_stats", "run_sweep"]
