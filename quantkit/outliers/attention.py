"""Statistics of attention: logits, logits as the model changed them, and effective maps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from quantkit.errors import ProbeError
from quantkit.outliers.effective import EffectiveRecord, scan_effective
from quantkit.outliers.maps import MapRecord, RowSampling, record_map
from quantkit.outliers.per_sequence import InfNorm
from quantkit.outliers.sinks import SinkRecord
from quantkit.probes import AttentionLogits
from quantkit.probes.token_scan import MAP_CLASSES as CLASSES
from quantkit.probes.token_scan import logits_of

LOGIT, MODIFIED, EFFECTIVE = "attention_logit", "logits_modified", "effective_map"
UNMASKED = "all of QK^T"
"""The second reading of the logits: masked ones count too. Only its summary is reported."""

R = TypeVar("R", MapRecord, EffectiveRecord, SinkRecord)


@dataclass
class AttentionStatistics:
    """Grows by `see(call)` once for each layer and map of a forward pass; maps in order.

    Attributes:
        sampling: Which rows enter moments, histogram and entropy.
        first_sequence: Index of the batch's first sequence; set before each batch.
        both_readings: Count all of QK^T too, apart.
        maps: By point (`attention_logit`, `logits_modified`), layer and map.
        effective: By layer, of differential heads.
        sinks: By layer, where queries and keys are of one sequence.
        names: Module of each layer; `cross`: those whose keys are of another sequence.
        inf_norm: Of logits, over all layers; its batch is closed by who runs the model.
    """

    sampling: RowSampling = field(default_factory=RowSampling)
    both_readings: bool = False
    first_sequence: int = 0
    maps: dict[tuple[str, int, int], MapRecord] = field(default_factory=dict)
    effective: dict[int, EffectiveRecord] = field(default_factory=dict)
    sinks: dict[int, SinkRecord] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    cross: set[int] = field(default_factory=set)
    inf_norm: InfNorm = field(default_factory=InfNorm)
    _earlier_maps: list[AttentionLogits] = field(default_factory=list)

    def see(self, call: AttentionLogits) -> None:
        """Adds one attention map.

        Raises:
            ProbeError: a filled KV cache: a step of generation has no first token and no rows
                before its own.
        """
        if call.is_cross:
            self.cross.add(call.layer)
        elif call.key.shape[2] > call.query.shape[2]:
            raise ProbeError(
                f"{call.name} attends to {call.key.shape[2]} keys from {call.query.shape[2]} "
                "queries: expected whole sequences, got a filled KV cache. Run the model on the "
                "whole sequence (use_cache=False), not step by step."
            )
        self.names[call.layer] = call.name
        self._scan(call, LOGIT, entropy=not call.is_modified)
        if call.is_modified:
            self._scan(call, MODIFIED, entropy=True)
        if self.both_readings:
            self._scan(replace(call, all_entries=True), UNMASKED, entropy=False)
        if call.map == 1:
            self._earlier_maps = []
        self._earlier_maps.append(call)
        if call.map == call.maps:
            self._see_layer(self._earlier_maps)
            self._earlier_maps = []

    def _scan(self, call: AttentionLogits, point: str, *, entropy: bool) -> None:
        slot = (point, call.layer, call.map)
        before = self.maps.get(slot)
        record, largest = record_map(
            call,
            logits_of(call, modified=point == MODIFIED),
            first_sequence=self.first_sequence,
            sampling=self.sampling,
            floor=None if before is None else before.floor,
            entropy=entropy and not call.all_entries,
        )
        if entropy and call.all_entries:  # the softmax is not over what is masked
            attended = replace(call, all_entries=False)
            alone, _ = record_map(
                attended,
                logits_of(attended, modified=point == MODIFIED),
                first_sequence=self.first_sequence,
                sampling=self.sampling,
                floor=torch.full((len(CLASSES) * call.heads,), torch.inf),
                entropy=True,
            )
            record = replace(record, entropy_sum=alone.entropy_sum, entropy_rows=alone.entropy_rows)
        self.maps[slot] = record if before is None else before.merge(record)
        if point == LOGIT:
            self.inf_norm.see(largest)

    def _see_layer(self, calls: list[AttentionLogits]) -> None:
        layer = calls[0].layer
        if not calls[0].is_cross:
            _add(self.sinks, layer, SinkRecord.of(calls))
        if len(calls) > 1:
            before = self.effective.get(layer)
            record = scan_effective(
                calls,
                first_sequence=self.first_sequence,
                sampling=self.sampling,
                floor=None if before is None else before.map.floor,
            )
            _add(self.effective, layer, record)

    def absorb(self, other: AttentionStatistics) -> None:
        """Adds what another process saw."""
        for slot, record in other.maps.items():
            before = self.maps.get(slot)
            self.maps[slot] = record if before is None else before.merge(record)
        for layer, effective in other.effective.items():
            _add(self.effective, layer, effective)
        for layer, sinks in other.sinks.items():
            _add(self.sinks, layer, sinks)
        self.names |= other.names
        self.cross |= other.cross
        self.inf_norm.absorb(other.inf_norm)

    @property
    def sink_rate(self) -> float:
        """Share of (sequence, layer, head) above the threshold; NaN where there is none."""
        sequences = sum(int(record.sequences.sum()) for record in self.sinks.values())
        above = sum(int(record.above.sum()) for record in self.sinks.values())
        return above / sequences if sequences else float("nan")

    def slots(self, point: str) -> list[tuple[int, int]]:
        """Returns the (layer, map) pairs that were seen at a point, in order."""
        return sorted({(layer, map_) for name, layer, map_ in self.maps if name == point})


def _add(records: dict[int, R], layer: int, record: R) -> None:
    before = records.get(layer)
    records[layer] = record if before is None else before.merge(record)


__all__ = ["EFFECTIVE", "LOGIT", "MODIFIED", "UNMASKED", "AttentionStatistics"]
