"""Linear layers that alone read one module's output, so that scales can move between the two.

Candidates come from how a transformer layer is built; what is returned has been tried on the model
itself, with scales that are powers of 2 and hence all but exact: its output stays when the scales
move, and does not when the producer alone is divided. So a norm whose output is also the residual
(BERT), the norm before a parallel attention and MLP, or a gate on the wrong side are never mixed
up, whatever their names are.

No group is found: behind norms without a weight, for GPT-2's `Conv1D`, for the MLPs of a mixture
of experts, for a fused gate and up projection's down projection, between values and the output
projection of attention, and in a model of which `_tiny_inputs` does not know what it takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quantkit.errors import InputError
from quantkit.models.families import (
    attention_modules,
    backbone,
    block_modules,
)
from quantkit.models.folding import Fold, folded
from quantkit.models.mlps import mlp_of, projection_modules

_OUTPUT: Final = re.compile(
    r"(^|\.)(o_proj|out_proj|c_proj|proj|dense|wo|Wo|o|out_lin|to_out(\.\d+)?|output\.dense)$"
)
"""The output projections of attention, which do not read what the attention reads."""
_SAME: Final = 1e-4
"""Relative move of the output that is rounding; the least that a real change makes is ten times
that."""
_TOKENS: Final = (2, 6)


@dataclass(frozen=True, kw_only=True)
class SmoothingGroup:
    """A producer and the linear layers that alone read its output.

    Attributes:
        producer: Module name: the norm, or the projection that is multiplied by an activated gate.
        linears: Module names, in module order.
        kind: `norm` (norm -> q, k and v; norm -> gate and up, or fc1) or `up` (up -> down).
    """

    producer: str
    linears: tuple[str, ...]
    kind: Literal["norm", "up"]


def smoothing_groups(model: nn.Module) -> list[SmoothingGroup]:
    """Returns the groups that scales can move in, in the order of the layers; perhaps none.

    Layers that are built alike are tried together: a handful of forwards of 12 tokens.

    Raises:
        InputError: the model is in training mode, where its output is random.
    """
    if model.training:
        raise InputError("the model is in training mode, so its output is random: call eval().")
    inputs = _tiny_inputs(model)
    before = None if inputs is None else _output(model, inputs)
    if inputs is None or before is None:
        return []
    proposals: dict[tuple[object, ...], list[SmoothingGroup]] = {}
    for layer_name, layer in block_modules(model):
        for group in _candidates(model, layer_name, layer):
            places = [name.removeprefix(layer_name) for name in (group.producer, *group.linears)]
            proposals.setdefault((type(layer), group.kind, *places), []).append(group)
    found: list[SmoothingGroup] = []
    taken: set[str] = set()
    for groups in proposals.values():
        free = [group for group in groups if taken.isdisjoint(group.linears)]
        if free and _holds(model, free, inputs, before):
            found += free
            taken.update(name for group in free for name in group.linears)
    order = {name: n for n, (name, _) in enumerate(model.named_modules())}
    return sorted(found, key=lambda group: order[group.linears[0]])


def _candidates(model: nn.Module, name: str, layer: nn.Module) -> Iterator[SmoothingGroup]:
    """Yields what may be a group, likeliest first."""
    modules = dict(layer.named_modules(prefix=name))
    linears = {
        n: m for n, m in projection_modules(model) if n in modules and isinstance(m, nn.Linear)
    }
    attention = [n for n, _ in attention_modules(model) if n in modules]
    mlp = mlp_of(name, layer)
    downs = [] if mlp is None or mlp.fused or len(mlp.downs) != 1 else [mlp.downs[0]]
    down_name, down = downs[0] if downs else ("", None)
    norms = [
        (n, m)
        for n, m in modules.items()
        if "Norm" in type(m).__name__
        and n not in attention
        and not any(n.startswith(f"{place}.") for place in attention)
    ]
    for norm_name, norm in norms:
        weight = dict(norm.named_parameters(recurse=False)).get("weight")
        if weight is None or weight.dim() != 1:
            continue
        reads = [n for n, m in linears.items() if m.in_features == len(weight)]
        attends = [
            n
            for n in reads
            if any(n.startswith(f"{place}.") for place in attention) and not _OUTPUT.search(n)
        ]
        inner = down.in_features if isinstance(down, nn.Linear) else 0
        first = [
            n
            for n in reads
            if inner
            and n != down_name
            and not any(n.startswith(f"{place}.") for place in attention)
            and linears[n].out_features in (inner, 2 * inner)
        ]
        both = [n for n in reads if n in attends or n in first]
        for readers in (attends, first, both if attends and first else []):
            if readers:
                yield SmoothingGroup(producer=norm_name, linears=tuple(readers), kind="norm")
    if isinstance(down, nn.Linear):
        beside = down_name.rsplit(".", 1)[0]
        wide = [
            n
            for n, m in linears.items()
            if n.rsplit(".", 1)[0] == beside
            and n != down_name
            and (m.in_features, m.out_features) == (down.out_features, down.in_features)
        ]
        if len(wide) == 2:  # a gate and an up projection: one of them commutes with the scales
            for up in sorted(wide, key=lambda n: "up" not in n.rsplit(".", 1)[1]):
                yield SmoothingGroup(producer=up, linears=(down_name,), kind="up")


def _holds(
    model: nn.Module, groups: list[SmoothingGroup], inputs: Mapping[str, Tensor], before: Tensor
) -> bool:
    """Whether the scales of all these groups move without a trace, and the division alone not."""
    modules: dict[str, Any] = dict(model.named_modules())
    folds = []
    for n, group in enumerate(groups):
        channels = modules[group.linears[0]].in_features
        generator = torch.Generator().manual_seed(n)
        exponents = torch.randint(-2, 3, (channels,), generator=generator)
        scales = torch.exp2(exponents.float())
        folds.append(Fold(producer=group.producer, readers=group.linears, scales=scales))
    divided = [Fold(producer=f.producer, readers=(), scales=f.scales) for f in folds]
    try:
        with folded(model, folds):
            stays = _moved(_output(model, inputs), before) <= _SAME
        if not stays:
            return False
        with folded(model, divided):
            return _moved(_output(model, inputs), before) > 10 * _SAME
    except InputError:  # a tied weight, a norm of another kind
        return False


def _moved(after: Tensor | None, before: Tensor) -> float:
    return float("nan") if after is None else float((after - before).norm() / before.norm())


def _output(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor | None:
    """Returns the first output of the model without its head, None where it does not run."""
    try:
        with torch.inference_mode():
            output = backbone(model)(**inputs)
    except (TypeError, ValueError, RuntimeError):  # it wants other inputs
        return None
    first = output if isinstance(output, Tensor) else output[0]
    return first.double() if isinstance(first, Tensor) else None


def _tiny_inputs(model: nn.Module) -> dict[str, Tensor] | None:
    """Returns arguments of a forward: tokens, or noise for an image; None where neither fits."""
    if not isinstance(model, PreTrainedModel):
        return None
    device, config = model.device, model.config
    if model.main_input_name == "input_ids":
        embedding: Any = model.get_input_embeddings()
        vocabulary = embedding.weight.shape[0]
        ids = torch.arange(_TOKENS[0] * _TOKENS[1]) * 7919 % vocabulary
        return {"input_ids": ids.reshape(_TOKENS).to(device)}
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if model.main_input_name == "pixel_values" and isinstance(size, int) and channels:
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randn(1, channels, size, size, generator=generator)
        return {"pixel_values": pixels.to(device=device, dtype=model.dtype)}
    return None
