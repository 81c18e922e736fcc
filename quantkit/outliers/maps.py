"""Statistics of one attention map: blocks of rows in, a mergeable `MapRecord` out.

Classes: `first` (the key is the sequence's first token), `others`; the one entry of a causal
map's row 0 belongs to neither and enters only the pooled figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from quantkit.numerics.observers import Bundle, merged
from quantkit.numerics.scan import Cut
from quantkit.outliers.per_sequence import SequenceMeans
from quantkit.probes import AttentionLogits, Spans
from quantkit.probes.token_scan import MAP_CLASSES as CLASSES
from quantkit.probes.token_scan import Feed, scan_map


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


def record_map(
    call: AttentionLogits,
    feed: Feed,
    *,
    first_sequence: int,
    sampling: RowSampling,
    floor: Tensor | None,
    entropy: bool,
) -> tuple[MapRecord, dict[int, float]]:
    """Returns the record of one map of one forward pass, and max |x| by sequence.

    Args:
        floor: `MapRecord.floor` of what was seen before; None: nothing was.
        Others: as `probes.token_scan.scan_map`.
    """
    heads, attended = call.heads, call.attended_spans()
    means, sequence_max = SequenceMeans.empty(heads), dict[int, float]()

    def on_cut(index: int, cut: Cut) -> None:
        nonlocal means
        moments = cut.moments.select(0, heads)
        for group in range(1, len(CLASSES)):
            moments = moments.merge(cut.moments.select(group * heads, (group + 1) * heads))
        largest = cut.abs_max.view(len(CLASSES), heads).amax(0)
        seen = (largest > 0) | (moments.count > 0)  # else all is NaN or inf
        means = means.add(largest, moments, seen)
        if bool(seen.any()):
            sequence_max[first_sequence + index] = float(largest.max())

    result = scan_map(
        call,
        feed,
        on_cut,
        first_sequence=first_sequence,
        sampled=lambda index, sequence: _sampled(call, attended, index, sampling, sequence),
        floor=floor,
        entropy=entropy,
    )
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
