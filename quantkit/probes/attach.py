"""`attach(model, {point: callback})`: the one way in which quantkit touches a model's forward.

Points and what their callbacks get:

* `attention_logit`: an `AttentionLogits` a layer and map. Returning None looks; returning a
  function of a tile replaces the logits, in every call that the layer makes with the same q and k.
* `hidden_state`: an `Activation`, the output of a decoder layer after both residual additions.
* `linear_input`: an `Activation`, the input of each `nn.Linear` (the output head is left out).

Inside the `with`, attention goes through a function and a mask function that are registered with
transformers under a name of their own. A callback that looks leaves the outputs bitwise unchanged:
the model's own function, with its own mask, computes them.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quantkit.errors import ProbeError, suggest
from quantkit.models import (
    attention_layout,
    attention_modules,
    backbone,
    differential_lambda,
    layer_modules,
)
from quantkit.probes.attention import AttentionLogits, LogitTransform, attend, split_maps
from quantkit.probes.masks import LazyMask, lazy_mask_function

POINTS: Final = ("attention_logit", "hidden_state", "linear_input")


@dataclass(frozen=True, kw_only=True, eq=False)
class Activation:
    """One activation tensor of one forward pass.

    Attributes:
        layer: Index in the order of the model's modules at this point; `name`: the module.
        tensor: `[batch, sequence, channel]`.
        real: bool `[batch, sequence]`, False where the token is padding.
    """

    point: str
    layer: int
    name: str
    tensor: Tensor
    real: Tensor


@dataclass
class Hits:
    """Proof of execution: how often a point was visited, and how many elements went through."""

    calls: int = 0
    elements: int = 0


@dataclass
class Attachment:
    """What `attach` yields: `hits[point][module name]`, zero until the module has run."""

    hits: dict[str, dict[str, Hits]] = field(default_factory=dict)

    def unseen(self) -> list[str]:
        """Returns `point module` for all that never ran."""
        return [
            f"{point} {name}"
            for point, modules in self.hits.items()
            for name, hits in modules.items()
            if hits.elements == 0
        ]


Callback = Callable[[Any], Any]


@contextmanager
def attach(
    model: PreTrainedModel, points: Mapping[str, Callback], *, count_masked: bool = False
) -> Iterator[Attachment]:
    """Calls back at the named points of every forward pass inside the `with`.

    Args:
        points: From a name in `POINTS` to its callback.
        count_masked: Tiles declare every logit valid ("all of QK^T"); for looking only.

    Raises:
        ProbeError: an unknown point; a compiled or parallel model; attention that does not go
            through transformers' registry; on leaving without an exception, a module at which a
            probe never fired (by name).
    """
    for point in points:
        if point not in POINTS:
            raise ProbeError(f"unknown probe point {point!r}.{suggest(point, POINTS)}")
    _refuse_unhookable(model)
    attachment = Attachment(hits={point: {} for point in points})
    state = _Padding()
    with ExitStack() as stack:
        # on the backbone: it runs with the head and also where it is called alone
        handle = backbone(model).register_forward_pre_hook(state.read, with_kwargs=True)
        stack.callback(handle.remove)
        if "hidden_state" in points:
            _hook_layers(model, points["hidden_state"], attachment, state, stack)
        if "linear_input" in points:
            _hook_linears(model, points["linear_input"], attachment, state, stack)
        if "attention_logit" in points:
            probe = _AttentionProbe(
                model, points["attention_logit"], attachment, state, count_masked
            )
            stack.enter_context(probe.installed())
        yield attachment
    unseen = attachment.unseen()
    if unseen:
        shown = ", ".join(unseen[:4]) + (f" and {len(unseen) - 4} more" if unseen[4:] else "")
        raise ProbeError(
            f"a probe never fired: {shown}. Nothing was measured there; check that the model ran "
            "inside the `with` and that its attention uses transformers' attention registry."
        )


class _Padding:
    """The 2-D attention mask of the forward pass that is under way."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None

    def read(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = kwargs.get("attention_mask")
        if given is None and len(args) > 1 and isinstance(args[1], Tensor):
            given = args[1]
        is_2d = isinstance(given, Tensor) and given.dim() == 2
        self.mask = given.to(torch.bool) if is_2d and given is not None else None

    def real(self, batch: int, length: int) -> Tensor | None:
        """Returns bool `[batch, length]` for the last `length` positions, or None without one."""
        if self.mask is None or self.mask.shape[0] != batch or self.mask.shape[1] < length:
            return None
        return self.mask[:, -length:]


def _refuse_unhookable(model: nn.Module) -> None:
    if isinstance(model, nn.DataParallel):
        raise ProbeError("DataParallel runs the model in threads, past the probes: unwrap it.")
    if any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    ):
        raise ProbeError(
            "the model, or a part of it, is compiled: hooks added later silently do not fire; "
            "pass the model as it was before."
        )


