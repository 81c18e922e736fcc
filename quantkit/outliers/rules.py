"""The rules on the hidden states of a whole sequence: massive, feature, outlier token.

They are applied to one sequence and layer at a time; `RuleRecord` adds up what they found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from quantkit.numerics.observers import Bundle, Histogram
from quantkit.numerics.outliers import (
    MASSIVE_ABOVE,
    MASSIVE_TIMES_MEDIAN,
    TOKEN_RATIO_ABOVE,
    massive_mask,
)
from quantkit.numerics.tokens import TokenSummary, abs_median
from quantkit.probes.places import pack

_KEPT: Final = 20

Massive = tuple[float, float, int, int]
"""(|x|, x, layer, tag) of a massive activation."""
Outlying = tuple[float, int, int, int]
"""(ratio, layer, sequence, position) of an outlier token."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RuleRecord:
    """What the rules found in one layer; a monoid.

    Attributes:
        massive: Elements; `massive_top`: the largest of them.
        reached: int64 `[channels]`: positions at which a channel reaches |x| >= 6.
        tokens: Real positions.
        outlying: Tokens above the ratio; `outlying_top`: the furthest of them.
        token_tops: Histogram of the tokens' largest |x|, for the pooled median.
    """

    massive: int
    massive_top: list[Massive]
    reached: Tensor
    tokens: int
    outlying: int
    outlying_top: list[Outlying]
    token_tops: Histogram

    @classmethod
    def empty(cls, channels: int) -> Self:
        """Returns the record of nothing."""
        return cls(
            massive=0,
            massive_top=[],
            reached=torch.zeros(channels, dtype=torch.int64),
            tokens=0,
            outlying=0,
            outlying_top=[],
            token_tops=Histogram.empty(1),
        )

    def merge(self, other: Self) -> Self:
        """Returns the record of both parts."""
        return type(self)(
            massive=self.massive + other.massive,
            massive_top=sorted(self.massive_top + other.massive_top, reverse=True)[:_KEPT],
            reached=self.reached + other.reached,
            tokens=self.tokens + other.tokens,
            outlying=self.outlying + other.outlying,
            outlying_top=sorted(self.outlying_top + other.outlying_top, reverse=True)[:_KEPT],
            token_tops=self.token_tops.merge(other.token_tops),
        )

    def outlying_pooled(self) -> int:
        """Returns how many tokens exceed the ratio to the median token of all sequences.

        Read off the histogram: a token counts if its bin's lower edge does.
        """
        return _count_above(self.token_tops, TOKEN_RATIO_ABOVE, 0.0)


def apply_rules(
    x: Tensor, real: Tensor, summary: TokenSummary, *, layer: int, sequence: int
) -> RuleRecord:
    """Returns what the rules find in the hidden states of one sequence and layer.

    Args:
        x: float32 `[positions, channels]`; `real`: bool `[positions]`.
        summary: Of `x` and `real`, with the threshold of outlier features.
    """
    position = real.nonzero()[:, 0]
    tops = summary.token_top[position]
    massive, massive_top = _massive(x, position, tops, layer, sequence, summary.is_finite)
    ratio = tops / tops.median()
    outlying = (ratio > TOKEN_RATIO_ABOVE).nonzero()[:, 0]
    furthest = sorted(
        ((float(ratio[i]), layer, sequence, int(position[i])) for i in outlying.tolist()),
        reverse=True,
    )
    return RuleRecord(
        massive=massive,
        massive_top=massive_top,
        reached=summary.channel_reached,
        tokens=len(position),
        outlying=len(outlying),
        outlying_top=furthest[:_KEPT],
        token_tops=Histogram.empty(1).update(tops[None]),
    )


def _massive(
    x: Tensor, position: Tensor, tops: Tensor, layer: int, sequence: int, is_finite: bool
) -> tuple[int, list[Massive]]:
    """Returns how many massive activations there are, and the largest of them."""
    high = tops > MASSIVE_ABOVE
    if not bool(high.any()):
        return 0, []  # and no need for the median
    used = x if len(position) == len(x) else x[position]
    median = abs_median(used if is_finite else used[used.isfinite()])
    candidates = position[high].to(x.device)
    tokens = x[candidates].cpu()
    mask = massive_mask(tokens, median=median) & tokens.isfinite()
    row, channel = mask.nonzero(as_tuple=True)  # few: their median is a thousandth of them
    values = tokens[row, channel]
    found = []
    for index in values.abs().topk(min(_KEPT, len(values))).indices.tolist():
        value = float(values[index])
        place = pack(sequence, int(candidates[row[index]]), int(channel[index]))
        found.append((abs(value), value, layer, place))
    return len(values), found


def massive_pooled(bundle: Bundle) -> int:
    """Returns how many elements are massive by the median of a layer over all sequences.

    Read off the histogram: an element counts if its bin's lower edge does.
    """
    return _count_above(bundle.histogram, MASSIVE_TIMES_MEDIAN, MASSIVE_ABOVE)


def _count_above(histogram: Histogram, times_median: float, least: float) -> int:
    median = float(histogram.quantile_abs(0.5)[0])
    threshold = max(least, times_median * median)
    counts = histogram.counts[0].sum(0).reshape(-1)
    return int(counts[histogram.edges() >= threshold].sum())
