"""quantkit: where a transformer's outliers are, what they cost, and how to ship without the cost.

The verbs are functions (`quantkit.stats(...)`), the modules are nouns. `import quantkit` loads
neither torch nor transformers, and nor does looking up a verb of `quantkit.api`: calling it does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

__version__ = "0.1.0"

VERBS: Final[dict[str, tuple[str, str]]] = {
    "stats": ("quantkit.api", "stats"),
    "calibrate": ("quantkit.api", "calibrate"),
    "sensitivity": ("quantkit.api", "sensitivity"),
    "sweep": ("quantkit.api", "sweep"),
    "export": ("quantkit.api", "export"),
    "diagnose": ("quantkit.api", "diagnose"),
    "compare": ("quantkit.api", "compare"),
    "report": ("quantkit.api", "report"),
    "train": ("quantkit.api", "train"),
    "load": ("quantkit.api", "load"),
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
    "load",
    "record",
    "record_qk",
    "report",
    "sensitivity",
    "stats",
    "sweep",
    "train",
]

if TYPE_CHECKING:
    from quantkit.api import (
        calibrate,
        compare,
        diagnose,
        export,
        load,
        report,
        sensitivity,
        stats,
        sweep,
        train,
    )
    from quantkit.exporting import QuantkitQuantizer
    from quantkit.outliers import record
    from quantkit.probes import record_qk


def __getattr__(name: str) -> Any:
    """Returns a verb, importing what it needs now."""
    if name not in VERBS:
        raise AttributeError(f"module 'quantkit' has no attribute {name!r}")
    module, attribute = VERBS[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
