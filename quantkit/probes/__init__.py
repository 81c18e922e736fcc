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
    LogitTile,
    LogitTransform,
    grouped_logits,
)

__all__ = [
    "POINTS",
    "TILE_ROWS",
    "Activation",
    "Attachment",
    "AttentionLogits",
    "Hits",
    "LogitTile",
    "LogitTransform",
    "attach",
    "grouped_logits",
    "linear_modules",
]
