"""|x| by token and channel of one sequence: the picture that papers on massive activations draw.

Of each layer the sequence with the largest |x| is kept, the first of equals. So two surfaces merge
to the one with the higher peak, and neither batches nor processes change what is found. Memory: at
most `TOKEN_BINS` x `CHANNEL_BINS` float32, 25 kB, a layer and point.

Few tokens or channels have a bin each. Of more, the three largest still have: they are the ones
that a reader asks for by number. The others share bins of one width, whose value is their max.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Self

import numpy as np
import torch
from torch import Tensor

TOKEN_BINS: Final = 64
CHANNEL_BINS: Final = 96
ALONE: Final = 3
"""The largest tokens, and channels, that share their bin with no other."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SurfaceRecord:
    """The surface of the sequence with the highest peak so far; a monoid under `merge`.

    Attributes:
        peak: Largest |x| of the sequence; `sequence`: its index; `name`: the module that it is of.
        values: float32 `[token bins, channel bins]`: max |x|; NaN and inf do not take part.
        positions: Of the first token of each bin; `largest`: of its largest token.
        channels: First of each bin.
        last: Position of the last token; `width`: channels.
    """

    peak: float
    sequence: int
    name: str
    values: Tensor
    positions: list[int]
    largest: list[int]
    last: int
    channels: list[int]
    width: int

    @classmethod
    def of(cls, x: Tensor, real: Tensor, *, peak: float, sequence: int, name: str) -> Self:
        """Returns the surface of one sequence that has a finite element.

        Args:
            x: `[positions, channels]`; `real`: bool `[positions]`, False where it is padding.
            peak: max |x| of its finite real elements.
        """
        position = real.cpu().nonzero()[:, 0]
        size = x.detach()[position.to(x.device)].abs().float().cpu()
        size = size.nan_to_num(nan=0.0, posinf=0.0)
        tokens, channels = size.amax(1), size.amax(0)
        rows, columns = starts(tokens, TOKEN_BINS), starts(channels, CHANNEL_BINS)
        by_row = np.maximum.reduceat(size.numpy(), rows, axis=0)
        values = np.maximum.reduceat(by_row, columns, axis=1)
        ends = [*rows[1:], len(tokens)]
        return cls(
            peak=peak,
            sequence=sequence,
            name=name,
            values=torch.from_numpy(values),
            positions=position[rows].tolist(),
            largest=[
                int(position[start + int(tokens[start:end].argmax())])
                for start, end in zip(rows, ends, strict=True)
            ],
            last=int(position[-1]),
            channels=columns,
            width=len(channels),
        )

    def is_behind(self, peak: float, sequence: int, name: str) -> bool:
        """Returns whether a sequence with this peak takes the surface's place."""
        return (-peak, sequence, name) < (-self.peak, self.sequence, self.name)

    def merge(self, other: Self) -> Self:
        """Returns the one with the higher peak; of equals that of the first sequence."""
        return other if self.is_behind(other.peak, other.sequence, other.name) else self


def higher(one: SurfaceRecord | None, two: SurfaceRecord | None) -> SurfaceRecord | None:
    """Returns `one.merge(two)`, where both are there."""
    if one is None or two is None:
        return two if one is None else one
    return one.merge(two)


def starts(tops: Tensor, limit: int) -> list[int]:
    """Returns where bins start: at most `limit` of them, the largest elements each in its own.

    Args:
        tops: `[elements]`; of equals the first is larger.
        limit: Above 2 x `ALONE`, so that each run between the largest has a bin.
    """
    count = len(tops)
    if count <= limit:
        return list(range(count))
    alone = sorted(tops.argsort(descending=True, stable=True)[:ALONE].tolist())
    edges = [-1, *alone, count]
    runs = [range(low + 1, high) for low, high in pairwise(edges)]
    room = limit - ALONE
    width = math.ceil((count - ALONE) / room)
    while sum(math.ceil(len(run) / width) for run in runs) > room:
        width += 1
    return sorted([*alone, *(start for run in runs for start in run[::width])])
