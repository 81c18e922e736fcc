"""Versioned result files: frozen dataclasses and their JSON. Never loads torch.

| file | class | written by |
|---|---|---|
| `stats.json` | `Stats` | `quantkit stats` |
| `ranges.json` | `Ranges` | `quantkit calibrate` |
| `calibration.json` | `Calibration` | `quantkit calibrate` |
| `sweep.json` | `Sweep` | `quantkit sweep` |
| `sensitivity.json` | `Sensitivity` | `quantkit sensitivity` |
| `export.json` | `Export` | `quantkit export` |
| `diagnosis.json` | `Diagnosis` | `quantkit diagnose` |
| `auto.json` | `AutoResult` | `quantkit export --quantize auto` |
| `training.json` | `TrainingResult` | `quantkit train` |
| `curves.jsonl` | `Curves` | `quantkit.monitoring` |
"""

from quantkit.results.auto import AutoResult, Trial
from quantkit.results.calibration import (
    Calibration,
    DrawnHistogram,
    MethodRange,
    TensorDiagnosis,
)
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
from quantkit.results.diagnosis import (
    Diagnosis,
    Finding,
    GraphInfo,
    QuantizerDiagnosis,
    TensorError,
)
from quantkit.results.export import (
    Accuracy,
    Component,
    ComponentMetadata,
    Export,
    FileInfo,
    Parity,
    QuantizerInfo,
)
from quantkit.results.info import DataInfo, ModelInfo
from quantkit.results.io import (
    decode,
    dumps,
    read_json,
    read_plain,
    schema_of,
    to_plain,
    write_json,
    written_whole,
)
from quantkit.results.plan import Plan, PlannedCell
from quantkit.results.ranges import Interval, Range, Ranges, Smoothing, StabilityPoint
from quantkit.results.result import Result
from quantkit.results.sensitivity import KeptPoint, Sensitivity, UnitSensitivity
from quantkit.results.stats import (
    TOP_RANKS,
    DifferentialLayer,
    GroupStats,
    MagnitudeSurface,
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
from quantkit.results.sweep import (
    AttentionMass,
    Cell,
    ChanceVerdict,
    Delta,
    Fired,
    SeedSpread,
    Sweep,
    TaskInfo,
)
from quantkit.results.training import (
    CorpusInfo,
    LossPoint,
    Measurement,
    SourceInfo,
    TrainedModel,
    TrainingResult,
)
from quantkit.results.weights import WeightFigures, WeightsInfo

__all__ = [
    "TOP_RANKS",
    "Accuracy",
    "AttentionMass",
    "AutoResult",
    "Calibration",
    "Cell",
    "ChanceVerdict",
    "Component",
    "ComponentMetadata",
    "CorpusInfo",
    "CurveStep",
    "Curves",
    "CurvesHeader",
    "DataInfo",
    "Delta",
    "Diagnosis",
    "DifferentialLayer",
    "DrawnHistogram",
    "Export",
    "FileInfo",
    "Finding",
    "Fired",
    "GraphInfo",
    "GroupStats",
    "HiddenCurve",
    "Interval",
    "KeptPoint",
    "LogitCurve",
    "LossPoint",
    "MagnitudeSurface",
    "MassiveActivations",
    "Measurement",
    "MethodRange",
    "ModelInfo",
    "OutlierFeatures",
    "OutlierTokens",
    "Parity",
    "Plan",
    "PlannedCell",
    "PointSummary",
    "ProbeHits",
    "QuantizerDiagnosis",
    "QuantizerInfo",
    "Range",
    "Ranges",
    "Result",
    "SeedSpread",
    "Sensitivity",
    "Smoothing",
    "SourceInfo",
    "StabilityPoint",
    "Stats",
    "StatsSummary",
    "Sweep",
    "TaskInfo",
    "TensorDiagnosis",
    "TensorError",
    "TokenClass",
    "TokenOutlier",
    "TopEntry",
    "TrainedModel",
    "TrainingResult",
    "Trial",
    "UnitSensitivity",
    "WeightFigures",
    "WeightsInfo",
    "append_curves",
    "decode",
    "dumps",
    "prepare_curves",
    "read_curves",
    "read_json",
    "read_plain",
    "schema_of",
    "to_plain",
    "write_json",
    "written_whole",
]
