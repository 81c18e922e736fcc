"""A training monitor: how attention logits and hidden-state outliers grow, one line a step.

    monitor.py      `OutlierMonitor`: two lines in a plain training loop
    trainer.py      `OutlierCallback`: the same for transformers' `Trainer`
    step.py         the figures of one step, from probes

The names below load on first use: importing this package loads no tensor library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.monitoring.monitor import OutlierMonitor
    from quantkit.monitoring.trainer import OutlierCallback

_HOME_OF = {"OutlierCallback": "trainer", "OutlierMonitor": "monitor"}

__all__ = ["OutlierCallback", "OutlierMonitor"]


def __getattr__(name: str) -> Any:
    """Returns a re-exported name, loading the file it lives in."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
