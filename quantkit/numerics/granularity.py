"""What shares one scale. Torch-free; `affine.reduce_absmax` gives these their meaning in numbers.

`axis` is always an axis that is *kept*: a weight `[out, in]` with one scale per output channel
is `PerAxis(axis=0)`, and its scales have the shape `[out, 1]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from quantkit.errors import InputError, suggest


@dataclass(frozen=True, kw_only=True)
class PerTensor:
    """One scale for all there is: `[...]` -> `[1, ..., 1]`. Over logits it would mix sequences:
    there, use `PerSequence`.
    """


@dataclass(frozen=True, kw_only=True)
class PerAxis:
    """One scale per index of `axis`: axis 0 of `[out, in]` -> `[out, 1]`."""

    axis: int


@dataclass(frozen=True, kw_only=True)
class PerGroup:
    """One scale per run of `group_size` neighbours along `axis`, every other axis kept, as ONNX's
    blocked quantization: axis 1 of `[out, in]` -> `[out, ceil(in / group_size)]`.

    Raises:
        InputError: group_size below 1.
    """

    axis: int
    group_size: int

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise InputError(f"A group has at least 1 element, got group_size={self.group_size}.")


@dataclass(frozen=True, kw_only=True)
class PerSequence:
    """One scale per sequence: `[batch, heads, query, key]` -> `[batch, 1, 1, 1]`. What recipes
    call `tensor`: one over the batch would make a result depend on the batch size.
    """


@dataclass(frozen=True, kw_only=True)
class PerHead:
    """One scale per sequence and head: `[batch, heads, query, key]` -> `[batch, heads, 1, 1]`."""


@dataclass(frozen=True, kw_only=True)
class PerRow:
    """One scale per query row: `[batch, heads, query, key]` -> `[batch, heads, query, 1]`."""


Granularity: TypeAlias = PerTensor | PerAxis | PerGroup | PerSequence | PerHead | PerRow

_LOGITS: dict[str, PerSequence | PerHead | PerRow] = {
    "tensor": PerSequence(),
    "head": PerHead(),
    "row": PerRow(),
}


def logit_granularity(name: str) -> PerSequence | PerHead | PerRow:
    """Returns the granularity that a recipe's `tensor`, `head` or `row` means for logits.

    Raises:
        InputError: another name.
    """
    if name not in _LOGITS:
        raise InputError(f"Unknown logit granularity {name!r}.{suggest(name, _LOGITS)}")
    return _LOGITS[name]


def weight_granularity(words: str) -> PerAxis | PerGroup:
    """Returns what `channel` or `group:32` means for a weight `[out, in]`.

    Raises:
        InputError: other words, or a group without a size.
    """
    kind, _, size = words.partition(":")
    if words == "channel":
        return PerAxis(axis=0)
    if kind == "group" and size.isascii() and size.isdigit() and len(size) <= 9:
        return PerGroup(axis=1, group_size=int(size))
    raise InputError(
        f"Expected channel, or group:N with N inputs a group, for weights, got {words!r}."
    )
