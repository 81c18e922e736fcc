"""Probes: the only code that touches a torch model's forward."""

from quantkit.probes.attach import (
    POINTS,
    Activation,
    Attachment,
    Hits,
    attach,
    linear_modules,
)
from quantkit.probes.attention import (
    TILE_ROWS,
    AttentionLogits,
    LogitBlock,
    LogitTile,
    LogitTransform,
    grouped_logits,
)
from quantkit.probes.masks import Spans

__all__ = [
    "POINTS",
    "TILE_ROWS",
    "Activation",
    "Attachment",
    "AttentionLogits",
    "Hits",
    "LogitBlock",
    "LogitTile",
    "LogitTransform",
    "Spans",
    "attach",
    "grouped_logits",
    "linear_modules",
]
