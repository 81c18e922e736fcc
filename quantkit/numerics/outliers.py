"""The published definitions of outliers, on one tensor at a time.

Each takes the hidden states of one sequence and layer `[tokens, channels]`, or the attention
probabilities `[batch, heads, query, key]`, with padding already left out; who runs over layers
and sequences adds the results up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import InputError

MASSIVE_ABOVE = 100.0
MASSIVE_TIMES_MEDIAN = 1000.0
FEATURE_ABOVE = 6.0
FEATURE_LAYER_FRAC = 0.25
FEATURE_POSITION_FRAC = 0.06
TOKEN_RATIO_ABOVE = 64.0
SINK_ABOVE = 0.3
SINK_QUERIES = (1, 63)


def _states(x: Tensor) -> Tensor:
    if x.dim() != 2:
        raise InputError(f"Expected hidden states [tokens, channels], got {list(x.shape)}.")
    return x.detach().to(torch.float32)


def massive_mask(x: Tensor, *, median: float | Tensor | None = None) -> Tensor:
    """Returns where `x` [tokens, channels] holds massive activations, bool of the same shape.

    |x| > 100 and |x| >= 1000 x the median of |x| (Sun et al., "Massive Activations in Large
    Language Models", 2024). The median is that of `x`, so of one
    sequence and layer, unless `median` gives the pooled one.

    Raises:
        InputError: not two axes.
    """
    size = _states(x).abs()
    if size.numel() == 0:
        return torch.zeros_like(size, dtype=torch.bool)
    middle = size.median() if median is None else median
    return (size > MASSIVE_ABOVE) & (size >= MASSIVE_TIMES_MEDIAN * middle)


def outlier_feature_counts(x: Tensor, *, above: float = FEATURE_ABOVE) -> Tensor:
    """Returns in how many tokens each channel reaches |x| >= 6, int64 [channels].

    For `x` [tokens, channels] of one layer; add the counts of its sequences up.
    """
    return (_states(x).abs() >= above).sum(0)


@dataclass(frozen=True, kw_only=True, eq=False)
class OutlierFeatureShares:
    """Per channel: `layer_frac` (layers it was seen in), `position_frac` (of all positions of all
    layers), both float64 [channels], and `is_outlier`, bool [channels].
    """

    layer_frac: Tensor
    position_frac: Tensor
    is_outlier: Tensor


def outlier_features(
    counts: Tensor,
    tokens: int | Sequence[int],
    *,
    min_layer_frac: float = FEATURE_LAYER_FRAC,
    min_position_frac: float = FEATURE_POSITION_FRAC,
) -> OutlierFeatureShares:
    """Returns which channels are outlier features in the sense of LLM.int8.

    |x| >= 6 in the same channel in at least 25 % of the layers, and in at least 6 % of the
    sequence positions over all hidden states (Dettmers et al. 2022).

    Args:
        counts: [layers, channels] from `outlier_feature_counts`, summed over sequences.
        tokens: positions that each layer's counts are out of; one number where all are alike.

    Raises:
        InputError: no tokens, no layers, or not two axes.
    """
    total = tokens * len(counts) if isinstance(tokens, int) else sum(tokens)
    if counts.dim() != 2 or counts.shape[0] == 0 or total < 1:
        raise InputError(
            "Expected counts [layers, channels] of at least 1 layer and 1 token, "
            f"got {list(counts.shape)} and {tokens} tokens."
        )
    layer_frac = (counts > 0).to(torch.float64).mean(0)
    position_frac = counts.to(torch.float64).sum(0) / total
    return OutlierFeatureShares(
        layer_frac=layer_frac,
        position_frac=position_frac,
        is_outlier=(layer_frac >= min_layer_frac) & (position_frac >= min_position_frac),
    )


def first_token_attention(
    attention: Tensor,
    *,
    queries: tuple[int, int] = SINK_QUERIES,
    signed: bool = True,
    lengths: Tensor | None = None,
) -> Tensor:
    """Returns the mean share of attention that goes to key 0, float32 [batch, heads].

    The share of a row is |a_0| / sum |a|, the definition for signed maps. With `signed=False` it is
    the probability a_0 itself: the same for a softmax row, and less where a learned sink takes part
    of the softmax. Averaged over queries 1 to 63 (query 0 sees only itself). NaN where a sequence
    has no such query.

    Args:
        attention: after the softmax (and after the difference of two maps),
            [batch, heads, query, key]; query 0 is the sequence's first. The first 64 rows do.
        queries: first and last query that count.
        lengths: int [batch], tokens of each right-padded sequence. Default: no padding.

    Raises:
        InputError: not four axes.
    """
    if attention.dim() != 4:
        raise InputError(
            f"Expected attention [batch, heads, query, key], got {list(attention.shape)}."
        )
    first, last = queries
    size = attention.detach()[:, :, first : last + 1].to(torch.float32).abs()
    total = size.sum(-1)
    share = size[..., 0]
    if signed:
        share = share / torch.where(total > 0, total, torch.ones_like(total))
    row = torch.arange(first, first + share.shape[2], device=share.device)
    if lengths is None:
        counts = torch.ones((share.shape[0], 1, row.numel()), device=share.device)
    else:
        counts = (row[None, None] < lengths[:, None, None]).to(torch.float32)
    share = torch.where(counts > 0, share, torch.zeros_like(share))  # padding may be NaN
    return share.sum(-1) / counts.sum(-1)


def sink_share(mean_attention: Tensor, *, above: float = SINK_ABOVE) -> float:
    """Returns the share of entries of `mean_attention` (any shape) above 0.3: the sink rate.

    Entries are (sequence, layer, head), from `first_token_attention`; NaN entries do not exist.
    NaN where there is none (Gu et al., "When Attention Sink Emerges", 2024).
    """
    seen = mean_attention[~mean_attention.isnan()]
    return float((seen > above).to(torch.float64).mean()) if seen.numel() else float("nan")


def token_ratio(x: Tensor) -> Tensor:
    """Returns max_c |x_t| / median_t (max_c |x_t|) of each token, float32 [tokens].

    PrefixQuant (Chen et al. 2024); a token above 64 is an outlier token. `x` is
    [tokens, channels] of one sequence and layer. NaN or inf where the median token is zero.
    """
    size = _states(x).abs()
    if size.numel() == 0:
        return size.new_zeros(size.shape[0])
    top = size.amax(1)
    return top / top.median()


def outlier_tokens(x: Tensor, *, above: float = TOKEN_RATIO_ABOVE) -> Tensor:
    """Returns which tokens of `x` [tokens, channels] are outlier tokens, bool [tokens]."""
    return token_ratio(x) > above
