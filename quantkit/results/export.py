"""`export.json`: what was exported, and the proof that it does what the model does."""

from __future__ import annotations

import builtins
from dataclasses import dataclass, field
from typing import ClassVar, Final

from quantkit.results.info import DataInfo, ModelInfo
from quantkit.results.result import Result

EXPORT_SCHEMA: Final = "quantkit.export/4"


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
    """The task metric of the float and of the quantized graph, both in ONNX Runtime.

    Attributes:
        change, change_low, change_high: What quantization changed, with its 95 % interval of paired
            resampled units: quantized / float for a perplexity, quantized - float else. None where
            there is one unit only, or in an older file.
        loss: The change as a loss: relative for a perplexity, in the metric's units else; below 0
            where quantization helped.
        units: How many were resampled, e.g. blocks.
    """

    metric: str
    float: builtins.float
    quantized: builtins.float
    change: builtins.float | None = None
    change_low: builtins.float | None = None
    change_high: builtins.float | None = None
    loss: builtins.float | None = None
    units: int | None = None


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
class ComponentMetadata:
    """How transformers' runner calls one graph; a part of its `ExportMetadata`.

    Attributes:
        kwargs: Keyed by argument of a call.
        out_spec: What it returns, as torch's pytrees write it.
    """

    architecture: str
    export_dtype: str
    kwargs: dict[str, dict[str, str]]
    out_spec: str


@dataclass(frozen=True, kw_only=True)
class Component:
    """One graph, for `transformers.exporters.ExportedModel.from_pretrained`."""

    file: str
    metadata: ComponentMetadata


@dataclass(frozen=True, kw_only=True, repr=False)
class Export(Result):
    """The whole of `export.json`.

    Attributes:
        domains: Operator domains of the graph.
        parity: Keyed by graph: `float`, `quantized`.
        accuracy: None where no evaluation text was given.
        latency_ms: Milliseconds a call, medians of paired calls: `float` and `quantized` of a
            prompt of `prefill_tokens`; `float_decode` and `quantized_decode` of one token behind
            `decode_cached` others.
        memory_bytes: Largest resident set of a process that loads the graph and runs that prompt,
            above one that has only imported ONNX Runtime: `float`, `quantized`.
        environment: Versions, the processor and its vector extensions.
        storage, layout: As asked for, see `quantkit.jobs`.
        precision: Of the floats, e.g. `float32`, or `float16` where the graph was halved.
        export_format, components: By these transformers' `ExportedModel.from_pretrained` reads this
            file, too; the graph is the component `model`.
        searched: File with all that `auto` tried, beside this one; empty where it was not asked.
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
    memory_bytes: dict[str, int] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    storage: str = "qdq"
    layout: str = "transformers"
    precision: str = "float32"
    searched: str = ""
    export_format: str = "onnx"
    components: dict[str, Component] = field(default_factory=dict)

    OLDER: ClassVar[tuple[str, ...]] = tuple(f"quantkit.export/{n}" for n in (1, 2, 3))
    """Schemas that are read too; what they lack has its default."""
