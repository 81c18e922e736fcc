"""What tests of weights' formats share: `quantized_weights` by a recipe's name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.calibration import WeightRanges
from quantkit.models import projection_modules
from quantkit.quantization.fired import Counter
from quantkit.quantization.weights import quantized_weights
from quantkit.recipe import BitsAndBytes, Recipe, WeightQuant

IDS = torch.arange(24).reshape(2, 12) * 31 % 257


def quant_of(name: str) -> WeightQuant | BitsAndBytes:
    found = Recipe.parse(name).weights
    assert found is not None
    return found


def inside(
    model: nn.Module,
    name: str,
    *,
    on: Collection[str] | None = None,
    ranges: WeightRanges | None = None,
    fired: Counter | None = None,
) -> Any:
    """`quantized_weights`, of every linear layer where `on` says nothing."""
    names = [f"weight/{n}" for n, _ in projection_modules(model)] if on is None else on
    counter = Counter() if fired is None else fired
    return quantized_weights(model, quant_of(name), on=names, ranges=ranges, fired=counter)


def forward(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits
