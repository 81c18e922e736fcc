"""Probes: the only code that touches a torch model's forward."""

from quantkit.probes.activations import Activation, has_point, linear_modules
from quantkit.probes.attach import POINTS, attach, require_seen
from quantkit.probes.attention import (
    TILE_ROWS,
    AttentionLogits,
    grouped_logits,
)
from quantkit.probes.attention_probe import AttentionValue
from quantkit.probes.hits import Attachment, Hits
from quantkit.probes.hooks import Hook
from quantkit.probes.masks import Spans
from quantkit.probes.pieces import (
    AttentionEdit,
    BlockTransform,
    LogitBlock,
    LogitTile,
    LogitTransform,
)
from quantkit.probes.record import record_qk

__all__ = [
    "POINTS",
    "TILE_ROWS",
    "Activation",
    "Attachment",
    "AttentionEdit",
    "AttentionLogits",
    "AttentionValue",
    "BlockTransform",
    "Hits",
    "Hook",
    "LogitBlock",
    "LogitTile",
    "LogitTransform",
    "Spans",
    "attach",
    "grouped_logits",
    "has_point",
    "linear_modules",
    "record_qk",
    "require_seen",
]
