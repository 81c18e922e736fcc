"""Statistics of one attention map: blocks of rows in, a mergeable `MapRecord` out.

Classes: `first` (the key is the sequence's first token), `others`; the one entry of a causal
map's row 0 belongs to neither and enters only the pooled figures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Self

import torch
from torch import Tensor

from quantkit.numerics.observers import Bundle, merged
from quantkit.numerics.scan import RowScan
from quantkit.outliers.per_sequence import SequenceMeans
from quantkit.outliers.places import POSITION_STEP, pack
from quantkit.probes import AttentionLogits, LogitBlock, Spans

ROW_0: Final = "row 0"
CLASSES: Final = ("others", "first", ROW_0)


@dataclass(frozen=True, kw_only=True)
class RowSampling:
    """Which query rows enter moments, histogram and entropy.

    Attributes:
        rows: Rows a sequence, one at random of each of as many equal parts; None: all. Rows of a
            causal map have different lengths, so parts are cut by position.
        seed: With the sequence's index it fixes the choice, whatever the batches are.
    """

    rows: int | None = None
    seed: int = 0

    def chosen(self, queries: int, sequence: int) -> Tensor:
        """Returns bool `[queries]`."""
        if self.rows is None or self.rows >= queries:
            return torch.ones(queries, dtype=torch.bool)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + sequence)
        edges = torch.linspace(0, queries, self.rows + 1, dtype=torch.float64)
        within = torch.rand(self.rows, generator=generator, dtype=torch.float64)
        picked = (edges[:-1] + within * (edges[1:] - edges[:-1])).long().clamp_max(queries - 1)
        return torch.zeros(queries, dtype=torch.bool).index_fill(0, picked, True)


@dataclass(frozen=True, kw_only=True, eq=False)
class MapRecord:
    """What was seen of one layer and map; a monoid.

    Attributes:
        classes: A bundle for each of `CLASSES`; groups are heads.
        means: Per-sequence figures.
        entropy_sum, entropy_rows: Nats over query rows, and how many, `[heads]`.
        excluded: Masked entries that were left out.
    """

    classes: dict[str, Bundle]
    means: SequenceMeans
    entropy_sum: Tensor
    entropy_rows: Tensor
    excluded: int

    def merge(self, other: Self) -> Self:
        """Returns the record of both parts."""
        return type(self)(
            classes={name: self.classes[name].merge(other.classes[name]) for name in CLASSES},
            means=self.means.merge(other.means),
            entropy_sum=self.entropy_sum + other.entropy_sum,
            entropy_rows=self.entropy_rows + other.entropy_rows,
            excluded=self.excluded + other.excluded,
        )

    @property
    def floor(self) -> Tensor:
        """Magnitudes below which nothing new can enter a top-k, float32 `[classes * heads]`."""
        return torch.cat([self.classes[name].floor for name in CLASSES])

    @cached_property
    def pooled(self) -> Bundle:
        """The bundle over all classes; merged once, since every figure of a layer asks for it."""
        return merged(list(self.classes.values()))

    @property
    def entropy(self) -> Tensor:
        """Mean over query rows of the entropy in nats, float64 `[heads]`; NaN of none."""
        return self.entropy_sum / self.entropy_rows


Feed = Callable[[int, "Adder"], None]
"""Given a sequence of the batch, hands every block of it to the adder."""


def scan_map(
    call: AttentionLogits,
    feed: Feed,
    *,
    first_sequence: int,
    sampling: RowSampling,
    floor: Tensor | None,
    entropy: bool,
) -> tuple[MapRecord, dict[int, float]]:
    """Returns the record of one map of one forward pass, and max |x| by sequence.

    Memory: a block a thread, and the bins that are used (about 0.1 MB a head, class and thread).

    Args:
        call: Which keys are attended to, and how many heads there are.
        feed: The map.
        first_sequence: Index of the batch's first sequence.
        floor: `MapRecord.floor` of what was seen before; None: nothing was.
    """
    attended = call.attended_spans()
    batch, queries = attended.lo.shape
    first, start = _first_keys(attended)
    heads = call.heads
    scan = RowScan(len(CLASSES) * heads, floor=floor, entropy=entropy, aside_rows=queries)
    means, sequence_max = SequenceMeans.empty(heads), dict[int, float]()
    for index in range(batch):
        row = int(start[index])
        if row < 0:
            continue  # all padding
        sequence = first_sequence + index
        adder = Adder(
            scan=scan,
            heads=heads,
            sequence=sequence,
            first=int(first[index]),
            full=_sampled(call, attended, index, sampling, sequence),
        )
        feed(index, adder)
        adder.add_first_key(row if int(attended.counts[index, row]) == 1 else -1)
        cut = scan.cut()
        moments = cut.moments.select(0, heads)
        for group in range(1, len(CLASSES)):
            moments = moments.merge(cut.moments.select(group * heads, (group + 1) * heads))
        largest = cut.abs_max.view(len(CLASSES), heads).amax(0)
        seen = (largest > 0) | (moments.count > 0)  # else all is NaN or inf
        means = means.add(largest, moments, seen)
        if bool(seen.any()):
            sequence_max[sequence] = float(largest.max())
    result = scan.finish()
    classes = {
        name: result.bundle.select(group * heads, (group + 1) * heads)
        for group, name in enumerate(CLASSES)
    }
    elements = sum(int(bundle.minmax.count.sum()) for bundle in classes.values())
    record = MapRecord(
        classes=classes,
        means=means,
        entropy_sum=result.entropy_sum[:heads],
        entropy_rows=result.entropy_rows[:heads],
        excluded=call.entries - elements,
    )
    return record, sequence_max


@dataclass(frozen=True, kw_only=True, eq=False)
class Adder:
    """Adds blocks of one sequence to a scan; the first key's column is set aside.

    Attributes:
        heads: Groups of the scan that are class `others`; as many follow for `first` and row 0.
        sequence: Its index among all; `first`: its first attended key.
        full: bool `[queries]`: rows that are sampled.
    """

    scan: RowScan
    heads: int
    sequence: int
    first: int
    full: Tensor

    def add(self, block: LogitBlock, worker: int | None = None) -> None:
        """Adds one block, for one worker or dealt out to all."""
        self.scan.add(
            block.logits,
            block.lo,
            block.hi,
            tag=pack(self.sequence, block.row, block.column),
            row_step=POSITION_STEP,
            first_group=block.head,
            valid=block.valid,
            full=self.full[block.row : block.row + block.logits.shape[1]],
            skip=self.first - block.column,
            row=block.row,
            worker=worker,
        )

    def add_first_key(self, alone: int) -> None:
        """Adds the first key's column, once all blocks are in; row `alone` (-1: none) is row 0."""
        values, has = self.scan.take_aside()
        values, has = values[: self.heads], has[: self.heads]
        is_row_0 = torch.arange(values.shape[1]) == alone
        for group, which in ((1, ~is_row_0), (2, is_row_0)):
            for sampled in (True, False):
                chosen = has & which & (self.full == sampled)
                if bool(chosen.any()):
                    self.scan.add(
                        values[:, None],
                        torch.zeros(1, dtype=torch.int64),
                        torch.tensor([values.shape[1]]),
                        tag=pack(self.sequence, 0, self.first),
                        row_step=0,
                        column_step=POSITION_STEP,
                        first_group=group * self.heads,
                        valid=chosen[:, None],
                        full=torch.tensor([sampled]),
                        worker=0,
                    )


