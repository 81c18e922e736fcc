"""`OutlierMonitor`: two lines in a training loop that write `curves.jsonl`."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from quantkit.errors import InputError
from quantkit.monitoring.step import StepObserver, require_watchable
from quantkit.results.curves import (
    CurvesHeader,
    CurveStep,
    append_curves,
    prepare_curves,
)

_NOT_RECORDED: Final = nullcontext()
_VERSIONS: Final = ("quantkit", "torch", "transformers")


class OutlierMonitor:
    """Notes the outliers of every N-th training step in a file of curves.

        monitor = OutlierMonitor(model, "curves.jsonl", every=50)
        for step, batch in enumerate(batches):
            with monitor.step(step):
                loss = model(**batch).loss
                loss.backward()
                monitor.note(loss=loss, lr=scheduler.get_last_lr()[0])

    Per layer and attention map: largest and smallest logit and max |logit| (the signed maximum is
    what QK-Clip caps: Kimi K2 report, arXiv 2507.20534); per layer: inf-norm and Pearson kurtosis
    of the hidden state (Quantizable Transformers, arXiv 2306.12929). Every sequence and head of
    every forward pass inside the `with` is seen, so gradient accumulation belongs inside it.
    Loss, gradients and weights are bitwise those of a step that nobody watches (where `attach`
    keeps outputs bitwise: for all transformers models).

    A file that stands there already is continued. With several processes only rank 0 records, its
    own share of the batch.
    """

    def __init__(
        self, model: nn.Module, path: str | Path, every: int = 50, *, name: str | None = None
    ) -> None:
        """Checks model and path; nothing is written before the first recorded step.

        Args:
            path: The file; its folder is made. `quantkit report` looks for `curves.jsonl`.
            every: Records the steps that it divides. 50: a recorded step took 14 % more
                processor time than a plain one, whole trainings 1 % more, for models of 3.7 million
                parameters (`benchmarks/monitor.py`, `benchmarks/results/monitor.json`).
            name: What reports call the model. Default: the last part of its name or folder, or
                its class.

        Raises:
            InputError: `every` is below 1; the path is a folder, cannot be written to, or holds
                something else or the curves of another model.
            ProbeError: the model cannot be watched.
        """
        self.path = Path(path)
        self.every = checked_every(every)
        self._model = _unwrapped(model)
        self._is_writer = _rank() == 0
        self._last: CurveStep | None = None  # of the step that is under way or over, if recorded
        self._is_held = False
        self._is_open = False
        self._loss = self._lr = math.nan  # of the step that is under way
        if not self._is_writer:
            return
        require_watchable(self._model)
        self._name = name or _name_of(self._model)
        self._parameters = sum(weight.numel() for weight in self._model.parameters())
        self._header = prepare_curves(self.path)
        if self._header is not None:
            self._require_same(self._header)

    def step(self, step: int, *, hold: bool = False) -> AbstractContextManager[None]:
        """Returns the context of one training step; recorded where `every` divides the step.

        Args:
            hold: The line waits for `flush()`, for who learns the loss later.

        Raises (on leaving):
            ProbeError: no forward pass ran inside.
        """
        if step % self.every or not self._is_writer:
            if self._last is not None:
                self.flush()
                self._last = None
            return _NOT_RECORDED
        return self._recorded(step, hold)

    @contextmanager
    def _recorded(self, step: int, hold: bool) -> Iterator[None]:
        self.flush()
        self._last, self._loss, self._lr, self._is_open = None, math.nan, math.nan, True
        observer = StepObserver()
        try:
            with observer.attached(self._model):
                yield
        finally:
            self._is_open = False
        line = replace(observer.finish(step), loss=self._loss, lr=self._lr)
        if self._header is None:
            self._header = self._new_header(observer)
            append_curves(self.path, self._header)
        self._last, self._is_held = line, True
        if not hold:
            self.flush()

    def note(self, *, loss: float | Tensor | None = None, lr: float | None = None) -> None:
        """Adds loss and learning rate to the step, inside its `with` or after it.

        Does nothing, and reads no tensor, where the step is not recorded. After the line was
        written it is written again, and readers take the later one.
        """
        if not self._is_open and self._last is None:
            return
        self._loss = self._loss if loss is None else _number(loss)
        self._lr = self._lr if lr is None else _number(lr)
        if self._last is None:
            return
        before, self._last = self._last, replace(self._last, loss=self._loss, lr=self._lr)
        if not self._is_held and self._last != before:
            append_curves(self.path, self._last)

    def flush(self) -> None:
        """Writes the line that `step(..., hold=True)` held back, if there is one."""
        if self._is_held and self._last is not None:
            append_curves(self.path, self._last)
        self._is_held = False

    @property
    def is_held(self) -> bool:
        """Whether a line waits for `flush()`."""
        return self._is_held

    def _new_header(self, observer: StepObserver) -> CurvesHeader:
        return CurvesHeader(
            name=self._name,
            architecture=type(self._model).__name__,
            parameters=self._parameters,
            layers=observer.layers,
            maps=observer.maps,
            every=self.every,
            ranks=_ranks(),
            versions=_versions(),
        )

    def _require_same(self, header: CurvesHeader) -> None:
        """Raises InputError unless the file's curves are of this model."""
        mine = (type(self._model).__name__, self._parameters)
        theirs = (header.architecture, header.parameters)
        if mine != theirs:
            raise InputError(
                f"{self.path} holds the curves of {header.name!r} ({_told(theirs)}), and this "
                f"model is {self._name!r} ({_told(mine)}). Name another file, or remove that one."
            )


def _number(value: float | Tensor) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def checked_every(every: int) -> int:
    """Returns the number of steps from one record to the next.

    Raises:
        InputError: not a whole number, or below 1.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise InputError(f"every: expected a whole number of steps of at least 1, got {every}.")
    return every


def _told(model: tuple[str, int]) -> str:
    return f"{model[0]}, {model[1]:,} parameters"


def _unwrapped(model: Any) -> Any:
    """Returns the transformers model inside DistributedDataParallel or a PEFT adapter."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return _unwrapped(model.module)
    inner = getattr(model, "get_base_model", None)
    return model if inner is None else _unwrapped(inner())


def _name_of(model: Any) -> str:
    given = getattr(getattr(model, "config", None), "name_or_path", "")
    return Path(given).name or type(model).__name__


def _rank() -> int:
    distributed = torch.distributed
    there = distributed.is_available() and distributed.is_initialized()
    return distributed.get_rank() if there else 0


def _ranks() -> int:
    distributed = torch.distributed
    there = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if there else 1


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _VERSIONS:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
