"""`export.json`: what was exported, and the proof that it does what the model does."""

from __future__ import annotations

import builtins
from dataclasses import dataclass, field
from typing import ClassVar, Final

from quantkit.results.info import DataInfo, ModelInfo

EXPORT_SCHEMA: Final = "quantkit.export/3"


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    """One file of the export, relative to its folder."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Parity:
    """One comparison of ONNX Runtime with torch.

    Attributes:
        reference: What it was compared with.
        batch, seq_len, cached: Shape of the call; `cached` positions stood in the KV cache.
        max_abs: Largest |difference| of an output logit.
        cosine, top1_agreement: 0 to 1.
    """

    reference: str
    batch: int
    seq_len: int
    cached: int
    max_abs: float
    cosine: float
    top1_agreement: float
    passed: bool


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """The task metric of the float and of the quantized graph."""

    metric: str
    float: builtins.float
    quantized: builtins.float


@dataclass(frozen=True, kw_only=True)
class QuantizerInfo:
    """One quantizer of the graph; `hits` of 0 would have failed the export."""

    name: str
    qtype: str
    granularity: str
    scale_min: float
    scale_max: float
    hits: int


@dataclass(frozen=True, kw_only=True)
class Export:
    """The whole of `export.json`.

    Attributes:
        domains: Operator domains of the graph.
        parity: Keyed by graph: `float`, `quantized`.
        accuracy: None where no evaluation text was given.
        latency_ms: Milliseconds a call, keyed by `float`, `quantized`, ...
        passed: Every gate was met.
        kept: Names of quantizers of the recipe that were left in float.
        smoothed: Migration strength (alpha) of each group of linear layers whose input's scales
            were moved into its weights.
        ranges_sha256: Hash of the ranges, smoothing and kept quantizers that it was made from.
    """

    schema: str = EXPORT_SCHEMA
    model: ModelInfo
    data: DataInfo
    recipe: str
    opset: int
    domains: list[str]
    files: list[FileInfo]
    parity: dict[str, list[Parity]]
    accuracy: Accuracy | None = None
    latency_ms: dict[str, float] = field(default_factory=dict)
    quantizers: list[QuantizerInfo] = field(default_factory=list)
    passed: bool
    kept: list[str] = field(default_factory=list)
    smoothed: dict[str, builtins.float] = field(default_factory=dict)
    ranges_sha256: str = ""

    OLDER: ClassVar[tuple[str, ...]] = ("quantkit.export/1", "quantkit.export/2")
    """Schemas that are read too; what they lack has its default."""
