"""Pipelines: what each command does, from a job to a finished run folder."""

from quantkit.pipelines.calibrate import run_calibrate
from quantkit.pipelines.compare import run_compare
from quantkit.pipelines.diagnose import run_diagnose
from quantkit.pipelines.export import run_export
from quantkit.pipelines.sensitivity import run_sensitivity
from quantkit.pipelines.stats import run_stats
from quantkit.pipelines.sweep import plan_sweep, run_sweep
from quantkit.pipelines.train import run_train

__all__ = [
    "plan_sweep",
    "run_calibrate",
    "run_compare",
    "run_diagnose",
    "run_export",
    "run_sensitivity",
    "run_stats",
    "run_sweep",
    "run_train",
]
