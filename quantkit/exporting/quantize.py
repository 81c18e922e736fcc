"""A quantized graph from the float one, without a second export."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import onnx_ir as ir

from quantkit.calibration import WeightRanges
from quantkit.exporting.graphs import load_graph, remove_unused_initializers
from quantkit.exporting.linears import ModuleLinears, match_linears
from quantkit.exporting.rewrite_cache import PREFIXES, quantize_cache
from quantkit.exporting.rewrite_linear import quantize_linears
from quantkit.exporting.rewrite_logits import quantize_logits
from quantkit.jobs import Storage
from quantkit.quantization import require_known
from quantkit.recipe import Recipe
from quantkit.results import QuantizerInfo, Range


def quantize_graph(
    float_model: ir.Model | Path,
    *,
    module_linears: ModuleLinears,
    recipe: Recipe,
    ranges: Mapping[str, Range],
    keep: Collection[str] = (),
    weight_ranges: WeightRanges | None = None,
    storage: Storage = "qdq",
    maps: int | None = None,
) -> tuple[ir.Model, list[QuantizerInfo]]:
    """Returns the graph with Q/DQ nodes where the recipe says, and one entry per quantizer.

    Args:
        float_model: What `export_float` wrote; it is not changed.
        module_linears: The linear layers to quantize, by module name; all others (`lm_head`) stay
            in float.
        ranges: `Ranges.tensors`.
        keep: Names of quantizers that stay in float, as in `fake_quantized`.
        weight_ranges: As in `fake_quantized`.
        storage: How weights by group are held.
        maps: Softmax maps of an attention layer; None: as many as `ranges` knows, else 1.

    Raises:
        InputError: a linear layer that the graph does not hold, a range that is missing or was
            chosen for another width, logits or a cache that the graph cannot hold so, an unknown
            name in `keep`, or a format that the storage cannot hold.
    """
    linear_names = [f"{kind}/{m}" for kind in ("weight", "linear_input") for m in module_linears]
    linear_keep = [name for name in keep if not name.startswith(("attention_logit/", *PREFIXES))]
    require_known(linear_keep, linear_names, "to keep in float")
    model = load_graph(float_model) if isinstance(float_model, Path) else float_model.clone()
    infos: list[QuantizerInfo] = []
    if recipe.weights is not None or recipe.activations is not None:
        infos += quantize_linears(
            model,
            match_linears(model, module_linears),
            recipe,
            ranges=ranges,
            keep=keep,
            weight_ranges=weight_ranges,
            storage=storage,
        )
    if recipe.logits is not None:
        infos += quantize_logits(model, recipe.logits, ranges, keep, maps=maps)
    if recipe.cache is not None:
        infos += quantize_cache(model, recipe.cache, ranges, keep)
    remove_unused_initializers(model)
    return model, infos
