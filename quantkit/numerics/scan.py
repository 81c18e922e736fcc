"""`RowScan`: the four observers of a `Bundle`, and entropy, over rows of float32 in one pass.

How this differs from `Bundle.update`: the same numbers (counts, extremes, top-k and histogram
exactly, moments to float64 rounding), but rows may end and begin anywhere, and each is read from
memory once. It holds dense bins while it runs, so a scan is short-lived: one layer, one batch.

The compiled pass needs numba and the CPU; without either `Bundle.update` does the work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from threading import Lock
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.numerics.observers.bundle import Bundle
from quantkit.numerics.observers.histogram import Histogram
from quantkit.numerics.observers.minmax import MinMax
from quantkit.numerics.observers.moments import Moments
from quantkit.numerics.observers.topk import MISSING, TopK
from quantkit.numerics.threads import pool, side_by_side

_CELLS: Final = 1 << 16  # sign, exponent and 7 bits of mantissa: the upper half of a float32
_MANTISSA_BITS: Final = 7
_MANTISSA: Final = 23  # bits of a float32
_TOP_OCTAVE: Final = 255  # the exponent field of inf and NaN
_DENSE_BYTES: Final = 1 << 30  # of all workers' bins, of which some 5 % are touched
_NO_ROOM: Final = -1


@cache
def compiled() -> ModuleType | None:
    """Returns the module of compiled passes, or None where numba is not installed."""
    try:
        from quantkit.numerics import kernels
    except ImportError:
        return None
    return kernels


@cache
def warm_up() -> None:
    """Loads the compiled passes, once: seconds where they are built, else a fraction of one."""
    scan = RowScan(1, k=1)
    ends = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    scan.add(torch.ones(1, 1, 1), *ends, tag=0, row_step=1, worker=0)
    scan.finish()


@dataclass(frozen=True, kw_only=True, eq=False)
class ScanResult:
    """What one scan saw.

    Attributes:
        bundle: One group each; its moments and histogram hold the full rows alone.
        entropy_sum, entropy_rows: float64 and int64 `[groups]`: nats summed over full rows, and how
            many they are; rows that hold NaN or inf have none.
    """

    bundle: Bundle
    entropy_sum: Tensor
    entropy_rows: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """A part of a scan, e.g. one sequence.

    Attributes:
        moments: Of its full rows.
        lo, hi: float32 `[groups]`: extremes of all finite elements; inf and -inf without any.
    """

    moments: Moments
    lo: Tensor
    hi: Tensor

    @property
    def abs_max(self) -> Tensor:
        """The largest finite magnitude, float32 `[groups]`; 0 without any."""
        return torch.maximum(-self.lo, self.hi).clamp_min(0.0)


class RowScan:
    """Accumulates blocks of rows; `finish` says what was seen. One thread calls it.

    Args:
        groups: How many are told apart.
        floor: float32 `[groups]`: magnitudes below it cannot enter the top-k, because k larger
            ones are known; a speed-up.
        entropy: Whether to take the entropy of softmax over each full row.
        aside_rows: Rows of a part of the scan, where what is skipped is wanted (`take_aside`).
    """

    def __init__(
        self,
        groups: int,
        *,
        k: int = 100,
        floor: Tensor | None = None,
        entropy: bool = False,
        aside_rows: int = 0,
    ) -> None:
        self.groups, self.k, self.wants_entropy = groups, k, entropy
        self.aside_rows, self.workers = aside_rows, 1
        self._new_aside()
        self._kernels = compiled()
        self._slow_lock = Lock()
        self._slow: Bundle | None = None
        self._slow_moments = Moments.empty(groups)
        self._slow_cut: tuple[Moments | None, Tensor, Tensor] = (None, *_nothing(groups))
        self._lo, self._hi = _nothing(groups)  # up to the last cut
        self._slow_entropy = torch.zeros(groups, 2, dtype=torch.float64)
        self._floor = torch.zeros(groups) if floor is None else floor.clamp_min(0.0).float()
        if self._kernels is not None:
            self._allocate()

    def _allocate(self) -> None:
        room = max(1, _DENSE_BYTES // (self.groups * _CELLS * 8))
        self.workers = min(torch.get_num_threads(), room)
        shape = (self.groups, self.workers)
        start = torch.tensor([-(2**31), 2**31 - 1, 2**31 - 1], dtype=torch.int32)
        self._keys = start.expand(*shape, 3).clone()
        self._counts = torch.zeros(*shape, 5, dtype=torch.int64)
        self._sizes = torch.full((*shape, self.k), _NO_ROOM, dtype=torch.int32)
        self._tags = torch.full((*shape, self.k), torch.iinfo(torch.int64).max)
        self._values = torch.zeros(*shape, self.k)
        self._moments = torch.zeros(*shape, 5, dtype=torch.float64)
        self._total = torch.zeros(self.groups, 5, dtype=torch.float64)
        # numpy's zeros take no memory until they are touched, and few octaves are
        self._histogram = torch.from_numpy(np.zeros((*shape, _CELLS), np.int64))
        self._entropy = torch.zeros(*shape, 2, dtype=torch.float64)
        self._arrays = [
            part.numpy()
            for part in (
                self._keys,
                self._counts,
                self._sizes,
                self._tags,
                self._values,
                self._moments,
                self._histogram,
                self._entropy,
            )
        ]
        self._floor_bits = self._floor.contiguous().view(torch.int32).numpy()
        self._no_holes = torch.empty(0, 0, 0, dtype=torch.bool).numpy()

    def _new_aside(self) -> None:
        shape = (self.groups, self.aside_rows)
        self._aside = torch.zeros(shape)
        self._has_aside = torch.zeros(shape, dtype=torch.bool)

    def side_by_side(self, work: Callable[[int], None]) -> None:
        """Runs `work(worker)` for every worker, each in a thread with one thread of torch's own.

        A worker may `add` with its own number, and share nothing else.
        """
        side_by_side(work, self.workers)

    def add(
        self,
        x: Tensor,
        lo: Tensor,
        hi: Tensor,
        *,
        tag: int,
        row_step: int,
        column_step: int = 1,
        first_group: int = 0,
        valid: Tensor | None = None,
        full: Tensor | None = None,
        skip: int = -1,
        row: int = 0,
        worker: int | None = None,
    ) -> None:
        """Adds rows.

        Args:
            x: float32 `[g, rows, columns]`, of group `first_group` and those after it.
            lo, hi: int64 `[rows]`: columns `lo <= column < hi` of a row count.
            tag: Of `x[:, 0, 0]`; `row_step` more a row, `column_step` more a column.
            valid: bool `[g or 1, rows, columns]` where the columns that count have holes.
            full: bool `[rows]`: False where only extremes and top-k are wanted.
            skip: A column that counts in the entropy alone; negative: none.
            row: Index in the part of the scan of the first row, for `take_aside`.
            worker: Whose this is, inside `side_by_side`; None: the rows are dealt out to all.
        """
        if full is None:
            full = torch.ones(x.shape[1], dtype=torch.bool)
        if self._kernels is None or x.device.type != "cpu":
            tags = tag + torch.arange(x.shape[1])[:, None] * row_step
            tags = tags + torch.arange(x.shape[2]) * column_step
            with self._slow_lock:  # workers share what it adds to
                self._add_slowly(x, lo, hi, tags, first_group, valid, full, skip, row)
            return
        inputs: tuple[Any, ...] = (
            x.detach().contiguous().numpy(),
            lo.numpy(),
            hi.numpy(),
            self._no_holes if valid is None else valid.contiguous().numpy(),
            full.numpy(),
            skip,
            tag,
            row_step,
            column_step,
            first_group,
            self._floor_bits,
            self.wants_entropy,
        )
        arrays = (*self._arrays, self._aside.numpy(), self._has_aside.numpy(), row)
        kernel = self._kernels.scan_rows
        if worker is not None:
            kernel(worker, 1, *inputs, *arrays)
            return
        others = [
            pool(self.workers).submit(kernel, part, self.workers, *inputs, *arrays)
            for part in range(1, self.workers)
        ]
        kernel(0, self.workers, *inputs, *arrays)
        for other in others:
            other.result()

    def take_aside(self) -> tuple[Tensor, Tensor]:
        """Returns what stood in the column `skip` of each row since this was last asked.

        float32 `[groups, aside_rows]`, and bool: where it counts.
        """
        taken = self._aside, self._has_aside
        self._new_aside()
        return taken

    def cut(self) -> Cut:
        """Returns moments and largest magnitudes since the last cut; goes on with the rest."""
        moments, lo, hi = self._slow_cut
        if moments is not None:
            self._slow_moments = self._slow_moments.merge(moments)
            self._slow_cut = (None, *_nothing(self.groups))
        if self._kernels is not None:
            together = self._kernels.cut_moments(self._moments.numpy(), self._total.numpy())
            compiled_part = _named_moments(torch.from_numpy(together))
            moments = compiled_part if moments is None else moments.merge(compiled_part)
            high, low = self._keys[..., 0].amax(1), self._keys[..., 1].amin(1)
            seen = high >= low  # the keys of a group without elements are the other way round
            its_lo, its_hi = _nothing(self.groups)
            its_lo = torch.where(seen, _number(low), its_lo)
            its_hi = torch.where(seen, _number(high), its_hi)
            self._lo, self._hi = torch.minimum(self._lo, its_lo), torch.maximum(self._hi, its_hi)
            lo, hi = torch.minimum(lo, its_lo), torch.maximum(hi, its_hi)
            self._keys[..., 0], self._keys[..., 1] = -(2**31), 2**31 - 1
        return Cut(moments=moments or Moments.empty(self.groups), lo=lo, hi=hi)

    def finish(self) -> ScanResult:
        """Returns what was seen."""
        self.cut()
        bundle, entropy = self._slow, self._slow_entropy
        if bundle is not None:
            bundle = replace(bundle, moments=self._slow_moments)
        if self._kernels is not None:
            compiled_part = self._bundle()
            bundle = compiled_part if bundle is None else bundle.merge(compiled_part)
            entropy = entropy + self._entropy.sum(1)
        return ScanResult(
            bundle=bundle or Bundle.empty(self.groups, k=self.k),
            entropy_sum=entropy[:, 1],
            entropy_rows=entropy[:, 0].to(torch.int64),
        )

    def _bundle(self) -> Bundle:
        """Returns the bundle of the compiled passes, all parts together."""
        counts, low, high = self._counts.sum(1), self._lo, self._hi
        seen = low <= high
        missing = self._sizes == _NO_ROOM
        top = {
            "values": self._values.abs().masked_fill(missing, MISSING),
            "signed": self._values.masked_fill(missing, 0.0),
            "tags": self._tags.masked_fill(missing, -1),
        }
        # only the octaves in use are read: the other bins have never been touched
        cells = self._histogram.view(self.groups, self.workers, 2, 256, 1 << _MANTISSA_BITS)
        first = min(int(self._keys[..., 2].min()) >> _MANTISSA, _TOP_OCTAVE)
        largest = torch.maximum(-low, high)[seen]
        last = int(largest.max().view(torch.int32)) >> _MANTISSA if len(largest) else 0
        return Bundle(
            minmax=MinMax(
                min=low,
                max=high,
                count=counts[:, 0],
                nan_count=counts[:, 1],
                inf_count=counts[:, 2],
            ),
            topk=TopK.of({name: x.flatten(1) for name, x in top.items()}, k=self.k),
            moments=_named_moments(self._total),
            histogram=Histogram.from_dense(
                cells[:, :, :, first : max(first, last + 1)].sum(1),
                first_octave=first,
                positive_zeros=counts[:, 3],
                negative_zeros=counts[:, 4],
                nonfinite=cells[:, :, :, _TOP_OCTAVE].sum((1, 2, 3)),
            ),
        )

    def _add_slowly(
        self,
        x: Tensor,
        lo: Tensor,
        hi: Tensor,
        tags: Tensor,
        first_group: int,
        valid: Tensor | None,
        full: Tensor,
        skip: int,
        row: int,
    ) -> None:
        groups, rows, columns = x.shape
        column = torch.arange(columns, device=x.device)
        seen = (column >= lo.to(x.device)[:, None]) & (column < hi.to(x.device)[:, None])
        seen = seen[None].expand(x.shape) if valid is None else (seen & valid).expand(x.shape)
        full = full.to(x.device)
        tags = tags.to(x.device)
        if self.wants_entropy:
            self._add_entropy(first_group, x.float(), seen, full)
        if 0 <= skip < columns:
            if self.aside_rows:
                where = (slice(first_group, first_group + groups), slice(row, row + rows))
                has = seen[:, :, skip].cpu()
                self._has_aside[where] |= has
                self._aside[where] = torch.where(has, x[:, :, skip].cpu(), self._aside[where])
            seen = seen & (column != skip)
        rest = (first_group, self.groups - first_group - groups)  # groups that have no row here
        values = pad(x.detach().float().flatten(1), (0, 0, *rest))
        every = pad(seen.flatten(1), (0, 0, *rest))
        chosen = pad((seen & full[:, None]).flatten(1), (0, 0, *rest))
        update = Bundle.empty(self.groups, k=self.k).to(x.device)
        update = update.update(values, tags.reshape(1, -1), valid=every, sampled=chosen).to("cpu")
        self._slow = update if self._slow is None else self._slow.merge(update)
        moments, low, high = self._slow_cut
        its = update.minmax
        moments = update.moments if moments is None else moments.merge(update.moments)
        self._slow_cut = (moments, torch.minimum(low, its.min), torch.maximum(high, its.max))

    def _add_entropy(self, first: int, x: Tensor, seen: Tensor, full: Tensor) -> None:
        usable = full & seen.any(2) & (x.isfinite() | ~seen).all(2)  # [g, rows]
        masked = x.double().masked_fill(~seen, -torch.inf)
        entropy = torch.special.entr(torch.softmax(masked, -1)).sum(-1)
        entropy = torch.where(usable, entropy, torch.zeros_like(entropy)).sum(1)
        both = torch.stack([usable.sum(1).double(), entropy], 1).cpu()
        self._slow_entropy[first : first + len(x)] += both


def _nothing(groups: int) -> tuple[Tensor, Tensor]:
    """Returns the extremes (lo, hi) of no elements, which any element beats."""
    return torch.full((groups,), torch.inf), torch.full((groups,), -torch.inf)


def _number(key: Tensor) -> Tensor:
    """Returns the float32 that an ordered int32 stands for."""
    bits = torch.where(key < 0, key ^ 0x7FFFFFFF, key)
    return bits.to(torch.int32).view(torch.float32)


def _named_moments(part: Tensor) -> Moments:
    names = ("count", "mean", "m2", "m3", "m4")
    return Moments.from_state(dict(zip(names, part.unbind(1), strict=True)))
