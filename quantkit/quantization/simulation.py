"""`fake_quantized`: a model that computes on the grids of a recipe, inside a `with`.

Attention is edited from within, see `attention`; inputs of linear layers are replaced before the
layer, weights once on entry. On leaving, also by an exception, every weight is the tensor it was.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

from transformers import PreTrainedModel

from quantkit.calibration import WeightRanges
from quantkit.probes import attach
from quantkit.quantization.attention import AttentionQuantizer
from quantkit.quantization.bitsandbytes_formats import FloatFeatures
from quantkit.quantization.fired import Counter
from quantkit.quantization.inputs import input_quantizer
from quantkit.quantization.names import (
    attention_names,
    every_quantizer,
    quantizer_names,
    require_known,
)
from quantkit.quantization.smoothing import smoothed
from quantkit.quantization.weights import quantized_weights
from quantkit.recipe import Recipe
from quantkit.results import Fired, Range, Smoothing

_INPUT: Final = "linear_input/"
_UNNAMED: Final = "attention that is only found when it runs"


@dataclass(frozen=True, kw_only=True, eq=False)
class Quantizers:
    """What `fake_quantized` yields: proof that its quantizers ran.

    Attributes:
        names: Of all that were installed; what is kept in float is not among them. Attention that
            is only found when it runs has no names before.
        float_features: What LLM.int8 has kept in float so far, by module; empty for other weights.
    """

    names: list[str]
    counter: Counter = field(repr=False)
    float_features: Mapping[str, FloatFeatures] = field(default_factory=dict, repr=False)

    @property
    def fired(self) -> dict[str, Fired]:
        """What each quantizer has done so far, by name.

        A weight is hit once; a map counts all its entries, the masked ones too; all else the
        elements of real tokens.
        """
        return self.counter.fired

    @property
    def hits(self) -> int:
        """How often a quantizer fired, all together."""
        return self.counter.hits


@contextmanager
def fake_quantized(
    model: PreTrainedModel,
    recipe: Recipe | str,
    ranges: Mapping[str, Range] | None = None,
    *,
    keep: Collection[str] = (),
    only: Collection[str] | None = None,
    smoothing: Mapping[str, Smoothing] | None = None,
    weight_ranges: WeightRanges | None = None,
) -> Iterator[Quantizers]:
    """Quantizes and dequantizes what the recipe names, in every forward inside the `with`.

    Args:
        ranges: `Ranges.tensors`, for what is static.
        keep: Names of quantizers (`every_quantizer`) that stay in float; no range is asked of them.
        only: Names of quantizers of this recipe that alone are installed; all where None.
        smoothing: `Ranges.smoothing`, applied around everything: weights are quantized after it.
        weight_ranges: Of each channel or group of a weight; None: absmax of each output channel.

    Raises:
        InputError: a range that the recipe needs and `ranges` or `weight_ranges` lacks, or that was
            chosen for another width, by name; an unknown name in `keep` or `only`.
        ProbeError: NaN or inf in what is quantized, by name; on leaving without an exception, a
            quantizer that never fired, by name.
    """
    recipe = Recipe.parse(recipe) if isinstance(recipe, str) else recipe
    listed = quantizer_names(model, recipe)
    if keep:
        require_known(keep, every_quantizer(model), "to keep in float")
    if only is not None:
        require_known(only, listed, f"to quantize alone in {recipe}")

    def is_on(name: str) -> bool:
        # attention that only shows when it runs has no names: it can be quantized, not chosen
        return name not in keep and (only is None or name in only)

    names = [name for name in listed if is_on(name)]
    counter = Counter(names)
    float_features: Mapping[str, FloatFeatures] = {}
    with ExitStack() as stack:
        if smoothing:
            stack.enter_context(smoothed(model, smoothing))
        if recipe.weights is not None:
            float_features = stack.enter_context(
                quantized_weights(
                    model, recipe.weights, on=names, ranges=weight_ranges, fired=counter
                )
            )
        quantizers = Quantizers(names=names, counter=counter, float_features=float_features)
        points = _points(model, recipe, ranges or {}, quantizers, is_on)
        if points:
            chosen = keep or only is not None
            inputs = [name.removeprefix(_INPUT) for name in names if name.startswith(_INPUT)]
            own = attention_names(model, recipe) if "attention_logit" in points else {}
            idle = [module for module, its in own.items() if not any(map(is_on, its))]
            stack.enter_context(
                attach(
                    model,
                    points,
                    select=[glob.escape(name) for name in inputs] if chosen else None,
                    allow_unseen=[glob.escape(module) for module in idle],
                )
            )
        yield quantizers
    counter.require_all()


def _points(
    model: PreTrainedModel,
    recipe: Recipe,
    ranges: Mapping[str, Range],
    quantizers: Quantizers,
    is_on: Callable[[str], bool],
) -> dict[str, Any]:
    """Returns the callbacks that `attach` takes; none where all is kept."""
    points: dict[str, Any] = {}
    names, counter = quantizers.names, quantizers.counter
    if recipe.activations is not None and any(name.startswith(_INPUT) for name in names):
        points["linear_input"] = input_quantizer(recipe.activations, ranges, counter)
    parts = (recipe.logits, recipe.queries_keys, recipe.probabilities, recipe.cache)
    own = attention_names(model, recipe)
    if any(part is not None for part in parts) and (
        any(map(is_on, chain(*own.values()))) or (not own and is_on(_UNNAMED))
    ):
        attention = AttentionQuantizer(recipe=recipe, ranges=ranges, is_on=is_on, fired=counter)
        points["attention_logit"] = attention.edit
        if recipe.cache is not None:
            points["attention_value"] = attention.value
    return points
