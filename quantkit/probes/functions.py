"""Attention that a model computes with torch's own functions, seen by a `TorchFunctionMode`.

Two forms: `scaled_dot_product_attention`, whose arguments say it all, and a softmax over the last
dimension of what comes from a product of two activations (`provenance.py`). `nn.MultiheadAttention`
and the layers of `torch.nn` are made to take the path through these: their fused fast path is off
while this is installed, so their outputs agree to rounding, all others bitwise.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from quantkit.errors import ProbeError
from quantkit.models.families import layout_of
from quantkit.probes.attention_probe import AttentionProbe, AttentionSource, Frame
from quantkit.probes.masks import first_keys_causal
from quantkit.probes.provenance import Found, Trace, Traces
from quantkit.probes.registry import Attend
from quantkit.probes.split import Pairs, edited_inputs

_SOFTMAXES: Final = ("softmax", "_softmax", "_safe_softmax")
_FUSED: Final = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
_HEAD_NAMES: Final = ("num_heads", "n_heads", "num_attention_heads", "n_head", "nhead", "heads")


class FunctionSource(AttentionSource):
    """Sees attention in torch functions, inside the modules of one model."""

    def __init__(self, probe: AttentionProbe, attend: Attend) -> None:
        self.probe, self.attend = probe, attend
        stored = {p.untyped_storage().data_ptr() for p in probe.model.parameters()}
        self.traces = Traces(stored)

    @contextmanager
    def installed(self) -> Iterator[None]:
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with _Watch(self):
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            self.traces.forget()

    def scaled_dot_product(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs SDPA, having reported its q, k and mask; or attends with what replaces parts.

        q and k of any number of dimensions: `[batch, heads, tokens, d]` as a rule.
        """
        frame = self.probe.frame()
        if frame is None:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        query, key, value = given["query"], given["key"], given["value"]
        q, k = _as_given(query, frame), _as_given(key, frame)
        if k.shape[0] != q.shape[0]:
            k = k.expand(q.shape[0], *k.shape[1:])
        mask, bias = given.get("attn_mask"), None
        causal, queries, keys = bool(given.get("is_causal")), q.shape[2], k.shape[2]
        if isinstance(mask, Tensor):
            mask, bias = (_broadcast(part, query, frame) for part in self.probe.split(mask))
        if causal and queries != keys:
            mask, causal = first_keys_causal(queries, keys, q.device), False
        scale = given.get("scale")
        pairs = self.probe.see(
            frame,
            "functions",
            q,
            k,
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            mask=mask,
            causal=causal,
            bias=bias,
        )
        v, new_value = _as_given(value, frame), None
        if frame.by == "functions":  # else another source has reported this run of the module
            new_value = self.probe.see_value(frame, v, pairs)
        if new_value is None and all(edit is None for _, edit in pairs):
            return func(*args, **kwargs)
        inputs = edited_inputs(pairs, layout_of(frame.module)) if pairs else (q, k)
        if inputs is not None and (q.numel(), k.numel()) == (query.numel(), key.numel()):
            given["query"], given["key"] = (
                new.reshape(old.shape) for new, old in zip(inputs, (query, key), strict=True)
            )
            if new_value is not None:
                given["value"] = new_value.reshape(value.shape)
            with self.probe.hushed():
                return func(**given)
        if given.get("dropout_p"):
            raise ProbeError("logits cannot be replaced under dropout: call model.eval().")
        with self.probe.calling_back():
            return self._attended(frame, pairs, v if new_value is None else new_value, query.shape)

    def _attended(self, frame: Frame, pairs: Pairs, value: Tensor, shape: torch.Size) -> Tensor:
        layout = layout_of(frame.module)
        if layout.maps == 1 or layout.order == "halves":
            out = self.attend(pairs, value)
        else:
            shared = layout.shared_keys
            values = [value if shared else value[:, n :: layout.maps] for n in range(layout.maps)]
            parts = [self.attend([pair], v) for pair, v in zip(pairs, values, strict=True)]
            out = torch.stack(parts, dim=3).flatten(2, 3)
        return out.transpose(1, 2).reshape(*shape[:-1], value.shape[-1])

    def softmax(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs a softmax, having reported the logits where they are attention's."""
        given = dict(zip(("input", "dim"), args, strict=False)) | dict(kwargs)
        x, dim = given.get("input"), given.get("dim")
        trace, frame = self.traces.of(x), self.probe.frame()
        if trace is None or frame is None or x is None or dim not in (-1, x.dim() - 1):
            return func(*args, **kwargs)
        found = self.traces.take_apart(x, trace)
        pairs = self._see_logits(frame, found)
        edits = [edit for _, edit in pairs if edit is not None]
        if not edits:
            return func(*args, **kwargs)
        if any(edit.query is not None or edit.key is not None for edit in edits):
            raise ProbeError(
                f"q and k of {frame.name} cannot be replaced (their product can): the model "
                "multiplies them itself, so that only the product is seen."
            )
        if any(edit.logits is not None for edit in edits):
            with self.probe.hushed():
                x = self._replaced(x, trace, pairs, frame)
        out = func(x, *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})
        if any(edit.probabilities is not None for edit in edits):
            with self.probe.hushed():
                out = self._replaced_outputs(out, pairs, frame)
        return out

    def _see_logits(self, frame: Frame, found: Found) -> Pairs:
        logits = _as_logits(found.logits, frame)
        batch, heads, queries, keys = logits.shape
        mask, bias = (
            None if part is None else _as_logits(part, frame) for part in (found.mask, found.bias)
        )
        # d is empty, the sizes are there: what reads a call asks q and k for them
        return self.probe.see(
            frame,
            "functions",
            logits.new_empty(batch, heads, queries, 0),
            logits.new_empty(batch, heads, keys, 0),
            scale=1.0,
            given=logits,
            mask=mask,
            bias=bias,
            softcap=found.softcap,
        )

    def _replaced(self, x: Tensor, trace: Trace, pairs: Pairs, frame: Frame) -> Tensor:
        if trace.shift is not None or len(pairs) > 1:
            raise ProbeError(
                f"the logits of {frame.name} cannot be replaced (recording them works): the model "
                "computes them itself, over two maps or less their row's maximum."
            )
        [(call, edit)] = pairs
        assert edit is not None and edit.logits is not None  # the caller has looked
        out = _as_logits(x, frame).clone()
        for tile in call.tiles():
            logits = edit.logits(tile)
            rows, keys = logits.shape[2:]
            place = out[:, :, tile.start : tile.start + rows, :keys]
            new = call.modified(tile, logits).to(out.dtype)
            place.copy_(torch.where(tile.valid, new, place))
        return out.reshape(x.shape)

    def _replaced_outputs(self, x: Tensor, pairs: Pairs, frame: Frame) -> Tensor:
        """Returns softmax outputs with what replaces them."""
        if len(pairs) > 1:
            raise ProbeError(
                f"the softmax outputs of {frame.name} cannot be replaced: the model computes them "
                "itself, over two maps."
            )
        [(call, edit)] = pairs
        assert edit is not None and edit.probabilities is not None  # the caller has looked
        out = _as_logits(x, frame).clone()
        for tile in call.tiles():
            rows, keys = tile.logits.shape[2:]
            place = out[:, :, tile.start : tile.start + rows, :keys]
            new = edit.probabilities(replace(tile, logits=place.float())).to(out.dtype)
            place.copy_(torch.where(tile.valid, new, place))
        return out.reshape(x.shape)

    def multi_head(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs `F.multi_head_attention_forward` so that what it calls is seen too.

        A mode is off while its own handler runs, and the function looks for modes once more on
        entry: it is run from its code, with that look answered by no.
        """
        frame = self.probe.frame()
        if frame is None:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "embed_dim_to_check", "num_heads")
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        query, key = given["query"], given["key"]
        same = query is key or (query.data_ptr() == key.data_ptr() and query.shape == key.shape)
        before = frame.heads, frame.is_cross
        frame.heads, frame.is_cross = int(given["num_heads"]), frame.is_cross or not same
        source: Any = F.multi_head_attention_forward
        body = types.FunctionType(
            source.__code__,
            source.__globals__ | {"has_torch_function": lambda _: False},
            source.__name__,
            source.__defaults__,
            source.__closure__,
        )
        body.__kwdefaults__ = source.__kwdefaults__
        try:
            with _Watch(self):
                return body(*args, **kwargs)
        finally:
            frame.heads, frame.is_cross = before


class _Watch(TorchFunctionMode):
    """Passes every torch function on, those that matter by way of the source."""

    def __init__(self, source: FunctionSource) -> None:
        super().__init__()
        self.source = source

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        source = self.source
        name = getattr(func, "__name__", "")
        probe = source.probe
        if probe.quiet or not probe.frames:
            return func(*args, **kwargs)
        step = source.traces.follows(name)
        if step is not None:
            return step(source.traces, func, args, kwargs)
        if name in _SOFTMAXES:
            return source.softmax(func, args, kwargs)
        if name == "scaled_dot_product_attention":
            return source.scaled_dot_product(func, args, kwargs)
        if name == "multi_head_attention_forward":
            return source.multi_head(func, args, kwargs)
        if name in _FUSED:
            raise ProbeError(
                f"torch.{name} computes attention in one piece, its logits cannot be seen: call "
                "the module itself, in a recording it takes the path that can."
            )
        return func(*args, **kwargs)


def _as_given(x: Tensor, frame: Frame) -> Tensor:
    """Returns q, k or v as `[batch, heads, tokens, d]`; x itself where it has four dimensions."""
    return x if x.dim() == 4 else _as_logits(x, frame)


def _as_logits(x: Tensor, frame: Frame) -> Tensor:
    """Returns a tensor of one matrix a head as `[batch, heads, ., .]`."""
    if x.dim() == 4:
        return x
    if x.dim() == 2:
        return x[None, None]
    if x.dim() > 4:
        return x.flatten(0, x.dim() - 4)
    heads = frame.heads or _heads_of_module(frame)
    if heads is not None and x.shape[0] % heads == 0:
        return x.reshape(x.shape[0] // heads, heads, *x.shape[1:])
    if frame.batch and x.shape[0] % frame.batch == 0:
        return x.reshape(frame.batch, x.shape[0] // frame.batch, *x.shape[1:])
    return x[:, None]


def _heads_of_module(frame: Frame) -> int | None:
    for name in _HEAD_NAMES:
        found = getattr(frame.module, name, None)
        if isinstance(found, int) and found > 0:
            return found
    return None


def _broadcast(mask: Tensor | None, query: Tensor, frame: Frame) -> Tensor | None:
    """Returns a mask for q of any number of dimensions as `[batch|1, heads|1, query|1, key]`."""
    if mask is None:
        return None
    if query.dim() <= 4 and mask.dim() <= 4 and (query.dim() == 4 or mask.dim() == 2):
        return mask[(None,) * (4 - mask.dim())]
    return _as_logits(mask.expand(*query.shape[:-2], *mask.shape[-2:]), frame)
