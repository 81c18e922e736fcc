"""Statistics of one attention map: blocks of rows in, a mergeable `MapRecord` out.

Classes: `first` (the key is the sequence's first token), `others`; the one entry of a causal
map's row 0 belongs to neither and enters only the pooled figures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from quantkit.numerics.observers import Bundle, Moments, merged
from quantkit.numerics.scan import Cut, RowScan
from quantkit.outliers.per_sequence import SequenceMeans
from quantkit.outliers.places import pack
from quantkit.probes import AttentionLogits, LogitBlock, Spans

ROW_0: Final = "row 0"
CLASSES: Final = (ROW_0, "first", "others")
_ROW_STEP: Final = int(pack(torch.tensor(0), torch.tensor(1), torch.tensor(0)))


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
        """Magnitudes below which nothing new can enter the top-k, float32 `[heads]`."""
        return self.classes["others"].topk.values[:, -1]

    @property
    def pooled(self) -> Bundle:
        """The bundle over all classes."""
        return merged(list(self.classes.values()))

    @property
    def entropy(self) -> Tensor:
        """Mean over query rows of the entropy in nats, float64 `[heads]`; NaN of none."""
        return self.entropy_sum / self.entropy_rows


def scan_map(
    call: AttentionLogits,
    blocks: Iterable[LogitBlock],
    *,
    first_sequence: int,
    sampling: RowSampling,
    floor: Tensor | None,
    entropy: bool,
) -> tuple[MapRecord, dict[int, float]]:
    """Returns the record of one map of one forward pass, and max |x| by sequence.

    Memory: as much as one block, and dense bins (1 MB a head, 64 MB at most).

    Args:
        call: Which keys are attended to, and how many heads there are.
        blocks: The map, sequence by sequence.
        first_sequence: Index of the batch's first sequence.
        floor: float32 `[heads]`, magnitudes that cannot enter the top-k; None: all can.
    """
    attended = call.attended_spans()
    first, start = _first_keys(attended)
    scan = RowScan(call.heads, floor=floor, entropy=entropy)
    edges: list[_Edge] = []
    means, sequence_max = SequenceMeans.empty(call.heads), dict[int, float]()
    current = -1

    def close() -> None:
        nonlocal means
        if current < 0:
            return
        cut = _with_edges(scan.cut(), [edge for edge in edges if edge.sequence == current])
        means = means.add(cut.abs_max, cut.moments, torch.ones(call.heads, dtype=torch.bool))
        sequence_max[first_sequence + current] = float(cut.abs_max.max())

    for block in blocks:
        if block.sequence != current:
            close()
            current = block.sequence
            full = _sampled(call, attended, current, sampling, first_sequence + current)
        rows = slice(block.row, block.row + block.logits.shape[1])
        tag = int(
            pack(
                torch.tensor(first_sequence + current),
                torch.tensor(block.row),
                torch.tensor(block.column),
            )
        )
        at = int(first[current]) - block.column
        if 0 <= at < block.logits.shape[2]:
            edges.append(_edge(block, at, full[rows], tag, int(start[current])))
        scan.add(
            block.logits,
            block.lo,
            block.hi,
            tag=tag,
            row_step=_ROW_STEP,
            first_group=block.head,
            valid=block.valid,
            full=full[rows],
            skip=at,
        )
    close()
    result = scan.finish()
    classes = {
        ROW_0: _edge_bundle(edges, call.heads, row_0=True),
        "first": _edge_bundle(edges, call.heads, row_0=False),
        "others": result.bundle,
    }
    elements = sum(int(bundle.minmax.count.sum()) for bundle in classes.values())
    record = MapRecord(
        classes=classes,
        means=means,
        entropy_sum=result.entropy_sum,
        entropy_rows=result.entropy_rows,
        excluded=call.entries - elements,
    )
    return record, sequence_max


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


@dataclass(frozen=True, kw_only=True, eq=False)
class _Edge:
    """The first key's column of a block: values `[heads, rows]`, and which of them count."""

    sequence: int
    head: int
    values: Tensor
    valid: Tensor
    sampled: Tensor
    tags: Tensor
    is_row_0: Tensor


def _edge(block: LogitBlock, at: int, full: Tensor, tag: int, start: int) -> _Edge:
    heads, rows, _ = block.logits.shape
    has = (block.lo <= at) & (at < block.hi)
    valid = has[None].expand(heads, rows)
    if block.valid is not None:
        valid = valid & block.valid[..., at]
    row = torch.arange(rows)
    return _Edge(
        sequence=block.sequence,
        head=block.head,
        values=block.logits[:, :, at].clone(),
        valid=valid,
        sampled=valid & full,
        tags=tag + row * _ROW_STEP + at,
        is_row_0=block.row + row == start,
    )


def _first_keys(attended: Spans) -> tuple[Tensor, Tensor]:
    """Returns each sequence's first attended key, and the row that sees it alone (-1: none)."""
    seen = attended.hi > attended.lo
    far = torch.iinfo(torch.int64).max
    first = torch.where(seen, attended.lo, far).amin(1)
    row = seen.to(torch.int8).argmax(1)
    width = attended.counts.gather(1, row[:, None])[:, 0]
    return first, torch.where(width == 1, row, -1)


def _placed(edges: list[_Edge], heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns values, valid, sampled `[heads, n]`, tags and is_row_0 `[n]` of all edges."""
    total = sum(edge.values.shape[1] for edge in edges)
    values = torch.zeros(heads, total)
    valid = torch.zeros(heads, total, dtype=torch.bool)
    sampled = torch.zeros_like(valid)
    done = 0
    for edge in edges:
        count, rows = edge.values.shape
        where = (slice(edge.head, edge.head + count), slice(done, done + rows))
        values[where], valid[where], sampled[where] = edge.values, edge.valid, edge.sampled
        done += rows
    empty = torch.zeros(0, dtype=torch.int64)
    tags = torch.cat([edge.tags for edge in edges]) if edges else empty
    is_row_0 = torch.cat([edge.is_row_0 for edge in edges]) if edges else empty.bool()
    return values, valid, sampled, tags, is_row_0


def _edge_bundle(edges: list[_Edge], heads: int, *, row_0: bool) -> Bundle:
    values, valid, sampled, tags, is_row_0 = _placed(edges, heads)
    which = is_row_0 if row_0 else ~is_row_0
    return Bundle.empty(heads).update(
        values[:, which], tags[which], valid=valid[:, which], sampled=sampled[:, which]
    )


def _with_edges(cut: Cut, edges: list[_Edge]) -> Cut:
    """Returns the cut of one sequence with the first key's column in it again."""
    heads = cut.abs_max.shape[0]
    values, valid, sampled, _, _ = _placed(edges, heads)
    moments = Moments.empty(heads).update(values, valid=sampled)
    finite = valid & values.isfinite()
    size = values.abs().masked_fill(~finite, 0.0)
    largest = size.amax(1) if size.shape[1] else torch.zeros(heads)
    return Cut(moments=cut.moments.merge(moments), abs_max=torch.maximum(cut.abs_max, largest))
