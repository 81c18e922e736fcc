"""`OutlierCallback`: the monitor for transformers' `Trainer`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from quantkit.errors import ProbeError
from quantkit.monitoring.monitor import OutlierMonitor, checked_every


class OutlierCallback(TrainerCallback):
    """Notes the outliers of every N-th optimizer step of a `Trainer` in a file of curves.

        Trainer(model, args, ..., callbacks=[OutlierCallback("curves.jsonl", every=50)])

    Steps are counted as in the Trainer's logs, from 1, and all forward passes of an accumulated
    step are seen. Where the Trainer logs at the same step, its loss (mean since the last log) and
    learning rate enter the line; else the optimizer's learning rate, and no loss. See
    `OutlierMonitor`.

    Only rank 0 records and writes. Where a step raises, the Trainer tells no callback: the probes
    of a recorded step stay until the next training begins or the callback is dropped.
    """

    def __init__(self, path: str | Path, every: int = 50, *, name: str | None = None) -> None:
        """Takes what `OutlierMonitor` takes; the model comes when the training begins.

        Raises:
            InputError: `every` is below 1.
        """
        self.path = Path(path)
        self.every = checked_every(every)
        self.name = name
        self._monitor: OutlierMonitor | None = None
        self._open = ExitStack()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Checks model and path, so that a mistake shows before the first step."""
        self._drop()
        self._monitor = None
        if not state.is_world_process_zero:
            return
        if args.n_gpu > 1:
            raise ProbeError(
                f"the Trainer runs the model in {args.n_gpu} threads (DataParallel), past the "
                "probes: start it with torchrun, or let it see one device."
            )
        self._monitor = OutlierMonitor(kwargs["model"], self.path, self.every, name=self.name)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begins to record where the optimizer step that comes is to be recorded."""
        if self._monitor is None:
            return
        self._monitor.flush()
        self._open.enter_context(self._monitor.step(state.global_step + 1, hold=True))
        optimizer = kwargs.get("optimizer")
        if optimizer is not None:
            self._monitor.note(lr=optimizer.param_groups[0]["lr"])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ends the recording; its line waits for the log where one is due at this step."""
        self._open.close()
        if self._monitor is not None and not control.should_log:
            self._monitor.flush()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Takes loss and learning rate of the step that has just ended."""
        if self._monitor is not None and self._monitor.is_held and logs and "loss" in logs:
            self._monitor.note(loss=logs["loss"], lr=logs.get("learning_rate"))
            self._monitor.flush()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Writes what is left."""
        self._drop()
        if self._monitor is not None:
            self._monitor.flush()

    def _drop(self) -> None:
        """Ends a recording that its step did not end, without a line."""
        left = InterruptedError("the training step did not end")
        self._open.__exit__(type(left), left, None)
