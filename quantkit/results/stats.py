"""`stats.json`: outlier statistics of one model on one text.

The strings in `PointSummary.definition` say which reading of a word a number follows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal

from quantkit.results.info import DataInfo, ModelInfo
from quantkit.results.result import Result

STATS_SCHEMA: Final = "quantkit.stats/4"
TOP_RANKS: Final = (1, 2, 3, 10, 100)
"""The ranks of the Differential Transformer paper's Table 5; `abs_top` has them as strings."""

TokenClass = Literal["all", "first", "others"]


@dataclass(frozen=True, kw_only=True)
class TopEntry:
    """One extreme element and where it stands.

    Attributes:
        value: Signed.
        sequence: Index of the sequence in the slice.
        position: Token position: of the hidden state, or of the logit's query.
        layer: Where the entry is listed outside of its layer, else None.
        channel: Of a hidden state.
        key: Position of a logit's key.
        token: Text of the token at `position` (of a logit: at `key`).
        query_token: Of a logit, text of the token at `position`.
    """

    value: float
    sequence: int
    position: int
    channel: int | None = None
    key: int | None = None
    token: str | None = None
    layer: int | None = None
    query_token: str | None = None


@dataclass(frozen=True, kw_only=True)
class PointSummary:
    """One point of the model, pooled over layers, heads, maps and token classes.

    Attributes:
        abs_top: |x| at rank "1", "2", "3", "10", "100".
        abs_median: Median of |x|; right to `median_relative_error`.
        abs_quantiles: Further quantiles of |x|, keyed by their fraction, e.g. "0.999".
        max, min: Signed extremes (`max` is the max logit of QK-Clip).
        count: Elements that entered; `excluded`: masked elements that did not.
        nan_count, inf_count: Of `count`; they enter no other figure.
        kurtosis: Pearson, non-excess, pooled over elements: a Gaussian has 3.
        inf_norm_mean: Mean over sequences of the per-sequence max |x|.
        abs_max: The largest |x| of all.
        definition: What the point is, in one sentence.
    """

    abs_top: dict[str, float]
    abs_median: float
    max: float
    min: float
    count: int
    excluded: int
    kurtosis: float
    inf_norm_mean: float
    abs_max: float
    definition: str
    median_relative_error: float
    abs_quantiles: dict[str, float] = field(default_factory=dict)
    nan_count: int = 0
    inf_count: int = 0


@dataclass(frozen=True, kw_only=True)
class GroupStats:
    """One layer (None: all), head (None: all), map (None: all) and token class of a point.

    Attributes:
        name: Qualified name of the layer's module.
        kurtosis_oft: Mean over sequences of the per-sequence kurtosis (Quantizable Transformers).
        span_999_frac: Share of [min, max] that the middle 99.9 % of the values take, 0 to 1.
        entropy: Mean over query rows of the attention's entropy, nats; of class "all".
        first_token_attention: Mean share of attention to the first token, over queries 1 to 63.
        sink_rate: Share of sequences where that share exceeds 0.3.
        negative_frac: Share of weights below zero, of an effective attention map.
        row_sum: Mean sum of a row, of an effective attention map: 1 - lambda.
        channel_absmax: max |x| by channel, six digits; `channel_ratio`: the largest of them over
            their median.
    """

    layer: int | None
    head: int | None
    map: int | None
    token_class: TokenClass
    abs_top: dict[str, float]
    abs_median: float
    max: float
    min: float
    count: int
    kurtosis: float
    inf_norm_mean: float | None = None
    top: list[TopEntry] = field(default_factory=list)
    name: str | None = None
    abs_max: float = math.nan
    abs_quantiles: dict[str, float] = field(default_factory=dict)
    nan_count: int = 0
    inf_count: int = 0
    kurtosis_oft: float | None = None
    span_999_frac: float = math.nan
    entropy: float | None = None
    first_token_attention: float | None = None
    sink_rate: float | None = None
    negative_frac: float | None = None
    row_sum: float | None = None
    channel_absmax: list[float] = field(default_factory=list)
    channel_ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class MassiveActivations:
    """|x| > 100 and |x| >= 1000 x the median |x|.

    Attributes:
        count: With the median of each sequence and layer.
        count_pooled: With the median of each layer over all sequences.
        entries: The largest of them, with their layers.
    """

    count: int
    count_pooled: int
    entries: list[TopEntry] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class OutlierFeatures:
    """LLM.int8's rule: |x| >= 6 in >= 25 % of the layers and >= 6 % of the positions.

    Attributes:
        channels: The features that meet it, ascending.
        count: How many.
        layer_share: For each of them, the share of layers (0 to 1).
        position_share: For each of them, the share of sequence positions (0 to 1).
    """

    channels: list[int]
    count: int
    layer_share: list[float] = field(default_factory=list)
    position_share: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class TokenOutlier:
    """One outlier token: its largest |x| is `ratio` times the median token's."""

    layer: int
    sequence: int
    position: int
    ratio: float
    token: str | None = None


