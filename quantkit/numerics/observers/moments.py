"""Mean, variance and kurtosis of each group, from central moments that merge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from quantkit.numerics.observers.rows import checked, counted, require_same_groups

_CHUNK = 1 << 16  # elements of a row that are held in float64 at a time; the cache likes it small


@dataclass(frozen=True, kw_only=True, eq=False)
class MomentSummary:
    """All float64 [groups]; NaN where undefined.

    `variance` is the population's (m2 / n). `kurtosis` is Pearson's, n m4 / m2^2: a Gaussian has
    3. It is undefined below two elements, and where all elements are equal.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor
    skewness: Tensor
    kurtosis: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
    """Central moment sums of the finite elements: m_p = sum (x - mean)^p, all float64 [groups].

    Merging follows Pebay, "Formulas for robust, one-pass parallel computation of covariances and
    arbitrary-order statistical moments" (2008); no difference of large sums.
    NaN and inf do not take part (`MinMax` counts them).
    """

    count: Tensor
    mean: Tensor
    m2: Tensor
    m3: Tensor
    m4: Tensor

    @classmethod
    def empty(cls, groups: int, *, device: torch.device | str = "cpu") -> Self:
        """Returns the observer that has seen nothing."""
        zeros = torch.zeros(groups, dtype=torch.float64, device=device)
        return cls(count=zeros, mean=zeros, m2=zeros, m3=zeros, m4=zeros)

    @property
    def groups(self) -> int:
        """How many rows are told apart."""
        return self.mean.shape[0]

    def update(self, x: Tensor, *, valid: Tensor | None = None) -> Self:
        """Returns the observer that has also seen `x` [groups, elements].

        `valid` (bool, [groups or 1, elements]): where False the element does not exist.
        """
        x = checked(x, self.groups)
        counts = None if valid is None else counted(x, valid)
        seen = self
        width = max(1, _CHUNK // max(1, self.groups), min(x.shape[1], 256))
        for start in range(0, x.shape[1], width):
            part = x[:, start : start + width].to(torch.float64)
            mask = None if counts is None else counts[:, start : start + width]
            seen = seen.merge(self._of(part, mask))
        return seen

    @classmethod
    def _of(cls, x: Tensor, mask: Tensor | None) -> Self:
        """Returns the moments of one float64 chunk, in two passes over it."""
        total = x.sum(1)
        if mask is None and bool(total.isfinite().all()):
            count = torch.full_like(total, x.shape[1])
            mean = total / count
            off = x - mean[:, None]
        else:
            finite = x.isfinite() if mask is None else x.isfinite() & mask
            count = finite.sum(1).to(torch.float64)
            mean = x.masked_fill(~finite, 0.0).sum(1) / count.clamp_min(1.0)
            off = (x - mean[:, None]).masked_fill(~finite, 0.0)
        square = off * off
        return cls(
            count=count,
            mean=mean,
            m2=square.sum(1),
            m3=(square * off).sum(1),
            m4=(square * square).sum(1),
        )

    def merge(self, other: Self) -> Self:
        """Returns the observer that has seen what both saw."""
        require_same_groups(self.groups, other.groups)
        na, nb = self.count, other.count
        n = na + nb
        safe = n.clamp_min(1.0)
        d = torch.where((na > 0) & (nb > 0), other.mean - self.mean, torch.zeros_like(n))
        fa, fb = na / safe, nb / safe
        d2 = d * d
        return type(self)(
            count=n,
            mean=torch.where(na > 0, self.mean + d * fb, other.mean),
            m2=self.m2 + other.m2 + d2 * na * fb,
            m3=self.m3
            + other.m3
            + d2 * d * na * fb * (fa - fb)
            + 3.0 * d * (fa * other.m2 - fb * self.m2),
            m4=self.m4
            + other.m4
            + d2 * d2 * na * fb * (fa * fa - fa * fb + fb * fb)
            + 6.0 * d2 * (fa * fa * other.m2 + fb * fb * self.m2)
            + 4.0 * d * (fa * other.m3 - fb * self.m3),
        )

    def pool(self) -> Self:
        """Returns the observer of one group that has seen what all groups saw."""
        parts = self
        while parts.groups > 1:  # halves onto halves
            half = parts.groups // 2
            merged = parts.select(0, half).merge(parts.select(half, 2 * half))
            rest = parts.select(2 * half, parts.groups)
            both = {k: torch.cat([v, rest.state()[k]]) for k, v in merged.state().items()}
            parts = self.from_state(both)
        return parts if parts.groups else type(self).empty(1, device=self.mean.device)

    def select(self, start: int, stop: int) -> Self:
        """Returns the groups `start <= group < stop`."""
        return self.from_state({k: v[start:stop] for k, v in self.state().items()})

    def finish(self) -> MomentSummary:
        """Returns mean, variance, skewness and kurtosis."""
        nan = torch.full_like(self.mean, torch.nan)
        n = self.count
        spread = (n >= 2) & (self.m2 > 0)
        variance = self.m2 / n
        return MomentSummary(
            count=n,
            mean=torch.where(n > 0, self.mean, nan),
            variance=torch.where(n > 0, variance, nan),
            skewness=torch.where(spread, (self.m3 / n) / variance**1.5, nan),
            kurtosis=torch.where(spread, (self.m4 / n) / (variance * variance), nan),
        )

    def state(self) -> dict[str, Tensor]:
        """Returns tensors from which `from_state` makes this observer again."""
        return {
            "count": self.count,
            "mean": self.mean,
            "m2": self.m2,
            "m3": self.m3,
            "m4": self.m4,
        }

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> Self:
        """Returns the observer whose `state` this was."""
        return cls(**state)
