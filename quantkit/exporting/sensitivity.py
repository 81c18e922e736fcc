"""How far a quantized simulation parts from itself when its input moves by a rounding error.

What no program can keep, no program is asked for: the end-to-end gate of a quantized graph is
widened by the model's own sensitivity, measured in torch on the same tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from quantkit.calibration import WeightRanges
from quantkit.exporting.parity import QUANTIZED_GATE, Agreement, Batch, Gate, compare_logits
from quantkit.probes import Activation, attach
from quantkit.quantization import fake_quantized
from quantkit.recipe import Recipe
from quantkit.results import Range

PERTURBATION: Final = 1e-5
"""Relative, on the first layer's output: about what two float32 programs differ by there."""
SEEDS: Final = (0, 1, 2)
ALLOWED_TIMES: Final = 2.0
"""How many times its own disagreement a graph may disagree with the simulation."""


def sensitivity(
    model: PreTrainedModel,
    recipe: Recipe,
    ranges: Mapping[str, Range],
    batch: Batch,
    *,
    keep: Collection[str] = (),
    weight_ranges: WeightRanges | None = None,
) -> Agreement:
    """Returns the worst agreement of the simulation with itself, perturbed; four forwards."""

    def forward(seed: int | None) -> Tensor:
        return _forward(model, recipe, ranges, batch, seed, keep, weight_ranges)

    reference = forward(None)
    found = [compare_logits(reference, forward(seed), batch.attention_mask) for seed in SEEDS]
    return Agreement(
        max_abs=max(agreement.max_abs for agreement in found),
        cosine=min(agreement.cosine for agreement in found),
        top1_agreement=min(agreement.top1_agreement for agreement in found),
        positions=found[0].positions,
    )


def widened(own: Agreement, gate: Gate = QUANTIZED_GATE) -> Gate:
    """Returns `gate`, or what `ALLOWED_TIMES` the model's own disagreement leaves of it."""
    return Gate(
        cosine=min(gate.cosine, 1 - ALLOWED_TIMES * (1 - own.cosine)),
        top1_agreement=min(gate.top1_agreement, 1 - ALLOWED_TIMES * (1 - own.top1_agreement)),
    )


def _forward(
    model: PreTrainedModel,
    recipe: Recipe,
    ranges: Mapping[str, Range],
    batch: Batch,
    seed: int | None,
    keep: Collection[str],
    weight_ranges: WeightRanges | None,
) -> Tensor:
    generator = torch.Generator().manual_seed(seed or 0)

    def disturb(visit: Activation) -> Tensor | None:
        if seed is None or visit.layer != 0:
            return None
        noise = torch.randn(visit.tensor.shape, generator=generator)
        return visit.tensor * (1 + PERTURBATION * noise)

    with (
        torch.inference_mode(),
        fake_quantized(model, recipe, ranges, keep=keep, weight_ranges=weight_ranges),
        attach(model, {"hidden_state": disturb}),
    ):
        logits: Tensor = model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False
        ).logits
    return logits
