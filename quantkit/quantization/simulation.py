"""`fake_quantized`: a model that computes on the grids of a recipe, inside a `with`.

Logits are replaced before the mask, after the model's own scale; inputs of linear layers before
the layer; weights once on entry. On leaving, also by an exception, every weight is the tensor it
was.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from quantkit.calibration import WeightRanges
from quantkit.numerics.affine import check_range, fake_quantize
from quantkit.numerics.qtypes import QType
from quantkit.probes import Attachment, AttentionLogits, LogitTransform, attach, linear_modules
from quantkit.quantization.grids import weight_scale
from quantkit.quantization.names import (
    every_quantizer,
    logit_names,
    quantizer_names,
    require_known,
)
from quantkit.quantization.quantizers import input_quantizer, logit_quantizer
from quantkit.quantization.smoothing import smoothed
from quantkit.recipe import BitsAndBytes, LogitQuant, Recipe, WeightQuant
from quantkit.results import Range, Smoothing


@dataclass
class Quantizers:
    """What `fake_quantized` yields: proof that its quantizers ran.

    Attributes:
        names: Of all that were installed; what is kept in float is not among them.
        weights: Elements quantized, by module.
        attachment: Hits of logits and linear inputs, by point and module.
        idle: Attention modules all of whose maps are kept; their hits are no quantizer's.
    """

    names: list[str] = field(default_factory=list)
    weights: dict[str, int] = field(default_factory=dict)
    attachment: Attachment = field(default_factory=Attachment)
    idle: frozenset[str] = frozenset()

    @property
    def hits(self) -> int:
        """How often a quantizer fired, weights once each."""
        calls = [
            hits.calls
            for point, modules in self.attachment.hits.items()
            for name, hits in modules.items()
            if point != "attention_logit" or name not in self.idle
        ]
        return len(self.weights) + sum(calls)


@contextmanager
def fake_quantized(
    model: PreTrainedModel,
    recipe: Recipe,
    ranges: Mapping[str, Range] | None = None,
    *,
    keep: Collection[str] = (),
    only: Collection[str] | None = None,
    smoothing: Mapping[str, Smoothing] | None = None,
    weight_ranges: WeightRanges | None = None,
) -> Iterator[Quantizers]:
    """Quantizes and dequantizes what the recipe names, in every forward inside the `with`.

    Args:
        ranges: `Ranges.tensors`, for activations and static logits.
        keep: Names of quantizers (`every_quantizer`) that stay in float; no range is asked of them.
        only: Names of quantizers of this recipe that alone are installed; all where None.
        smoothing: `Ranges.smoothing`, applied around everything: weights are quantized after it.
        weight_ranges: Of each channel or group of a weight; None: absmax of each output channel.

    Raises:
        InputError: a range that the recipe needs and `ranges` or `weight_ranges` lacks, or that was
            chosen for another width, by name; an unknown name in `keep` or `only`.
        ProbeError: on leaving without an exception, a quantizer that never fired.
    """
    listed = quantizer_names(model, recipe)
    if keep:
        require_known(keep, every_quantizer(model), "to keep in float")
    if only is not None:
        require_known(only, listed, f"to quantize alone in {recipe}")
    kept = set(keep) | ({*listed} - {*only} if only is not None else set())
    quantizers = Quantizers(names=[name for name in listed if name not in kept])
    on = set(quantizers.names)
    known = ranges or {}
    points: dict[str, Any] = {}
    select: list[str] | None = None
    if recipe.activations is not None and _any_of(on, "linear_input/"):
        points["linear_input"] = input_quantizer(recipe.activations, known)
        if kept:
            inputs = [name for name in quantizers.names if name.startswith("linear_input/")]
            select = [glob.escape(name.removeprefix("linear_input/")) for name in inputs]
    if recipe.logits is not None:
        maps = logit_names(model)
        idle = {module for module, names in maps.items() if kept.issuperset(names)}
        quantizers.idle = frozenset(idle)
        # attention that only shows when it runs has no names: it can be quantized, not chosen
        if len(idle) < len(maps) or (not maps and only is None):
            points["attention_logit"] = _chosen(recipe.logits, known, kept, only)
    with ExitStack() as stack:
        if smoothing:
            stack.enter_context(smoothed(model, smoothing))
        if recipe.weights is not None:
            stack.enter_context(
                _quantized_weights(model, recipe.weights, quantizers, weight_ranges)
            )
        if points:
            unseen = [glob.escape(module) for module in quantizers.idle]
            quantizers.attachment = stack.enter_context(
                attach(
                    model,
                    points,
                    select=select,
                    allow_unseen=unseen if "attention_logit" in points else (),
                )
            )
        yield quantizers


def _any_of(names: Collection[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)


def _chosen(
    quant: LogitQuant,
    ranges: Mapping[str, Range],
    kept: Collection[str],
    only: Collection[str] | None,
) -> Callable[[AttentionLogits], LogitTransform | None]:
    """Returns the quantizer of logits, which leaves kept maps alone."""
    quantizer = logit_quantizer(quant, ranges)

    def unless_kept(call: AttentionLogits) -> LogitTransform | None:
        name = f"attention_logit/{call.layer}/map {call.map}"
        if name in kept or (only is not None and name not in only):
            return None
        return quantizer(call)

    return unless_kept


@contextmanager
def _quantized_weights(
    model: PreTrainedModel,
    quant: WeightQuant | BitsAndBytes,
    quantizers: Quantizers,
    ranges: WeightRanges | None,
) -> Iterator[None]:
    bits = quant.bits
    qtype = QType(bits=bits, signed=True, narrow=True)
    originals: dict[str, Tensor] = {}
    on = set(quantizers.names)
    modules = {name: m for name, m in linear_modules(model) if f"weight/{name}" in on}
    try:
        for name, module in modules.items():
            weight = originals[name] = module.weight.data
            check_range(weight.min(), weight.max(), f"{name}.weight")
            scale = weight_scale(weight, bits, module=name, ranges=ranges)
            module.weight.data = fake_quantize(weight, scale, 0, qtype)
            quantizers.weights[name] = weight.numel()
        yield
    finally:
        for name, weight in reversed(originals.items()):  # modules may share a weight
            modules[name].weight.data = weight
