"""The family table: what differs between architectures, in one place.

Layers and attention modules are found by rules that hold for any transformer: what transformers
declares, which classes call its attention registry, how classes are named, how lists are built.
A family needs a row only where attention is more than one softmax map (and in `mlps.py`, where the
last linear of its MLP has a name of its own).
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from quantkit.errors import ProbeError

Named = list[tuple[str, nn.Module]]

_ATTENTION_CLASS: Final = re.compile(r"Attention|Attn|MHA")
_NOT_ATTENTION: Final = re.compile(r"(Output|Norm|Dropout|Bias|Mask|Gate|Projection|M[Ll][Pp])$")


@dataclass(frozen=True, kw_only=True)
class AttentionLayout:
    """How a layer calls its attention function.

    A module of any model may carry one as its attribute `attention_layout`.

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


def layout_of(module: nn.Module) -> AttentionLayout:
    """Returns the layout that an attention module carries, else that of its config's family."""
    own = getattr(module, "attention_layout", None)
    if isinstance(own, AttentionLayout):
        return own
    return attention_layout(getattr(module, "config", None))


def differential_lambda(module: nn.Module) -> float:
    """Returns lambda of a differential attention module (arXiv 2410.05258, equation 2).

    Raises:
        ProbeError: not a differential attention module, or its lambda differs by token.
    """
    value = _lambda(module)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ProbeError(f"lambda of {type(module).__name__} differs by token and head.")
    return float(value)


def mixes_of(module: nn.Module, layout: AttentionLayout) -> tuple[float | Tensor, ...]:
    """Returns each map's factor in the effective map: 1, and -lambda for a second one.

    A number, or `[batch, heads, query]` where lambda is projected from the token (DIFF V2).
    """
    if layout.maps == 1:
        return (1.0,)
    return (1.0, -_lambda(module))


def _lambda(module: nn.Module) -> float | Tensor:
    method = getattr(module, "differential_lambda", None)
    if callable(method):
        value = method()
        return value.detach() if isinstance(value, Tensor) else float(value)
    parts = [getattr(module, f"lambda_{name}", None) for name in ("q1", "k1", "q2", "k2")]
    if any(part is None for part in parts):
        raise ProbeError(f"{type(module).__name__} has no lambda: not differential attention.")
    q1, k1, q2, k2 = (torch.as_tensor(part).detach().float() for part in parts)
    first, second = torch.exp((q1 * k1).sum()), torch.exp((q2 * k2).sum())
    initial: Any = module.lambda_init
    return float(first - second) + float(initial)


def backbone(model: nn.Module) -> Any:
    """Returns the model without its vocabulary head (the model itself where it has none)."""
    return model.base_model if isinstance(model, PreTrainedModel) else model


# Attention modules


@dataclass(frozen=True, kw_only=True)
class RegistryUse:
    """What a class takes from its file: the attention interface, and its eager function."""

    interface: AttentionInterface
    eager_name: str | None
    file: dict[str, Any]


@cache
def registry_use(kind: type[nn.Module]) -> RegistryUse | None:
    """Returns how a class calls transformers' attention registry, None where it does not.

    Read off the names that its methods use: neither a class name nor a base class tells, and the
    eager function is only ever passed as a default.
    """
    if issubclass(kind, PreTrainedModel):  # chooses implementations, does not attend
        return None
    own = kind.__mro__[: kind.__mro__.index(nn.Module)]
    for name in dict.fromkeys(name for base in own for name in vars(base)):
        method: Any = inspect.unwrap(getattr(kind, name))
        code = getattr(method, "__code__", None)
        if code is None:
            continue
        known = {used: method.__globals__.get(used) for used in code.co_names}
        found = [value for value in known.values() if isinstance(value, AttentionInterface)]
        if found:
            eager = [used for used, value in known.items() if "eager" in used and callable(value)]
            return RegistryUse(
                interface=found[0],
                eager_name=eager[0] if eager else None,
                file=method.__globals__,
            )
    return None


