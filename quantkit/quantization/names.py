"""What quantizers are called, and which of them a recipe installs in a model.

`linear_input/<module>`, `weight/<module>` and `attention_logit/<layer>/map <n>`, as ranges and
reports call them.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from quantkit.errors import InputError, suggest
from quantkit.models import attention_modules, layout_of, projection_modules
from quantkit.probes import linear_modules
from quantkit.quantization.grids import linear_input_grid, static_logit_grid
from quantkit.recipe import Recipe
from quantkit.results import Range

_NEAREST = 5


def every_quantizer(model: nn.Module) -> list[str]:
    """Returns the names of all quantizers that any recipe can install in the model."""
    return quantizer_names(model, Recipe.parse("w8a8+logits8"))


def quantizer_names(model: nn.Module, recipe: Recipe) -> list[str]:
    """Returns the names of the quantizers that the recipe installs, in the order of the modules.

    Attention that is only found when it runs (`probes.functions`) is not among them.
    """
    names: list[str] = []
    if recipe.weights is not None:
        names += [f"weight/{name}" for name, _ in linear_modules(model)]
    if recipe.activations is not None:
        # as the probe: nn.MultiheadAttention hands out_proj's weight on without calling it
        names += [
            f"linear_input/{name}"
            for name, module in projection_modules(model)
            if not isinstance(module, NonDynamicallyQuantizableLinear)
        ]
    if recipe.logits is not None:
        names += [name for maps in logit_names(model).values() for name in maps]
    return names


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
        point, _, rest = name.partition("/")
        if name in keep:
            continue
        if point == "linear_input" and recipe.activations is not None:
            if recipe.activations.range == "static":
                linear_input_grid(ranges, rest, recipe.activations.bits)
        elif point == "attention_logit" and recipe.logits is not None:
            layer, _, map_ = rest.partition("/map ")
            if recipe.logits.range == "static":
                static_logit_grid(ranges, int(layer), int(map_), recipe.logits)


def logit_names(model: nn.Module) -> dict[str, list[str]]:
    """Returns the names of each attention module's maps, by module."""
    return {
        name: [f"attention_logit/{layer}/map {n}" for n in range(1, layout_of(module).maps + 1)]
        for layer, (name, module) in enumerate(attention_modules(model))
    }


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
