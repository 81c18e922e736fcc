"""A model with its items, and with what its quantized rows read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quantkit.calibration import WeightRanges
from quantkit.errors import InputError
from quantkit.models import LoadedModel
from quantkit.quantization import (
    every_quantizer,
    quantizer_names,
    require_known,
    require_ranges,
    require_smoothable,
)
from quantkit.recipe import Recipe
from quantkit.results import DataInfo, Ranges
from quantkit.sweeps.cells import digest
from quantkit.tasks import Task


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A model of a sweep.

    Attributes:
        group: What the seeds of one model are called together.
        tasks: Its items: two models with one tokenizer have the same.
        ranges: For static grids; their smoothing is applied to every quantized row.
        weight_ranges: Those that `ranges.weights` describes.
        keep: Quantizers that stay in float in every row.
        data: What results say about the items, by task, where it is more than the task knows.
    """

    loaded: LoadedModel
    group: str
    tasks: Sequence[Task[Any]]
    ranges: Ranges | None = None
    weight_ranges: WeightRanges | None = None
    keep: Collection[str] = ()
    data: Mapping[str, DataInfo] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """The hash of what a quantized cell reads beside model and items; empty for nothing."""
        return digest_of(self.ranges, self.keep)

    def require(self, recipes: Sequence[Recipe]) -> None:
        """Returns if every recipe can run: what one lacks must not show after hours of others.

        Raises:
            InputError: ranges that were chosen for another width than a recipe has, or are missing;
                a name in `keep` that no recipe has, or all names of one; smoothed keys that the
                model would see.
        """
        model = self.loaded.model
        tensors = {} if self.ranges is None else self.ranges.tensors
        for recipe in recipes:
            require_ranges(model, recipe, tensors, keep=self.keep)
            require_smoothable(model, recipe)
            if self.weight_ranges is not None and recipe.weight_bits is not None:
                self.weight_ranges.require_width(recipe.weight_bits)
        if self.keep:
            self._require_some(recipes)

    def _require_some(self, recipes: Sequence[Recipe]) -> None:
        require_known(self.keep, every_quantizer(self.loaded.model), "to keep in float")
        used: set[str] = set()
        for recipe in recipes:
            names = set(quantizer_names(self.loaded.model, recipe))
            used |= names
            if names and names <= set(self.keep):
                raise InputError(
                    f"--keep leaves none of the {len(names)} quantizers of {recipe}: its row would "
                    "be the float one. Keep fewer, or leave the recipe out."
                )
        idle = [name for name in self.keep if name not in used]
        if idle:
            raise InputError(
                f"--keep {idle[0]}: no recipe of this sweep has that quantizer. Leave it out, or "
                "add a recipe that does."
            )


def digest_of(ranges: Ranges | None, keep: Collection[str] = ()) -> str:
    """Returns the hash of what a quantized cell reads beside model and text; empty for nothing."""
    if ranges is None and not keep:
        return ""
    read: list[Any] = [sorted(keep)]
    if ranges is not None:
        read += [ranges.tensors, ranges.smoothing, ranges.weights and ranges.weights.sha256]
    return digest(read)


def ranges_digest(digests: Sequence[str]) -> str:
    """Returns one hash for all models: that of one where they are the same."""
    different = sorted(set(digests))
    return different[0] if len(different) == 1 else digest(different)
