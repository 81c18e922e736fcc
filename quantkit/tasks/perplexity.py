"""Perplexity: exp of the mean negative log-likelihood over every predicted token.

A block of n real tokens predicts n - 1 of them. Bits per byte divide the same sum by the length of
the predicted text, so that models with other tokenizers compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit.calib_sets import TokenBatch, TokenSlice
from quantkit.jobs.tasks import PerplexitySpec
from quantkit.progress import Progress, silent
from quantkit.results import DataInfo
from quantkit.tasks.continuations import likelihood, planned
from quantkit.tasks.items import item_hash
from quantkit.tasks.task import Metric, Rows, Scores, TextForward

Scorer = Callable[[TokenBatch], Tensor]
"""Given a batch, returns vocabulary logits `[batch, sequence, vocabulary]`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Perplexity:
    """Blocks of text. Rows: negative log-likelihood in nats, predicted tokens, their bytes.

    Attributes:
        predicted_bytes: UTF-8 bytes of what each block predicts, without special tokens; empty
            without a tokenizer. Where a block's edge cuts a character, two too many at most.
        item_hashes: One short hash a block, over its text; without a tokenizer over its token ids.
    """

    text: TokenSlice
    batch_size: int
    predicted_bytes: tuple[int, ...]
    item_hashes: tuple[str, ...]

    @classmethod
    def of(cls, text: TokenSlice, tokenizer: Any, batch_size: int) -> Perplexity:
        """Returns the task over a slice; `tokenizer` may be None: there are no bytes then."""
        sizes: list[int] = []
        hashes = list(text.block_hashes)
        for index, block in enumerate(text.ids if tokenizer is not None else ()):
            ids = block.tolist()
            # the first token is decoded with the others: some decoders drop a space that begins
            sizes.append(_bytes(tokenizer, ids) - _bytes(tokenizer, ids[:1]))
            hashes[index] = item_hash(
                _decoded(tokenizer, ids[text.prefix : len(ids) - text.suffix])
            )
        return cls(
            text=text,
            batch_size=batch_size,
            predicted_bytes=tuple(sizes),
            item_hashes=tuple(hashes),
        )

    @property
    def name(self) -> str:
        """`perplexity`."""
        return str(PerplexitySpec())

    @property
    def unit(self) -> str:
        """What is resampled."""
        return "blocks"

    @property
    def batches(self) -> tuple[tuple[int, ...], ...]:
        """Blocks of each forward pass."""
        return planned([len(block) for block in self.text.ids], self.batch_size)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Positions that each batch computes."""
        return tuple(
            len(batch) * max(len(self.text.ids[index]) for index in batch) for batch in self.batches
        )

    @property
    def data(self) -> DataInfo:
        """What a result says about the text."""
        return self.text.info(self.batch_size)

    def run(self, forward: TextForward, items: Sequence[int]) -> Rows:
        """Returns `[items, 3]`; memory: one batch's vocabulary logits, one block's log-softmax."""
        chosen = replace(self.text, ids=tuple(self.text.ids[index] for index in items), spans=())
        (batch,) = chosen.batches(len(items))
        with torch.inference_mode():
            logits = forward(replace(batch, first_sequence=items[0]))
        rows = np.zeros((len(items), 3))
        for row, index in enumerate(items):
            block = self.text.ids[index]
            found = likelihood(logits[row, : len(block) - 1], block[1:])
            size = self.predicted_bytes[index] if self.predicted_bytes else 0
            rows[row] = -found.log_probability, found.tokens, size
        return rows

    def scores(self, rows: Rows) -> Scores:
        """Returns `perplexity`, and `bits_per_byte` where the text's bytes are known."""
        nll, tokens, sizes = rows.T
        metrics = [
            Metric(name="perplexity", total=nll, weight=tokens, link="exp", higher_is_better=False)
        ]
        if sizes.sum():
            bits = nll / math.log(2)
            metrics.append(
                Metric(name="bits_per_byte", total=bits, weight=sizes, higher_is_better=False)
            )
        return Scores(metrics=tuple(metrics))


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
    """Returns the likelihood of every block of the slice, in order.

    Memory as `Perplexity.run`. Log-likelihoods are summed in float64.
    """

    def forward(batch: TokenBatch, positions: Tensor | None = None) -> Tensor:
        return score(batch)

    task = Perplexity.of(text, None, batch_size)
    rows = np.zeros((text.sequences, 3))
    done = 0
    for items in task.batches:
        progress(what, done, text.sequences)
        rows[list(items)] = task.run(forward, items)
        done += len(items)
    progress(what, text.sequences, text.sequences)
    return BlockScores(nll=rows[:, 0], tokens=rows[:, 1].astype(np.int64))


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _bytes(tokenizer: Any, ids: list[int]) -> int:
    return len(_decoded(tokenizer, ids).encode())
