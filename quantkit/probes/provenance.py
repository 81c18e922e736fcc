"""From q k^T to its softmax: which logits a tensor is made of, operation by operation.

Remembered is the product of two activations; followed are the model's own scale, changes of shape,
and whatever is added to or masked in it. What was added and masked is not kept: it is read off the
difference between what enters the softmax and the scaled product, so no form of mask need be known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from quantkit.probes.masks import MASKED, masking

_PRODUCTS: Final = ("matmul", "bmm", "mm", "einsum", "__matmul__", "__rmatmul__")
_SCALES: Final = ("mul", "multiply", "div", "divide", "true_divide", "truediv", "rmul")
_CHANGES: Final = (
    "add",
    "radd",
    "sub",
    "subtract",
    "masked_fill",
    "where",
    "clamp",
    "clamp_min",
    "max",
    "maximum",
    "nan_to_num",
    "setitem",
)
_SHAPES: Final = (
    "view",
    "view_as",
    "reshape",
    "reshape_as",
    "transpose",
    "swapaxes",
    "swapdims",
    "permute",
    "movedim",
    "squeeze",
    "unsqueeze",
    "flatten",
    "unflatten",
    "expand",
    "expand_as",
    "contiguous",
    "clone",
    "detach",
    "narrow",
    "getitem",
    "to",
    "float",
    "half",
    "bfloat16",
    "double",
    "type",
    "type_as",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """What is known of a tensor that comes from a product q k^T; tensors are in its shape.

    Attributes:
        logits: The scaled product before anything was added or masked; None: the tensor itself.
        softcap: After `logits` came `softcap * tanh(logits / softcap)`.
        shift: What was taken from each row, as its maximum; a softmax does not see it.
        is_exact: Nothing added is exactly nothing; False where rounding may leave a remainder.
    """

    logits: Tensor | None = None
    softcap: float | None = None
    shift: Tensor | None = None
    is_exact: bool = True

    def reshaped(self, change: Callable[[Tensor], Tensor]) -> Trace:
        """Returns the trace of the tensor after the same change of shape or type."""
        return replace(
            self,
            logits=None if self.logits is None else change(self.logits),
            shift=None if self.shift is None else change(self.shift),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """What enters a softmax, taken apart: `logits` and `bias` float32, `mask` bool, one shape."""

    logits: Tensor
    bias: Tensor | None
    mask: Tensor | None
    softcap: float | None


class Traces:
    """The products that are alive; a tensor that the model drops is forgotten."""

    def __init__(self, parameters: set[int]) -> None:
        """Takes where the model's parameters are stored: a product with one makes no logits."""
        self._parameters = parameters
        self._known: Any = WeakTensorKeyDictionary()

    def forget(self) -> None:
        """Drops all."""
        self._known = WeakTensorKeyDictionary()

    def of(self, x: Any) -> Trace | None:
        """Returns the trace of a tensor, None where it has none."""
        found: Trace | None = self._known.get(x) if isinstance(x, Tensor) else None
        return found

    def follows(self, name: str) -> Callable[..., Any] | None:
        """Returns what runs a function of this name and follows what it does, None for others."""
        return _STEPS.get(name)

    def _mark(self, x: Any, trace: Trace | None) -> None:
        if trace is not None and isinstance(x, Tensor):
            self._known[x] = trace
        elif isinstance(x, Tensor) and x in self._known:
            del self._known[x]

    def _is_activation(self, x: Any) -> bool:
        if not isinstance(x, Tensor) or isinstance(x, torch.nn.Parameter) or x.dim() < 2:
            return False
        return x.untyped_storage().data_ptr() not in self._parameters

    def product(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs a matrix product; of two activations it may be logits."""
        out = func(*args, **kwargs)
        flat = [x for a in args for x in (a if isinstance(a, (list, tuple)) else (a,))]
        tensors = [x for x in (*flat, *kwargs.values()) if isinstance(x, Tensor)]
        if len(tensors) == 2 and all(self._is_activation(x) for x in tensors):
            self._mark(out, Trace())
        return out

    def added_product(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs `baddbmm`: beta * (bias or mask) + alpha * q k^T, whose product is made again."""
        out = func(*args, **kwargs)
        named = dict(zip(("input", "batch1", "batch2"), args, strict=False)) | dict(kwargs)
        first, second = named["batch1"], named["batch2"]
        if self._is_activation(first) and self._is_activation(second):
            trace = Trace()
            if named.get("beta", 1) != 0:
                with torch.no_grad():
                    product = torch.bmm(first, second) * named.get("alpha", 1)
                trace = Trace(logits=product, is_exact=False)
            self._mark(out, trace)
        return out

    def shaped(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs a change of shape or type, and the same on the logits behind it."""
        out = func(*args, **kwargs)
        trace = self.of(args[0]) if args else None
        if trace is not None and isinstance(out, Tensor) and out is not args[0]:
            with torch.no_grad():
                self._mark(out, trace.reshaped(lambda t: func(t, *args[1:], **kwargs)))
        return out

    def scaled(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs a multiplication or division; by one number, or one a row, it is the scale."""
        pair = (*args, *(kwargs[n] for n in ("input", "other") if n in kwargs))
        trace = self.of(pair[0])
        is_product = "mul" in func.__name__
        if trace is None and is_product and len(pair) > 1:
            pair = (pair[1], pair[0])
            trace = self.of(pair[0])
        if trace is None or len(pair) < 2 or kwargs.get("rounding_mode") is not None:
            return func(*args, **kwargs)
        factor = pair[1]
        if isinstance(factor, Tensor) and factor.numel() != 1 and factor.shape[-1] != 1:
            return self.changed(func, args, kwargs)  # by key: part of what comes after the logits
        number = factor.detach() if isinstance(factor, Tensor) else factor
        step = torch.mul if is_product else torch.div
        if trace.softcap is not None and isinstance(number, Tensor) and number.numel() != 1:
            trace = None
        if trace is not None:
            with torch.no_grad():
                capped = trace.softcap
                if capped is not None:
                    capped = float(step(torch.tensor(capped), number))
                trace = replace(trace.reshaped(lambda t: step(t, number)), softcap=capped)
        out = func(*args, **kwargs)
        self._mark(out, trace)
        return out

    def changed(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs what adds to the logits or masks them: the logits stay what they were."""
        x = next((a for a in (*args, *kwargs.values()) if self.of(a) is not None), None)
        trace = self.of(x)
        if x is None or trace is None:
            return func(*args, **kwargs)
        in_place = _writes(func.__name__)
        if trace.logits is None:
            trace = replace(trace, logits=x.detach().clone() if in_place else x.detach())
        other: Any = args[1] if len(args) > 1 else kwargs.get("other")
        if "sub" in func.__name__ and _is_row_value(other, x):
            taken = other.detach() if trace.shift is None else trace.shift + other.detach()
            trace = replace(trace, shift=taken, is_exact=False)
        out = func(*args, **kwargs)
        target = x if func.__name__ == "__setitem__" else out
        if isinstance(target, Tensor) and trace.logits is not None and target.dim() >= x.dim():
            if target.shape != trace.logits.shape:
                trace = trace.reshaped(lambda t: t.expand(target.shape))
            self._mark(target, trace)
        return out

    def capped(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs `tanh`: the middle of a softcap, where nothing was added before."""
        x = args[0]
        trace = self.of(x)
        kept = x.detach().clone() if trace is not None and _writes(func.__name__) else x
        out = func(*args, **kwargs)
        plain = trace is not None and trace.logits is None and trace.softcap is None
        capped = Trace(logits=kept.detach(), softcap=1.0, is_exact=False) if plain else None
        self._mark(out, capped)
        return out

    def take_apart(self, final: Tensor, trace: Trace) -> Found:
        """Returns the logits, the mask and the bias of what enters a softmax."""
        with torch.no_grad():
            wide = final.detach().float()
            if trace.logits is None:
                return Found(logits=wide, bias=None, mask=None, softcap=None)
            logits = trace.logits.detach().float()
            base = logits
            if trace.softcap is not None:
                base = trace.softcap * torch.tanh(logits / trace.softcap)
            if trace.shift is not None:
                wide = wide + trace.shift.float()
            added = wide - base
            beyond_doubt = (added != 0) & ((added <= MASKED) | (wide <= MASKED))
            masked = masking(added, beyond_doubt)
            added.masked_fill_(masked, 0.0)
            if not trace.is_exact:
                size = torch.maximum(base.abs(), wide.abs().masked_fill(masked, 0.0)).clamp_min(1)
                remainder = 16 * torch.finfo(final.dtype).eps * size
                added.masked_fill_(added.abs() <= remainder, 0.0)
            return Found(
                logits=logits,
                bias=added if bool(added.any()) else None,
                mask=~masked if bool(masked.any()) else None,
                softcap=trace.softcap,
            )


def _writes(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    if name.startswith("__"):
        return name.startswith("__i") or name == "__setitem__"
    return name.endswith("_")


def _is_row_value(other: Any, x: Tensor) -> bool:
    return isinstance(other, Tensor) and other.shape == (*x.shape[:-1], 1) and x.shape[-1] > 1


def _forms(names: tuple[str, ...]) -> list[str]:
    """Returns how functions, methods, in-place methods and operators of these names are called."""
    return [form for n in names for form in (n, f"{n}_", f"__{n}__", f"__i{n}__")]


_STEPS: Final[dict[str, Callable[..., Any]]] = {
    **dict.fromkeys(_PRODUCTS, Traces.product),
    **dict.fromkeys(("baddbmm", "baddbmm_"), Traces.added_product),
    **dict.fromkeys(_forms(_SHAPES), Traces.shaped),
    **dict.fromkeys(_forms(_SCALES), Traces.scaled),
    **dict.fromkeys(_forms(_CHANGES), Traces.changed),
    **dict.fromkeys(("tanh", "tanh_"), Traces.capped),
}