def _activation(point: str, layer: int, name: str, tensor: Tensor, state: _Padding) -> Activation:
    real = state.real(tensor.shape[0], tensor.shape[1])
    if real is None:
        real = torch.ones(tensor.shape[:2], dtype=torch.bool, device=tensor.device)
    return Activation(point=point, layer=layer, name=name, tensor=tensor, real=real)


def _hook_layers(
    model: PreTrainedModel,
    callback: Callback,
    attachment: Attachment,
    state: _Padding,
    stack: ExitStack,
) -> None:
    layers = layer_modules(model)
    if not layers:
        raise ProbeError(f"{type(model).__name__} names no decoder layers: hidden states unseen.")
    for index, (name, module) in enumerate(layers):
        hits = attachment.hits["hidden_state"][name] = Hits()

        def after(
            _module: nn.Module,
            _args: Any,
            output: Any,
            index: int = index,
            name: str = name,
            hits: Hits = hits,
        ) -> Any:
            tensor = output[0] if isinstance(output, tuple) else output
            visit = _activation("hidden_state", index, name, tensor, state)
            hits.calls += 1
            hits.elements += int(visit.real.sum()) * tensor.shape[-1]
            replaced = callback(visit)
            if replaced is None:
                return None
            return (replaced, *output[1:]) if isinstance(output, tuple) else replaced

        stack.callback(module.register_forward_hook(after).remove)


def _hook_linears(
    model: PreTrainedModel,
    callback: Callback,
    attachment: Attachment,
    state: _Padding,
    stack: ExitStack,
) -> None:
    for index, (name, module) in enumerate(linear_modules(model)):
        hits = attachment.hits["linear_input"][name] = Hits()

        def before(
            _module: nn.Module,
            args: tuple[Any, ...],
            index: int = index,
            name: str = name,
            hits: Hits = hits,
        ) -> Any:
            visit = _activation("linear_input", index, name, args[0], state)
            hits.calls += 1
            hits.elements += int(visit.real.sum()) * args[0].shape[-1]
            replaced = callback(visit)
            return None if replaced is None else (replaced, *args[1:])

        stack.callback(module.register_forward_pre_hook(before).remove)


