"""What enters the last linear of each expert, where all experts are one 3-D parameter.

transformers keeps an MoE's experts so, and multiplies by slices of the parameter, grouped or one
by one as configured: no module's input is there to be hooked. The class's own loop over experts is
run once more, beside the model's, and its multiplications by `down_proj` are looked at.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quantkit.probes.hooks import Hook

See = Callable[[str, Tensor], None]


def hook_experts(name: str, module: nn.Module, see: See, stack: ExitStack) -> list[str]:
    """Returns the names `NAME.<expert>.down_proj`; `see` is called for each expert that runs."""
    experts: Any = module.down_proj
    places = [f"{name}.{index}.down_proj" for index in range(experts.shape[0])]
    loop: Any = inspect.unwrap(type(module).forward)

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taken: list[tuple[int, Tensor]] = []
        with (
            torch.no_grad(),
            _present(module, args, kwargs) as (args, kwargs),
            _Products(module.down_proj, taken),
        ):
            loop(module, *args, **kwargs)
        for index, x in taken:
            see(places[index], x)

    stack.callback(module.register_forward_pre_hook(Hook(before), with_kwargs=True).remove)
    return places


@contextmanager
def _present(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Brings in weights that accelerate keeps elsewhere, as its own forward does; yields inputs."""
    offloading = getattr(module, "_hf_hook", None)
    if offloading is None:
        yield args, kwargs
        return
    try:
        yield offloading.pre_forward(module, *args, **kwargs)
    finally:
        offloading.post_forward(module, None)


class _Products(TorchFunctionMode):
    """Takes what is multiplied by a slice of one parameter, with the slice's index."""

    def __init__(self, down: Tensor, taken: list[tuple[int, Tensor]]) -> None:
        super().__init__()
        self.down, self.taken = down, taken

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.__name__ in ("linear", "matmul", "__matmul__", "mm") and len(args) > 1:
            weight = args[1]
            if (
                isinstance(weight, Tensor)
                and weight.untyped_storage().data_ptr() == self.down.untyped_storage().data_ptr()
            ):
                offset = weight.storage_offset() - self.down.storage_offset()
                self.taken.append((offset // self.down.stride(0), args[0]))
        return func(*args, **(kwargs or {}))
