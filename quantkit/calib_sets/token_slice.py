"""Blocks of tokens, with their hashes, as batches for a model."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from quantkit.calib_sets.batches import Span
from quantkit.calib_sets.check import SetInfo, set_fields
from quantkit.calib_sets.overlap import fingerprints
from quantkit.results import DataInfo

_HASH_DIGITS: Final = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenBatch:
    """Some sequences, padded on the right.

    Attributes:
        input_ids: int64 `[batch, sequence]`, 0 where padded.
        attention_mask: int64 `[batch, sequence]`, 1 for real tokens.
        first_sequence: Index of the first one in the slice.
        decoder_start: First token of the decoder's inputs, of an encoder-decoder; else None.
    """

    input_ids: Tensor
    attention_mask: Tensor
    first_sequence: int
    decoder_start: int | None = None

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Keyword arguments for the model or its backbone.

        An encoder-decoder's decoder gets the same tokens shifted right: its start token, then all
        but the last. Real and padded positions are therefore the same in both.
        """
        named = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        if self.decoder_start is not None:
            start = torch.full_like(self.input_ids[:, :1], self.decoder_start)
            named["decoder_input_ids"] = torch.cat([start, self.input_ids[:, :-1]], 1)
            named["decoder_attention_mask"] = self.attention_mask
        return named

    @property
    def real(self) -> Tensor | None:
        """Which positions are no padding, `[batch, sequence]`."""
        return self.attention_mask.bool()


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSlice:
    """Consecutive blocks of one source.

    Attributes:
        ids: One int64 tensor a sequence.
        skip: Blocks of the source before the first one.
        source_sha256: Hash of the text; of the tokens: `sha256`.
        prefix: Tokens at the start of each block that are not the text's: 1 with a BOS, else 0.
        suffix: The same at its end: 1 with a [SEP].
        decoder_start: First token of the decoder's inputs, of an encoder-decoder; else None.
        spans: Where each block lies in the source's tokens; empty where they are no one text.
        named: The calibration set that they come from, if they do.
    """

    source: str
    source_sha256: str
    ids: tuple[Tensor, ...]
    seq_len: int
    skip: int
    bos: str
    prefix: int = 0
    suffix: int = 0
    decoder_start: int | None = None
    spans: tuple[Span, ...] = ()
    named: SetInfo | None = None

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return len(self.ids)

    @property
    def tokens(self) -> int:
        """Real tokens in all."""
        return sum(len(block) for block in self.ids)

    @property
    def block_hashes(self) -> tuple[str, ...]:
        """One short hash a block, over its text alone: a BOS does not make it another text."""
        return tuple(map(short_hash, self._texts))

    @property
    def fingerprints(self) -> tuple[np.ndarray[Any, np.dtype[np.uint64]], ...]:
        """Fingerprints of each block's text: its BOS is none of it."""
        return tuple(fingerprints(block.numpy()) for block in self._texts)

    @property
    def _texts(self) -> Iterator[Tensor]:
        return (block[self.prefix : len(block) - self.suffix] for block in self.ids)

    @property
    def sha256(self) -> str:
        """Hash of all token ids and of where blocks end."""
        return hashlib.sha256("".join(map(short_hash, self.ids)).encode()).hexdigest()

    def first(self, samples: int) -> TokenSlice:
        """Returns the slice of the first so many sequences."""
        return replace(self, ids=self.ids[:samples], spans=self.spans[:samples])

    def batches(self, batch_size: int) -> Iterator[TokenBatch]:
        """Yields the sequences in order, `batch_size` at a time."""
        for start in range(0, len(self.ids), batch_size):
            rows = self.ids[start : start + batch_size]
            longest = max(len(row) for row in rows)
            ids = torch.zeros(len(rows), longest, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for index, row in enumerate(rows):
                ids[index, : len(row)] = row
                mask[index, : len(row)] = 1
            yield TokenBatch(
                input_ids=ids,
                attention_mask=mask,
                first_sequence=start,
                decoder_start=self.decoder_start,
            )

    def info(self, batch_size: int) -> DataInfo:
        """Returns what a result file says about the slice."""
        return DataInfo(
            source=self.source,
            sha256=self.sha256,
            sequences=self.sequences,
            seq_len=self.seq_len,
            tokens=self.tokens,
            batch_size=batch_size,
            bos=self.bos,
            block_hashes=list(self.block_hashes),
            skipped_blocks=self.skip,
            python=platform.python_version(),
            **set_fields(self.named),
        )


def short_hash(ids: Tensor) -> str:
    """Returns 16 hex digits over token ids."""
    return hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:_HASH_DIGITS]