def logits_of(call: AttentionLogits, *, modified: bool) -> Feed:
    """Returns the feed of a map's logits; threads compute and scan blocks side by side."""

    def feed(index: int, adder: Adder) -> None:
        def work(worker: int) -> None:
            share = (worker, adder.scan.workers)
            for block in call.blocks(modified=modified, sequence=index, share=share):
                adder.add(block, worker)

        call.spans()  # found once, before the threads ask for them
        with torch.inference_mode():
            adder.scan.side_by_side(work)

    return feed


def _sampled(
    call: AttentionLogits, attended: Spans, index: int, sampling: RowSampling, sequence: int
) -> Tensor:
    """Returns which rows are sampled, bool `[queries]`.

    Of those that attend to something, so that the choice does not depend on how far a batch is
    padded; of all rows where masked entries count.
    """
    seen = attended.hi[index] > attended.lo[index]
    if call.all_entries:
        seen = torch.ones_like(seen)
    full = torch.zeros_like(seen)
    full[seen] = sampling.chosen(int(seen.sum()), sequence)
    return full


def _first_keys(attended: Spans) -> tuple[Tensor, Tensor]:
    """Returns each sequence's first attended key and first row that attends (-1: none does)."""
    seen = attended.hi > attended.lo
    first = torch.where(seen, attended.lo, torch.iinfo(torch.int64).max).amin(1)
    return first, torch.where(seen.any(1), seen.to(torch.int8).argmax(1), -1)
