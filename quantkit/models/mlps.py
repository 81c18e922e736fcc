"""Where the MLP of a layer begins and ends, which modules are linear layers, and their weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quantkit.errors import InputError
from quantkit.models.families import Named, is_attention_class, surely_attends
from quantkit.numerics.affine import check_range

_DOWN_NAMES: Final = (
    "down_proj",  # Llama and its many relatives, MPT
    "fc2",  # OPT, BART, Whisper, timm, newer ViT
    "mlp.c_proj",  # GPT-2
    "mlp.fc_out",  # GPT-J
    "dense_4h_to_h",  # Bloom, Falcon, GPT-NeoX
    "wo",  # T5
    "output.dense",  # BERT, DeBERTa, older ViT
    "output_dense",  # Wav2Vec2, WavLM
    "linear2",  # torch.nn
    "lin2",  # DistilBERT
    "w2",  # Mixtral as published
)
"""How the last linear of an MLP ends, by family; tried in this order, outside attention."""


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """The MLP of one layer.

    Attributes:
        input: The module whose input is the MLP's: its first linear, or the block of experts.
        downs: The last linears, one an expert.
        fused: Modules that hold the last linears of all experts as one 3-D `down_proj`.
    """

    input: tuple[str, nn.Module]
    downs: tuple[tuple[str, nn.Module], ...]
    fused: tuple[tuple[str, nn.Module], ...]


def projection_modules(model: nn.Module) -> Named:
    """Returns every linear layer but the output head, transformers' `Conv1D` (GPT-2) too."""
    head: Any = None
    if isinstance(model, PreTrainedModel):
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return [
        (name or type(module).__name__, module)
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head
    ]


def as_matrix(name: str, module: nn.Module) -> Tensor:
    """Returns the weight of a linear layer as `[out, in]`, without a copy.

    Raises:
        InputError: it is no floating-point matrix, is computed anew at each use, or is not on a
            device.
        RangeError: NaN or inf.
    """
    parameter = module._parameters.get("weight")
    if parameter is None or parameter.dim() != 2 or not parameter.is_floating_point():
        found = "none" if parameter is None else f"{parameter.dtype} {list(parameter.shape)}"
        raise InputError(
            f"Expected a floating-point matrix as a parameter for the weight of {name!r}, got "
            f"{found}: load the model without quantization and remove parametrizations first."
        )
    if parameter.is_meta:
        raise InputError(
            f"the weight of {name!r} is offloaded: weights are quantized where the whole model is "
            "on a device; use a larger one or several."
        )
    check_range(parameter.min(), parameter.max(), f"{name}.weight")
    matrix = parameter.detach()
    return matrix.t() if isinstance(module, Conv1D) else matrix


def mlp_of(name: str, layer: nn.Module) -> Mlp | None:
    """Returns the MLP of a layer, None where it has none outside its attention."""
    outside = dict(_outside_attention(name, layer))
    linears = {n: m for n, m in outside.items() if isinstance(m, (nn.Linear, Conv1D))}
    fused = tuple((n, m) for n, m in outside.items() if holds_fused_experts(m))
    downs: list[tuple[str, nn.Linear | Conv1D]] = []
    for ending in _DOWN_NAMES:
        pattern = re.compile(rf"(^|[._]){re.escape(ending)}$")
        downs = [(n, m) for n, m in linears.items() if pattern.search(n[len(name) :])]
        if downs:
            break
    if not downs and not fused:
        wide = [(n, m) for n, m in linears.items() if _features(m)[0] > _features(m)[1]]
        downs = wide[-1:]
    if not downs and not fused:
        return None
    if len(downs) == 1 and not fused:
        inner, width = _features(downs[0][1])
        ups = [
            (n, m)
            for n, m in linears.items()
            if _features(m)[0] == width and _features(m)[1] >= inner and m is not downs[0][1]
        ]
        start: tuple[str, nn.Module] = (ups or downs)[0]
    else:
        places = [n for n, _ in (*downs, *fused)]
        start = _common_block(name, layer, outside, places)
    return Mlp(input=start, downs=tuple(downs), fused=fused)


def _features(module: nn.Linear | Conv1D) -> tuple[int, int]:
    """Returns (inputs, outputs) of a linear layer."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    rows, columns = module.weight.shape
    return int(rows), int(columns)


def holds_fused_experts(module: nn.Module) -> bool:
    """Returns whether a module holds the last linears of all experts as one 3-D `down_proj`."""
    down = dict(module.named_parameters(recurse=False)).get("down_proj")
    return down is not None and down.dim() == 3


def _outside_attention(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        if not is_attention_class(child) and not surely_attends(child):
            yield f"{name}.{child_name}", child
            yield from _outside_attention(f"{name}.{child_name}", child)


def _common_block(
    name: str, layer: nn.Module, outside: dict[str, nn.Module], places: list[str]
) -> tuple[str, nn.Module]:
    """Returns the smallest module that is called and holds all the places."""
    parts = [place.split(".")[:-1] for place in places]
    shared = 0
    while all(len(p) > shared and p[shared] == parts[0][shared] for p in parts):
        shared += 1
    for length in range(shared, len(name.split(".")), -1):
        block = ".".join(parts[0][:length])
        if not isinstance(outside.get(block), (nn.ModuleList, nn.ModuleDict, type(None))):
            return block, outside[block]
    return name, layer
