"""`stats.json`: outlier statistics of one model on one text.

The strings in `PointSummary.definition` say which reading of a word a number follows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from quantkit.results.info import DataInfo, ModelInfo

STATS_SCHEMA: Final = "quantkit.stats/1"
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
    """

    value: float
    sequence: int
    position: int
    channel: int | None = None
    key: int | None = None
    token: str | None = None
    layer: int | None = None


@dataclass(frozen=True, kw_only=True)
class PointSummary:
    """One point of the model, pooled over layers, heads, maps and token classes.

    Attributes:
        abs_top: |x| at rank "1", "2", "3", "10", "100".
        abs_median: Median of |x|; right to `median_relative_error`.
        max, min: Signed extremes (`max` is the max logit of QK-Clip).
        count: Elements that entered; `excluded`: masked elements that did not.
        kurtosis: Pearson, non-excess: a Gaussian has 3.
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


@dataclass(frozen=True, kw_only=True)
class GroupStats:
    """One layer, head (None: all), map (None: all) and token class of a point."""

    layer: int
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
class StatsSummary:
    """The figures a report opens with; `sink_rate` is a share, 0 to 1."""

    attention_logit: PointSummary
    hidden_state: PointSummary
    sink_rate: float
    massive_activations: MassiveActivations
    outlier_features: OutlierFeatures


@dataclass(frozen=True, kw_only=True)
class Stats:
    """The whole of `stats.json`; `points` is keyed by point name, e.g. `attention_logit`."""

    schema: str = STATS_SCHEMA
    model: ModelInfo
    data: DataInfo
    environment: dict[str, str]
    summary: StatsSummary
    points: dict[str, list[GroupStats]]
