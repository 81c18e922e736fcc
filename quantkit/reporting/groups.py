"""Which groups of a `stats.json` a table or a picture shows: a pooled one never passes for a head.

A point lists each (layer, head, map), then the same layers over all their heads, then all layers
together; activations have no heads. Where a `layer` or a `head` is None, the group is pooled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from quantkit.results import GroupStats, Stats

LOGIT, MODIFIED, EFFECTIVE, HIDDEN = (
    "attention_logit",
    "logits_modified",
    "effective_map",
    "hidden_state",
)
POINT_WORDS: Final = {
    LOGIT: "attention logits",
    MODIFIED: "modified logits",
    EFFECTIVE: "effective attention map",
    HIDDEN: "hidden states",
    "attention_output": "attention output",
    "mlp_input": "MLP input",
    "mlp_down_input": "MLP down-projection input",
    "linear_input": "linear-layer inputs",
}


def of_heads(
    stats: Stats, point: str, token_class: str = "all"
) -> list[tuple[int, int, GroupStats]]:
    """Returns (layer, head, group) of every head of a point, one a map, by layer."""
    found = [
        (group.layer, group.head, group)
        for group in stats.points.get(point, [])
        if group.layer is not None and group.head is not None and group.token_class == token_class
    ]
    return sorted(found, key=lambda row: (row[0], row[2].map or 0, row[1]))


def of_layers(stats: Stats, point: str, token_class: str = "all") -> list[tuple[int, GroupStats]]:
    """Returns (layer, group) of every layer of an activation, in order."""
    found = [
        (group.layer, group)
        for group in stats.points.get(point, [])
        if group.layer is not None and group.head is None and group.token_class == token_class
    ]
    return sorted(found, key=lambda row: (row[0], row[1].map or 0))


def pooled(stats: Stats, point: str, token_class: str = "all") -> GroupStats | None:
    """Returns the group of all layers, heads and maps; None in files of version 1."""
    for group in stats.points.get(point, []):
        is_pooled = group.layer is None and group.head is None and group.map is None
        if is_pooled and group.token_class == token_class:
            return group
    return None


def top(group: GroupStats, rank: int = 1) -> float:
    """Returns |x| at a rank; NaN where there are fewer elements."""
    return group.abs_top.get(str(rank), math.nan)


def ends(values: Iterable[float | None]) -> tuple[float, float] | None:
    """Returns the lowest and the highest of the values that are known, or None."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    return (min(known), max(known)) if known else None


def by_size(rows: Iterable[tuple[int, GroupStats]]) -> list[tuple[int, GroupStats]]:
    """Returns the groups that have a largest |x|, the largest first."""
    known = [row for row in rows if not math.isnan(top(row[1]))]
    return sorted(known, key=lambda row: -top(row[1]))
