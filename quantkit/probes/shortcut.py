"""A forward that starts at a later layer, from what an earlier forward left there.

Where only the suffix of a model changes, its prefix need not run again: inside
`with skipped(model, recorded, start):` the layers before `start` return what they returned before.
Everything else (embeddings, masks, position embeddings, norms, head) is the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import ProbeError
from quantkit.models import layer_modules
from quantkit.probes.hooks import Hook


@dataclass
class Recorded:
    """What each layer returned in one forward, in the order in which they ran.

    Memory: layers x batch x sequence x hidden size numbers.
    """

    outputs: list[Any] = field(default_factory=list)
    order: list[int] = field(default_factory=list)

    @property
    def in_order(self) -> bool:
        """Whether each layer ran once, one after the other: else no layer can be left out."""
        return bool(self.order) and self.order == list(range(len(self.order)))


@contextmanager
def recorded(model: nn.Module) -> Iterator[Recorded]:
    """Yields what the layers return in the one forward that is run inside the `with`."""
    found = Recorded()

    def keep(index: int) -> Callable[[nn.Module, Any, Any], None]:
        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            found.order.append(index)
            found.outputs.append(_cloned(output))

        return after

    with ExitStack() as stack:
        for index, (_, layer) in enumerate(layer_modules(model)):
            stack.callback(layer.register_forward_hook(Hook(keep(index))).remove)
        yield found


@contextmanager
def skipped(model: nn.Module, before: Recorded, start: int) -> Iterator[None]:
    """Lets layers 0 to `start - 1` return what they returned in `before`, without running.

    Safe only for the same input, and where layers talk to each other through their outputs alone:
    compare one forward with the full one before trusting it.

    Raises:
        ProbeError: `before` is no forward in which each layer ran once and in order.
    """
    layers = layer_modules(model)
    if not before.in_order or len(before.outputs) != len(layers):
        raise ProbeError(
            f"layers of {type(model).__name__} ran in the order {before.order[:8]}: expected each "
            f"of the {len(layers)} once, so that a forward can start at a later one."
        )
    with ExitStack() as stack:
        for (_, layer), output in zip(layers[:start], before.outputs, strict=False):
            stack.callback(_put_back, layer, layer.__dict__.get("forward"))
            layer.__dict__["forward"] = _returning(output)
        yield


def _returning(output: Any) -> Callable[..., Any]:
    # a clone each time: a later layer may add to its input in place
    return lambda *_args, **_kwargs: _cloned(output)


def _put_back(layer: nn.Module, own: Any) -> None:
    if own is None:
        del layer.__dict__["forward"]
    else:  # accelerate puts a forward of its own into the instance
        layer.__dict__["forward"] = own


def _cloned(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.detach().clone(memory_format=torch.preserve_format)
    if isinstance(output, (tuple, list)):
        return type(output)(_cloned(item) for item in output)
    return output
