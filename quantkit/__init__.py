"""quantkit: where a transformer's outliers are, what they cost, and how to ship without the cost.

The verbs are functions (`quantkit.stats(...)`), the modules are nouns. Nothing heavy is imported
until a verb is looked up: `import quantkit` loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

__version__ = "0.1.0"

VERBS: Final[dict[str, tuple[str, str]]] = {
    "stats": ("quantkit.pipelines", "run_stats"),
    "calibrate": ("quantkit.pipelines", "run_calibrate"),
    "sensitivity": ("quantkit.pipelines", "run_sensitivity"),
    "sweep": ("quantkit.pipelines", "run_sweep"),
    "export": ("quantkit.pipelines", "run_export"),
    "diagnose": ("quantkit.pipelines", "run_diagnose"),
    "compare": ("quantkit.pipelines", "run_compare"),
    "report": ("quantkit.reporting", "write_report"),
    "train": ("quantkit.pipelines", "run_train"),
    "record": ("quantkit.outliers", "record"),
    "record_qk": ("quantkit.probes", "record_qk"),
    "QuantkitQuantizer": ("quantkit.exporting", "QuantkitQuantizer"),
}
"""Public function, or class that another library takes -> (the module that has it, its name)."""

__all__ = [
    "QuantkitQuantizer",
    "__version__",
    "calibrate",
    "compare",
    "diagnose",
    "export",
    "record",
    "record_qk",
    "report",
    "sensitivity",
    "stats",
    "sweep",
    "train",
]

if TYPE_CHECKING:
    from quantkit.exporting import QuantkitQuantizer
    from quantkit.outliers import record
    from quantkit.pipelines import run_calibrate as calibrate
    from quantkit.pipelines import run_compare as compare
    from quantkit.pipelines import run_diagnose as diagnose
    from quantkit.pipelines import run_export as export
    from quantkit.pipelines import run_sensitivity as sensitivity
    from quantkit.pipelines import run_stats as stats
    from quantkit.pipelines import run_sweep as sweep
    from quantkit.pipelines import run_train as train
    from quantkit.probes import record_qk
    from quantkit.reporting import write_report as report


def __getattr__(name: str) -> Any:
    """Returns a verb, importing what it needs now."""
    if name not in VERBS:
        raise AttributeError(f"module 'quantkit' has no attribute {name!r}")
    module, attribute = VERBS[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
