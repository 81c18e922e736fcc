"""Statistics of one activation point (hidden state, MLP input, ...), by layer and token class."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from quantkit.numerics.observers import Bundle, merged
from quantkit.numerics.outliers import FEATURE_ABOVE
from quantkit.numerics.scan import Cut
from quantkit.numerics.tokens import token_summary
from quantkit.outliers.per_sequence import InfNorm, SequenceMeans
from quantkit.outliers.rules import RuleRecord, apply_rules
from quantkit.outliers.surface import SurfaceRecord, higher
from quantkit.probes import Activation
from quantkit.probes.token_scan import TOKEN_CLASSES as CLASSES
from quantkit.probes.token_scan import scan_tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class ActivationRecord:
    """What was seen of one layer's activation; a monoid.

    Attributes:
        classes: A bundle of one group for each of `CLASSES`.
        means: Per-sequence figures.
        channel_top: float32 `[channels]`: max |x| by channel.
        rules: The rules on whole sequences, where they were asked for.
        excluded: Elements of padding.
        surface: |x| by token and channel of one sequence, where it was asked for.
    """

    classes: dict[str, Bundle]
    means: SequenceMeans
    channel_top: Tensor
    rules: RuleRecord | None
    excluded: int
    surface: SurfaceRecord | None = None

    def merge(self, other: Self) -> Self:
        """Returns the record of both parts."""
        rules = self.rules
        if rules is not None and other.rules is not None:
            rules = rules.merge(other.rules)
        return type(self)(
            classes={name: self.classes[name].merge(other.classes[name]) for name in CLASSES},
            means=self.means.merge(other.means),
            channel_top=torch.maximum(self.channel_top, other.channel_top),
            rules=rules,
            excluded=self.excluded + other.excluded,
            surface=higher(self.surface, other.surface),
        )

    @cached_property
    def pooled(self) -> Bundle:
        """The bundle over both classes; merged once, since every figure of a layer asks for it."""
        return merged(list(self.classes.values()))

    @property
    def channel_ratio(self) -> float:
        """Max over median of the channels' largest |x|; inf or NaN where the median is zero."""
        return float(self.channel_top.max() / self.channel_top.median())


@dataclass
class ActivationStatistics:
    """Grows by `see(visit)` once for each layer of a forward pass, at one point.

    Attributes:
        with_rules: Apply the rules on whole sequences too (they are defined on hidden states).
        with_surface: Keep the surface of each layer's largest sequence.
        first_sequence: Index of the batch's first sequence; set before each batch.
        records: By layer.
        names: Module of each layer.
        inf_norm: Over all layers; its batch is closed by who runs the model.
        batch: Sequences of the last visit.
    """

    with_rules: bool = False
    with_surface: bool = False
    first_sequence: int = 0
    records: dict[int, ActivationRecord] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    inf_norm: InfNorm = field(default_factory=InfNorm)
    batch: int = 0

    def see(self, visit: Activation) -> None:
        """Adds one layer's activation."""
        self.batch = len(visit.tensor)
        before = self.records.get(visit.layer)
        record = self._record(visit, before)
        self.records[visit.layer] = record if before is None else before.merge(record)
        self._call(visit.layer, visit.name)

    def _record(self, visit: Activation, before: ActivationRecord | None) -> ActivationRecord:
        channels = visit.tensor.shape[2]
        floor = None if before is None else torch.cat([before.classes[n].floor for n in CLASSES])
        means, sequence_max = SequenceMeans.empty(1), dict[int, float]()
        channel_top = torch.zeros(channels)
        rules = RuleRecord.empty(channels) if self.with_rules else None
        real = visit.real.cpu()

        def on_cut(index: int, cut: Cut) -> None:
            nonlocal means, channel_top, rules
            sequence, x = self.first_sequence + index, visit.tensor[index].detach().float()
            moments, largest = cut.moments.pool(), cut.abs_max.amax().reshape(1)
            has_any = (largest > 0) | (moments.count > 0)  # else all is NaN or inf
            means = means.add(largest, moments, has_any)
            if bool(has_any):
                sequence_max[sequence] = float(largest)
            summary = token_summary(x, real[index], above=FEATURE_ABOVE)
            channel_top = torch.maximum(channel_top, summary.channel_top)
            if rules is not None:
                rules = rules.merge(
                    apply_rules(x, real[index], summary, layer=visit.layer, sequence=sequence)
                )

        result = scan_tokens(
            visit.tensor[:, None],
            visit.real,
            on_cut,
            first_sequence=self.first_sequence,
            floor=floor,
        )
        self.inf_norm.see(sequence_max)
        seen = result.bundle
        return ActivationRecord(
            classes={name: seen.select(group, group + 1) for group, name in enumerate(CLASSES)},
            means=means,
            channel_top=channel_top,
            rules=rules,
            excluded=int((~real).sum()) * channels,
            surface=self._surface(visit, sequence_max, None if before is None else before.surface),
        )

    def _surface(
        self, visit: Activation, sequence_max: dict[int, float], before: SurfaceRecord | None
    ) -> SurfaceRecord | None:
        """Returns the surface of the batch's largest sequence, if it is higher than before."""
        if not self.with_surface or not sequence_max:
            return None
        sequence = max(sequence_max, key=lambda n: sequence_max[n])  # in order: the first of equals
        peak = sequence_max[sequence]
        if before is not None and not before.is_behind(peak, sequence, visit.name):
            return None
        index = sequence - self.first_sequence
        return SurfaceRecord.of(
            visit.tensor[index], visit.real[index], peak=peak, sequence=sequence, name=visit.name
        )

    def absorb(self, other: ActivationStatistics) -> None:
        """Adds what another process saw."""
        for layer, record in other.records.items():
            before = self.records.get(layer)
            self.records[layer] = record if before is None else before.merge(record)
            self._call(layer, other.names[layer])
        self.inf_norm.absorb(other.inf_norm)

    def _call(self, layer: int, name: str) -> None:
        """Names a layer; of several modules (experts) the first by name, in whatever order."""
        self.names[layer] = min(name, self.names.get(layer, name))
