"""The statistics of all points of one model, growing batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from quantkit.outliers.activations import ActivationStatistics
from quantkit.outliers.attention import UNMASKED, AttentionStatistics
from quantkit.outliers.maps import RowSampling
from quantkit.probes import Attachment
from quantkit.probes.hits import HitCounts, add_counts, attachment_of, counts_of

ATTENTION, HIDDEN, DOWN = "attention_logit", "hidden_state", "mlp_down_input"
WITH_SURFACE: Final = (HIDDEN, DOWN)
"""Where massive activations stand, and where they come from."""


@dataclass
class ModelStatistics:
    """Grows by one batch between `begin` and `end`, through its callbacks for `probes.attach`.

    Attributes:
        attention: Of logits, modified logits and effective maps.
        activations: By point; `hidden_state` among them.
        hits: By point and module: calls and elements; `notes`: what the probes had to say.
    """

    attention: AttentionStatistics
    activations: dict[str, ActivationStatistics]
    hits: HitCounts = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls, points: Sequence[str], sampling: RowSampling, *, both_readings: bool = False
    ) -> ModelStatistics:
        """Returns an empty recording; attention logits and hidden states are always in it."""
        names = dict.fromkeys([HIDDEN, *(point for point in points if point != ATTENTION)])
        return cls(
            attention=AttentionStatistics(sampling=sampling, both_readings=both_readings),
            activations={
                name: ActivationStatistics(
                    with_rules=name == HIDDEN, with_surface=name in WITH_SURFACE
                )
                for name in names
            },
        )

    def callbacks(self) -> dict[str, Callable[[Any], None]]:
        """Returns what `probes.attach` calls at each point."""
        looks: dict[str, Callable[[Any], None]] = {ATTENTION: self.attention.see}
        return looks | {name: stats.see for name, stats in self.activations.items()}

    def begin(self, first_sequence: int) -> None:
        """Starts a batch whose first sequence has this index."""
        self.attention.first_sequence = first_sequence
        for statistics in self.activations.values():
            statistics.first_sequence = first_sequence

    def end(self) -> None:
        """Ends a batch."""
        self.attention.inf_norm.close()
        for statistics in self.activations.values():
            statistics.inf_norm.close()

    def add_attachment(self, attachment: Attachment) -> None:
        """Adds what the probes counted, once they are removed."""
        add_counts(self.hits, counts_of(attachment))
        self._add_notes(getattr(attachment, "notes", []))

    def _add_notes(self, notes: Sequence[str]) -> None:
        self.notes += [note for note in notes if note not in self.notes]

    def absorb(self, other: ModelStatistics) -> None:
        """Adds what another process saw."""
        self.attention.absorb(other.attention)
        for name, statistics in other.activations.items():
            self.activations[name].absorb(statistics)
        add_counts(self.hits, other.hits)
        self._add_notes(other.notes)

    def attachment(self) -> Attachment:
        """Returns the hits as probes count them, to be judged over all processes."""
        return attachment_of(self.hits)

    def nonfinite(self) -> list[str]:
        """Returns one sentence for each layer and point where NaN or inf were seen."""
        said: list[str] = []
        for (point, layer, map_), record in sorted(self.attention.maps.items()):
            if point == UNMASKED:
                continue
            bad = record.pooled.minmax
            where = f"{point} of layer {layer}, map {map_}"
            said += _said(where, int(bad.nan_count.sum()), int(bad.inf_count.sum()))
        for point, statistics in self.activations.items():
            for layer, activation in sorted(statistics.records.items()):
                bad = activation.pooled.minmax
                where = f"{point} of layer {layer}"
                said += _said(where, int(bad.nan_count.sum()), int(bad.inf_count.sum()))
        return said


def _said(where: str, nans: int, infs: int) -> list[str]:
    if not nans and not infs:
        return []
    return [f"{where} holds {nans} NaN and {infs} inf values; they are left out of its figures."]
