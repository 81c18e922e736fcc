"""batches x probes x min-max observers -> `Ranges`, and the mergeable state beside them.

Memory: one batch's activations, one tile of logits and two numbers a tensor; flat in the number of
samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quantkit.calib_sets import TokenSlice
from quantkit.errors import InputError
from quantkit.models import LoadedModel, backbone
from quantkit.numerics.affine import check_range
from quantkit.numerics.observers.minmax import MinMax
from quantkit.probes import Activation, AttentionLogits, attach
from quantkit.progress import Progress, silent
from quantkit.results import Range, Ranges
from quantkit.results.environment import environment

MASK_VALUE = 1e30
"""A range this wide holds a mask's stand-in for -inf, not data."""


def observe(
    loaded: LoadedModel,
    text: TokenSlice,
    *,
    batch_size: int = 4,
    progress: Progress = silent,
) -> dict[str, MinMax]:
    """Returns a min-max observer for each linear input (1 group) and logit map (a group a head).

    Only valid positions count: no padding, no masked logits.
    """
    seen: dict[str, MinMax] = {}

    def update(name: str, x: Tensor) -> None:
        seen[name] = (seen.get(name) or MinMax.empty(x.shape[0])).update(x)

    def look_at_input(visit: Activation) -> None:
        update(f"linear_input/{visit.name}", visit.tensor[visit.real].reshape(1, -1))

    def look_at_logits(call: AttentionLogits) -> None:
        name = f"attention_logit/{call.layer}/map {call.map}"
        for tile in call.tiles():
            before = seen.get(name) or MinMax.empty(call.heads)
            logits = tile.logits.transpose(0, 1).reshape(call.heads, -1)
            seen[name] = before.update(logits, valid=tile.valid.reshape(1, -1))

    batches = math.ceil(text.sequences / batch_size)
    points: dict[str, Callable[[Any], None]] = {
        "linear_input": look_at_input,
        "attention_logit": look_at_logits,
    }
    with torch.inference_mode(), attach(loaded.model, points):
        for done, batch in enumerate(text.batches(batch_size)):
            progress(f"calibrating {loaded.name}", done, batches)
            backbone(loaded.model)(
                input_ids=batch.input_ids.to(loaded.model.device),
                attention_mask=batch.attention_mask.to(loaded.model.device),
                use_cache=False,
            )
    progress(f"calibrating {loaded.name}", batches, batches)
    return seen


def ranges_of(
    observed: dict[str, MinMax], loaded: LoadedModel, text: TokenSlice, *, batch_size: int
) -> Ranges:
    """Returns min-max ranges from what was observed.

    Raises:
        InputError: a tensor that holds NaN, inf or a mask value.
    """
    tensors = {}
    for name, state in observed.items():
        bad = int(state.nan_count.sum()) + int(state.inf_count.sum())
        if bad:
            raise InputError(f"range of {name!r}: {bad} NaN or inf values; expected finite ones.")
        lo, hi = state.finish()
        check_range(lo, hi, name)
        if float(torch.maximum(lo.abs(), hi.abs()).amax()) >= MASK_VALUE:
            raise InputError(
                f"range of {name!r} reaches {MASK_VALUE:g}: a mask's stand-in for -inf leaked in."
            )
        is_logit = name.startswith("attention_logit/")
        tensors[name] = Range(
            lo=lo.tolist() if is_logit else float(lo[0]),
            hi=hi.tolist() if is_logit else float(hi[0]),
            method="minmax",
            granularity="head" if is_logit else "tensor",
            count=int(state.count.sum()),
            point=name.split("/", 1)[0],
        )
    return Ranges(
        model=loaded.info(),
        data=text.info(batch_size),
        method="minmax",
        environment=environment(),
        tensors=tensors,
    )


def observation_tensors(observed: dict[str, MinMax]) -> dict[str, Tensor]:
    """Returns the mergeable state as flat tensors, for `observations.safetensors`."""
    return {
        f"{name}|{field}": tensor.clone()
        for name, state in observed.items()
        for field, tensor in state.state().items()
    }
