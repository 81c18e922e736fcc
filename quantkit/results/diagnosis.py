"""`diagnosis.json`: where a quantized graph parts from its float graph, and which quantizer did it.

Words: *local* is what a quantizer alone does to the float graph's values; *arriving* is the error
that stands in its tensor already; *alone* is what the output loses when, of all quantizers, only
this one is switched on in the float graph. Inliers are a tensor's elements between its 0.05 % and
its 99.95 % quantile: a single large element hides the error of all others. Levels are in dB,
10 log10(sum x^2 / sum (x - x')^2); what was not measured is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal

from quantkit.results.info import DataInfo
from quantkit.results.result import Result

DIAGNOSIS_SCHEMA: Final = "quantkit.diagnosis/1"

Severity = Literal["broken", "costly", "note"]


@dataclass(frozen=True, kw_only=True)
class GraphInfo:
    """One .onnx file. `sha256`: of the file alone; `domains`: nodes of each operator domain."""

    source: str
    sha256: str
    opset: int
    nodes: int
    domains: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class TensorError:
    """One tensor that both graphs compute, in the order of the float graph.

    Attributes:
        name, quantized_name: In either graph.
        op, layer: The float graph's node that writes it.
        sqnr_db, inlier_sqnr_db, cosine: Quantized against float.
        relative_error: sqrt(sum (x - x')^2 / sum x^2), of the inliers.
        jump: Relative error over the largest one of what its node reads; inf where that is 0.
        elements: Compared.
    """

    name: str
    quantized_name: str
    op: str
    layer: str
    sqnr_db: float
    inlier_sqnr_db: float
    relative_error: float
    cosine: float
    jump: float
    elements: int


@dataclass(frozen=True, kw_only=True)
class QuantizerDiagnosis:
    """One quantizer: its grid, what the float tensor makes of it, and what it costs.

    Attributes:
        name, op: The node, or the product whose weight it is.
        place: `input`, `output`, `logits`, `probabilities` or `weight`, of `layer`.
        kind: `static`, `dynamic` (the graph finds its range as it runs) or `weight`.
        lo, hi: Ends of the grid in real numbers, the outermost over channels.
        tensor_min, tensor_max, span_lo, span_hi: Of the float tensor; the span holds 99.9 % of it.
        wasted_bits: log2 of the grid's width over the span's; NaN for dynamic and weights.
        median_steps: Median |x| over the largest step, the mean over samples.
        below_frac, above_frac: Shares of elements beyond either end of the grid.
        levels_used, levels: Of the grid; of the visible logits where there is a mask; 0: unknown.
        hidden_frac: Logits that cannot matter to their Softmax: masked, or 40 below their row's
            largest. They are left out of every figure but `tensor_min` and `tensor_max`.
        visible_frac: Share of the grid's width that the other logits span.
        local_sqnr_db, local_inlier_sqnr_db: What this quantizer alone does to the float tensor; of
            a weight only the whole is measured, its inliers are NaN (`null` in the file).
        arriving_sqnr_db: Error of its tensor before it, of the inliers.
        worst_channel, worst_channel_sqnr_db: Of a weight; -1 else.
        alone: What the output loses by this quantizer alone, in `Diagnosis.metric`.
        share: `alone` over the sum of all that were measured.
    """

    name: str
    op: str
    tensor: str
    layer: str
    place: str
    kind: str
    dtype: str
    granularity: str
    scale_min: float
    scale_max: float
    zero_point_min: int
    zero_point_max: int
    lo: float
    hi: float
    tensor_min: float
    tensor_max: float
    span_lo: float
    span_hi: float
    wasted_bits: float
    median_steps: float
    below_frac: float
    above_frac: float
    levels_used: int
    levels: int
    hidden_frac: float
    visible_frac: float
    local_sqnr_db: float
    local_inlier_sqnr_db: float
    arriving_sqnr_db: float
    worst_channel: int
    worst_channel_sqnr_db: float
    alone: float
    share: float


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the ranked table.

    Attributes:
        severity: `broken` (wrong whatever the data), `costly` (the output loses by it), `note`.
        kind: `scale`, `mask`, `hidden`, `saturation`, `wide_range`, `outliers`, `rounding`,
            `weight`, `in_float`, `weight_only`, `domain` or `opset`.
        where: The tensor or layer, as people call it.
        quantizer: Name of the row that it is about; empty where it is about none.
        share: Of the damage; NaN where it was not measured.
        what: What was seen, with figures. `advice`: what to try.
    """

    severity: Severity
    kind: str
    where: str
    quantizer: str
    share: float
    what: str
    advice: str


@dataclass(frozen=True, kw_only=True, repr=False)
class Diagnosis(Result):
    """The whole of `diagnosis.json`; `findings` has the largest share of the damage first.

    Attributes:
        metric: What `total` and `alone` are: `kl`, the mean KL(float || quantized) of the output
            `logits` in nats; or `relative`, sum (x - x')^2 / sum x^2 over all float outputs.
        total: Of the quantized graph as it is; `measured`: quantizers with an `alone`, on the
            first `alone_samples` samples.
        begins: The first tensor in graph order whose inliers are off by 10 % or more, and by twice
            what its node read; empty where none is.
        in_float, weight_only: Layers with constant weights and no quantizer, or none on the input.
        unmatched: Tensors of the float graph that the quantized one does not show.
    """

    schema: str = DIAGNOSIS_SCHEMA
    float_graph: GraphInfo
    quantized_graph: GraphInfo
    data: DataInfo
    environment: dict[str, str]
    metric: str
    total: float
    measured: int
    alone_samples: int
    begins: str
    findings: list[Finding]
    quantizers: list[QuantizerDiagnosis]
    tensors: list[TensorError]
    in_float: list[str] = field(default_factory=list)
    weight_only: list[str] = field(default_factory=list)
    unmatched: int = 0
    warnings: list[str] = field(default_factory=list)

    OLDER: ClassVar[tuple[str, ...]] = ()