def linear_modules(model: PreTrainedModel) -> list[tuple[str, nn.Linear]]:
    """Returns every `nn.Linear` but the output head, by qualified name, in module order."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]


class _AttentionProbe:
    """Stands in for the model's attention function while it is installed."""

    def __init__(
        self,
        model: PreTrainedModel,
        callback: Callback,
        attachment: Attachment,
        state: _Padding,
        count_masked: bool,
    ) -> None:
        self.model = model
        self.callback = callback
        self.state = state
        self.count_masked = count_masked
        self.layout = attention_layout(model.config)
        self.modules = attention_modules(model)
        if not self.modules:
            raise ProbeError(
                f"{type(model).__name__} names no attention modules that go through transformers' "
                "attention registry: its logits cannot be seen."
            )
        self.index = {id(module): n for n, (_, module) in enumerate(self.modules)}
        self.hits = attachment.hits["attention_logit"]
        for name, _ in self.modules:
            self.hits[name] = Hits()
        self.original = model.config._attn_implementation
        # (q, k, transform of each map) of the layer that is under way, for calls that repeat it
        self.current: tuple[Tensor, Tensor, list[LogitTransform | None]] | None = None
        self.repeats = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        name = f"quantkit_{uuid.uuid4().hex}"
        masks = ALL_MASK_ATTENTION_FUNCTIONS
        ALL_ATTENTION_FUNCTIONS.register(name, self.attention)
        masks.register(name, lazy_mask_function(masks[self.original]))
        handles = [m.register_forward_pre_hook(self._begin) for _, m in self.modules]
        try:
            self.model.set_attn_implementation(name)
            yield
        finally:
            self.model.set_attn_implementation(self.original)
            for handle in handles:
                handle.remove()
            for registry in (ALL_ATTENTION_FUNCTIONS, masks):
                type(registry)._global_mapping.pop(name, None)
            self.current = None

    def _begin(self, _module: nn.Module, _args: Any) -> None:
        self.current, self.repeats = None, 0

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: LazyMask | Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Looks at the logits, then computes attention as before or with what replaces them."""
        if scaling is None:
            scaling = query.shape[-1] ** -0.5
        calls = self._maps(module, query, key, attention_mask, scaling)
        transforms = self._transforms(module, query, key, calls)
        if all(transform is None for transform in transforms):
            mask = (
                attention_mask.original if isinstance(attention_mask, LazyMask) else attention_mask
            )
            function = self._original_function(module)
            result: tuple[Tensor, Tensor | None] = function(
                module, query, key, value, mask, scaling=scaling, **kwargs
            )
            return result
        self._refuse_modifiers(kwargs)
        return attend(list(zip(calls, transforms, strict=True)), value), None

    def _maps(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        mask: LazyMask | Tensor | None,
        scale: float,
    ) -> list[AttentionLogits]:
        layer = self.index.get(id(module))
        if layer is None:
            raise ProbeError(f"attention came from {type(module).__name__}, not a known module.")
        is_differential = self.layout.maps == 2
        return split_maps(
            query,
            key,
            layout=self.layout,
            mixes=(1.0, -differential_lambda(module)) if is_differential else (1.0,),
            layer=layer,
            name=self.modules[layer][0],
            scale=scale,
            mask=mask,
            causal=bool(getattr(module, "is_causal", False)) and query.shape[2] > 1,
            real_queries=self.state.real(query.shape[0], query.shape[2]),
            all_entries=self.count_masked,
        )

    def _transforms(
        self, module: nn.Module, query: Tensor, key: Tensor, calls: list[AttentionLogits]
    ) -> list[LogitTransform | None]:
        if self.current is not None:
            self.repeats += 1
            first_query, first_key, transforms = self.current
            same = first_query is query and first_key is key
            if self.repeats < self.layout.calls_per_layer and same:
                return transforms
            raise ProbeError(
                f"{calls[0].name} called attention {self.repeats + 1} times in one forward; "
                f"expected {self.layout.calls_per_layer} with the same q and k."
            )
        transforms = [self.callback(call) for call in calls]
        self.current = (query, key, transforms)
        hits = self.hits[calls[0].name]
        hits.calls += 1
        hits.elements += sum(call.entries for call in calls)
        return transforms

    def _original_function(self, module: nn.Module) -> Callable[..., Any]:
        if self.original == "eager":
            source = sys.modules[type(module).__module__]
            function: Callable[..., Any] = source.eager_attention_forward
            return function
        found: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[self.original]
        return found

    @staticmethod
    def _refuse_modifiers(kwargs: Mapping[str, Any]) -> None:
        for name in ("softcap", "s_aux", "position_bias"):
            if kwargs.get(name) is not None:
                raise ProbeError(
                    f"this model's attention uses {name!r} after the logits; replacing logits "
                    "there is not supported yet (recording is)."
                )
