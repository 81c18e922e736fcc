"""What is switched together: one quantizer, those of a module, or those of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import nn

from quantkit.errors import InputError
from quantkit.models import attention_modules, layer_modules
from quantkit.recipe import Recipe

INPUT: Final = "linear_input/"
WEIGHT: Final = "weight/"
_IN_ATTENTION: Final = ("attention_", "cache_")


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Quantizers that are switched together.

    Attributes:
        layer: The first layer in which one of them is; 0 where one is outside of the layers.
    """

    name: str
    point: str
    quantizers: tuple[str, ...]
    layer: int


def layers_of(model: nn.Module, names: Sequence[str]) -> dict[str, int | None]:
    """Returns the index of each quantizer's layer, None outside of the layers."""
    layers = [name for name, _ in layer_modules(model)]
    attention = [name for name, _ in attention_modules(model)]

    def layer_of(name: str) -> int | None:
        point, _, place = name.partition("/")
        if point.startswith(_IN_ATTENTION):
            place = attention[int(place.split("/")[0])]
        inside = [n for n, layer in enumerate(layers) if f"{place}.".startswith(f"{layer}.")]
        return inside[0] if inside else None

    return {name: layer_of(name) for name in names}


def units_of(
    model: nn.Module, names: Sequence[str], recipe: Recipe, *, group: str, weights: bool
) -> list[Unit]:
    """Returns the units in the order of the model.

    Args:
        names: Every quantizer of the recipe.
        group: `tensor`: each by itself. `module`: the input and the weight of a linear layer, the
            maps of a layer's logits. `layer`: all of a layer.
        weights: With `tensor`: weights are units too; else they stay as the recipe has them.

    Raises:
        InputError: nothing is left to switch.
    """
    layers = layers_of(model, names)
    members: dict[str, list[str]] = {}
    for name in names:
        if group == "tensor" and name.startswith(WEIGHT) and not weights:
            continue
        members.setdefault(_unit_name(name, layers[name], group), []).append(name)
    if not members:
        tail = " --weights switches the weights too." if recipe.weights is not None else ""
        raise InputError(f"recipe {recipe} leaves nothing to switch: expected e.g. w8a8.{tail}")
    return [
        Unit(
            name=unit,
            point=points.pop() if len(points := {n.split("/")[0] for n in own}) == 1 else "mixed",
            quantizers=tuple(own),
            layer=min(layers[name] or 0 for name in own),
        )
        for unit, own in members.items()
    ]


def _unit_name(name: str, layer: int | None, group: str) -> str:
    point, _, place = name.partition("/")
    if group == "tensor":
        return name
    if group == "layer":
        return "outside the layers" if layer is None else f"layer {layer}"
    # the maps of a layer, and the halves of its values, are one
    return f"{point}/{place.split('/')[0]}" if point.startswith(_IN_ATTENTION) else place
