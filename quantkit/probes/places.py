"""Where an element stands, packed into the int64 tag that travels with a top-k."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_BITS: Final = 20
POSITION_STEP: Final = 1 << _BITS
_MASK: Final = (1 << _BITS) - 1


def pack(sequence: int, position: int, last: int) -> int:
    """Returns the tag of (sequence, position, channel or key).

    Room for 2^23 sequences, 2^20 positions, 2^20 channels or keys. Tags are sums: `POSITION_STEP`
    a position and 1 a channel or key.
    """
    return (sequence << (2 * _BITS)) + position * POSITION_STEP + last


def unpack(tag: int) -> tuple[int, int, int]:
    """Returns (sequence, position, channel or key)."""
    return tag >> (2 * _BITS), (tag >> _BITS) & _MASK, tag & _MASK


def first_real(real: Tensor) -> Tensor:
    """Returns the index of each sequence's first real token, int64 `[batch]`."""
    return real.to(torch.int8).argmax(dim=1)