@dataclass(frozen=True, kw_only=True)
class OutlierTokens:
    """PrefixQuant's rule: max_c |x_t| > 64 x the median over tokens of max_c |x_t|.

    Attributes:
        count: (sequence, layer, token) that meet it, with the median of each sequence and layer.
        count_pooled: With the median of each layer over all sequences.
        by_layer: `count` of each layer.
        entries: The largest of them.
    """

    count: int = 0
    count_pooled: int = 0
    by_layer: list[int] = field(default_factory=list)
    entries: list[TokenOutlier] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class DifferentialLayer:
    """lambda of one differential layer.

    Attributes:
        lambda_mean: Over batch, heads and positions where it depends on them (DIFF V2), else the
            number itself; `lambda_min`, `lambda_max`: its range.
        row_sum: Measured mean sum of the effective map's rows; 1 - lambda.
        negative_frac: Share of valid weights of the effective map that are negative.
    """

    layer: int
    lambda_mean: float
    lambda_min: float
    lambda_max: float
    row_sum: float
    negative_frac: float


@dataclass(frozen=True, kw_only=True)
class MagnitudeSurface:
    """max |x| by token and channel of one sequence: the one that holds the point's largest |x|.

    Of equals it is the first layer's, then the first sequence's. A bin is some neighbouring tokens
    by some neighbouring channels; up to 64 tokens and 96 channels have a bin each. Of more, the
    three largest tokens, and channels, have one each, and the others share bins of one width.
    Padding is left out; NaN and inf do not take part.

    Attributes:
        layer, name: The point's worst layer and its module.
        sequence: Index of the sequence in the slice.
        positions: Of each token bin the first token; the last bin ends at `last_position`.
        largest_positions: Of each token bin the token with the largest |x|; `tokens`: its text,
            None where there is none.
        channels: Of each channel bin the first channel; of `channel_count`.
        abs_max: By token bin, then channel bin: max |x|, six digits.
    """

    layer: int
    name: str
    sequence: int
    positions: list[int]
    last_position: int
    largest_positions: list[int]
    tokens: list[str | None]
    channels: list[int]
    channel_count: int
    abs_max: list[list[float]]


@dataclass(frozen=True, kw_only=True)
class ProbeHits:
    """Proof of execution of one probe: forward calls, and elements that went through."""

    point: str
    name: str
    calls: int
    elements: int


@dataclass(frozen=True, kw_only=True)
class StatsSummary:
    """The figures a report opens with; `sink_rate` is a share, 0 to 1 (NaN: no attention).

    `attention_logit_unmasked` is the second reading, all of QK^T, where it was asked for.
    """

    attention_logit: PointSummary
    hidden_state: PointSummary
    sink_rate: float
    massive_activations: MassiveActivations
    outlier_features: OutlierFeatures
    outlier_tokens: OutlierTokens = field(default_factory=OutlierTokens)
    attention_entropy: float | None = None
    attention_logit_unmasked: PointSummary | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Stats(Result):
    """The whole of `stats.json`; `points` is keyed by point name, e.g. `attention_logit`.

    Attributes:
        sampled_rows: Query rows a sequence and layer that entered moments and histogram of the
            attention points; None: all. Extremes and top-k are of all rows in any case.
        differential: One entry a layer of a differential model.
        hits: Every probe: calls and elements.
        allow_unseen: Patterns of modules that need not run; `waived`: those that did not.
        warnings: One sentence each, e.g. where NaN were seen.
        surfaces: By point, of hidden states and of MLP down-projection inputs where measured.
    """

    schema: str = STATS_SCHEMA
    model: ModelInfo
    data: DataInfo
    environment: dict[str, str]
    summary: StatsSummary
    points: dict[str, list[GroupStats]]
    sampled_rows: int | None = None
    seed: int = 0
    processes: int = 1
    differential: list[DifferentialLayer] = field(default_factory=list)
    hits: list[ProbeHits] = field(default_factory=list)
    allow_unseen: list[str] = field(default_factory=list)
    waived: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    surfaces: dict[str, MagnitudeSurface] = field(default_factory=dict)

    OLDER: ClassVar[tuple[str, ...]] = (
        "quantkit.stats/1",
        "quantkit.stats/2",
        "quantkit.stats/3",
    )
    """Schemas that are read too; what they lack has its default."""
