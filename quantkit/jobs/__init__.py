"""What each command is asked to do, as data: one frozen job a command, and its output folder.

A job checks its own words and numbers when it is made, so that a wrong one costs no model load.
"""

from quantkit.jobs.calibrate import CalibrateJob
from quantkit.jobs.choices import (
    ATTENTION_BITS,
    BOS,
    CALIBRATION_POINTS,
    DEFAULT_CALIBRATION_POINTS,
    DEFAULT_EVAL_SAMPLES,
    DEFAULT_SAMPLES,
    DEFAULT_SYMMETRIC,
    DEFAULT_TEXT,
    DEFAULT_WEIGHT_BITS,
    DEFAULT_WEIGHT_METHOD,
    DEVICE_MAPS,
    DTYPES,
    GUARDS,
    KV_CACHE,
    LAYOUTS,
    OPSETS,
    RANGE_GRANULARITIES,
    SHIPPED_PAIR,
    STATS_POINTS,
    UNTIL_STABLE_SAMPLES,
)
from quantkit.jobs.compare import PAIR_DEFAULTS, CompareJob
from quantkit.jobs.diagnose import DiagnoseJob
from quantkit.jobs.export import ExportJob, with_attention_bits
from quantkit.jobs.formats import EXPORT_NAMES, STORAGES, ExportFormat, Storage
from quantkit.jobs.naming import NOT_CONFIG, Job, config_hash, default_out
from quantkit.jobs.pair import ARMS, Data, PairSpec, Records, Sizes, TextSource, Training, flat
from quantkit.jobs.sensitivity import SensitivityJob
from quantkit.jobs.stats import StatsJob, memory_limits
from quantkit.jobs.sweep import NamedModel, SweepJob
from quantkit.jobs.tasks import (
    TASKS,
    IclSpec,
    ImageClassificationSpec,
    LmEvalSpec,
    MultipleChoiceSpec,
    NeedlesSpec,
    PerplexitySpec,
    TaskSpec,
    parse_task,
    reads_text,
)
from quantkit.jobs.train import TrainJob
from quantkit.numerics.methods import METHODS, WEIGHT_METHODS

__all__ = [
    "ARMS",
    "ATTENTION_BITS",
    "BOS",
    "CALIBRATION_POINTS",
    "DEFAULT_CALIBRATION_POINTS",
    "DEFAULT_EVAL_SAMPLES",
    "DEFAULT_SAMPLES",
    "DEFAULT_SYMMETRIC",
    "DEFAULT_TEXT",
    "DEFAULT_WEIGHT_BITS",
    "DEFAULT_WEIGHT_METHOD",
    "DEVICE_MAPS",
    "DTYPES",
    "EXPORT_NAMES",
    "GUARDS",
    "KV_CACHE",
    "LAYOUTS",
    "METHODS",
    "NOT_CONFIG",
    "OPSETS",
    "PAIR_DEFAULTS",
    "RANGE_GRANULARITIES",
    "SHIPPED_PAIR",
    "STATS_POINTS",
    "STORAGES",
    "TASKS",
    "UNTIL_STABLE_SAMPLES",
    "WEIGHT_METHODS",
    "CalibrateJob",
    "CompareJob",
    "Data",
    "DiagnoseJob",
    "ExportFormat",
    "ExportJob",
    "IclSpec",
    "ImageClassificationSpec",
    "Job",
    "LmEvalSpec",
    "MultipleChoiceSpec",
    "NamedModel",
    "NeedlesSpec",
    "PairSpec",
    "PerplexitySpec",
    "Records",
    "SensitivityJob",
    "Sizes",
    "StatsJob",
    "Storage",
    "SweepJob",
    "TaskSpec",
    "TextSource",
    "TrainJob",
    "Training",
    "config_hash",
    "default_out",
    "flat",
    "memory_limits",
    "parse_task",
    "reads_text",
    "with_attention_bits",
]
