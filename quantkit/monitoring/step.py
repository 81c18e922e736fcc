"""The figures of one training step, taken while its forward passes run.

Nothing of the step is changed: probes that look leave outputs bitwise as they were, everything
here runs detached and outside of autograd and autocast, and draws no random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from quantkit.numerics.observers.moments import Moments
from quantkit.probes import TILE_ROWS, Activation, AttentionLogits, LogitTile, attach
from quantkit.results.curves import CurveStep, HiddenCurve, LogitCurve

_TILE_ELEMENTS: Final = {"cpu": 1 << 20}
"""Logits per tile: what the caches of two cores hold; elsewhere `_TILE_ELEMENTS_FAR`."""
_TILE_ELEMENTS_FAR: Final = 1 << 24
_DIGITS: Final = 7  # what float32 holds


@dataclass
class _Logits:
    """Signed extremes of each head of one layer and map, and how many logits are NaN."""

    high: Tensor
    low: Tensor
    nan: int


@dataclass
class _Hidden:
    """One layer's output: max |x| of each sequence, and moments of all elements."""

    peaks: list[Tensor]
    moments: Moments
    nan: int


@dataclass
class StepObserver:
    """Sees the forward passes of one step inside `with observer.attached(model)`.

    Attributes:
        forwards, sequences, tokens: What was seen, tokens without padding.
    """

    forwards: int = 0
    sequences: int = 0
    tokens: int = 0
    _logits: dict[tuple[int, int], _Logits] = field(default_factory=dict)
    _hidden: dict[int, _Hidden] = field(default_factory=dict)

    @contextmanager
    def attached(self, model: Any) -> Iterator[None]:
        """Records every forward pass of the model inside the `with`.

        With gradient checkpointing a layer's first forward is counted, not the one that the
        backward pass repeats (see `attach`).

        Raises:
            ProbeError: see `attach`.
        """
        with attach(model, {"attention_logit": self._see_logits, "hidden_state": self._see_hidden}):
            yield

    @property
    def layers(self) -> int:
        """Attention modules that were seen."""
        return len({layer for layer, _ in self._logits})

    @property
    def maps(self) -> int:
        """Attention maps per head."""
        return max(map_ for _, map_ in self._logits)

    def _see_logits(self, call: AttentionLogits) -> None:
        """Adds one attention map of one forward pass."""
        with torch.no_grad(), _no_autocast(call.query):
            high, low = _extremes(call)
            # amax and amin hand a NaN on: without one there is nothing to count
            nan = _count_nan(call) if bool((high.isnan() | low.isnan()).any()) else 0
            before = self._logits.get((call.layer, call.map))
            if before is not None:
                high, low = torch.maximum(high, before.high), torch.minimum(low, before.low)
                nan += before.nan
            self._logits[call.layer, call.map] = _Logits(high=high, low=low, nan=nan)

    def _see_hidden(self, visit: Activation) -> None:
        """Adds the output of one layer in one forward pass."""
        with torch.no_grad(), _no_autocast(visit.tensor):
            tensor, real = visit.tensor.detach(), visit.real
            tokens = int(real.sum())
            if tokens < real.numel():
                tensor = tensor.masked_fill(~real[..., None], 0.0)
            some = real.any(1)
            flat = tensor.flatten(1)
            peaks = torch.maximum(flat.amax(1), -flat.amin(1))[some].double()
            nan = int(tensor.isnan().sum()) if bool(peaks.isnan().any()) else 0
            moments = _moments(visit.tensor.detach(), real, is_padded=tokens < real.numel())
            if visit.layer == 0:
                self.forwards += 1
                self.sequences += len(peaks)
                self.tokens += tokens
            before = self._hidden.get(visit.layer)
            if before is None:
                self._hidden[visit.layer] = _Hidden(peaks=[peaks], moments=moments, nan=nan)
            else:
                before.peaks.append(peaks)
                before.moments = before.moments.merge(moments)
                before.nan += nan

    def finish(self, step: int) -> CurveStep:
        """Returns the step's line, without loss and learning rate."""
        return CurveStep(
            step=step,
            loss=math.nan,
            lr=math.nan,
            forwards=self.forwards,
            sequences=self.sequences,
            tokens=self.tokens,
            logits=[_logit_curve(*place, seen) for place, seen in sorted(self._logits.items())],
            hidden=[_hidden_curve(layer, seen) for layer, seen in sorted(self._hidden.items())],
        )


