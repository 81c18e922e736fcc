"""Models as the callables that tasks score."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from quantkit.calib_sets import TokenBatch
from quantkit.models import LoadedModel
from quantkit.tasks.task import ImageForward, TextForward

_KEPT = "logits_to_keep"


def text_forward(loaded: LoadedModel) -> TextForward:
    """Returns a causal language model as a function of a batch, without a KV cache.

    Where the model can, the vocabulary head runs on the wanted positions alone: it is a fifth of a
    small model's work.
    """
    model = loaded.model
    takes_positions = _KEPT in inspect.signature(model.forward).parameters

    def forward(batch: TokenBatch, positions: Tensor | None = None) -> Tensor:
        more: dict[str, Any] = {}
        if positions is not None and takes_positions:
            more[_KEPT] = positions.to(loaded.device)
        with torch.inference_mode():
            logits: Tensor = model(
                input_ids=batch.input_ids.to(loaded.device),
                attention_mask=batch.attention_mask.to(loaded.device),
                use_cache=False,
                **more,
            ).logits
        if positions is not None and not takes_positions:
            logits = logits[:, positions.to(logits.device)]
        return logits.cpu()

    return forward


def image_forward(loaded: LoadedModel) -> ImageForward:
    """Returns a classifier of images as a function of a batch."""
    model, name = loaded.model, loaded.input_name

    def forward(images: Tensor) -> Tensor:
        dtype = next(model.parameters()).dtype
        with torch.inference_mode():
            output: Any = model(**{name: images.to(loaded.device, dtype)})
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        return logits.float().cpu()

    return forward
