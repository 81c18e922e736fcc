"""KL(float || quantized) over the vocabulary, block by block.

Memory: the float logits of one batch, and `CHUNK` rows of float64 at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

CHUNK: Final = 4
"""Positions a step: 4 x 49,152 float64 numbers are 1.6 MB and stay in the cache; 64 take twice as
long."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Reference:
    """The float model's vocabulary logits of one batch.

    Attributes:
        logits: `[batch, sequence, vocabulary]`; padding on the right.
        tokens: Predicted tokens of each sequence: one fewer than it has.
    """

    logits: Tensor
    tokens: tuple[int, ...]

    def divergence(self, logits: Tensor) -> list[float]:
        """Returns the KL in nats of each sequence, summed over its predicted tokens in float64."""
        found = []
        for row, tokens in enumerate(self.tokens):
            total = torch.zeros((), dtype=torch.float64)
            for start in range(0, tokens, CHUNK):
                rows = slice(start, min(start + CHUNK, tokens))
                expected = torch.log_softmax(self.logits[row, rows].double(), -1)
                got = torch.log_softmax(logits[row, rows].double(), -1)
                total += (expected.exp() * (expected - got)).sum().cpu()
            found.append(float(total))
        return found
