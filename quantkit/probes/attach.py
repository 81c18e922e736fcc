"""`attach(model, {point: callback})`: the one way in which quantkit touches a model's forward.

Points and what their callbacks get:

* `attention_logit`: an `AttentionLogits` a layer and map. Returning None looks; returning a
  function of a tile replaces the logits, an `AttentionEdit` also queries, keys and softmax
  outputs, in every call that the layer makes with the same q and k.
* `attention_value`: an `AttentionValue` an attention call; returning a tensor replaces it. Of the
  modules that hand their values to transformers' registry or to `scaled_dot_product_attention`.
* `hidden_state`: an `Activation`, the output of a layer after both residual additions.
* `attention_output`: the output of each attention module (of BERT's, before its dense layer).
* `linear_input`: the input of each `nn.Linear` and `Conv1D` (the output head is left out).
  `linear_output`: what each returns, its bias included.
* `mlp_input`: the input of each layer's MLP. `mlp_down_input`: that of its last linear, of every
  expert's where it has experts.

The model may be any PyTorch transformer. Attention is seen in transformers' registry
(`registry.py`) or in the torch functions that compute it (`functions.py`); a model that does it in
a kernel of its own says what it does with `record_qk` (`record.py`). A callback that looks leaves
the outputs bitwise unchanged, but that torch.nn's own layers take their unfused path, which agrees
to rounding (at padding, where the fused path returns zeros, it does not). A layer that gradient
checkpointing repeats in the backward pass is not seen again; what replaces, replaces there too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Final

import torch
from torch import nn

from quantkit.errors import ProbeError, suggest
from quantkit.probes.activations import ActivationProbe, Callback
from quantkit.probes.attend import attend
from quantkit.probes.attention_probe import AttentionProbe, ValuePoint
from quantkit.probes.functions import FunctionSource
from quantkit.probes.hits import Attachment
from quantkit.probes.padding import Padding
from quantkit.probes.record import listening
from quantkit.probes.registry import RegistrySource

POINTS: Final = (
    "attention_logit",
    "hidden_state",
    "linear_input",
    "linear_output",
    "attention_output",
    "attention_value",
    "mlp_input",
    "mlp_down_input",
)
_IN_ATTENTION: Final = ("attention_logit", "attention_value")
_SHOWN: Final = 4


@contextmanager
def attach(
    model: nn.Module,
    points: Mapping[str, Callback],
    *,
    count_masked: bool = False,
    layers: str | Sequence[str] | None = None,
    select: str | Sequence[str] | None = None,
    allow_unseen: str | Sequence[str] = (),
) -> Iterator[Attachment]:
    """Calls back at the named points of every forward pass inside the `with`.

    Args:
        points: From a name in `POINTS` to its callback.
        count_masked: Tiles declare every logit valid ("all of QK^T"); for looking only.
        layers: Glob patterns on module names: whose outputs are the hidden states, instead of the
            layers that are found.
        select: Glob patterns on module names: which linear inputs and outputs.
        allow_unseen: Glob patterns on module names that may never run (experts).

    Raises:
        ProbeError: an unknown point; a pattern that matches nothing; a compiled, scripted or
            parallel model; on leaving without an exception, a module at which a probe never fired
            (by name, and why), or a model in which no attention was seen.
    """
    for point in points:
        if point not in POINTS:
            raise ProbeError(f"unknown probe point {point!r}.{suggest(point, POINTS)}")
    _refuse_unhookable(model)
    attachment = Attachment(hits={point: {} for point in points})
    padding, attention = Padding(), None
    with ExitStack() as stack:
        if any(point in points for point in _IN_ATTENTION):
            hits = attachment.hits.get("attention_logit", {})
            values = None
            if "attention_value" in points:
                values = ValuePoint(
                    callback=points["attention_value"], hits=attachment.hits["attention_value"]
                )
            looker = points.get("attention_logit", lambda call: None)
            attention = AttentionProbe(model, looker, hits, padding, count_masked, values)
        for point, callback in points.items():
            if point not in _IN_ATTENTION:
                quiet = callback if attention is None else _hushed(callback, attention)
                probe = ActivationProbe(model, point, quiet, attachment, padding)
                probe.install(stack, _patterns(layers), _patterns(select))
        allowed = _allowed(model, attachment, _patterns(allow_unseen) or ())
        if attention is not None:
            stack.enter_context(attention.installed())
            stack.enter_context(listening(attention))
            # one attend for all: what replaces it here replaces it everywhere
            stack.enter_context(RegistrySource(attention, attend).installed())
            stack.enter_context(FunctionSource(attention, attend).installed())
        padding.follow(model, stack)
        yield attachment
    if attention is not None:
        attention.refuse_blindness()
    require_seen(attachment, allowed, attention)


def _patterns(given: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    return (given,) if isinstance(given, str) else tuple(given)


def _hushed(callback: Callback, probe: AttentionProbe) -> Callback:
    """Returns the callback such that what it computes is not taken for the model's attention."""

    def call(visit: object) -> object:
        with probe.calling_back():
            return callback(visit)

    return call


def _allowed(
    model: nn.Module, attachment: Attachment, patterns: tuple[str, ...]
) -> tuple[str, ...]:
    names = {name for name, _ in model.named_modules()}
    names |= {name for modules in attachment.hits.values() for name in modules}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ProbeError(f"no module matches {pattern!r}.{suggest(pattern, names)}")
    return patterns


def require_seen(
    attachment: Attachment, allowed: Sequence[str], attention: AttentionProbe | None = None
) -> None:
    """Raises ProbeError for a module without hits that no pattern in `allowed` matches."""
    unseen = []
    for place in attachment.unseen():
        point, name = place.split(" ", 1)
        if any(fnmatchcase(name, pattern) for pattern in allowed):
            attachment.waived.append(place)
        else:
            is_logit = point == "attention_logit" and attention is not None
            unseen.append(place + (attention.explain(name) if is_logit and attention else ""))
    if unseen:
        more = f" and {len(unseen) - _SHOWN} more" if unseen[_SHOWN:] else ""
        raise ProbeError(
            f"a probe never fired: {', '.join(unseen[:_SHOWN])}{more}. Nothing was measured there; "
            "check that the model ran inside the `with`. What need not run (experts) can be "
            "allowed with allow_unseen; an attention of its own kind can call quantkit.record_qk."
        )


def _refuse_unhookable(model: nn.Module) -> None:
    if isinstance(model, nn.DataParallel):
        raise ProbeError("DataParallel runs the model in threads, past the probes: unwrap it.")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ProbeError(
            "the model, or a part of it, is TorchScript: hooks and torch functions inside it "
            "cannot be seen; pass the model that it was made from."
        )
    if any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    ):
        raise ProbeError(
            "the model, or a part of it, is compiled: hooks added later silently do not fire; "
            "pass the model as it was before."
        )
