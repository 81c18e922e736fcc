"""What every slice of data can do, whether it is text or arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from quantkit.errors import InputError
from quantkit.results import DataInfo


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
        """One short hash a sample; two slices with none in common are disjoint."""

    def info(self, batch_size: int) -> DataInfo:
        """Returns what a result file says about the slice."""

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Yields the samples in order, `batch_size` at a time."""


def require_disjoint(one: DataSlice, other: DataSlice, what: str) -> None:
    """Raises InputError if two slices share a sample."""
    shared = set(one.block_hashes) & set(other.block_hashes)
    if shared:
        raise InputError(
            f"{what} share {len(shared)} blocks of data: expected disjoint slices. Name another "
            "source for one of them, or fewer samples."
        )
