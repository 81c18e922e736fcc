"""Optimizers over groups of weights, and the learning rate of a step."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import nn

from quantkit.errors import InputError
from quantkit.jobs import Training

_QUERIES_KEYS: Final = ("q_proj.", "k_proj.")


def optimizers_of(model: nn.Module, training: Training) -> list[Any]:
    """Returns one optimizer or two, whose groups have the peak learning rate.

    Weight decay holds matrices alone: no norm and no lambda vector, and the query and key
    projections only where the recipe says so. Muon (Jordan et al. 2024) takes the matrices inside
    the layers, its update scaled to AdamW's root mean square (arXiv 2502.16982, equation 4).

    Raises:
        InputError: a torch without Muon.
    """
    matrices, free, rest = [], [], []
    for name, weight in model.named_parameters():
        is_inside = weight.ndim == 2 and "embed" not in name and "lm_head" not in name
        if weight.ndim < 2 or (
            any(part in name for part in _QUERIES_KEYS) and not training.decay_queries_keys
        ):
            free.append((is_inside, weight))
        elif is_inside:
            matrices.append(weight)
        else:
            rest.append(weight)
    decay = training.weight_decay
    if training.optimizer == "adamw":
        return [
            _adamw(
                training,
                [(matrices + rest, decay), ([weight for _, weight in free], 0.0)],
            )
        ]
    if not hasattr(torch.optim, "Muon"):
        raise InputError(
            f"[training] optimizer muon: torch {torch.__version__} has none; expected 2.9 or later."
        )
    inside = [weight for is_inside, weight in free if is_inside]
    groups = [
        {"params": weights, "weight_decay": held}
        for weights, held in ((matrices, decay), (inside, 0.0))
        if weights
    ]
    muon = torch.optim.Muon(
        groups, lr=training.learning_rate, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    outside = [weight for is_inside, weight in free if not is_inside]
    return [muon, _adamw(training, [(rest, decay), (outside, 0.0)])]


def _adamw(training: Training, groups: list[tuple[list[nn.Parameter], float]]) -> Any:
    return torch.optim.AdamW(
        [{"params": weights, "weight_decay": decay} for weights, decay in groups if weights],
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        fused=True,
    )


def learning_rate(training: Training, step: int) -> float:
    """Returns the learning rate of step 0, 1, ...: linear warm-up, then half a cosine."""
    warm = training.warmup_steps
    if step < warm:
        return training.learning_rate * (step + 1) / warm
    span = max(1, training.steps - 1 - warm)
    done = min(1.0, (step - warm) / span)
    low = training.final_fraction
    return training.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))
