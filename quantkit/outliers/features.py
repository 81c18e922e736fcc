"""What the rules on hidden states found in all layers together: features and tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quantkit.numerics.outliers import outlier_features
from quantkit.outliers.activations import ActivationStatistics
from quantkit.results import OutlierFeatures, OutlierTokens, TokenOutlier


def outlier_tokens_of(
    states: ActivationStatistics, token: Callable[[str, int, int], str | None]
) -> OutlierTokens:
    """Returns the tokens by PrefixQuant's rule; `token` (module, sequence, position): its text."""
    rules = [
        record.rules for _, record in sorted(states.records.items()) if record.rules is not None
    ]
    top = sorted((entry for rule in rules for entry in rule.outlying_top), reverse=True)
    return OutlierTokens(
        count=sum(rule.outlying for rule in rules),
        count_pooled=sum(rule.outlying_pooled() for rule in rules),
        by_layer=[rule.outlying for rule in rules],
        entries=[
            TokenOutlier(
                layer=layer,
                sequence=sequence,
                position=position,
                ratio=ratio,
                token=token(states.names[layer], sequence, position),
            )
            for ratio, layer, sequence, position in top[:20]
        ],
    )


def outlier_features_of(states: ActivationStatistics) -> OutlierFeatures:
    """Returns the channels by LLM.int8's rule; none where layers have several widths."""
    rules = [record.rules for _, record in sorted(states.records.items()) if record.rules]
    if not have_one_width(states):
        return OutlierFeatures(channels=[], count=0)
    counts = torch.stack([rule.reached for rule in rules])
    shares = outlier_features(counts, [rule.tokens for rule in rules])
    channels = [int(channel) for channel in shares.is_outlier.nonzero()[:, 0]]
    return OutlierFeatures(
        channels=channels,
        count=len(channels),
        layer_share=[float(shares.layer_frac[channel]) for channel in channels],
        position_share=[float(shares.position_frac[channel]) for channel in channels],
    )


def have_one_width(states: ActivationStatistics) -> bool:
    """Returns whether all layers have as many channels."""
    return len({len(record.channel_top) for record in states.records.values()}) == 1
