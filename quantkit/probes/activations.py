"""The points that are one activation: of layers, of attention, of linear layers, of MLPs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from quantkit.errors import ProbeError, suggest
from quantkit.models.families import Named, attention_modules, block_modules, layer_modules
from quantkit.models.mlps import mlp_of, projection_modules
from quantkit.probes.experts import hook_experts
from quantkit.probes.hits import Attachment, Hits, is_repeated
from quantkit.probes.hooks import Hook
from quantkit.probes.padding import Padding

Callback = Callable[[Any], Any]

_EXPERTS: Final = re.compile(r"(^|\.)experts\.")


@dataclass(frozen=True, kw_only=True, eq=False)
class Activation:
    """One activation tensor of one forward pass.

    Attributes:
        layer: Index in the order of the model's modules at this point (of its layers for the
            points of an MLP); `name`: the module.
        tensor: `[batch, sequence, channel]`. A model's `[batch, height, width, channel]` is
            flattened. Its `[tokens, channel]` is cut into the sequences of the forward where those
            are all its tokens, else (experts, packed sequences) it is one sequence.
        real: bool `[batch, sequence]`, False where the token is padding.
    """

    point: str
    layer: int
    name: str
    tensor: Tensor
    real: Tensor


def linear_modules(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Returns every `nn.Linear` but the output head, by qualified name, in module order."""
    return [(n, m) for n, m in projection_modules(model) if isinstance(m, nn.Linear)]


def chosen(modules: Named, patterns: Sequence[str] | None, what: str) -> Named:
    """Returns the modules whose name one of the glob patterns matches, all where there is none.

    Raises:
        ProbeError: a pattern that matches nothing.
    """
    if patterns is None:
        return modules
    names = [name for name, _ in modules]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ProbeError(f"no {what} matches {pattern!r}.{suggest(pattern, names)}")
    return [(n, m) for n, m in modules if any(fnmatchcase(n, pattern) for pattern in patterns)]


