"""What quantizers are called, and which of them a recipe installs in a model.

`linear_input/<module>`, `weight/<module>` and, of attention layer L: `attention_logit/L/map n`,
`attention_query/L/map n`, `attention_key/L/map n`, `attention_probability/L/map n`,
`cache_key/L/map n` and `cache_value/L`, as ranges and reports call them. A key that the cache gives
back and one that is then quantized for the product with the query are two quantizers. A layer that
attends twice, to the halves of its values, has `cache_value/L/part 2` beside `cache_value/L`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from quantkit.errors import InputError, suggest
from quantkit.models import attention_modules, layout_of, projection_modules
from quantkit.quantization.grids import cache_grid, probability_grid, static_logit_grid
from quantkit.quantization.inputs import static_input_grid
from quantkit.recipe import Recipe
from quantkit.results import Range

_NEAREST = 5


def every_quantizer(model: nn.Module) -> list[str]:
    """Returns the names of all quantizers that any recipe can install in the model."""
    return quantizer_names(model, Recipe.parse("w8a8+logits8+qk8+probs8+kv8"))


def quantizer_names(model: nn.Module, recipe: Recipe) -> list[str]:
    """Returns the names of the quantizers that the recipe installs, in the order of the modules.

    Attention that is only found when it runs (`probes.functions`) is not among them.
    """
    names: list[str] = []
    if recipe.weights is not None:
        names += [f"weight/{name}" for name, _ in projection_modules(model)]
    if recipe.activations is not None:
        # as the probe: nn.MultiheadAttention hands out_proj's weight on without calling it
        names += [
            f"linear_input/{name}"
            for name, module in projection_modules(model)
            if not isinstance(module, NonDynamicallyQuantizableLinear)
        ]
    return names + [name for own in attention_names(model, recipe).values() for name in own]


def require_ranges(
    model: nn.Module, recipe: Recipe, ranges: Mapping[str, Range], *, keep: Collection[str] = ()
) -> None:
    """Returns if every static grid of the recipe has its range: to be asked before long work.

    Raises:
        InputError: a name in `keep` that no quantizer has; a range that is missing, carries no grid
            or was chosen for another width.
    """
    require_known(keep, every_quantizer(model), "to keep in float")
    for name in quantizer_names(model, recipe):
        if name not in keep:
            _require_range(name, recipe, ranges)


def _require_range(name: str, recipe: Recipe, ranges: Mapping[str, Range]) -> None:
    point, _, rest = name.partition("/")
    layer, _, map_ = rest.partition("/map ")
    inputs, logits, cache = recipe.activations, recipe.logits, recipe.cache
    if point == "linear_input" and inputs is not None and inputs.range == "static":
        static_input_grid(ranges, rest, inputs)
    elif point == "attention_logit" and logits is not None and logits.range == "static":
        static_logit_grid(ranges, int(layer), int(map_), logits)
    elif point == "attention_probability" and recipe.probabilities is not None:
        probability_grid(ranges, int(layer), int(map_), recipe.probabilities)
    elif point.startswith("cache_") and cache is not None and cache.range == "static":
        cache_grid(ranges, name, cache)


def attention_names(model: nn.Module, recipe: Recipe) -> dict[str, list[str]]:
    """Returns the names of the quantizers of each attention module, by module."""
    points = [
        point
        for point, part in (
            ("cache_key", recipe.cache),
            ("attention_query", recipe.queries_keys),
            ("attention_key", recipe.queries_keys),
            ("attention_logit", recipe.logits),
            ("attention_probability", recipe.probabilities),
        )
        if part is not None
    ]
    found: dict[str, list[str]] = {}
    for layer, (name, module) in enumerate(attention_modules(model)):
        layout = layout_of(module)
        maps = range(1, layout.maps + 1)
        found[name] = [map_name(point, layer, n) for n in maps for point in points]
        if recipe.cache is not None:
            parts = range(1, layout.calls_per_layer + 1)
            found[name] += [value_name(layer, part) for part in parts]
    return found


def map_name(point: str, layer: int, map_: int) -> str:
    """Returns the name of a quantizer that each map of a layer has."""
    return f"{point}/{layer}/map {map_}"


def value_name(layer: int, part: int) -> str:
    """Returns the name of the quantizer of a layer's values, or of a later part of them."""
    return f"cache_value/{layer}" + (f"/part {part}" if part > 1 else "")


def require_smoothable(model: nn.Module, recipe: Recipe) -> None:
    """Returns if the model may be given keys less their mean, where the recipe asks for it.

    Raises:
        InputError: it has a softcap or attention sinks, which see that all logits of a row move.
    """
    if recipe.queries_keys is None or not recipe.queries_keys.smooth:
        return
    config = getattr(model, "config", None)
    found = ""
    if getattr(config, "attn_logit_softcapping", None):
        found = "softcaps its logits"
    elif any(getattr(module, "sinks", None) is not None for _, module in attention_modules(model)):
        found = "has attention sinks"
    if found:
        raise InputError(
            f"recipe {recipe}: {type(model).__name__} {found}, which sees that smooth moves the "
            "logits of a row: leave smooth out."
        )


def require_known(names: Iterable[str], known: Collection[str], what: str) -> None:
    """Returns if all names are known.

    Raises:
        InputError: for the first that is not; suggests the nearest ones, not all of hundreds.
    """
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=_NEAREST, cutoff=0.0)
            hint = suggest(name, nearest).replace("Available:", "Nearest:")
            raise InputError(f"{what}: {name!r} is none of {len(known)} quantizers.{hint}")
