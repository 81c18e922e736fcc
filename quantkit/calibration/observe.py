"""The calibration pass: batches x probes x observers -> `Recording`.

Time: a forward pass over the data, and what is scanned: about as much again for the inputs of
linear layers and the logits. Memory: one batch's activations, a block of logits a thread, and an
`Observation` of fixed size a tensor: it does not grow with the number of samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from quantkit.calib_sets import DataSlice
from quantkit.calibration.observation import Observation
from quantkit.calibration.recording import (
    OBSERVATIONS_FILE,
    Checkpoint,
    Recording,
    load,
    save,
)
from quantkit.calibration.stability import checkpoints_before, checkpoints_until, is_stable
from quantkit.calibration.watch import Watch
from quantkit.errors import InputError
from quantkit.models import LoadedModel, run_batch
from quantkit.numerics.scan import warm_up
from quantkit.probes import Attachment, attach, require_seen
from quantkit.probes.hits import HitCounts, attachment_of, counts_of
from quantkit.processes import Processes, uninterrupted
from quantkit.progress import Progress, silent

SAVE_EVERY_S: Final = 60.0
"""Seconds between two writes of what was seen so far; a write takes less than one."""
ALONE: Final = Processes()
_PARTS: Final = "observations.part-*.safetensors"

Choose = Callable[[Mapping[str, Observation]], dict[str, tuple[Tensor, Tensor]]]
"""Returns the ranges that would be chosen from what was seen so far."""


def observe(
    loaded: LoadedModel,
    data: DataSlice,
    *,
    points: Sequence[str],
    choose: Choose,
    batch_size: int = 4,
    averaging_constant: float = 0.01,
    until_stable: float | None = None,
    allow_unseen: Sequence[str] = (),
    store: Path | None = None,
    identity: Mapping[str, Any] | None = None,
    finish: Callable[[Recording], None] = lambda recording: None,
    processes: Processes = ALONE,
    progress: Progress = silent,
) -> Recording | None:
    """Returns what was seen of every tensor of the points, in all processes together.

    Of a decoder only the backbone runs: vocabulary logits, the largest tensor of a forward, are
    never made. Only elements that exist count: no padding, no masked logits.

    Args:
        choose: For the ranges at growing sample counts; called at the first process.
        until_stable: Stop where no range moved by more than this share of itself over the last
            quarter of the samples; None: take all samples.
        store: Folder in which a process that is interrupted leaves what it has seen, and where it
            looks for that when it starts; None: nothing is kept.
        identity: Plain data; what was left by a run with another identity is not taken up.
        finish: What the first process does with the result, e.g. write it; where it is interrupted
            what was seen is kept as well.
        processes: Those that share the batches; all but the first get None.

    Raises:
        ProbeError: a module that no probe saw and that `allow_unseen` does not match.
        InputError: a batch that the model cannot run on, a point of which nothing was seen.
    """
    known = dict(identity or {}) | {"processes": processes.count, "batch_size": batch_size}
    kept = None if store is None else _Kept(path=store / _part(processes), identity=known)
    work = _Pass(
        loaded=loaded,
        data=data,
        batch_size=batch_size,
        points=points,
        averaging_constant=averaging_constant,
        choose=choose,
        until_stable=until_stable,
        allow_unseen=allow_unseen,
        kept=kept,
        processes=processes,
        progress=progress,
    )

    def finish_whole(whole: Recording | None) -> None:
        assert whole is not None  # which it is at the first process
        require_seen(attachment_of(whole.hits), allow_unseen)
        _require_points(whole, points, loaded)
        finish(whole)
        work.is_written = True

    try:
        whole = work.run()
        processes.at_first(lambda: finish_whole(whole))
    except BaseException:  # Ctrl-C, a peer that was lost: what was seen is kept
        if kept is not None and work.recording.batches and not work.is_written:
            with suppress(InputError):  # a full disk must not hide what happened
                kept.save(work.recording)
        raise
    return whole


def forget(store: Path) -> None:
    """Removes what interrupted processes left, once it is part of a finished file."""
    for path in (*store.glob(_PARTS), *store.glob(f".{_PARTS}.*")):  # the latter: half written
        path.unlink(missing_ok=True)


def _require_points(whole: Recording, points: Sequence[str], loaded: LoadedModel) -> None:
    seen = {observation.point for observation in whole.seen.values()}
    for point in points:
        if point not in seen:
            raise InputError(
                f"nothing of point {point} was seen in {loaded.name} "
                f"({type(loaded.model).__name__}): leave it out of --points."
            )


@dataclass
class _Kept:
    """Where this process leaves what it has seen."""

    path: Path
    identity: Mapping[str, Any]
    last: float = field(default_factory=time.monotonic)

    def save(self, recording: Recording) -> None:
        save(self.path, recording, dict(self.identity))
        self.last = time.monotonic()

    def save_now_and_then(self, recording: Recording) -> None:
        if time.monotonic() - self.last >= SAVE_EVERY_S:
            self.save(recording)

    def load(self) -> Recording:
        """Returns what an earlier process of the same job left, else an empty recording."""
        if self.path.is_file():
            try:
                recording, theirs = load(self.path)
            except InputError:  # of another version, or broken: begin again
                return Recording()
            if theirs == dict(self.identity):
                return recording
        return Recording()


@dataclass(kw_only=True)
class _Pass:
    """One process's share of the pass."""

    loaded: LoadedModel
    data: DataSlice
    batch_size: int
    points: Sequence[str]
    averaging_constant: float
    choose: Choose
    until_stable: float | None
    allow_unseen: Sequence[str]
    kept: _Kept | None
    processes: Processes
    progress: Progress
    recording: Recording = field(default_factory=Recording)
    whole: Recording | None = None
    is_written: bool = False

    def run(self) -> Recording | None:
        """Returns the recording of all processes at the first one, None at the others."""
        plan = checkpoints_before if self.until_stable is None else checkpoints_until
        stops = plan(self.data.sequences, self.batch_size)
        passed = self._take_up(stops)
        loaded, batches = self.loaded, stops[-1]
        watch = Watch(
            points=self.points,
            averaging_constant=self.averaging_constant,
            seen=self.recording.seen,
        )
        what = f"calibrating {self.loaded.name}"
        with uninterrupted():
            warm_up()
        has_some = any(self.processes.mine(index) for index in range(batches))
        with ExitStack() as stack:
            attachment = Attachment()
            if has_some:
                stack.enter_context(torch.no_grad())
                attachment = stack.enter_context(
                    # what one process's batches leave out, another's may see: judged at the end
                    attach(loaded.model, watch.callbacks(), allow_unseen=[*self.allow_unseen, "*"])
                )
            earlier = self.recording.hits
            for index, batch in enumerate(self.data.batches(self.batch_size)):
                if index >= self.recording.batches:
                    if self.processes.mine(index):
                        self.progress(what, index, batches)
                        watch.begin(batch.first_sequence)
                        run_batch(loaded, batch.inputs, self.data.source)
                        watch.end()
                    self._count(index + 1, watch.seen, earlier, attachment)
                if index + 1 in stops and index + 1 > passed and self._at_stop(stops):
                    break
        self.progress(what, batches, batches)
        return self.whole

    def _count(
        self, batches: int, seen: dict[str, Observation], earlier: HitCounts, attachment: Attachment
    ) -> None:
        """Notes that so many batches are done, and keeps the recording from time to time."""
        before = self.recording
        recording = Recording(
            seen=seen,
            batches=batches,
            samples=min(batches * self.batch_size, self.data.sequences),
            notes=list(dict.fromkeys([*before.notes, *attachment.notes])),
            checkpoints=before.checkpoints,
        )
        recording.add_hits(earlier)
        recording.add_hits(counts_of(attachment))
        self.recording = recording  # all of it at once: an interruption finds the old or the new
        if self.kept is not None:
            self.kept.save_now_and_then(recording)

    def _take_up(self, stops: Sequence[int]) -> int:
        """Takes up what an interrupted job left; returns the last stop that was passed.

        Only where all processes left it within the same two stops: else all begin again.
        """
        if self.kept is None:
            return 0
        found = self.kept.load()

        def last_stop() -> int:
            if not found.checkpoints:
                return 0
            count = found.checkpoints[-1].samples
            fitting = (n for n in stops if min(n * self.batch_size, self.data.sequences) == count)
            return next(fitting, 0)

        passed = self.processes.at_first(last_stop)
        ahead = next((n for n in stops if n > passed), passed)
        fits = [passed <= found.batches <= ahead]
        everyone: list[bool] = []
        for theirs in self.processes.gather(fits):
            everyone += theirs
        if not self.processes.at_first(lambda: all(everyone)):
            return 0
        self.recording = found
        return passed

    def _at_stop(self, stops: Sequence[int]) -> bool:
        """Looks at the ranges so far; returns whether this is the end, as the first decides."""
        recording = self.recording
        together = Recording()
        for other in self.processes.gather(recording):
            together.absorb(other)

        def decide() -> bool:
            point = Checkpoint(samples=recording.samples, ranges=self.choose(together.seen))
            points = [*recording.checkpoints, point]
            is_end = recording.batches == stops[-1] or (
                self.until_stable is not None and is_stable(points, self.until_stable)
            )
            if is_end:  # not kept in the recording: taken again where this is interrupted
                together.batches, together.samples = recording.batches, recording.samples
                together.checkpoints, self.whole = points, together
            else:
                self.recording = replace(recording, checkpoints=points)
            return is_end

        return self.processes.at_first(decide)


def _part(processes: Processes) -> str:
    stem, suffix = OBSERVATIONS_FILE.split(".")
    return f"{stem}.part-{processes.rank}-of-{processes.count}.{suffix}"
