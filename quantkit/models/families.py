"""The family table: what differs between architectures, in one place.

transformers models name their decoder layers and attention modules themselves
(`_can_record_outputs`), so a family needs a row only where attention is more than one softmax map.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from quantkit.errors import ProbeError


@dataclass(frozen=True, kw_only=True)
class AttentionLayout:
    """How a layer calls its attention function.

    Attributes:
        maps: Softmax maps a head.
        order: Where the heads of map 1 are in a call: the first `halves` of the heads, or
            `interleaved` with those of map 2.
        shared_keys: Both maps use the same key heads (DIFF V2), instead of their own.
        calls_per_layer: Calls with the same q and k in one forward of the layer; they count once.
    """

    maps: int = 1
    order: Literal["halves", "interleaved"] = "halves"
    shared_keys: bool = False
    calls_per_layer: int = 1


_LAYOUTS: Final = {"diffllama": AttentionLayout(maps=2, calls_per_layer=2)}


def attention_layout(config: Any) -> AttentionLayout:
    """Returns the layout of a transformers config's family."""
    return _LAYOUTS.get(getattr(config, "model_type", ""), AttentionLayout())


def _recorded(model: PreTrainedModel, what: str) -> list[tuple[str, nn.Module]]:
    """Returns the modules whose class the model declares as the source of `what`, in order."""
    base = backbone(model)
    declared = getattr(base, "_can_record_outputs", None) or {}
    entries = declared.get(what, ())
    entries = entries if isinstance(entries, (list, tuple)) else (entries,)
    classes = tuple(
        entry if isinstance(entry, type) else getattr(entry, "target_class", None)
        for entry in entries
    )
    kinds = tuple(kind for kind in classes if isinstance(kind, type))
    if not kinds:
        return []
    modules: list[tuple[str, nn.Module]] = list(model.named_modules())
    return [(name, module) for name, module in modules if isinstance(module, kinds)]


def layer_modules(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Returns the layers whose outputs are the hidden states, by qualified name, in order."""
    return _recorded(model, "hidden_states")


def attention_modules(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Returns the attention modules that go through transformers' registry, in order."""
    return _recorded(model, "attentions")


def backbone(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the model without its vocabulary head (the model itself where it has none)."""
    base = model.base_model
    assert isinstance(base, PreTrainedModel)
    return base


def differential_lambda(module: nn.Module) -> float:
    """Returns lambda of a DiffLlama attention module (arXiv 2410.05258, equation 2).

    Raises:
        ProbeError: not a differential attention module.
    """
    parts = [getattr(module, f"lambda_{name}", None) for name in ("q1", "k1", "q2", "k2")]
    if any(part is None for part in parts):
        raise ProbeError(f"{type(module).__name__} has no lambda: not differential attention.")
    q1, k1, q2, k2 = (torch.as_tensor(part).detach().float() for part in parts)
    first, second = torch.exp((q1 * k1).sum()), torch.exp((q2 * k2).sum())
    initial: Any = module.lambda_init
    return float(first - second) + float(initial)
