"""Probe callbacks that turn what a forward pass shows into observations, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import torch
from torch import Tensor

from quantkit.calibration.observation import CLASSES, Observation
from quantkit.errors import ProbeError
from quantkit.numerics.observers import Bundle
from quantkit.numerics.observers.moving import MovingAverage
from quantkit.numerics.scan import Cut, ScanResult
from quantkit.probes import Activation, AttentionLogits, AttentionValue
from quantkit.probes.token_scan import (
    MAP_CLASSES,
    TOKEN_CLASSES,
    Feed,
    logits_of,
    probabilities_of,
    scan_map,
    scan_tokens,
)

_ACTIVATIONS: Final = ("linear_input", "linear_output", "attention_output")
_Q_AND_K: Final = ("attention_query", "attention_key")
_UNKNOWN: Final = -1
_OF_CALLS: Final = (
    "attention_logit",
    "attention_probability",
    *_Q_AND_K,
)


@dataclass
class Watch:
    """Grows by one forward pass after another.

    A pass that does not end leaves no trace: what it shows is pending until `end()`.

    Attributes:
        points: From `jobs.CALIBRATION_POINTS`.
        averaging_constant: Of the moving averages.
        first_sequence: Index of the batch's first sequence.
        seen: By tensor, up to the last pass that ended.
    """

    points: Sequence[str]
    averaging_constant: float = 0.01
    first_sequence: int = 0
    seen: dict[str, Observation] = field(default_factory=dict)
    _pending: dict[str, Visit] = field(default_factory=dict)
    _last: dict[str, tuple[Tensor, int, Visit]] = field(default_factory=dict)

    def callbacks(self) -> dict[str, Callable[[Any], None]]:
        """Returns the callbacks for `probes.attach`."""
        found: dict[str, Callable[[Any], None]] = {
            point: self._see_activation for point in _ACTIVATIONS if point in self.points
        }
        if any(point in self.points for point in _OF_CALLS):
            found["attention_logit"] = self._see_call
        if "attention_value" in self.points:
            found["attention_value"] = self._see_value
        return found

    def begin(self, first_sequence: int) -> None:
        """A forward pass begins, whose first sequence has this index."""
        self.first_sequence, self._pending, self._last = first_sequence, {}, {}

    def end(self) -> None:
        """The pass has ended: what it showed is part of what was seen, all of it at once."""
        seen = dict(self.seen)
        merged: dict[tuple[int, int], Observation] = {}
        for name, visit in self._pending.items():
            before = seen.get(name)
            # linear layers that share an input share one observation, in memory and in the file
            key = (id(before), id(visit))
            if key not in merged:
                new = visit.observation(self.averaging_constant)
                merged[key] = new if before is None else before.merge(new)
            seen[name] = merged[key]
        self.seen, self._pending, self._last = seen, {}, {}

    def _see_activation(self, visit: Activation) -> None:
        name = f"{visit.point}/{visit.name}"
        x = visit.tensor
        last = self._last.get(visit.point)
        if last is not None and _is_same(x, last[0], last[1]):
            found = last[2]
        else:
            floor = self._floor(name, TOKEN_CLASSES)
            extremes = Extremes(self.first_sequence, 1, TOKEN_CLASSES)
            result = scan_tokens(
                x[:, None], visit.real, extremes, first_sequence=self.first_sequence, floor=floor
            )
            found = extremes.visit(visit.point, "tensor", result)
            # the tensor is held, so that its memory stays its own
            self._last[visit.point] = (x, _version(x), found)
        self._add(name, found)

    def _see_call(self, call: AttentionLogits) -> None:
        slot = f"{call.layer}/map {call.map}"
        if "attention_logit" in self.points:
            self._see_map(f"attention_logit/{slot}", call, logits_of(call, modified=False))
        if "attention_probability" in self.points:
            self._see_map(f"attention_probability/{slot}", call, probabilities_of(call))
        if call.given is not None and any(point in self.points for point in _Q_AND_K):
            raise ProbeError(
                f"{call.name} multiplies q and k itself, so that only their product is seen: leave "
                f"{' and '.join(_Q_AND_K)} out of the points."
            )
        if "attention_query" in self.points:
            batch, _, queries, _ = call.query.shape
            real = call.real_queries
            every = torch.ones(batch, queries, dtype=torch.bool) if real is None else real
            self._see_heads(f"attention_query/{slot}", call.query, every)
        if "attention_key" in self.points:
            self._see_heads(f"attention_key/{slot}", call.key, call.real_keys())

    def _see_value(self, visit: AttentionValue) -> None:
        part = f"/part {visit.part}" if visit.part > 1 else ""
        self._see_heads(f"attention_value/{visit.layer}{part}", visit.tensor, visit.real)

    def _see_map(self, name: str, call: AttentionLogits, feed: Feed) -> None:
        extremes = Extremes(self.first_sequence, call.heads, MAP_CLASSES)
        result = scan_map(
            call,
            feed,
            extremes,
            first_sequence=self.first_sequence,
            floor=self._floor(name, MAP_CLASSES),
        )
        self._add(name, extremes.visit(name.split("/")[0], "head", result))

    def _see_heads(self, name: str, x: Tensor, real: Tensor) -> None:
        extremes = Extremes(self.first_sequence, x.shape[1], TOKEN_CLASSES)
        floor = self._floor(name, TOKEN_CLASSES)
        result = scan_tokens(x, real, extremes, first_sequence=self.first_sequence, floor=floor)
        self._add(name, extremes.visit(name.split("/")[0], "head", result))

    def _floor(self, name: str, classes: Sequence[str]) -> Tensor | None:
        """Returns the top-k's floors in the order of a scan's classes; None: nothing was seen."""
        before = self.seen.get(name)
        if before is None:
            return None
        nothing = torch.zeros(before.groups)
        return torch.cat([before.floor.get(name, nothing) for name in classes])

    def _add(self, name: str, new: Visit) -> None:
        before = self._pending.get(name)  # a module that runs twice in a pass
        self._pending[name] = new if before is None else before.merge(new)


@dataclass(frozen=True, kw_only=True, eq=False)
class Visit:
    """What one forward pass showed of one tensor.

    Attributes:
        point, granularity, classes: As of `Observation`.
        extremes: By sample (lo, hi): float32 `[2 * groups]`, over all, then without first tokens.
    """

    point: str
    granularity: str
    classes: dict[str, Bundle]
    extremes: dict[int, tuple[Tensor, Tensor]]

    def merge(self, other: Self) -> Self:
        """Returns what both saw of the same samples."""
        extremes = dict(self.extremes)
        for sample, (lo, hi) in other.extremes.items():
            if sample in extremes:
                lo = torch.minimum(lo, extremes[sample][0])
                hi = torch.maximum(hi, extremes[sample][1])
            extremes[sample] = lo, hi
        classes = {name: self.classes[name].merge(other.classes[name]) for name in CLASSES}
        return replace(self, classes=classes, extremes=extremes)

    def observation(self, averaging_constant: float) -> Observation:
        """Returns the same as the beginning of something that grows."""
        groups = 2 * self.classes["others"].minmax.groups
        moving = MovingAverage.empty(groups, constant=averaging_constant)
        for sample, (lo, hi) in sorted(self.extremes.items()):
            moving = moving.update(sample, lo, hi)
        return Observation(
            point=self.point, granularity=self.granularity, classes=self.classes, moving=moving
        )


class Extremes:
    """Hears of each sequence that a scan has seen, and keeps its extremes."""

    def __init__(self, first_sequence: int, groups: int, classes: Sequence[str]) -> None:
        self.first_sequence, self.groups, self.classes = first_sequence, groups, classes
        self.found: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, index: int, cut: Cut) -> None:
        lo, hi = (x.view(len(self.classes), self.groups) for x in (cut.lo, cut.hi))
        others = self.classes.index("others")
        self.found[self.first_sequence + index] = (
            torch.cat([lo.amin(0), lo[others]]),
            torch.cat([hi.amax(0), hi[others]]),
        )

    def visit(self, point: str, granularity: str, result: ScanResult) -> Visit:
        """Returns what the scan saw, its classes joined to first and others."""
        parts: dict[str, Bundle] = {}
        for number, name in enumerate(self.classes):
            part = result.bundle.select(number * self.groups, (number + 1) * self.groups)
            kept = name if name in CLASSES else "first"  # row 0 attends to the first key alone
            parts[kept] = parts[kept].merge(part) if kept in parts else part
        classes = {name: parts[name] for name in CLASSES}
        return Visit(point=point, granularity=granularity, classes=classes, extremes=self.found)


def _is_same(x: Tensor, other: Tensor, version: int) -> bool:
    """Whether two tensors are one: q, k and v projections read the same hidden state."""
    return (
        x.data_ptr() == other.data_ptr()
        and x.shape == other.shape
        and x.stride() == other.stride()
        and x.dtype == other.dtype
        and _version(x) == version != _UNKNOWN
    )


def _version(x: Tensor) -> int:
    """Returns how often a tensor was written to; of those of inference mode nobody counts that."""
    return _UNKNOWN if x.is_inference() else x._version
