"""What every slice of data can do, whether it is text or arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from quantkit.results import DataInfo


@dataclass(frozen=True, kw_only=True)
class Span:
    """A part of a stream of tokens, `[begin, end)`; `stream` is the hash of all of it."""

    stream: str
    begin: int
    end: int


class Batch(Protocol):
    """Some samples, ready for a forward pass: `model(**batch.inputs)`."""

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Keyword arguments for the model or its backbone, on the CPU."""

    @property
    def real(self) -> Tensor | None:
        """Which positions are no padding, `[batch, sequence]`; None where nothing is padded."""

    @property
    def first_sequence(self) -> int:
        """Index in the slice of the first sample."""


class DataSlice(Protocol):
    """Samples of one source, in order, with a hash each: a TokenSlice or an ArraySlice."""

    @property
    def source(self) -> str:
        """What the user gave."""

    @property
    def sequences(self) -> int:
        """Number of samples."""

    @property
    def tokens(self) -> int:
        """Real tokens in all; the number of samples where they are no text."""

    @property
    def sha256(self) -> str:
        """Hash of everything that the model is given."""

    @property
    def block_hashes(self) -> tuple[str, ...]:
        """One short hash a sample."""

    @property
    def fingerprints(self) -> tuple[np.ndarray[Any, np.dtype[np.uint64]], ...]:
        """Fingerprints of each sample's text, see `overlap`; empty where it is no text."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """Where each sample lies in a stream of tokens; empty where it is none."""

    def info(self, batch_size: int) -> DataInfo:
        """Returns what a result file says about the slice."""

    def first(self, samples: int) -> DataSlice:
        """Returns the slice of the first so many samples."""

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Yields the samples in order, `batch_size` at a time."""