class ActivationProbe:
    """Hooks the modules of one point; each visit is counted and handed to the callback."""

    def __init__(
        self,
        model: nn.Module,
        point: str,
        callback: Callback,
        attachment: Attachment,
        padding: Padding,
    ) -> None:
        self.model, self.point, self.callback, self.padding = model, point, callback, padding
        self.hits = attachment.hits[point]
        self.notes = attachment.notes
        self._noted: set[str] = set()
        self._replaced: set[str] = set()  # modules whose tensor the callback has replaced
        # inside torch.nn's layers tensors are [sequence, batch, channel] without batch_first
        self.sequence_first = {
            id(inner)
            for module in model.modules()
            if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer))
            and not getattr(module.self_attn, "batch_first", True)
            for inner in module.modules()
        }

    def install(
        self,
        stack: ExitStack,
        layers: Sequence[str] | None = None,
        select: Sequence[str] | None = None,
    ) -> None:
        """Hooks what belongs to the point, until the stack closes."""
        if self.point == "hidden_state":
            found = chosen(_known_layers(self.model, layers), layers, "module")
            self._each(found, self._after, stack)
        elif self.point in ("linear_input", "linear_output"):
            # nn.MultiheadAttention hands its out_proj's weight to a function, without calling it
            called = [
                (n, m)
                for n, m in projection_modules(self.model)
                if not isinstance(m, NonDynamicallyQuantizableLinear)
            ]
            found = chosen(called, select, "linear layer")
            hook = self._before if self.point == "linear_input" else self._after
            self._each(found, hook, stack)
        elif self.point == "attention_output":
            found = attention_modules(self.model)
            self._refuse_none(found, "attention module")
            self._each(found, self._after, stack)
        else:
            self._install_mlps(stack)

    def _install_mlps(self, stack: ExitStack) -> None:
        blocks = block_modules(self.model)
        mlps = [(n, mlp) for n, (name, m) in enumerate(blocks) if (mlp := mlp_of(name, m))]
        self._refuse_none(mlps, "MLP")
        for index, mlp in mlps:
            if self.point == "mlp_input":
                self._before(index, *mlp.input, stack)
                continue
            for name, module in mlp.downs:
                self._before(index, name, module, stack)
            for name, module in mlp.fused:

                def see(place: str, x: Tensor, index: int = index) -> None:
                    if self._visit(index, place, x, self.hits[place], None) is not None:
                        raise ProbeError(f"what enters {place} can be looked at, not replaced.")

                for place in hook_experts(name, module, see, stack):
                    self.hits[place] = Hits()

    def _refuse_none(self, found: Sequence[Any], what: str) -> None:
        if not found:
            kinds = sorted({type(module).__name__ for module in self.model.modules()})
            raise ProbeError(
                f"no {what} was found in {type(self.model).__name__}, for {self.point}. "
                f"Looked at: {', '.join(kinds)}."
            )

    def _each(self, modules: Named, hook: Callable[..., None], stack: ExitStack) -> None:
        for index, (name, module) in enumerate(modules):
            hook(index, name, module, stack)

    def _before(self, index: int, name: str, module: nn.Module, stack: ExitStack) -> None:
        hits = self.hits[name] = Hits()

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            by_name = not args
            key, x = next(iter(kwargs.items())) if by_name else ("", args[0])
            replaced = self._visit(index, name, x, hits, module)
            if replaced is None:
                return None
            return (args, kwargs | {key: replaced}) if by_name else ((replaced, *args[1:]), kwargs)

        stack.callback(module.register_forward_pre_hook(Hook(before), with_kwargs=True).remove)

    def _after(self, index: int, name: str, module: nn.Module, stack: ExitStack) -> None:
        hits = self.hits[name] = Hits()

        def after(module: nn.Module, _args: Any, output: Any) -> Any:
            x = output[0] if isinstance(output, (tuple, list)) else output
            if not isinstance(x, Tensor):
                raise ProbeError(f"{name} returns {type(x).__name__}: expected a tensor first.")
            replaced = self._visit(index, name, x, hits, module)
            if replaced is None or not isinstance(output, (tuple, list)):
                return replaced
            return type(output)((replaced, *output[1:]))

        stack.callback(module.register_forward_hook(Hook(after)).remove)

    def _visit(
        self, index: int, name: str, x: Tensor, hits: Hits, module: nn.Module | None
    ) -> Tensor | None:
        """Returns what replaces x, in its own shape; see `is_repeated` for what a repeat is."""
        repeated = is_repeated()
        if repeated and name not in self._replaced:
            return None
        turned = x.dim() == 3 and id(module) in self.sequence_first
        tensor = self._sequences(name, x.transpose(0, 1) if turned else x, module)
        real = self._real(name, tensor)
        visit = Activation(point=self.point, layer=index, name=name, tensor=tensor, real=real)
        if not repeated:
            hits.calls += 1
            hits.elements += int(real.sum()) * tensor.shape[-1]
        replaced: Tensor | None = self.callback(visit)
        if replaced is None:
            return None
        self._replaced.add(name)
        return replaced.transpose(0, 1) if turned else replaced.reshape(x.shape)

    def _sequences(self, name: str, x: Tensor, module: nn.Module | None) -> Tensor:
        """Returns x as `[batch, sequence, channel]`."""
        if x.dim() >= 3:
            return x.flatten(1, -2)
        x = x.reshape(-1, x.shape[-1])
        # an expert's tokens are chosen and reordered, however many they are
        in_order = not _EXPERTS.search(name) and id(module) not in self.sequence_first
        shape = self.padding.flattened(len(x)) if in_order else None
        if shape is not None:
            return x.reshape(*shape, x.shape[-1])
        self._note(
            "flat",
            f"{self.point} of {_any_of(name)} has no batch dimension and is seen as one sequence "
            "per forward, as are others like it: per-sequence figures depend on the batch, and "
            "positions, tokens and token classes are those of its rows, not of the text.",
        )
        return x[None]

    def _real(self, name: str, tensor: Tensor) -> Tensor:
        """Returns which tokens are not padding."""
        real = self.padding.real(*tensor.shape[:2])
        if real is not None:
            return real
        if "padding" not in self._noted and self.padding.has_padding():
            self._note(
                "padding",
                f"{self.point} of {_any_of(name)} has other sequences and tokens than the padding "
                "mask: there, and wherever else it does not fit, padding is counted with the rest.",
            )
        return torch.ones(tensor.shape[:2], dtype=torch.bool, device=tensor.device)

    def _note(self, kind: str, sentence: str) -> None:
        """Says something once."""
        if kind not in self._noted:
            self._noted.add(kind)
            self.notes.append(sentence)


def _any_of(name: str) -> str:
    """Returns a module's name without its numbers, so that a note is the same for any batch."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _known_layers(model: nn.Module, patterns: Sequence[str] | None) -> Named:
    """Returns the model's layers, or every module where patterns choose.

    Raises:
        ProbeError: no layers are known, and no pattern says which they are.
    """
    if patterns is not None:
        return [(name, module) for name, module in model.named_modules() if name]
    found = layer_modules(model)
    if not found:
        raise ProbeError(
            f"{type(model).__name__} has no list of layers that contain attention; name them: "
            'attach(model, points, layers="blocks.*").'
        )
    return found


def has_point(model: nn.Module, point: str) -> bool:
    """Returns whether modules of an activation point are found in the model."""
    probe = ActivationProbe(model, point, lambda visit: None, Attachment({point: {}}), Padding())
    try:
        with ExitStack() as stack:
            probe.install(stack)
    except ProbeError:
        return False
    return True
