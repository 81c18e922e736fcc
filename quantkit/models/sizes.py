"""What a model is called in a result file: its kind of input, its sizes, its type and place."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

MODALITIES: Final = ("text", "image", "audio", "other")
_MODALITY_OF: Final = {
    "input_ids": "text",
    "pixel_values": "image",
    "input_features": "audio",
    "input_values": "audio",
}
_PARTS: Final = ("text_config", "vision_config", "audio_config", "encoder", "decoder")
_HIDDEN: Final = ("hidden_size", "d_model", "n_embd", "embed_dim", "num_features", "dim")
_HEADS: Final = ("num_attention_heads", "encoder_attention_heads", "num_heads", "n_head", "n_heads")
_LAYERS: Final = ("num_hidden_layers", "encoder_layers", "num_layers", "n_layer", "n_layers")
_HEAD_DIM: Final = ("head_dim", "d_kv", "attention_head_size")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a transformer; 0 where neither config nor module says.

    Where they differ between stages (Swin), those of the last stage. Of a model with several parts
    (encoder and decoder, text and vision), those of the part that reads its main input.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int


def input_name(model: nn.Module) -> str:
    """Returns the name of the forward argument that carries the data, e.g. `input_ids`."""
    named = getattr(model, "main_input_name", None)
    if isinstance(named, str):
        return named
    return next(iter(inspect.signature(model.forward).parameters), "x")


def modality_of(model: nn.Module) -> str:
    """Returns `text`, `image`, `audio` or `other`, from the name of the main input.

    A timm model has no such name; it is one that carries a `pretrained_cfg`.
    """
    known = _MODALITY_OF.get(input_name(model))
    if known is not None:
        return known
    return "image" if isinstance(getattr(model, "pretrained_cfg", None), dict) else "other"


def sizes_of(model: nn.Module) -> Sizes:
    """Returns the model's sizes as its config (or a timm model's own attributes) gives them."""
    config: Any = getattr(model, "config", None)
    part: Any = model if config is None else _part(config, modality_of(model))
    hidden = _number(part, _HIDDEN)
    heads = _number(part, _HEADS) or _heads_of_modules(model)
    return Sizes(
        layers=_number(part, _LAYERS),
        heads=heads,
        kv_heads=_number(part, ("num_key_value_heads",)) or heads,
        head_dim=_number(part, _HEAD_DIM) or (hidden // heads if heads else 0),
        hidden_size=hidden,
    )


def place_of(model: nn.Module) -> tuple[str, str]:
    """Returns (dtype, device) of the first floating-point weight, e.g. `("float32", "cpu")`."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            return str(tensor.dtype).removeprefix("torch."), str(tensor.device)
    return str(torch.get_default_dtype()).removeprefix("torch."), "cpu"


def _part(config: Any, modality: str) -> Any:
    """Returns the config, or the one inside it, that has the sizes."""
    first = {"text": "text_config", "image": "vision_config", "audio": "audio_config"}
    order = sorted(_PARTS, key=lambda name: name != first.get(modality))
    candidates = [config, *(getattr(config, name, None) for name in order)]
    for candidate in candidates:
        if candidate is not None and _number(candidate, _HIDDEN) and _number(candidate, _HEADS):
            return candidate
    return config


def _number(holder: Any, names: tuple[str, ...]) -> int:
    for name in names:
        value = getattr(holder, name, None)
        if isinstance(value, (list, tuple)) and value:
            value = value[-1]
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0


def _heads_of_modules(model: nn.Module) -> int:
    found: list[Any] = [getattr(module, "num_heads", None) for module in model.modules()]
    return next((heads for heads in reversed(found) if isinstance(heads, int)), 0)
