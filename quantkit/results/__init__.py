"""Versioned result files: frozen dataclasses and their JSON. Never loads torch.

| file | class | written by |
|---|---|---|
| `stats.json` | `Stats` | `quantkit stats` |
| `ranges.json` | `Ranges` | `quantkit calibrate` |
| `sweep.json` | `Sweep` | `quantkit sweep` |
| `export.json` | `Export` | `quantkit export` |
"""

from quantkit.results.export import Accuracy, Export, FileInfo, Parity, QuantizerInfo
from quantkit.results.info import DataInfo, ModelInfo
from quantkit.results.io import dumps, read_json, read_plain, schema_of, to_plain, write_json
from quantkit.results.ranges import Range, Ranges
from quantkit.results.stats import (
    TOP_RANKS,
    GroupStats,
    MassiveActivations,
    OutlierFeatures,
    PointSummary,
    Stats,
    StatsSummary,
    TokenClass,
    TopEntry,
)
from quantkit.results.sweep import Cell, Delta, Sweep

__all__ = [
    "TOP_RANKS",
    "Accuracy",
    "Cell",
    "DataInfo",
    "Delta",
    "Export",
    "FileInfo",
    "GroupStats",
    "MassiveActivations",
    "ModelInfo",
    "OutlierFeatures",
    "Parity",
    "PointSummary",
    "QuantizerInfo",
    "Range",
    "Ranges",
    "Stats",
    "StatsSummary",
    "Sweep",
    "TokenClass",
    "TopEntry",
    "dumps",
    "read_json",
    "read_plain",
    "schema_of",
    "to_plain",
    "write_json",
]
