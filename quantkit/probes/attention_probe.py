"""Where every source of attention calls reports to: who called, what it is, whom to tell.

A source (`AttentionSource`) stands where a model computes attention: transformers' registry
(`registry.py`), torch's functions (`functions.py`), or a line that the model's author wrote
(`record.py`). It hands q and k, or the logits themselves, to the `AttentionProbe`, which knows
the module that runs, splits the call into maps, counts, and calls back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from quantkit.errors import ProbeError
from quantkit.models.families import attention_modules, layout_of, mixes_of
from quantkit.probes.attention import AttentionLogits
from quantkit.probes.autocast import without_autocast
from quantkit.probes.hits import Hits, is_repeated
from quantkit.probes.hooks import Hook
from quantkit.probes.masks import LazyMask, Spans, split_additive
from quantkit.probes.padding import Padding, arguments_of
from quantkit.probes.pieces import AttentionEdit
from quantkit.probes.split import Pairs, split_maps

Callback = Callable[[Any], Any]

_CROSS_INPUTS: Final = ("key_value_states", "encoder_hidden_states", "cross_attention_states")


class AttentionSource(ABC):
    """A place where attention calls can be seen while it is installed."""

    @abstractmethod
    def installed(self) -> AbstractContextManager[None]:
        """Returns a context inside which calls are reported."""


@dataclass
class Frame:
    """One run of a module.

    Attributes:
        batch: Sequences of its first input, None where it has none.
        heads: How many its attention has, where the call says so itself.
        seen: (q, k, edits) of its calls so far; held so that a repeat is told by identity.
        values: (v, what replaces it) of its calls so far.
        by: Which source has reported it; a second one is not counted again.
    """

    module: nn.Module
    name: str
    batch: int | None = None
    heads: int | None = None
    is_cross: bool = False
    seen: list[tuple[Tensor, Tensor, Pairs]] = field(default_factory=list)
    values: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    by: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionValue:
    """The values of one attention call.

    Attributes:
        layer, name: As of `AttentionLogits`.
        part: 1; a DiffLlama layer attends twice, to the two halves of its values: 1 and 2.
        tensor: `[batch, kv_heads, key, d]`.
        real: bool `[batch, key]`, False where the key is padding.
    """

    layer: int
    name: str
    part: int
    tensor: Tensor
    real: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class ValuePoint:
    """The `attention_value` point: its callback, and its hits by module."""

    callback: Callback
    hits: dict[str, Hits]


class AttentionProbe:
    """The `attention_logit` and `attention_value` points of one `attach`."""

    def __init__(
        self,
        model: nn.Module,
        callback: Callback,
        hits: dict[str, Hits],
        padding: Padding,
        count_masked: bool,
        values: ValuePoint | None = None,
    ) -> None:
        self.model, self.callback, self.hits, self.padding = model, callback, hits, padding
        self.count_masked, self.values = count_masked, values
        self.attention = attention_modules(model)
        for name, _ in self.attention:
            hits[name] = Hits()
        self.names = {id(m): name or type(m).__name__ for name, m in model.named_modules()}
        self.expected = {id(module) for _, module in self.attention}
        self.index = {name: n for n, (name, _) in enumerate(self.attention)}
        self.ran: set[str] = set()
        self.frames: list[Frame] = []
        self.quiet = 0
        self._replaced: set[str] = set()  # modules of which a callback has replaced something
        self._spans: dict[int, tuple[object, Spans]] = {}
        self._splits: Any = WeakTensorKeyDictionary()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Follows which module runs."""
        with ExitStack() as stack:
            for module in self.model.modules():
                if self._is_leaf_of_torch(module):
                    continue
                before = module.register_forward_pre_hook(
                    Hook(self._enter), with_kwargs=True, prepend=True
                )
                after = module.register_forward_hook(Hook(self._leave), always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            try:
                yield
            finally:
                self.frames.clear()
                self._forget()

    @contextmanager
    def hushed(self) -> Iterator[None]:
        """What runs inside is not the model's own attention, or is reported already."""
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    @contextmanager
    def calling_back(self) -> Iterator[None]:
        """Hushed, in float32, and unseen by function modes: each operation would cost them a call.

        Statistics are thousands of small operations, so that is most of their time in Python.
        """
        with self.hushed(), torch._C.DisableTorchFunction(), without_autocast():
            yield

    def frame(self, module: nn.Module | None = None) -> Frame | None:
        """Returns the run of a module, or of the innermost that attends; None between forwards."""
        if module is not None:
            found = next((f for f in reversed(self.frames) if f.module is module), None)
            if found is None and id(module) in self.names:  # its forward was called past its hooks
                return Frame(module=module, name=self.names[id(module)])
            return found
        for frame in reversed(self.frames):
            if id(frame.module) in self.expected:
                return frame
        # a class with another name: the one that calls torch's modules, not those themselves
        own = [f for f in self.frames if not type(f.module).__module__.startswith("torch.nn.")]
        running = own or self.frames
        return running[-1] if running else None

    def see(
        self, frame: Frame, by: str, query: Tensor, key: Tensor, *, scale: float, **rest: Any
    ) -> Pairs:
        """Returns each map of a call with what replaces parts of it; calls back unless a repeat.

        A forward that a backward pass repeats is not counted, and the callbacks hear of it only
        where one replaced something before: the gradients need the same forward.

        Args:
            by: The source; what another one has reported in this run of the module is left out.
            query, key: `[batch, heads, tokens, d]`.
            rest: Other fields of `AttentionLogits`; with `map`, `maps` and `mix` the call is that
                one map, without them it is split as the module's layout says.
        """
        for known_query, known_key, pairs in frame.seen:
            if known_query is query and known_key is key:
                return pairs
        repeated = is_repeated()
        if frame.by not in (None, by) or (repeated and frame.name not in self._replaced):
            return []
        frame.by = by
        calls = self._maps(frame, query, key, scale, rest)
        if calls[0].name not in self.hits:
            self.hits[calls[0].name] = Hits()
        with self.calling_back():
            edits = [_edit(self.callback(_detached(call))) for call in calls]
        if any(edit is not None for edit in edits):
            self._replaced.add(frame.name)
        if not repeated:
            hits = self.hits[calls[0].name]
            hits.calls += 1
            hits.elements += sum(call.entries for call in calls)
        pairs = list(zip(calls, edits, strict=True))
        frame.seen.append((query, key, pairs))
        return pairs

    def see_value(self, frame: Frame, value: Tensor, pairs: Pairs) -> Tensor | None:
        """Returns what replaces the values of a call that `see` has seen; asks once a tensor."""
        for known, before in frame.values:
            if known is value:
                return before
        repeated = is_repeated()
        if self.values is None or not pairs or (repeated and frame.name not in self._replaced):
            return None
        _, heads, _, width = value.shape
        real = pairs[0][0].real_keys()
        if not repeated:
            hits = self.values.hits.setdefault(frame.name, Hits())
            hits.calls += 1
            hits.elements += int(real.sum()) * heads * width
        visit = AttentionValue(
            layer=self.index.setdefault(frame.name, len(self.index)),
            name=frame.name,
            part=len(frame.values) + 1,
            tensor=value.detach(),
            real=real,
        )
        with self.calling_back():
            replaced: Tensor | None = self.values.callback(visit)
        if replaced is not None:
            self._replaced.add(frame.name)
        frame.values.append((value, replaced))
        return replaced

    def split(self, mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Returns (bool mask, bias) of a mask, once for all layers of a forward that share it."""
        if mask.dtype == torch.bool:
            return mask, None
        found: tuple[Tensor | None, Tensor | None] | None = self._splits.get(mask)
        if found is None:
            found = self._splits[mask] = split_additive(mask)
        return found

    def explain(self, name: str) -> str:
        """Returns why a module has no hits, in brackets; empty where it did not run."""
        module = dict(self.attention).get(name)
        if name not in self.ran or module is None:
            return ""
        return (
            f" ({type(module).__name__}: it ran, but no softmax of q k^T and no "
            "scaled_dot_product_attention was seen inside)"
        )

    def refuse_blindness(self) -> None:
        """Raises a ProbeError where nothing that attends was even there to be looked at."""
        if self.hits:
            return
        kinds = sorted({type(module).__name__ for module in self.model.modules()})
        raise ProbeError(
            f"no attention was seen in {type(self.model).__name__}: no module's class is named "
            "like one, and no softmax of q k^T and no scaled_dot_product_attention was seen "
            f"inside any. Looked at: {', '.join(kinds)}. If it attends in a way of its own, call "
            "quantkit.record_qk(module, q, k, scale, mask) there."
        )

    def _maps(
        self, frame: Frame, query: Tensor, key: Tensor, scale: float, rest: dict[str, Any]
    ) -> list[AttentionLogits]:
        layout = layout_of(frame.module)
        mask, given = rest.get("mask"), rest.get("given")
        if given is None and mask is not None:  # made by a mask function: layers share it
            rest["known_spans"] = self._spans
        known_map = rest.pop("map", None)
        mix = rest.pop("mix", None)
        common: dict[str, Any] = {
            "layer": self.index.setdefault(frame.name, len(self.index)),
            "name": frame.name,
            "scale": scale,
            "mask": None,
            "causal": False,
            "real_queries": self._real_queries(frame, query, key, mask),
            "all_entries": self.count_masked,
            "is_cross": frame.is_cross,
        } | rest
        if known_map is not None:
            calls = [AttentionLogits(map=known_map, query=query, key=key, mix=mix, **common)]
        else:
            mixes = mixes_of(frame.module, layout)
            calls = split_maps(query, key, layout=layout, mixes=mixes, **common)
        offset = _query_offset(calls[0])
        return [replace(call, query_offset=offset) for call in calls] if offset else calls

    def _real_queries(
        self, frame: Frame, query: Tensor, key: Tensor, mask: LazyMask | Tensor | None
    ) -> Tensor | None:
        batch, _, queries, _ = query.shape
        real = self.padding.real(batch, queries)
        square = queries == key.shape[2] and not frame.is_cross
        if real is None and square and isinstance(mask, Tensor) and self.padding.has_padding():
            # the model has made other tokens of its inputs: padding are the keys without queries
            real = mask.flatten(1, 2).any(1).expand(batch, queries)
        return real

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is self.model:
            self.frames.clear()  # what an interrupt left behind in the middle of a forward
        if not self.frames:
            self._forget()
        frame = Frame(module=module, name=self.names[id(module)])
        if id(module) in self.expected:
            self.ran.add(frame.name)
        first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        frame.batch = None if first is None or first.dim() < 2 else first.shape[0]
        if id(module) in self.expected:
            given = arguments_of(module, args, kwargs)
            frame.is_cross = (
                any(given.get(name) is not None for name in _CROSS_INPUTS)
                or "cross" in type(module).__name__.lower()
                or bool(getattr(module, "is_cross_attention", False))
            )
        self.frames.append(frame)

    def _is_leaf_of_torch(self, module: nn.Module) -> bool:
        """Whether a module can be no one's attention: half of a model's, and no hook for them."""
        own = module is self.model or id(module) in self.expected
        is_torchs = type(module).__module__.startswith("torch.nn.")
        return is_torchs and not own and next(module.children(), None) is None

    def _leave(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if not self.padding.is_of_this_thread():  # it was refused on entry
            return
        while self.frames and self.frames.pop().module is not module:
            pass

    def _forget(self) -> None:
        self._spans = {}
        self._splits = WeakTensorKeyDictionary()


def _query_offset(call: AttentionLogits) -> int:
    """Returns which key is the first query's own (`AttentionLogits.query_offset`).

    Read off where the rows end, since a cache of fixed size has keys behind the last query.
    """
    queries, keys = call.query.shape[2], call.key.shape[2]
    if call.is_cross or keys <= queries:
        return 0
    spans = call.attended_spans()
    ends = (spans.hi - 1 - torch.arange(queries))[spans.hi > 0]
    is_causal = len(ends) > 0 and bool((ends == ends[0]).all())
    return max(0, int(ends[0])) if is_causal else 0


def _edit(answer: Any) -> AttentionEdit | None:
    """Returns a callback's answer as an edit: a function alone is one of the logits."""
    if answer is None or isinstance(answer, AttentionEdit):
        return None if answer is None or answer.is_nothing else answer
    return AttentionEdit(logits=answer)


def _detached(call: AttentionLogits) -> AttentionLogits:
    """Returns the call for looking: without a graph, its blocks can be computed in place."""
    if not (call.query.requires_grad or call.key.requires_grad):
        return call
    return replace(call, query=call.query.detach(), key=call.key.detach())
