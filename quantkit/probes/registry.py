"""Attention that goes through transformers' registry, seen from a function registered there."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quantkit.errors import ProbeError
from quantkit.models.families import layout_of, registry_use
from quantkit.probes.attention_probe import AttentionProbe, AttentionSource, Frame
from quantkit.probes.masks import LazyMask, first_keys_causal, lazy_mask_function
from quantkit.probes.split import Pairs, edited_inputs

Attend = Callable[[Pairs, Tensor], Tensor]


class _StandIn(str):
    """The name of an implementation that stands in for another.

    Equal to the other's, so that model code that asks `== "eager"` takes the branch that it would
    have taken; hashed as itself, so that a registry's lookup finds the stand-in.
    """

    original: str

    def __new__(cls, original: str) -> _StandIn:
        name = super().__new__(cls, f"quantkit_{uuid.uuid4().hex}_{original}")
        name.original = original
        return name

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or self.original == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return str.__hash__(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return self.original  # a copied model outlives the registry's entry

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.original,)


class RegistrySource(AttentionSource):
    """Stands in for the attention and mask functions of every config of a model."""

    def __init__(self, probe: AttentionProbe, attend: Attend) -> None:
        self.probe, self.attend = probe, attend

    @contextmanager
    def installed(self) -> Iterator[None]:
        names: dict[str, _StandIn] = {}
        with ExitStack() as stack:
            for config in _configs(self.probe.model):
                original = config._attn_implementation
                if original not in names:
                    names[original] = self._register(original, stack)
                stack.callback(setattr, config, "_attn_implementation_internal", original)
                config._attn_implementation_internal = names[original]
            yield

    def _register(self, original: str, stack: ExitStack) -> _StandIn:
        name = _StandIn(original)
        masks = ALL_MASK_ATTENTION_FUNCTIONS

        def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._attention(original, module, *args, **kwargs)

        plain = str(original)
        ALL_ATTENTION_FUNCTIONS.register(name, attention)
        stack.callback(type(ALL_ATTENTION_FUNCTIONS)._global_mapping.pop, name)
        if original in masks:
            # What these make is no 4-D tensor to read: keep how it was described beside it.
            is_opaque = any(word in plain for word in ("flash", "flex", "paged"))
            made = masks[original]
            masks.register(name, lazy_mask_function(made) if is_opaque else made)
            stack.callback(type(masks)._global_mapping.pop, name)
        return name

    def _attention(
        self,
        original: str,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: LazyMask | Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Looks at the call, then computes attention as before or with what replaces its parts."""
        probe = self.probe
        frame = probe.frame(module)
        pairs: Pairs = []
        if frame is not None and not probe.quiet:
            pairs = self._look(original, frame, query, key, attention_mask, kwargs)
            replaced = probe.see_value(frame, value, pairs)
            value = value if replaced is None else replaced
        if frame is not None and any(edit is not None for _, edit in pairs):
            inputs = edited_inputs(pairs, layout_of(frame.module))
            if inputs is None:
                if module.training and kwargs.get("dropout"):
                    raise ProbeError("logits cannot be replaced under dropout: call model.eval().")
                with probe.calling_back():
                    return self.attend(pairs, value), None
            query, key = inputs
        with probe.hushed():
            function = _original_function(original, module)
            mask = (
                attention_mask.original if isinstance(attention_mask, LazyMask) else attention_mask
            )
            return function(module, query, key, value, mask, *args, **kwargs)

    def _look(
        self,
        original: str,
        frame: Frame,
        query: Tensor,
        key: Tensor,
        mask: LazyMask | Tensor | None,
        kwargs: dict[str, Any],
    ) -> Pairs:
        scale = kwargs.get("scaling")
        queries, keys = query.shape[2], key.shape[2]
        bias = kwargs.get("position_bias")
        bias = bias if bias is not None and bool(bias.any()) else None
        causal = False
        if mask is None and original != "eager":  # an eager function masks by the mask alone
            given = kwargs.get("is_causal")
            wanted = getattr(frame.module, "is_causal", True) if given is None else given
            causal = bool(wanted) and queries > 1
            if causal and queries != keys:
                mask, causal = first_keys_causal(queries, keys, query.device), False
        elif isinstance(mask, Tensor):
            if original == "eager" and mask.dtype == torch.bool:
                raise ProbeError(
                    "an eager attention adds its mask, and a boolean one adds 0 and 1 where it "
                    "should mask: pass an additive mask, or call "
                    'model.set_attn_implementation("sdpa").'
                )
            mask, added = self.probe.split(mask)
            if mask is not None and mask.shape[-1] > keys:
                mask = mask[..., :keys]
            added = None if added is None else added[..., :keys]
            bias = added if bias is None else bias if added is None else bias + added
        return self.probe.see(
            frame,
            "registry",
            query,
            key,
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            mask=mask,
            causal=causal,
            bias=None if bias is None else bias.detach()[..., :keys],
            softcap=kwargs.get("softcap"),
            sinks=_sinks(kwargs),
        )


def _sinks(kwargs: dict[str, Any]) -> Tensor | None:
    for name in ("s_aux", "sinks"):
        found = kwargs.get(name)
        if isinstance(found, Tensor):
            return found.detach().reshape(-1)
    return None


def _configs(model: nn.Module) -> list[Any]:
    """Returns every config of the model that names an attention implementation, each once."""
    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        if getattr(config, "_attn_implementation_internal", None) is None or id(config) in found:
            return
        found[id(config)] = config
        for name in getattr(config, "sub_configs", {}):
            add(getattr(config, name, None))

    for module in model.modules():
        add(getattr(module, "config", None))
    return list(found.values())


def _original_function(original: str, module: nn.Module) -> Callable[..., Any]:
    kind: Any = type(module)
    use = registry_use(kind)
    interface = ALL_ATTENTION_FUNCTIONS if use is None else use.interface
    if original in interface:
        found: Callable[..., Any] = interface[original]
        return found
    if use is None or use.eager_name is None:
        raise ProbeError(
            f"{type(module).__name__} has no attention function for {str(original)!r} that could "
            'be found: call model.set_attn_implementation("sdpa").'
        )
    eager: Callable[..., Any] = use.file[use.eager_name]
    return eager
