"""Figures that are means over sequences: `inf_norm_mean` and `kurtosis_oft`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from quantkit.numerics.observers import Moments


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceMeans:
    """Sums over sequences, float64 `[groups]`, and how many sequences each is of.

    `inf_norm_mean` is the mean of max |x|; `kurtosis_oft` the mean of the kurtosis of each
    sequence's elements (Bondarenko et al., "Quantizable Transformers", 2023, section 5; their
    tables average it over layers too). The pooled kurtosis weighs a sequence by its length and
    sees differences between sequences; this one does neither. A sequence whose elements are all
    equal has none.
    """

    abs_max: Tensor
    sequences: Tensor
    kurtosis: Tensor
    with_kurtosis: Tensor

    @classmethod
    def empty(cls, groups: int) -> Self:
        """Returns the sums over nothing."""
        zeros = torch.zeros(groups, dtype=torch.float64)
        return cls(abs_max=zeros, sequences=zeros, kurtosis=zeros, with_kurtosis=zeros)

    def add(self, abs_max: Tensor, moments: Moments, seen: Tensor) -> Self:
        """Returns the sums with one sequence more; `seen` bool `[groups]`: it has elements."""
        kurtosis = moments.finish().kurtosis
        defined = ~kurtosis.isnan()
        return type(self)(
            abs_max=self.abs_max + abs_max.double() * seen,
            sequences=self.sequences + seen,
            kurtosis=self.kurtosis + kurtosis.nan_to_num(nan=0.0),
            with_kurtosis=self.with_kurtosis + defined,
        )

    def merge(self, other: Self) -> Self:
        """Returns the sums of both."""
        return type(self)(
            abs_max=self.abs_max + other.abs_max,
            sequences=self.sequences + other.sequences,
            kurtosis=self.kurtosis + other.kurtosis,
            with_kurtosis=self.with_kurtosis + other.with_kurtosis,
        )

    @property
    def inf_norm_mean(self) -> Tensor:
        """Mean over sequences of max |x|, float64 `[groups]`; NaN of none."""
        return self.abs_max / self.sequences

    @property
    def kurtosis_oft(self) -> Tensor:
        """Mean over sequences of the kurtosis, float64 `[groups]`; NaN of none."""
        return self.kurtosis / self.with_kurtosis


@dataclass
class InfNorm:
    """The mean over sequences of max |x| over all layers, in constant memory.

    The layers of a batch come one after the other: `see` each, then `close` the batch.
    """

    total: float = 0.0
    sequences: int = 0
    _open: dict[int, float] = field(default_factory=dict)

    def see(self, largest: dict[int, float]) -> None:
        """Adds one layer: by sequence, its max |x|."""
        for sequence, value in largest.items():
            self._open[sequence] = max(value, self._open.get(sequence, 0.0))

    def close(self) -> None:
        """Ends a batch."""
        self.total += sum(self._open.values())
        self.sequences += len(self._open)
        self._open = {}

    def absorb(self, other: InfNorm) -> None:
        """Adds what another process saw."""
        self.total += other.total
        self.sequences += other.sequences

    @property
    def mean(self) -> float:
        """The mean; NaN of no sequence."""
        return self.total / self.sequences if self.sequences else float("nan")
