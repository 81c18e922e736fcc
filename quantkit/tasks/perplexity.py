"""Perplexity: exp of the mean negative log-likelihood over every predicted token.

A block of n real tokens predicts n - 1 of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit.calib_sets import TokenBatch, TokenSlice
from quantkit.progress import Progress, silent

Scorer = Callable[[TokenBatch], Tensor]
"""Given a batch, returns vocabulary logits `[batch, sequence, vocabulary]`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockScores:
    """Negative log-likelihood in nats, summed over each block, and predicted tokens of each."""

    nll: NDArray[np.float64]
    tokens: NDArray[np.int64]

    @property
    def perplexity(self) -> float:
        """Over all blocks, each token weighted the same."""
        return float(np.exp(self.nll.sum() / self.tokens.sum()))


def score_blocks(
    score: Scorer,
    text: TokenSlice,
    *,
    batch_size: int = 4,
    what: str = "perplexity",
    progress: Progress = silent,
) -> BlockScores:
    """Returns the likelihood of every block of the slice.

    Memory: one batch's vocabulary logits, batch x sequence x vocabulary floats, and one block's
    log-softmax. Log-likelihoods are summed in float64.
    """
    nll: list[float] = []
    tokens: list[int] = []
    for batch in text.batches(batch_size):
        progress(what, len(nll), text.sequences)
        with torch.inference_mode():
            logits = score(batch)
        for row in range(batch.input_ids.shape[0]):
            real = int(batch.attention_mask[row].sum())
            targets = batch.input_ids[row, 1:real]
            losses = torch.nn.functional.cross_entropy(
                logits[row, : real - 1].float(), targets, reduction="none"
            )
            nll.append(float(losses.double().sum()))
            tokens.append(real - 1)
    progress(what, text.sequences, text.sequences)
    return BlockScores(nll=np.array(nll), tokens=np.array(tokens, dtype=np.int64))
