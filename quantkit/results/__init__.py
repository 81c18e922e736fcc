"""Versioned result files: frozen dataclasses and their JSON. Never loads torch.

| file | class | written by |
|---|---|---|
| `stats.json` | `Stats` | `quantkit stats` |
| `ranges.json` | `Ranges` | `quantkit calibrate` |
| `sweep.json` | `Sweep` | `quantkit sweep` |
| `export.json` | `Export` | `quantkit export` |
| `curves.jsonl` | `Curves` | `quantkit.monitoring` |
"""

from quantkit.results.curves import (
    Curves,
    CurvesHeader,
    CurveStep,
    HiddenCurve,
    LogitCurve,
    append_curves,
    prepare_curves,
    read_curves,
)
from quantkit.results.export import Accuracy, Export, FileInfo, Parity, QuantizerInfo
from quantkit.results.info import DataInfo, ModelInfo
from quantkit.results.io import dumps, read_json, read_plain, schema_of, to_plain, write_json
from quantkit.results.ranges import Range, Ranges
from quantkit.results.stats import (
    TOP_RANKS,
    DifferentialLayer,
    GroupStats,
    MassiveActivations,
    OutlierFeatures,
    OutlierTokens,
    PointSummary,
    ProbeHits,
    Stats,
    StatsSummary,
    TokenClass,
    TokenOutlier,
    TopEntry,
)
from quantkit.results.sweep import Cell, Delta, Sweep

__all__ = [
    "TOP_RANKS",
    "Accuracy",
    "Cell",
    "CurveStep",
    "Curves",
    "CurvesHeader",
    "DataInfo",
    "Delta",
    "DifferentialLayer",
    "Export",
    "FileInfo",
    "GroupStats",
    "HiddenCurve",
    "LogitCurve",
    "MassiveActivations",
    "ModelInfo",
    "OutlierFeatures",
    "OutlierTokens",
    "Parity",
    "PointSummary",
    "ProbeHits",
    "QuantizerInfo",
    "Range",
    "Ranges",
    "Stats",
    "StatsSummary",
    "Sweep",
    "TokenClass",
    "TokenOutlier",
    "TopEntry",
    "append_curves",
    "dumps",
    "prepare_curves",
    "read_curves",
    "read_json",
    "read_plain",
    "schema_of",
    "to_plain",
    "write_json",
]
