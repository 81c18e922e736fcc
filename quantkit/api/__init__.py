"""The Python API: the commands as functions, and `load` for what they wrote.

| verb | returns |
|---|---|
| `stats(MODEL, DATA)` | `Stats`; also of an nn.Module |
| `calibrate(MODEL, SET)` | `Calibrated`: `Ranges` and `Calibration` |
| `sensitivity(MODEL, RANGES)` | `Sensitivity` |
| `sweep(MODELS)` | `Sweep` |
| `export(MODEL)` | `Export` |
| `diagnose(FLOAT, QUANTIZED)` | `Diagnosis` |
| `compare(MODELS)` | `Comparison`: all of these of each model |
| `train(PAIR)` | `TrainingResult` |
| `report(RUNS)` | the paths that it wrote |
| `load(PATH)` | whichever of these lies there |

Every result knows its `folder`, and notebooks show it as a table.
"""

from quantkit.api.folders import Calibrated, Comparison, load
from quantkit.api.verbs import (
    calibrate,
    compare,
    diagnose,
    export,
    report,
    sensitivity,
    stats,
    sweep,
    train,
)

__all__ = [
    "Calibrated",
    "Comparison",
    "calibrate",
    "compare",
    "diagnose",
    "export",
    "load",
    "report",
    "sensitivity",
    "stats",
    "sweep",
    "train",
]
