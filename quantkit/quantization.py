"""`with fake_quantized(model, recipe, ranges):` runs the model as if it were quantized.

Logits are replaced before the mask, after the model's own scale; inputs of linear layers before
the layer; weights once on entry. On leaving, also by an exception, every weight is the tensor it
was. The grids are those of `quantkit.recipe`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from quantkit.errors import InputError, ProbeError
from quantkit.numerics.affine import (
    affine_params,
    check_range,
    fake_quantize,
    reduce_absmax,
    symmetric_scale,
)
from quantkit.numerics.granularity import PerAxis, PerRow, logit_granularity
from quantkit.numerics.qtypes import QType
from quantkit.probes import (
    Activation,
    Attachment,
    AttentionLogits,
    LogitTile,
    LogitTransform,
    attach,
    linear_modules,
)
from quantkit.recipe import LogitQuant, Recipe
from quantkit.results import Range


@dataclass
class Quantizers:
    """What `fake_quantized` yields: proof that its quantizers ran.

    Attributes:
        weights: Elements quantized, by module.
        attachment: Hits of logits and linear inputs, by point and module.
    """

    weights: dict[str, int] = field(default_factory=dict)
    attachment: Attachment = field(default_factory=Attachment)

    @property
    def hits(self) -> int:
        """How often a quantizer fired, weights once each."""
        calls = [
            hits.calls for modules in self.attachment.hits.values() for hits in modules.values()
        ]
        return len(self.weights) + sum(calls)


@contextmanager
def fake_quantized(
    model: PreTrainedModel, recipe: Recipe, ranges: Mapping[str, Range] | None = None
) -> Iterator[Quantizers]:
    """Quantizes and dequantizes what the recipe names, in every forward inside the `with`.

    Args:
        ranges: `Ranges.tensors`, for activations and static logits.

    Raises:
        InputError: a range that the recipe needs and `ranges` lacks, by name.
        ProbeError: on leaving without an exception, a quantizer that never fired.
    """
    known = ranges or {}
    quantizers = Quantizers()
    points: dict[str, Any] = {}
    if recipe.logits is not None:
        points["attention_logit"] = logit_quantizer(recipe.logits, known)
    if recipe.activations is not None:
        points["linear_input"] = input_quantizer(recipe.activations, known)
    with ExitStack() as stack:
        if recipe.weights is not None:
            stack.enter_context(_quantized_weights(model, recipe.weights, quantizers))
        if points:
            quantizers.attachment = stack.enter_context(attach(model, points))
        yield quantizers


def weight_scale(weight: Tensor, bits: int) -> Tensor:
    """Returns the symmetric narrow scale of each output channel, `[out, 1]`."""
    qtype = QType(bits=bits, signed=True, narrow=True)
    return symmetric_scale(reduce_absmax(weight, PerAxis(axis=0)), qtype)


@contextmanager
def _quantized_weights(model: PreTrainedModel, bits: int, quantizers: Quantizers) -> Iterator[None]:
    qtype = QType(bits=bits, signed=True, narrow=True)
    originals: dict[str, Tensor] = {}
    modules = dict(linear_modules(model))
    try:
        for name, module in modules.items():
            weight = originals[name] = module.weight.data
            check_range(weight.min(), weight.max(), f"{name}.weight")
            module.weight.data = fake_quantize(weight, weight_scale(weight, bits), 0, qtype)
            quantizers.weights[name] = weight.numel()
        yield
    finally:
        for name, weight in reversed(originals.items()):  # modules may share a weight
            modules[name].weight.data = weight


def _range(ranges: Mapping[str, Range], name: str) -> Range:
    if name not in ranges:
        raise InputError(
            f"no range for {name!r} ({len(ranges)} ranges are known): calibrate this model first."
        )
    return ranges[name]


def input_quantizer(bits: int, ranges: Mapping[str, Range]) -> Callable[[Activation], Tensor]:
    """Returns a `linear_input` callback: the static asymmetric signed grid of each module.

    Raises:
        InputError: when called, for a module without a range or with an unusable one.
    """
    qtype = QType(bits=bits, signed=True)
    grids: dict[str, tuple[Tensor, Tensor]] = {}

    def quantizer(visit: Activation) -> Tensor:
        if visit.name not in grids:
            name = f"linear_input/{visit.name}"
            found = _range(ranges, name)
            lo, hi = torch.tensor(found.lo), torch.tensor(found.hi)
            check_range(lo, hi, name)
            grids[visit.name] = affine_params(lo, hi, qtype)
        scale, zero_point = grids[visit.name]
        return fake_quantize(visit.tensor, scale, zero_point, qtype)

    return quantizer


def static_logit_scale(
    ranges: Mapping[str, Range], layer: int, map_: int, quant: LogitQuant
) -> Tensor:
    """Returns the symmetric scale of one map's logits, `[heads]` or one number `[1]`."""
    name = f"attention_logit/{layer}/map {map_}"
    found = _range(ranges, name)
    lo, hi = torch.tensor(found.lo).reshape(-1), torch.tensor(found.hi).reshape(-1)
    check_range(lo, hi, name)
    absmax = torch.maximum(lo.abs(), hi.abs())
    if quant.granularity == "tensor":
        absmax = absmax.amax().reshape(1)
    return symmetric_scale(absmax, QType(bits=quant.bits, signed=True, narrow=True))


def logit_quantizer(
    quant: LogitQuant, ranges: Mapping[str, Range]
) -> Callable[[AttentionLogits], LogitTransform]:
    """Returns an `attention_logit` callback: the symmetric narrow grid of `quant`.

    Dynamic scales per sequence or head take a first look at all tiles of the map; per row none.
    """
    qtype = QType(bits=quant.bits, signed=True, narrow=True)
    granularity = logit_granularity(quant.granularity)

    def checked(absmax: Tensor, call: AttentionLogits) -> Tensor:
        if not bool(absmax.isfinite().all()):
            raise ProbeError(f"logits of {call.name}, map {call.map}, are not finite")
        return symmetric_scale(absmax, qtype)

    def quantizer(call: AttentionLogits) -> LogitTransform:
        if quant.range == "static":
            per_head = static_logit_scale(ranges, call.layer, call.map, quant)
            scale = per_head.reshape(1, -1, 1, 1)
        elif isinstance(granularity, PerRow):

            def by_row(tile: LogitTile) -> Tensor:
                absmax = reduce_absmax(tile.logits, granularity, tile.valid)
                return fake_quantize(tile.logits, checked(absmax, call), 0, qtype)

            return by_row
        else:
            parts = [reduce_absmax(t.logits, granularity, t.valid) for t in call.tiles()]
            scale = checked(torch.stack(parts).amax(0), call)

        def by_scale(tile: LogitTile) -> Tensor:
            return fake_quantize(tile.logits, scale, 0, qtype)

        return by_scale

    return quantizer
