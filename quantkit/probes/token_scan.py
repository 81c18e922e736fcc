"""Blocks of an attention map, and tokens of an activation, fed to a `RowScan` class by class.

What the statistics and the ranges have in common: which element is of which token class, what is
padding, and where an element stands. Classes of a map: `others`, `first` (the key is the sequence's
first attended token), and the one entry of a causal map's row 0, which belongs to neither. Classes
of an activation: `first` (token of the sequence), `others`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from quantkit.numerics.scan import Cut, RowScan, ScanResult
from quantkit.probes.attention import AttentionLogits
from quantkit.probes.masks import Spans
from quantkit.probes.pieces import LogitBlock
from quantkit.probes.places import POSITION_STEP, first_real, pack

ROW_0: Final = "row 0"
MAP_CLASSES: Final = ("others", "first", ROW_0)
TOKEN_CLASSES: Final = ("first", "others")

Feed = Callable[[int, "Adder"], None]
"""Given a sequence of the batch, hands every block of it to the adder."""

OnCut = Callable[[int, Cut], None]
"""Told the index in the batch of a sequence, and what the scan saw of it."""


def scan_map(
    call: AttentionLogits,
    feed: Feed,
    on_cut: OnCut,
    *,
    first_sequence: int,
    sampled: Callable[[int, int], Tensor] | None = None,
    floor: Tensor | None = None,
    entropy: bool = False,
    k: int = 100,
) -> ScanResult:
    """Returns what was seen of one map of one forward pass; group `class * heads + head`.

    Memory: a block a thread, and the bins that are used (about 0.1 MB a head, class and thread).

    Args:
        call: Which keys are attended to, and how many heads there are.
        feed: The map.
        first_sequence: Index of the batch's first sequence.
        sampled: Given (index in the batch, sequence): bool `[queries]`, rows that enter moments,
            histogram and entropy; None: all.
        floor: float32 `[classes * heads]`: magnitudes below it cannot enter the top-k.
    """
    attended = call.attended_spans()
    batch, queries = attended.lo.shape
    first, start = _first_keys(attended)
    scan = RowScan(
        len(MAP_CLASSES) * call.heads, k=k, floor=floor, entropy=entropy, aside_rows=queries
    )
    every = torch.ones(queries, dtype=torch.bool)
    for index in range(batch):
        row = int(start[index])
        if row < 0:
            continue  # all padding
        sequence = first_sequence + index
        adder = Adder(
            scan=scan,
            heads=call.heads,
            sequence=sequence,
            first=int(first[index]),
            full=every if sampled is None else sampled(index, sequence),
        )
        feed(index, adder)
        adder.add_first_key(row if int(attended.counts[index, row]) == 1 else -1)
        on_cut(index, scan.cut())
    return scan.finish()


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

    def add_tile(self, index: int, start: int, tile: Tensor, spans: Spans, valid: Tensor) -> None:
        """Adds a tile of one sequence's rows, all heads and keys.

        Args:
            index: Of the sequence in the batch; `start`: its first row.
            tile: float32 `[heads, rows, keys]`; `valid`: bool `[heads or 1, rows, keys]`.
        """
        rows = slice(start, start + tile.shape[1])
        self.add(
            LogitBlock(
                sequence=index,
                head=0,
                row=start,
                column=0,
                logits=tile.contiguous(),
                lo=spans.lo[index, rows],
                hi=spans.hi[index, rows],
                valid=valid if spans.has_holes else None,
            )
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


def probabilities_of(call: AttentionLogits) -> Feed:
    """Returns the feed of a map's softmax outputs, tile by tile."""

    def feed(index: int, adder: Adder) -> None:
        alone, spans = call.of_sequence(index), call.attended_spans()
        for tile in alone.tiles():
            weights = alone.probabilities(tile)[0]
            adder.add_tile(index, tile.start, weights, spans, tile.attended[0])

    return feed


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


def scan_tokens(
    x: Tensor,
    real: Tensor,
    on_cut: OnCut,
    *,
    first_sequence: int,
    floor: Tensor | None = None,
    k: int = 100,
) -> ScanResult:
    """Returns what was seen of one activation of one forward pass; group `class * groups + group`.

    `on_cut` hears of every sequence that has a real token. Memory: the bins that are used.

    Args:
        x: `[batch, groups, token, channel]`.
        real: bool `[batch, token]`, False where the token is padding.
        first_sequence, floor: As in `scan_map`.
    """
    x, real = x.detach().float(), real.cpu()
    batch, groups, length, channels = x.shape
    first, position = first_real(real), torch.arange(length)
    scan = RowScan(len(TOKEN_CLASSES) * groups, k=k, floor=floor)
    hi = torch.full((length,), channels)
    for index in range(batch):
        if not bool(real[index].any()):
            continue
        is_first = position == first[index]
        for number, chosen in enumerate((real[index] & is_first, real[index] & ~is_first)):
            scan.add(
                x[index],
                torch.zeros_like(hi),
                torch.where(chosen, hi, 0),
                tag=pack(first_sequence + index, 0, 0),
                row_step=POSITION_STEP,
                first_group=number * groups,
            )
        on_cut(index, scan.cut())
    return scan.finish()


def _first_keys(attended: Spans) -> tuple[Tensor, Tensor]:
    """Returns each sequence's first attended key and first row that attends (-1: none does)."""
    seen = attended.hi > attended.lo
    first = torch.where(seen, attended.lo, torch.iinfo(torch.int64).max).amin(1)
    return first, torch.where(seen.any(1), seen.to(torch.int8).argmax(1), -1)