def is_attention_class(module: nn.Module) -> bool:
    """Whether the class's name says that it attends (or holds what does)."""
    name = type(module).__name__
    return bool(_ATTENTION_CLASS.search(name)) and not _NOT_ATTENTION.search(name)


def attention_modules(model: nn.Module) -> Named:
    """Returns the modules that attend, by qualified name, in module order.

    Those that call transformers' registry or carry a layout, and the innermost of those whose
    class is named like one. The model itself goes by its class's name.
    """
    named = [(name, module) for name, module in model.named_modules()]
    certain = {name for name, m in named if surely_attends(m)}
    likely = {
        name
        for name, m in named
        if is_attention_class(m)
        and not isinstance(m, (nn.ModuleList, PreTrainedModel))
        and any(p.dim() > 1 for p in m.parameters())
        and not any(name.startswith(f"{above}.") or not above for above in certain)
    }
    both = certain | likely
    return [
        (name or type(module).__name__, module)
        for name, module in named
        if name in certain or (name in likely and not any(_within(n, name) for n in both))
    ]


def surely_attends(module: nn.Module) -> bool:
    """Whether the module carries a layout, or its class calls the attention registry."""
    carries = isinstance(getattr(module, "attention_layout", None), AttentionLayout)
    kind: Any = type(module)
    return carries or registry_use(kind) is not None


def _within(inner: str, outer: str) -> bool:
    return inner != outer and (not outer or inner.startswith(f"{outer}."))


# Layers


def layer_modules(model: nn.Module) -> Named:
    """Returns the layers whose outputs are the hidden states, by qualified name, in order.

    What transformers declares; else the children of every innermost `ModuleList` or `Sequential`
    that are all of one class and each contain attention (a list of experts does not, and T5's
    `layer` lists are of mixed classes).
    """
    declared = _declared_layers(model)
    if not declared:
        return _listed_layers(model)
    return [(name, m) for name, m in model.named_modules() if id(m) in declared]


def block_modules(model: nn.Module) -> Named:
    """Returns the layers with one MLP each: where a declared one is a stage (Swin), its blocks."""
    layers, listed = layer_modules(model), _listed_layers(model)
    blocks = {name for name, _ in listed if any(_within(name, stage) for stage, _ in layers)}
    stages = {name for name, _ in layers if any(_within(block, name) for block in blocks)}
    names = {name for name, _ in layers}
    return [
        (name, module)
        for name, module in model.named_modules()
        if name in blocks or (name not in stages and name in names)
    ]


def _listed_layers(model: nn.Module) -> Named:
    attends = {name for name, _ in attention_modules(model)}
    lists = {
        name: [(f"{name}.{child}".lstrip("."), m) for child, m in module.named_children()]
        for name, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
    }
    found = {
        name
        for name, children in lists.items()
        if len({type(child) for _, child in children}) == 1
        and all(any(_within(place, child) for place in attends) for child, _ in children)
    }
    innermost = {id(m) for n in found if not any(_within(o, n) for o in found) for _, m in lists[n]}
    return [(name, module) for name, module in model.named_modules() if id(module) in innermost]


def _declared_layers(model: nn.Module) -> set[int]:
    """Returns the ids of the modules that transformers records hidden states from."""
    found: set[int] = set()
    for part in model.modules():
        declared = getattr(part, "_can_record_outputs", None) or {}
        entries = declared.get("hidden_states", ()) if isinstance(declared, dict) else ()
        for entry in entries if isinstance(entries, (list, tuple)) else (entries,):
            kind = entry if isinstance(entry, type) else getattr(entry, "target_class", None)
            if isinstance(kind, type):
                within = getattr(entry, "layer_name", None) or ""
                found |= {
                    id(module)
                    for name, module in part.named_modules()
                    if isinstance(module, kind) and within in name
                }
    return found
