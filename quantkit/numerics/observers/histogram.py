"""A histogram on the floating-point grid itself, which therefore merges exactly.

A bin is a sign, an octave (the exponent) and the leading bits of the mantissa: its edges are
fixed by the format and not by the data, so nothing is ever rescaled. Only the octaves in use are
stored, and that window grows to either side without touching a count.

How this differs from the usual calibration histogram (equal bins over [min, max] that are merged
or interpolated when a larger value arrives): that one loses a little with every outlier, and its
result depends on the order of the batches. This one loses nothing, and is fine near zero, where
most values are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Self

import torch
from torch import Tensor

from quantkit.errors import InputError
from quantkit.numerics.observers.rows import checked, counted, require_same_groups

_MANTISSA = 23  # bits of a float32
_MAGNITUDE = 0x7FFFFFFF  # everything but the sign
_TOP_OCTAVE = 255  # the exponent field of inf and NaN
_CHUNK = 1 << 22  # elements binned at a time: many, as every chunk touches every bin once

# Bits of mantissa that a value of this dtype has when it is written as float32.
_LOSSLESS_BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: _MANTISSA}


@dataclass(frozen=True, kw_only=True, eq=False)
class Histogram:
    """Integer counts over sign x octave x 2^mantissa_bits, for each group.

    `counts` int64 [groups, 2, octaves, 2^mantissa_bits]; sign 0 is positive. The first octave
    stored is `first_octave` (float32's exponent field; the subnormals share octave 0).
    `zeros` int64 [groups]: exact zeros of either sign, in no bin.
    `nonfinite` int64 [groups]: NaN and inf, in no bin and no quantile.
    `sums`, `squares` float64, shaped as counts: per bin the sum of x and of x^2; None unless
    asked for. `lossless`: every value seen so far was exactly the lower edge of its bin, because
    it was bfloat16 or float16 and the bins are that fine.
    """

    counts: Tensor
    zeros: Tensor
    nonfinite: Tensor
    sums: Tensor | None
    squares: Tensor | None
    first_octave: int
    lossless: bool

    @classmethod
    def empty(
        cls,
        groups: int,
        *,
        mantissa_bits: int = 7,
        with_sums: bool = False,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Returns the observer that has seen nothing.

        7 mantissa bits hold bfloat16 without loss and bound the relative error of a float32
        quantile by 2^-8; float16 without loss takes 10.

        Raises:
            InputError: mantissa_bits outside 0..16.
        """
        if not 0 <= mantissa_bits <= 16:
            raise InputError(f"Expected 0 to 16 mantissa bits, got {mantissa_bits}.")
        shape = (groups, 2, 0, 2**mantissa_bits)
        zeros = torch.zeros(groups, dtype=torch.int64, device=device)
        bins = torch.zeros(shape, dtype=torch.float64, device=device)
        return cls(
            counts=torch.zeros(shape, dtype=torch.int64, device=device),
            zeros=zeros,
            nonfinite=zeros,
            sums=bins if with_sums else None,
            squares=bins if with_sums else None,
            first_octave=0,
            lossless=True,
        )

    @classmethod
    def from_dense(
        cls,
        cells: Tensor,
        *,
        first_octave: int,
        positive_zeros: Tensor,
        negative_zeros: Tensor,
        nonfinite: Tensor,
    ) -> Self:
        """Returns the histogram whose bins over some octaves are `cells`.

        Args:
            cells: int64 `[groups, 2, octaves, 2^mantissa_bits]`, the upper bits of float32 numbers,
                all that are finite; in octave 0 the first bin of each sign holds its zeros too.
            positive_zeros, negative_zeros, nonfinite: int64 `[groups]`.
        """
        if first_octave == 0 and cells.shape[2]:
            cells = cells.clone()
            cells[:, 0, 0, 0] -= positive_zeros
            cells[:, 1, 0, 0] -= negative_zeros
        return cls(
            counts=cells.contiguous(),
            zeros=positive_zeros + negative_zeros,
            nonfinite=nonfinite,
            sums=None,
            squares=None,
            first_octave=first_octave if cells.shape[2] else 0,
            lossless=not cells.shape[2],
        )

    @property
    def groups(self) -> int:
        """How many rows are told apart."""
        return self.counts.shape[0]

    @property
    def mantissa_bits(self) -> int:
        """Bits of mantissa that tell bins of one octave apart."""
        return self.counts.shape[3].bit_length() - 1

    @property
    def octaves(self) -> int:
        """How many octaves are stored."""
        return self.counts.shape[2]

    @property
    def count(self) -> Tensor:
        """Finite elements seen, int64 [groups]."""
        return self.zeros + self.counts.sum((1, 2, 3))

    @property
    def relative_error(self) -> float:
        """The most by which a quantile can be off, relative to the element it stands for.

        0 where lossless, else half a bin: 2^-(mantissa_bits + 1). Holds for normal numbers; below
        2^-126 the same bound holds relative to 2^-126.
        """
        return 0.0 if self.lossless else 2.0 ** -(self.mantissa_bits + 1)

    def update(self, x: Tensor, *, valid: Tensor | None = None) -> Self:
        """Returns the observer that has also seen `x` [groups, elements], float32 or narrower.

        `valid` (bool, [groups or 1, elements]): where False the element does not exist.

        Raises:
            InputError: a shape that does not fit, or float64 (its bins would be float32's).
        """
        x = checked(x, self.groups)
        if x.dtype not in _LOSSLESS_BITS:
            raise InputError(f"Expected float32, bfloat16 or float16, got {x.dtype}.")
        if x.numel() == 0:
            return self
        seen = self
        exact = _LOSSLESS_BITS[x.dtype] <= self.mantissa_bits
        counts = None if valid is None else counted(x, valid)
        width = max(1, _CHUNK // self.groups)
        for start in range(0, x.shape[1], width):
            part = x[:, start : start + width].to(torch.float32)
            ignored = None
            if counts is not None:
                out = ~counts[:, start : start + width]
                part = part.masked_fill(out, 0.0)  # counted as zeros, and taken off again
                ignored = out.sum(1)
            seen = seen._with(part.contiguous(), ignored, exact)
        return seen

    def _with(self, x: Tensor, ignored: Tensor | None, exact: bool) -> Self:
        """Returns self and one float32 chunk; `ignored` [groups] of its zeros are not elements."""
        m, shift = self.mantissa_bits, _MANTISSA - self.mantissa_bits
        bits = x.view(torch.int32)
        size = bits & _MAGNITUDE
        # The octaves in use. Zero minus 1 loses its sign and becomes the largest of all, so it
        # does not count as the smallest; 2^k minus 1 is put right by the + 1 below.
        smallest = int(((size - 1) & _MAGNITUDE).min()) + 1
        first = min(smallest >> _MANTISSA, _TOP_OCTAVE)
        last = int(size.max()) >> _MANTISSA
        if last == _TOP_OCTAVE:  # some are not finite, and must not widen the window
            last = int(size.masked_fill(size >= _TOP_OCTAVE << _MANTISSA, 0).max()) >> _MANTISSA
        octaves = max(0, last - first + 1)
        inner = octaves << m
        # One row of slots for each group and sign: [zeros][bins in use][not finite].
        row = inner + 2
        slot = size.bitwise_right_shift_(shift)  # size is ours
        slot.sub_((first << m) - 1).clamp_(0, inner + 1)
        slot.sub_((bits >> 31).mul_(row))  # the sign bit shifts to -1
        group = torch.arange(self.groups, device=x.device) * (2 * row)
        total = 2 * row * self.groups
        flat = slot + group.to(torch.int32)[:, None] if total < 2**31 else slot + group[:, None]
        flat = flat.reshape(-1)
        shape = (self.groups, 2, row)
        found = torch.bincount(flat, minlength=total).view(shape)
        counts = found[:, :, 1:-1].reshape(self.groups, 2, octaves, 1 << m)
        zeros = found[:, :, 0].sum(1)
        nonfinite = found[:, :, -1].sum(1)
        if first == 0 and octaves:  # zeros fell into the first subnormal bin
            is_zero = x == 0
            negative = (is_zero & (bits < 0)).sum(1)
            zeros = is_zero.sum(1)
            counts = counts.clone()
            counts[:, 1, 0, 0] -= negative
            counts[:, 0, 0, 0] -= zeros - negative
        sums = squares = None
        if self.sums is not None:
            value = x.reshape(-1).to(torch.float64)
            sums = torch.bincount(flat, value, total).view(shape)[:, :, 1:-1]
            squares = torch.bincount(flat, value * value, total).view(shape)[:, :, 1:-1]
            sums, squares = sums.reshape(counts.shape), squares.reshape(counts.shape)
        part = replace(
            self,
            counts=counts,
            zeros=zeros if ignored is None else zeros - ignored,
            nonfinite=nonfinite,
            sums=sums,
            squares=squares,
            first_octave=first,
            lossless=exact or not octaves,  # a zero is exact in any case
        )
        return self.merge(part)

    def merge(self, other: Self) -> Self:
        """Returns the observer that has seen what both saw; counts are exact.

        Raises:
            InputError: another number of groups or mantissa bits, or only one has sums.
        """
        require_same_groups(self.groups, other.groups)
        same = self.mantissa_bits == other.mantissa_bits
        if not same or (self.sums is None) != (other.sums is None):
            raise InputError(
                "Expected to merge histograms of equal kind, got mantissa_bits "
                f"{self.mantissa_bits} and {other.mantissa_bits}, with_sums "
                f"{self.sums is not None} and {other.sums is not None}."
            )
        used = [h for h in (self, other) if h.octaves]
        first = min((h.first_octave for h in used), default=0)
        stop = max((h.first_octave + h.octaves for h in used), default=0)
        window = first, stop - first

        def added(mine: Tensor | None, its: Tensor | None) -> Tensor | None:
            if mine is None or its is None:
                return None
            total = mine.new_zeros((self.groups, 2, window[1], mine.shape[3]))
            for h, part in ((self, mine), (other, its)):
                at = h.first_octave - first if h.octaves else 0
                total[:, :, at : at + h.octaves] += part
            return total

        counts = added(self.counts, other.counts)
        assert counts is not None
        return replace(
            self,
            counts=counts,
            zeros=self.zeros + other.zeros,
            nonfinite=self.nonfinite + other.nonfinite,
            sums=added(self.sums, other.sums),
            squares=added(self.squares, other.squares),
            first_octave=first,
            lossless=self.lossless and other.lossless,
        )

    def select(self, start: int, stop: int) -> Self:
        """Returns the groups `start <= group < stop`, with the octaves that they use."""
        counts = self.counts[start:stop]
        used = counts.any(3).any(1).any(0).nonzero()[:, 0].tolist()
        first, last = (used[0], used[-1] + 1) if used else (0, 0)
        window = (slice(None), slice(None), slice(first, last))
        return replace(
            self,
            counts=counts[window].clone(),
            zeros=self.zeros[start:stop],
            nonfinite=self.nonfinite[start:stop],
            sums=None if self.sums is None else self.sums[start:stop][window].clone(),
            squares=None if self.squares is None else self.squares[start:stop][window].clone(),
            first_octave=self.first_octave + first if used else 0,
            lossless=self.lossless or not used,
        )

    def pool(self) -> Self:
        """Returns the observer of one group that has seen what all groups saw."""
        return replace(
            self,
            counts=self.counts.sum(0, keepdim=True),
            zeros=self.zeros.sum(0, keepdim=True),
            nonfinite=self.nonfinite.sum(0, keepdim=True),
            sums=None if self.sums is None else self.sums.sum(0, keepdim=True),
            squares=None if self.squares is None else self.squares.sum(0, keepdim=True),
        )

    def edges(self) -> Tensor:
        """Returns the lower edges of the magnitude bins, float32 [octaves * 2^mantissa_bits]."""
        m = self.mantissa_bits
        codes = torch.arange(self.octaves << m, device=self.counts.device)
        codes = (codes + (self.first_octave << m)) << (_MANTISSA - m)
        return codes.to(torch.int32).view(torch.float32)

    def centers(self) -> Tensor:
        """Returns what stands for a magnitude bin, float32 [octaves * 2^mantissa_bits].

        The lower edge where lossless (it is the value), else the middle of the bin.
        """
        edges = self.edges()
        if self.lossless:
            return edges
        bits = edges.view(torch.int32) + (1 << (_MANTISSA - self.mantissa_bits - 1))
        return bits.view(torch.float32)

    def quantile_abs(self, q: float) -> Tensor:
        """Returns the q-quantile of |x|, float32 [groups]; NaN where nothing was seen.

        The element of rank ceil(q n), counted from 1 (numpy's "inverted_cdf"; for q = 0.5 and
        even n the lower middle, as torch.median), to within `relative_error`.
        """
        size = self.counts.sum(1).flatten(1)
        cells = torch.cat([self.zeros[:, None], size], 1)
        return _pick(cells, torch.cat([self.centers().new_zeros(1), self.centers()]), q)

    def quantile(self, q: float) -> Tensor:
        """Returns the q-quantile of x with its sign, float32 [groups]; else as `quantile_abs`."""
        positive = self.counts[:, 0].flatten(1)
        negative = self.counts[:, 1].flatten(1).flip(1)
        cells = torch.cat([negative, self.zeros[:, None], positive], 1)
        center = self.centers()
        return _pick(cells, torch.cat([-center.flip(0), center.new_zeros(1), center]), q)

    def finish(self) -> Tensor:
        """Returns the median of |x|, float32 [groups]."""
        return self.quantile_abs(0.5)

    def state(self) -> dict[str, Tensor]:
        """Returns tensors from which `from_state` makes this observer again."""
        state = {
            "counts": self.counts,
            "zeros": self.zeros,
            "nonfinite": self.nonfinite,
            "first_octave": torch.tensor(self.first_octave),
            "lossless": torch.tensor(self.lossless),
        }
        if self.sums is not None and self.squares is not None:
            state |= {"sums": self.sums, "squares": self.squares}
        return state

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> Self:
        """Returns the observer whose `state` this was."""
        return cls(
            counts=state["counts"],
            zeros=state["zeros"],
            nonfinite=state["nonfinite"],
            sums=state.get("sums"),
            squares=state.get("squares"),
            first_octave=int(state["first_octave"]),
            lossless=bool(state["lossless"]),
        )


def _pick(cells: Tensor, values: Tensor, q: float) -> Tensor:
    """Returns the value of the cell that holds rank ceil(q n): cells [groups, c], values [c]."""
    if not 0.0 <= q <= 1.0:
        raise InputError(f"Expected a quantile as a fraction in [0, 1], got {q}.")
    until = cells.cumsum(1)
    totals: list[int] = until[:, -1].tolist()
    share = Fraction(str(q))  # 0.999 of 1000 is 999, which the float product misses
    ranks = [max(1, -(-share.numerator * n // share.denominator)) for n in totals]
    rank = torch.tensor(ranks, dtype=torch.int64, device=cells.device)
    at = torch.searchsorted(until, rank[:, None])[:, 0].clamp_max(values.shape[0] - 1)
    return torch.where(until[:, -1] > 0, values[at], torch.full_like(values[at], torch.nan))
