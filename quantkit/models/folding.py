"""Channel scales moved from a module's output into the linear layers that read it.

The producer's output channel c is divided by `scales[c]`, and column c of each reader's weight is
multiplied by it: the same function in real numbers, and bit for bit where scales are powers of 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from quantkit.errors import InputError, suggest

_PROBE_ROWS: Final = 4
_ROUNDING: Final = 1e-3
"""Relative; a norm that keeps its weight otherwise is off by about the scales themselves."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Fold:
    """One move of scales.

    Attributes:
        producer: Module whose output is divided: an `nn.Linear`, or a norm with a weight.
        readers: The `nn.Linear`s that alone read it.
        scales: `[channels]`, positive.
    """

    producer: str
    readers: tuple[str, ...]
    scales: Tensor


@contextmanager
def folded(model: nn.Module, folds: Sequence[Fold]) -> Iterator[None]:
    """Applies the folds, one after the other, while inside; every weight is then the one it was.

    Raises:
        InputError: a module that is not there or cannot be folded into, scales of another length or
            not positive, a weight that another module holds too, or a layer that reads two folds.
    """
    modules = dict(model.named_modules())
    holders = _holders(model)
    originals: dict[Tensor, Tensor] = {}

    def scale(name: str, parameter: Tensor, value: Tensor) -> None:
        if len(holders[parameter]) > 1:
            also = " and ".join(holders[parameter])
            raise InputError(f"{name}: its weight is tied ({also}), so no scales fold into it.")
        originals.setdefault(parameter, parameter.data)
        parameter.data = value.to(parameter.dtype)

    try:
        with torch.inference_mode(False), torch.no_grad():
            read: set[str] = set()
            for fold in folds:
                for name in (fold.producer, *fold.readers):
                    if name not in modules:
                        near = difflib.get_close_matches(name, modules, cutoff=0.0)
                        hint = suggest(name, near).replace("Available:", "Nearest:")
                        raise InputError(f"no module {name!r} to smooth.{hint}")
                if read.intersection(fold.readers):
                    raise InputError(f"two groups to smooth hold {sorted(read & {*fold.readers})}.")
                read.update(fold.readers)
                producer = modules[fold.producer]
                for name in fold.readers:
                    linear = _linear(name, modules[name])
                    scales = _checked(fold, linear.in_features).to(linear.weight.device)
                    scale(name, linear.weight, linear.weight.data.float() * scales)
                if isinstance(producer, nn.Linear):
                    linear = _linear(fold.producer, producer)
                    scales = _checked(fold, linear.out_features).to(linear.weight.device)
                    scale(
                        fold.producer, linear.weight, linear.weight.data.float() / scales[:, None]
                    )
                    if linear.bias is not None:
                        scale(fold.producer, linear.bias, linear.bias.data.float() / scales)
                else:
                    for norm_parameter, value in _norm_parameters(fold, producer):
                        scale(fold.producer, norm_parameter, value)
        yield
    finally:
        for parameter, data in originals.items():
            parameter.data = data


def _holders(model: nn.Module) -> dict[Tensor, list[str]]:
    found: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, []).append(name)
    return found


def _linear(name: str, module: nn.Module) -> nn.Linear:
    if not isinstance(module, nn.Linear) or not module.weight.is_floating_point():
        raise InputError(f"{name}: scales fold into nn.Linear, got {type(module).__name__}.")
    if module.weight.is_meta:
        raise InputError(f"{name}: its weight is not in memory (offloaded): load the model whole.")
    return module


def _checked(fold: Fold, channels: int) -> Tensor:
    scales = fold.scales.float()
    if scales.shape != (channels,) or not bool((scales.isfinite() & (scales > 0)).all()):
        raise InputError(
            f"scales after {fold.producer!r}: expected {channels} positive numbers, got "
            f"{scales.numel()}, from {float(scales.min()):g} to {float(scales.max()):g}."
        )
    return scales


def _norm_parameters(fold: Fold, norm: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """Returns the new value of each parameter of a norm that divides its output by the scales.

    Some families (Gemma) multiply by 1 + weight. Which it is is tried on the norm itself.
    """
    parameters = dict(norm.named_parameters(recurse=False))
    weight, bias = parameters.get("weight"), parameters.get("bias")
    name = type(norm).__name__
    if weight is None or weight.dim() != 1 or weight.is_meta or {*parameters} - {"weight", "bias"}:
        raise InputError(
            f"{fold.producer}: expected a linear layer, or a norm with one weight a channel (and a "
            f"bias), got {name}."
        )
    scales = _checked(fold, len(weight)).to(weight.device)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _PROBE_ROWS, len(weight), generator=generator)
    x = x.to(device=weight.device, dtype=weight.dtype)
    new_bias = [] if bias is None else [(bias, bias.data.float() / scales)]
    plain = weight.data.float() / scales
    offset = (1 + weight.data.float()) / scales - 1
    choices = [[(weight, value), *new_bias] for value in (plain, offset)]
    errors = [_error(norm, x, choice, scales) for choice in choices]
    best = min(range(len(choices)), key=errors.__getitem__)
    if not errors[best] <= max(_ROUNDING, 16 * torch.finfo(weight.dtype).eps):
        raise InputError(
            f"{fold.producer}: {name} is not proportional to its weight nor to 1 + its weight: no "
            "scales fold into it."
        )
    return choices[best]


def _error(
    norm: nn.Module, x: Tensor, choice: list[tuple[nn.Parameter, Tensor]], scales: Tensor
) -> float:
    """Returns how far the norm with these parameters, times the scales, is from the norm."""
    before = [parameter.data for parameter, _ in choice]
    # Not the call: no hook has business here.
    expected = norm.forward(x).float()
    try:
        for parameter, value in choice:
            parameter.data = value.to(parameter.dtype)
        found = norm.forward(x).float() * scales
    finally:
        for (parameter, _), data in zip(choice, before, strict=True):
            parameter.data = data
    return float((found - expected).norm() / expected.norm())
