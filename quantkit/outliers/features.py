"""What is found in all layers together: outlier features and tokens, the highest surface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from quantkit.numerics.outliers import outlier_features
from quantkit.outliers.activations import ActivationStatistics
from quantkit.outliers.surface import SurfaceRecord
from quantkit.results import MagnitudeSurface, OutlierFeatures, OutlierTokens, TokenOutlier

DIGITS: Final = 6
"""Of magnitudes by channel in a result file."""


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


def surfaces_of(
    activations: dict[str, ActivationStatistics], token: Callable[[str, int, int], str | None]
) -> dict[str, MagnitudeSurface]:
    """Returns, by point, the surface of the worst layer, the first of equals.

    None of a point without surfaces, or without a finite element. `token` is as above.
    """
    found = {}
    for point, statistics in activations.items():
        surfaces = {
            layer: record.surface
            for layer, record in sorted(statistics.records.items())
            if record.surface is not None
        }
        if surfaces:
            layer = max(surfaces, key=lambda n: surfaces[n].peak)
            found[point] = _written(layer, surfaces[layer], token)
    return found


def _written(
    layer: int, found: SurfaceRecord, token: Callable[[str, int, int], str | None]
) -> MagnitudeSurface:
    return MagnitudeSurface(
        layer=layer,
        name=found.name,
        sequence=found.sequence,
        positions=found.positions,
        last_position=found.last,
        largest_positions=found.largest,
        tokens=[token(found.name, found.sequence, position) for position in found.largest],
        channels=found.channels,
        channel_count=found.width,
        abs_max=[rounded(row) for row in found.values.tolist()],
    )


def rounded(values: list[float]) -> list[float]:
    """Returns the values with as many digits as a result file has of magnitudes by channel."""
    return [float(f"{value:.{DIGITS}g}") for value in values]