def require_watchable(model: Any) -> None:
    """Raises ProbeError where a model cannot be watched (see `attach`); runs nothing of it."""

    class Looked(Exception):
        pass

    # leaving by an exception: that no probe fired is no error
    try:
        with attach(model, {"attention_logit": _nothing, "hidden_state": _nothing}):
            raise Looked
    except Looked:
        return


def _nothing(_seen: Any) -> None:
    return None


def _no_autocast(tensor: Tensor) -> torch.autocast:
    """Returns the context in which q and k that came in bf16 are multiplied in float32."""
    return torch.autocast(device_type=tensor.device.type, enabled=False)


def _tiles(call: AttentionLogits) -> Iterator[LogitTile]:
    """Yields the map in tiles that stay in a processor's cache."""
    budget = _TILE_ELEMENTS.get(call.query.device.type, _TILE_ELEMENTS_FAR)
    row = call.query.shape[0] * call.heads * call.key.shape[2]
    return call.tiles(max(1, min(TILE_ROWS, budget // max(1, row))))


def _extremes(call: AttentionLogits) -> tuple[Tensor, Tensor]:
    """Returns the largest and the smallest valid logit of each head, float32 `[heads]`.

    max and min over sequences, queries and keys of `scale * q_i . k_j`; NaN where one is NaN,
    (-inf, inf) where none is valid.
    """
    device = call.query.device
    high = torch.full((call.heads,), -math.inf, device=device)
    low = torch.full((call.heads,), math.inf, device=device)
    for tile in _tiles(call):
        hidden = ~tile.valid
        upper = tile.logits.masked_fill(hidden, -math.inf).amax(dim=(2, 3)).amax(0)
        lower = tile.logits.masked_fill(hidden, math.inf).amin(dim=(2, 3)).amin(0)
        high, low = torch.maximum(high, upper), torch.minimum(low, lower)
    return high, low


def _count_nan(call: AttentionLogits) -> int:
    return sum(int((tile.logits.isnan() & tile.valid).sum()) for tile in _tiles(call))


def _moments(tensor: Tensor, real: Tensor, *, is_padded: bool) -> Moments:
    """Returns the central moments of `[batch, sequence, channel]` without padding, one group.

    In float64, a sequence at a time: a batch in float64 would be as large as several layers.
    """
    # not Moments.update: that leaves NaN and inf out, where here they make the kurtosis NaN, and
    # it takes small chunks and masks, which cost a step on a GPU far more than these dot products
    rows = []
    for index in range(tensor.shape[0]):
        part = tensor[index][real[index]] if is_padded else tensor[index]
        if part.numel() == 0:
            continue
        x = part.double().reshape(-1)
        mean = x.mean()
        off = x - mean
        square = off * off
        count = torch.full_like(mean, x.numel())
        rows.append(
            torch.stack(
                [count, mean, off.dot(off), square.dot(off), square.dot(square)],
            )
        )
    if not rows:
        return Moments.empty(1)
    count, mean, m2, m3, m4 = torch.stack(rows, dim=1).cpu()
    return Moments(count=count, mean=mean, m2=m2, m3=m3, m4=m4).pool()


def _logit_curve(layer: int, map_: int, seen: _Logits) -> LogitCurve:
    highs, lows = seen.high.tolist(), seen.low.tolist()
    peaks = [_abs_max(high, low) for high, low in zip(highs, lows, strict=True)]
    head = max(range(len(peaks)), key=lambda index: (math.isnan(peaks[index]), peaks[index]))
    # a head without a valid logit has high < low; where all heads are so, there is no figure
    high = math.nan if seen.nan else max(highs)
    low = math.nan if seen.nan else min(lows)
    if high < low:
        high = low = math.nan
    return LogitCurve(
        layer=layer,
        map=map_,
        max=_rounded(high),
        min=_rounded(low),
        abs_max=_rounded(_abs_max(high, low)),
        head=head,
        nan=seen.nan,
    )


def _hidden_curve(layer: int, seen: _Hidden) -> HiddenCurve:
    peaks = torch.cat(seen.peaks)
    some = len(peaks) > 0
    return HiddenCurve(
        layer=layer,
        abs_max=_rounded(float(peaks.max())) if some else math.nan,
        inf_norm_mean=_rounded(float(peaks.mean())) if some else math.nan,
        kurtosis=_rounded(float(seen.moments.finish().kurtosis)),
        nan=seen.nan,
    )


def _abs_max(high: float, low: float) -> float:
    """Returns max(|high|, |low|), NaN where one of them is."""
    return math.nan if math.isnan(high) or math.isnan(low) else max(abs(high), abs(low))


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
