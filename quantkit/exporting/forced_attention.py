"""What a graph's logits and cache held, in the place of what torch would have quantized."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.probes import (
    AttentionEdit,
    AttentionLogits,
    AttentionValue,
    LogitTile,
    LogitTransform,
)
from quantkit.quantization import logit_quantizer
from quantkit.quantization.names import map_name, value_name
from quantkit.quantization.tokens import on_cache_grid
from quantkit.recipe import Recipe
from quantkit.results import Range


@dataclass(frozen=True, kw_only=True, eq=False)
class ForcedAttention:
    """Callbacks for the points `attention_logit` and `attention_value`.

    Attributes:
        keep: Names of quantizers that stay in float.
        parts: How often each layer attends, to equal parts of its values.
        tap: The graph's numbers of a tensor, and the distance of two of its integers, both
            `[batch, heads, ...]` of all maps or parts.
        record: Takes the name of a quantizer and how many steps torch's and the graph's valid
            values are apart.
    """

    recipe: Recipe
    ranges: Mapping[str, Range]
    keep: Collection[str]
    parts: Mapping[int, int]
    tap: Callable[[str], tuple[Tensor, Tensor]]
    record: Callable[[str, Tensor], None]
    seen: set[tuple[str, int]] = field(default_factory=set, init=False)

    def edit(self, call: AttentionLogits) -> AttentionEdit | None:
        """Returns the graph's keys and logits of one map; None where both are kept."""
        key = self._key(call)
        edit = AttentionEdit(key=key, logits=self._logits(call.edited(AttentionEdit(key=key))))
        return None if edit.is_nothing else edit

    def value(self, visit: AttentionValue) -> Tensor | None:
        """Returns the graph's values; None where they are kept."""
        name = value_name(visit.layer, visit.part)
        if self.recipe.cache is None or name in self.keep:
            return None
        whole, step = self.tap(value_name(visit.layer, 1))
        share = whole.shape[1] // self.parts[visit.layer]
        # each head of a part is there as often as the model repeats it
        heads = torch.arange(visit.tensor.shape[1]) % share + (visit.part - 1) * share
        return self._cached(name, visit.tensor, visit.real, whole[:, heads], step[:, heads])

    def _key(self, call: AttentionLogits) -> Tensor | None:
        name = map_name("cache_key", call.layer, call.map)
        if self.recipe.cache is None or name in self.keep:
            return None
        whole, step = self.tap(f"cache_key/{call.layer}")
        count = call.key.shape[1]
        heads = slice((call.map - 1) * count, call.map * count)
        return self._cached(name, call.key, call.real_keys(), whole[:, heads], step[:, heads])

    def _cached(self, name: str, x: Tensor, real: Tensor, theirs: Tensor, step: Tensor) -> Tensor:
        assert self.recipe.cache is not None  # both callers have asked
        ours = on_cache_grid(x, real, self.recipe.cache, self.ranges, name, name)
        kept = real[:, None, :, None].expand_as(ours)
        self._record(name, 0, ((ours - theirs) / step)[kept])
        return theirs

    def _logits(self, call: AttentionLogits) -> LogitTransform | None:
        label = map_name("attention_logit", call.layer, call.map)
        if self.recipe.logits is None or label in self.keep:
            return None
        heads = slice((call.map - 1) * call.heads, call.map * call.heads)
        theirs, step = (part[:, heads] for part in self.tap(f"attention_logit/{call.layer}"))
        transform = logit_quantizer(self.recipe.logits, self.ranges)(call)

        def force(tile: LogitTile) -> Tensor:
            rows, keys = tile.logits.shape[2:]
            part, its_step = (
                x[:, :, tile.start : tile.start + rows, :keys] for x in (theirs, step)
            )
            ours = transform(tile)
            self._record(label, tile.start, ((ours - part) / its_step)[tile.valid.expand_as(ours)])
            return part

        return force

    def _record(self, name: str, start: int, distance: Tensor) -> None:
        if (name, start) not in self.seen:  # a layer may use its logits and keys twice
            self.seen.add((name, start))
            self.record(name, distance)
