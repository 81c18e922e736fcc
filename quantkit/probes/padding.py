"""Which tokens are padding, on each side of a model.

A model is made of parts that are given their own tokens and their own mask: an encoder, a decoder,
a vision tower, a `nn.TransformerEncoder`. Each is a scope; what runs in it has its padding.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Lock, get_ident
from threading import enumerate as enumerate_threads
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quantkit.errors import ProbeError
from quantkit.probes.hits import is_repeated
from quantkit.probes.hooks import Hook
from quantkit.probes.masks import split_additive

_TORCH_SCOPES: Final = (
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
_MEMORY_NAMES: Final = ("encoder_attention_mask", "memory_key_padding_mask")
_PADDING_NAMES: Final = ("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask")


@dataclass(frozen=True, kw_only=True, eq=False)
class _Scope:
    """What one part was called with.

    Attributes:
        real: bool `[batch, tokens]`, or None; `memory`: the same of the encoder's output.
        batch, length: Of its inputs, None where they are not a batch of sequences.
    """

    module: nn.Module
    real: Tensor | None
    memory: Tensor | None
    batch: int | None
    length: int | None


class Padding:
    """The scopes that are running, outermost first."""

    def __init__(self) -> None:
        self._scopes: list[_Scope] = []
        self._model: nn.Module | None = None
        self._thread, self._lock = 0, Lock()

    def follow(self, model: nn.Module, stack: ExitStack) -> None:
        """Hooks every scope of the model, until the stack closes."""
        self._model = model
        for module in model.modules():
            if module is model or isinstance(module, (PreTrainedModel, *_TORCH_SCOPES)):
                before = module.register_forward_pre_hook(
                    Hook(self._enter), with_kwargs=True, prepend=True
                )
                after = module.register_forward_hook(Hook(self._leave), always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
        stack.callback(self._scopes.clear)

    def real(self, batch: int, length: int) -> Tensor | None:
        """Returns bool `[batch, length]` of the tokens that the running scope was given.

        None where it has no mask, or one of other tokens (the model has made its own of them).
        A mask may go back further than the tokens, over a filled cache.
        """
        scope = self._scopes[-1] if self._scopes else None
        if scope is None:
            return None
        memory = scope.memory
        if length != scope.length and memory is not None and memory.shape == (batch, length):
            return memory
        if scope.real is None or scope.real.shape[0] != batch:
            return None
        if scope.real.shape[1] == length:
            return scope.real
        if length == scope.length and scope.real.shape[1] > length:
            return scope.real[:, -length:]
        # speech models shorten their input, and can say what that makes of the mask
        shortened = getattr(scope.module, "_get_feature_vector_attention_mask", None)
        if shortened is not None and length < scope.real.shape[1]:
            found: Tensor = shortened(length, scope.real.long())
            return found.bool() if found.shape == (batch, length) else None
        return None

    def flattened(self, tokens: int) -> tuple[int, int] | None:
        """Returns (batch, length) of the running scope's inputs where that many tokens are all."""
        scope = self._scopes[-1] if self._scopes else None
        if scope is None or scope.batch is None or scope.length is None:
            return None
        return (scope.batch, scope.length) if scope.batch * scope.length == tokens else None

    def is_of_this_thread(self) -> bool:
        """Whether the thread that asks is the one whose forward runs."""
        return not self._scopes or self._thread == get_ident()

    def has_padding(self) -> bool:
        """Whether the running scope's mask drops anything."""
        scope = self._scopes[-1] if self._scopes else None
        return scope is not None and scope.real is not None and not bool(scope.real.all())

    def _claim(self, module: nn.Module) -> None:
        """Makes the forward that starts this thread's; raises where another thread's runs."""
        if not self.is_of_this_thread() and not is_repeated():
            if any(thread.ident == self._thread for thread in enumerate_threads()):
                raise ProbeError(
                    "two threads run the model at once, and what a probe sees could be of either: "
                    "run one forward after the other, or probe a copy a thread."
                )
            self._scopes.clear()
        if module is self._model:  # what an interrupt left behind in the middle of a forward
            self._scopes.clear()
        if not self._scopes:
            self._thread = get_ident()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = arguments_of(module, args, kwargs)
        with self._lock:
            self._claim(module)
            self._begin(module, given)

    def _begin(self, module: nn.Module, given: dict[str, Any]) -> None:
        real = _real_of(given)
        mask = given.get("attention_mask")
        if real is None and isinstance(mask, Tensor) and self._scopes:
            real = self._scopes[-1].real  # a mask that was prepared outside, of the same tokens
        tensors = (given.get("input_ids"), given.get("inputs_embeds"), *given.values())
        first = next((t for t in tensors if isinstance(t, Tensor) and t.dim() > 1), None)
        batch, length = (None, None) if first is None or first.dim() > 3 else first.shape[:2]
        if real is None and isinstance(mask, Tensor):
            real = _attended_to(mask, batch, length)
        memory = _mask_of(given, _MEMORY_NAMES)
        self._scopes.append(
            _Scope(module=module, real=real, memory=memory, batch=batch, length=length)
        )

    def _leave(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if not self.is_of_this_thread():  # it was refused on entry
            return
        while self._scopes and self._scopes.pop().module is not module:
            pass


def arguments_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Returns what a module's forward was called with, by name."""
    try:
        bound = inspect.signature(module.forward).bind_partial(*args, **kwargs)
    except (TypeError, ValueError):
        return {**{str(n): value for n, value in enumerate(args)}, **kwargs}
    given = dict(bound.arguments)
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(parameter.name, {})
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            rest = given.pop(parameter.name, ())
            given |= {f"{parameter.name}{n}": value for n, value in enumerate(rest)}
    return given


def _real_of(given: dict[str, Any]) -> Tensor | None:
    return _mask_of(given, (*_PADDING_NAMES, "attention_mask"))


def _mask_of(given: dict[str, Any], names: tuple[str, ...]) -> Tensor | None:
    """Returns which tokens are real by the first of these arguments that is a padding mask."""
    for name in names:
        mask = given.get(name)
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            continue
        if not name.endswith("key_padding_mask"):
            return mask.to(torch.bool)
        if mask.dtype == torch.bool:
            return ~mask  # torch.nn's marks padding
        attended = split_additive(mask)[0]
        return torch.ones_like(mask, dtype=torch.bool) if attended is None else attended
    return None


def _attended_to(mask: Tensor, batch: int | None, length: int | None) -> Tensor | None:
    """Returns which tokens some query attends to by a whole mask `[batch|1, heads|1, query, key]`.

    The others are padding: a token that is read attends at least to itself. None where the mask is
    of other tokens (over a cache there are more keys than queries).
    """
    if mask.dim() != 4 or batch is None or mask.shape[0] not in (1, batch):
        return None
    if mask.shape[3] != length or mask.shape[2] not in (1, length):
        return None
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        return None
    attended = mask if mask.dtype == torch.bool else split_additive(mask)[0]
    return None if attended is None else attended.flatten(1, 2).any(1).expand(batch, length)
