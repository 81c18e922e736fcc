"""The callbacks that put the parts of attention on their grids, one after the other.

Keys and values come back from the cache; then queries and keys are quantized; then the logits that
they make, before the mask; then the softmax outputs. Each sees what the one before has left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from quantkit.errors import InputError, ProbeError
from quantkit.numerics.affine import QParams
from quantkit.probes import AttentionEdit, AttentionLogits, AttentionValue, LogitTransform
from quantkit.quantization.fired import Counter
from quantkit.quantization.grids import (
    logit_qtype,
    probability_grid,
    probability_qtype,
    static_logit_grid,
)
from quantkit.quantization.maps import ByRow, OnGrid, grid_of, logit_reach, probability_reach
from quantkit.quantization.names import map_name, value_name
from quantkit.quantization.tokens import on_cache_grid, on_dynamic_grid, without_mean
from quantkit.recipe import LogitQuant, ProbabilityQuant, Recipe
from quantkit.results import Range


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionQuantizer:
    """Callbacks for the points `attention_logit` and `attention_value`.

    Attributes:
        ranges: `Ranges.tensors`, for what is static.
        is_on: Whether the quantizer of that name is to run.
        fired: Where each that runs is counted: a map's entries, and real tokens x heads x width.
    """

    recipe: Recipe
    ranges: Mapping[str, Range]
    is_on: Callable[[str], bool]
    fired: Counter

    def edit(self, call: AttentionLogits) -> AttentionEdit | None:
        """Returns what takes the place of the parts of one map; None where all are kept."""
        key = self._cached_key(call)
        query, key = self._query(call), self._key(call, key)
        inputs = AttentionEdit(query=query, key=key)
        edited = call.edited(inputs)
        logits = self._logits(edited)
        probabilities = self._probabilities(edited, logits)
        edit = AttentionEdit(query=query, key=key, logits=logits, probabilities=probabilities)
        return None if edit.is_nothing else edit

    def value(self, visit: AttentionValue) -> Tensor | None:
        """Returns the values as the cache gives them back; None where they are kept."""
        name = value_name(visit.layer, visit.part)
        if self.recipe.cache is None or not self.is_on(name):
            return None
        what = f"values of {visit.name}, part {visit.part}"
        x, real = visit.tensor, visit.real
        self.fired.add(name, int(real.sum()) * x.shape[1] * x.shape[3])
        return on_cache_grid(x, real, self.recipe.cache, self.ranges, name, what)

    def _cached_key(self, call: AttentionLogits) -> Tensor | None:
        name = map_name("cache_key", call.layer, call.map)
        if self.recipe.cache is None or not self.is_on(name):
            return None
        what = f"keys of the cache of {call.name}, map {call.map}"
        real = self._count(name, call, call.key, of_keys=True)
        return on_cache_grid(call.key, real, self.recipe.cache, self.ranges, name, what)

    def _query(self, call: AttentionLogits) -> Tensor | None:
        quant, name = self.recipe.queries_keys, map_name("attention_query", call.layer, call.map)
        if quant is None or not self.is_on(name):
            return None
        return on_dynamic_grid(
            call.query,
            self._count(name, call, call.query, of_keys=False),
            bits=quant.bits,
            granularity=quant.granularity,
            symmetric=True,
            what=f"queries of {call.name}, map {call.map}",
        )

    def _key(self, call: AttentionLogits, cached: Tensor | None) -> Tensor | None:
        """Returns the key of the product, of what the cache gave back."""
        quant, name = self.recipe.queries_keys, map_name("attention_key", call.layer, call.map)
        if quant is None or not self.is_on(name):
            return cached
        key = call.key if cached is None else cached
        return on_dynamic_grid(
            without_mean(call, key) if quant.smooth else key,
            self._count(name, call, key, of_keys=True),
            bits=quant.bits,
            granularity=quant.granularity,
            symmetric=True,
            what=f"keys of {call.name}, map {call.map}",
        )

    def _logits(self, call: AttentionLogits) -> LogitTransform | None:
        quant, name = self.recipe.logits, map_name("attention_logit", call.layer, call.map)
        if quant is None or not self.is_on(name):
            return None
        self.fired.add(name, call.entries)
        return _logit_transform(quant, self.ranges, call)

    def _probabilities(
        self, call: AttentionLogits, logits: LogitTransform | None
    ) -> LogitTransform | None:
        quant = self.recipe.probabilities
        name = map_name("attention_probability", call.layer, call.map)
        if quant is None or not self.is_on(name):
            return None
        self.fired.add(name, call.entries)
        return _probability_transform(quant, self.ranges, call, logits)

    def _count(self, name: str, call: AttentionLogits, x: Tensor, *, of_keys: bool) -> Tensor:
        """Returns which tokens of queries or keys are real, having counted them."""
        if call.given is not None:
            raise ProbeError(
                f"{call.name} multiplies q and k itself, so that only their product is seen: "
                f"{name!r} cannot be quantized there; keep it in float by name."
            )
        real = call.real_keys() if of_keys else call.query_is_real()
        self.fired.add(name, int(real.sum()) * x.shape[1] * x.shape[3])
        return real


def logit_quantizer(
    quant: LogitQuant, ranges: Mapping[str, Range]
) -> Callable[[AttentionLogits], LogitTransform]:
    """Returns an `attention_logit` callback: the grid of `quant`, uncounted.

    Dynamic scales per sequence or head take a first look at all of the map; per row none.

    Raises:
        InputError: when called, static only: no range of a map, or one that does not fit.
        ProbeError: when called, logits that are not finite.
    """
    return lambda call: _logit_transform(quant, ranges, call)


def _logit_transform(
    quant: LogitQuant, ranges: Mapping[str, Range], call: AttentionLogits
) -> LogitTransform:
    qtype, what = logit_qtype(quant), f"logits of {call.name}, map {call.map}"
    if quant.range == "static":
        grid = static_logit_grid(ranges, call.layer, call.map, quant)
        return _on_static_grid(grid, call, what, symmetric=quant.symmetric)
    if quant.granularity == "row":
        return ByRow(qtype=qtype, symmetric=quant.symmetric, what=what)
    reach = logit_reach(call, quant.granularity)
    scale, zero_point = grid_of(reach, qtype, symmetric=quant.symmetric, what=what)
    return OnGrid(scale=scale, zero_point=zero_point, qtype=qtype)


def _probability_transform(
    quant: ProbabilityQuant,
    ranges: Mapping[str, Range],
    call: AttentionLogits,
    logits: LogitTransform | None,
) -> LogitTransform:
    qtype, what = probability_qtype(quant), f"softmax outputs of {call.name}, map {call.map}"
    if quant.range != "dynamic":
        grid = probability_grid(ranges, call.layer, call.map, quant)
        return _on_static_grid(grid, call, what, symmetric=True)  # their zero point is 0
    if quant.granularity == "row":
        return ByRow(qtype=qtype, symmetric=True, what=what)  # absmax / qmax, of all that is > 0
    reach = probability_reach(call, logits, quant.granularity)
    scale, zero_point = grid_of(reach, qtype, symmetric=True, what=what)
    return OnGrid(scale=scale, zero_point=zero_point, qtype=qtype)


def _on_static_grid(
    grid: QParams, call: AttentionLogits, what: str, *, symmetric: bool
) -> LogitTransform:
    if grid.scale.numel() not in (1, call.heads):
        raise InputError(
            f"the range of {what} has {grid.scale.numel()} groups, and the map {call.heads} heads: "
            "calibrate this model."
        )
    device = call.query.device
    return OnGrid(
        scale=grid.scale.reshape(1, -1, 1, 1).to(device),
        zero_point=0 if symmetric else grid.zero_point.reshape(1, -1, 1, 1).to(device),
        qtype=grid.qtype,
    )
