"""A candidate as a graph in ONNX Runtime: built, scored on a task, timed beside the float graph.

Memory: the float graph's session and one candidate's; a graph is removed once it was measured.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from quantkit.calib_sets import TokenBatch
from quantkit.exporting import (
    load_graph,
    maps_of,
    paired_latency,
    quantize_graph,
    save_graph,
)
from quantkit.models import LoadedModel, projection_modules
from quantkit.numerics.resampling import Values, paired_change, resampled
from quantkit.onnx_runtime import DecoderSession, open_decoder
from quantkit.quantization import smoothed
from quantkit.results import Accuracy, Ranges, Trial, read_json, write_json
from quantkit.search.candidates import Candidate
from quantkit.tasks import Metric, Rows, TextForward
from quantkit.tasks.task import Task

ALL: Final = slice(None)
REPEATS: Final = 7
"""Prompts of either graph; the median of fewer moves by more than what is told apart."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """What candidates of one smoothing and method are built from.

    Attributes:
        ranges: Of the smoothed model; `graph`: the smoothed model's float graph.
    """

    ranges: Ranges
    graph: Path


def session_forward(session: DecoderSession) -> TextForward:
    """Returns a graph as tasks see a language model."""

    def forward(batch: TokenBatch, positions: Tensor | None = None) -> Tensor:
        ids = batch.input_ids.numpy().astype(np.int64)
        mask = batch.attention_mask.numpy().astype(np.int64)
        logits = torch.from_numpy(session.run(ids, mask).logits)
        return logits if positions is None else logits[:, positions]

    return forward


def rows_of(forward: TextForward, task: Task[TextForward]) -> Rows:
    """Returns a task's rows, in the order of its items."""
    found: dict[int, Any] = {}
    for items in task.batches:
        found |= dict(zip(items, task.run(forward, items), strict=True))
    return np.stack([found[index] for index in sorted(found)])


def scored(session: DecoderSession, task: Task[TextForward], units: slice = ALL) -> Metric:
    """Returns the first metric of a task, of a graph, over these of its units."""
    metric = task.scores(rows_of(session_forward(session), task)).metrics[0]
    return replace(
        metric,
        total=metric.total[units],
        weight=metric.weight[units],
        successes=None if metric.successes is None else metric.successes[units],
    )


def task_accuracy(
    quantized: Path, float_graph: Path, task: Task[TextForward], units: slice, seed: int
) -> Accuracy:
    """Returns the first metric of a task of both graphs, and what changed."""
    base, ours = (scored(open_decoder(path), task, units) for path in (float_graph, quantized))
    change = change_of(ours, base, resampled(ours, seed), resampled(base, seed))
    return Accuracy(
        metric=ours.name,
        float=base.value,
        quantized=ours.value,
        change=change.value,
        change_low=change.low,
        change_high=change.high,
        loss=change.loss,
        units=len(ours.total),
    )


@dataclass(frozen=True, kw_only=True)
class Change:
    """What quantization changed: a ratio of perplexities, a difference of anything else."""

    value: float
    low: float
    high: float
    is_ratio: bool
    higher_is_better: bool

    @property
    def loss(self) -> float:
        """The change as a loss."""
        if self.is_ratio:
            return self.value - 1.0
        return -self.value if self.higher_is_better else self.value

    @property
    def loss_high(self) -> float:
        """The far end as a loss; inf where there is no interval."""
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            return math.inf
        return -self.low if self.higher_is_better else self.high - float(self.is_ratio)


def change_of(ours: Metric, base: Metric, mine: Values, theirs: Values) -> Change:
    """Returns the change of a metric over the same units, with its paired 95 % interval."""
    is_ratio = ours.link == "exp"
    value = ours.value / base.value if is_ratio else ours.value - base.value
    low, high = paired_change(ours, base, mine, theirs)
    return Change(
        value=value,
        low=low,
        high=high,
        is_ratio=is_ratio,
        higher_is_better=ours.higher_is_better,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class TrialBench:
    """What every candidate is measured with.

    Attributes:
        graph: The float graph of the model as it is.
        ids: `[1, tokens]`, the prompt that is timed.
        store: Folder with a file a trial, so that an interrupted search goes on.
        identity: Of model, data, task, budget and code: another one's trials are not taken.
        source: Returns what a candidate is built from; slow the first time.
        units: Of the task, those that the choice is made on.
    """

    loaded: LoadedModel
    task: Task[TextForward]
    graph: Path
    ids: Tensor
    max_drop: float
    seed: int
    store: Path
    identity: Mapping[str, str]
    source: Callable[[Candidate], Source]
    units: slice = field(default_factory=lambda: ALL)
    _base: list[tuple[DecoderSession, Metric, Values]] = field(default_factory=list)

    def base(self) -> tuple[DecoderSession, Metric, Values]:
        """Returns the float graph's session, metric and resamples; measured once."""
        if not self._base:
            session = open_decoder(self.graph)
            metric = scored(session, self.task, self.units)
            self._base.append((session, metric, resampled(metric, self.seed)))
        return self._base[0]

    def judge(self, candidate: Candidate) -> Trial:
        """Returns what was measured of a candidate, now or by an interrupted run."""
        key = {**self.identity, "name": candidate.name, "keep": "\n".join(sorted(candidate.keep))}
        path = self.store / f"{_digest(key)}.json"
        if path.is_file():
            return read_json(path, _Kept).trial
        trial = self._measure(candidate)
        write_json(path, _Kept(trial=trial))
        return trial

    def _measure(self, candidate: Candidate) -> Trial:
        source = self.source(candidate)
        base_session, base, base_values = self.base()
        self.store.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.store, prefix=".building-") as folder:
            path = build(self.loaded, candidate, source, Path(folder))
            size = sum(file.stat().st_size for file in Path(folder).iterdir())
            session = open_decoder(path)
            metric = scored(session, self.task, self.units)
            float_ms, own_ms = paired_latency(base_session, session, self.ids, REPEATS)
        change = change_of(metric, base, resampled(metric, self.seed), base_values)
        return Trial(
            name=candidate.name,
            recipe=str(candidate.recipe),
            storage=candidate.storage,
            smoothing=candidate.smoothing,
            method=candidate.method,
            kept=list(candidate.keep),
            value=metric.value,
            change=change.value,
            change_low=change.low,
            change_high=change.high,
            loss_high=change.loss_high,
            latency_ms=own_ms,
            float_ms=float_ms,
            bytes=size,
            is_within=change.loss_high <= self.max_drop,
        )


def build(
    loaded: LoadedModel,
    candidate: Candidate,
    source: Source,
    folder: Path,
) -> Path:
    """Writes a candidate's graph and returns its path."""
    with smoothed(loaded.model, source.ranges.smoothing):
        graph, _ = quantize_graph(
            load_graph(source.graph),
            module_linears=dict(projection_modules(loaded.model)),
            recipe=candidate.recipe,
            ranges=source.ranges.tensors,
            keep=candidate.keep,
            storage=candidate.storage,
            maps=maps_of(loaded.model),
        )
        return save_graph(graph, folder)


@dataclass(frozen=True, kw_only=True)
class _Kept:
    schema: str = "quantkit.trial/1"
    trial: Trial


def _digest(key: Mapping[str, str]) -> str:
    text = "\n".join(f"{name}={value}" for name, value in sorted(key.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
