"""One model under every setting of its quantizers: the forwards that a search makes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from quantkit.calib_sets import TokenBatch
from quantkit.calibration import WeightRanges
from quantkit.models import LoadedModel
from quantkit.probes.shortcut import Recorded, recorded, skipped
from quantkit.quantization import fake_quantized, smoothed
from quantkit.recipe import Recipe
from quantkit.results import Ranges
from quantkit.search.units import WEIGHT, Unit, layers_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Bench:
    """A model, what quantizes it, and what of that is switched.

    Attributes:
        names: Every quantizer that the units hold.
        layers: The layer of each, None outside of the layers.
        starts: Which layers a forward may start at: found out at the first use of each.
    """

    loaded: LoadedModel
    recipe: Recipe
    ranges: Ranges
    names: tuple[str, ...]
    layers: Mapping[str, int | None]
    weight_ranges: WeightRanges | None = None
    starts: dict[int, bool] = field(default_factory=lambda: {0: True})

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        recipe: Recipe,
        ranges: Ranges,
        units: Collection[Unit],
        weight_ranges: WeightRanges | None = None,
    ) -> Bench:
        """Returns the bench for some units."""
        names = tuple(name for unit in units for name in unit.quantizers)
        return cls(
            loaded=loaded,
            recipe=recipe,
            ranges=ranges,
            names=names,
            layers=layers_of(loaded.model, names),
            weight_ranges=weight_ranges,
        )

    @property
    def switches_weights(self) -> bool:
        """Whether a weight is switched; else all weights are quantized, once a batch."""
        return any(name.startswith(WEIGHT) for name in self.names)

    def forward(self, batch: TokenBatch) -> Tensor:
        """Returns vocabulary logits of the model as it is now."""
        model = self.loaded.model
        with torch.inference_mode():
            logits: Tensor = model(
                input_ids=batch.input_ids.to(model.device),
                attention_mask=batch.attention_mask.to(model.device),
                use_cache=False,
            ).logits
        return logits

    @contextmanager
    def float_around(self) -> Iterator[None]:
        """The float model as the quantizers find it: smoothed, where its ranges are."""
        smoothing = self.ranges.smoothing
        with smoothed(self.loaded.model, smoothing) if smoothing else nullcontext():
            yield

    @contextmanager
    def quantized_around(self) -> Iterator[None]:
        """The model with everything quantized that is not switched."""
        with ExitStack() as stack:
            stack.enter_context(self.float_around())
            if self.recipe.weights is not None and not self.switches_weights:
                weights = Recipe(weights=self.recipe.weights)
                stack.enter_context(
                    fake_quantized(self.loaded.model, weights, weight_ranges=self.weight_ranges)
                )
            yield

    @contextmanager
    def switched_on(self, names: Collection[str]) -> Iterator[None]:
        """The model with these quantizers, inside one of the contexts above."""
        recipe = self.recipe if self.switches_weights else replace(self.recipe, weights=None)
        with (
            fake_quantized(
                self.loaded.model,
                recipe,
                self.ranges.tensors,
                only=tuple(names),
                weight_ranges=self.weight_ranges,
            )
            if names
            else nullcontext()
        ):
            yield

    def base(self, batch: TokenBatch, names: Collection[str]) -> tuple[Tensor, Recorded]:
        """Returns the logits with these quantizers on, and what each layer returned."""
        with self.switched_on(names), recorded(self.loaded.model) as before:
            logits = self.forward(batch)
        return logits, before

    def resumed(
        self, batch: TokenBatch, before: Recorded, layer: int, names: Collection[str]
    ) -> Tensor:
        """Returns the logits with these quantizers on, run from `layer` on after `before`.

        What the layers before it would do is in `before`; where they cannot be left out, all run.
        """
        start = layer if self.starts.get(layer) else 0
        if start == 0:
            with self.switched_on(names):
                return self.forward(batch)
        places = {name: self.layers[name] for name in names}
        on = [name for name, at in places.items() if at is None or at >= start]
        with self.switched_on(on), skipped(self.loaded.model, before, start):
            return self.forward(batch)

    def learn_start(self, batch: TokenBatch, before: Recorded, layer: int, logits: Tensor) -> None:
        """Finds out whether a forward that starts at `layer` is the whole one, bit for bit.

        Args:
            before, logits: Of the model as it is now.
        """
        if layer in self.starts:
            return
        self.starts[layer] = False
        if not before.in_order:
            return
        try:
            with skipped(self.loaded.model, before, layer):
                found = self.forward(batch)
        except Exception:  # a later layer misses what an earlier one left for it
            return
        self.starts[layer] = torch.equal(found, logits)
