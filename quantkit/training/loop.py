"""Rows to a trained model: the optimizer steps of one arm and seed.

A checkpoint is everything that the next step depends on, and the figures so far; it is written to
a temporary name and moved into place. Rows are a function of seed and step, dropout is seeded by
them, so that a training which was killed ends in the same weights: bit for bit on the CPU of the
same machine with as many threads and processes. A GPU adds in whatever order its threads come, so
that there the rows are the same and the weights are near.

Time grows with steps x batch x context; memory as one batch, with four numbers a weight.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import torch
from torch import Tensor

from quantkit.errors import InputError, QuantkitError
from quantkit.jobs import PairSpec
from quantkit.models.placement import parameter_count
from quantkit.models.shipped import quiet_transformers, sha256_of
from quantkit.monitoring import OutlierMonitor
from quantkit.progress import Progress, silent
from quantkit.results import LossPoint, Measurement, TrainedModel, decode, to_plain, written_whole
from quantkit.training.arms import new_model
from quantkit.training.corpus import Corpus
from quantkit.training.measure import Gauge
from quantkit.training.optimizers import learning_rate, optimizers_of

CHECKPOINT: Final = "checkpoint.pt"
CURVES: Final = "curves.jsonl"
WEIGHTS: Final = "model.safetensors"
_TEMPORARY: Final = ".weights-"
_UNREADABLE: Final = (
    OSError, RuntimeError, ValueError, EOFError, LookupError, TypeError, UnpicklingError
)  # fmt: skip
"""What torch raises for a file that is torn or is no checkpoint."""


@dataclass(kw_only=True)
class State:
    """How far a training is; all of it is in a checkpoint.

    Attributes:
        step: Steps done; `seconds`: what they took.
        pending, pending_steps: Sum of the losses since the last point, and their number.
    """

    step: int = 0
    seconds: float = 0.0
    pending: float = 0.0
    pending_steps: int = 0
    losses: list[LossPoint] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)


class ArmTraining:
    """One arm and seed of a pair, in its own folder."""

    def __init__(
        self, spec: PairSpec, arm: str, seed: int, corpus: Corpus, folder: Path, accelerator: Any
    ) -> None:
        """Makes the model, or takes it up from its checkpoint.

        Raises:
            InputError: a batch that the processes cannot share; a checkpoint of another pair.
        """
        if spec.training.batch % accelerator.num_processes:
            raise InputError(
                f"[training] batch: {spec.training.batch} rows cannot be shared by "
                f"{accelerator.num_processes} processes; expected a multiple."
            )
        self.spec, self.arm, self.seed = spec, arm, seed
        self.corpus, self.folder = corpus, folder
        self._accelerator = accelerator
        self.state = State()
        bare = new_model(arm, spec.sizes, seed=seed, dropout=spec.training.dropout)
        self.architecture, self.parameters = type(bare).__name__, parameter_count(bare)
        bare.to(accelerator.device).train()
        self.bare = bare
        self._optimizers = optimizers_of(bare, spec.training)
        if accelerator.is_main_process:
            self._remove_abandoned()
        self._read_checkpoint()
        self._model = accelerator.prepare(bare) if accelerator.num_processes > 1 else bare

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.arm}, seed {self.seed}"

    @property
    def finished(self) -> bool:
        """Whether the last step is done."""
        return self.state.step >= self.spec.training.steps

    def run(self, gauge: Gauge, keep: Callable[[], None], progress: Progress = silent) -> None:
        """Trains to the end.

        Args:
            keep: Called after each checkpoint and at the end, by the first process.

        Raises:
            QuantkitError: a loss that is not finite; the last checkpoint stays.
        """
        records, steps = self.spec.records, self.spec.training.steps
        first = self._accelerator.is_main_process
        monitor = OutlierMonitor(
            self.bare, self.folder / CURVES, records.curves_every, name=f"{self.arm}-{self.seed}"
        )
        if self.state.step == 0:
            self._measure(gauge)
        while not self.finished:
            step = self.state.step
            begun = time.perf_counter()
            with monitor.step(step + 1):
                loss = self._step(step)
                monitor.note(loss=loss, lr=learning_rate(self.spec.training, step))
            self._note(step, float(loss))
            self.state.seconds += time.perf_counter() - begun
            done = self.state.step
            if done == steps:
                self._round_weights()
            if done % records.measure_every == 0 or done == steps:
                self._measure(gauge)
            if done % records.checkpoint_every == 0 or done == steps:
                self._write_checkpoint()
                if first and done < steps:
                    keep()
            progress(self._told(), done, steps)
        if first:
            # what says that it is finished comes last, after the weights
            self._write_weights()
            keep()
        self._accelerator.wait_for_everyone()

    def _told(self) -> str:
        """Returns what a person reads: it changes with each point of the loss."""
        what = f"training {self.name}"
        if not self.state.losses:
            return what
        last = self.state.losses[-1]
        return f"{what}: step {last.step}, loss {last.loss:.3f}"

    def info(self) -> TrainedModel:
        """Returns what the result says about it."""
        tokens = self.state.step * self.spec.training.batch * self.spec.sizes.context
        weights = self.folder / WEIGHTS
        seconds = self.state.seconds
        return TrainedModel(
            arm=self.arm,
            seed=self.seed,
            architecture=self.architecture,
            parameters=self.parameters,
            folder=self.folder.name,
            sha256=sha256_of(weights) if self.finished and weights.is_file() else "",
            steps=self.state.step,
            tokens=tokens,
            seconds=seconds,
            tokens_per_second=tokens / seconds if seconds else 0.0,
            finished=self.finished,
            losses=self.state.losses,
            measurements=self.state.measurements,
        )

    def _step(self, step: int) -> Tensor:
        """Does one optimizer step; returns the mean loss of the whole batch, detached."""
        training, accelerator = self.spec.training, self._accelerator
        mine = self.corpus.order(self.seed, step, training.batch)[
            accelerator.process_index :: accelerator.num_processes
        ]
        rows = torch.from_numpy(self.corpus.rows[mine].astype("int64")).to(accelerator.device)
        if training.dropout:
            torch.manual_seed((self.seed << 32) + step * accelerator.num_processes
                              + accelerator.process_index)  # fmt: skip
        is_mixed = training.autocast == "bfloat16"
        with torch.autocast(accelerator.device.type, torch.bfloat16, enabled=is_mixed):
            logits: Tensor = self._model(input_ids=rows, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten()
        )
        loss.backward()  # type: ignore[no-untyped-call]
        limit = training.clip_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.bare.parameters(), limit)
        if not torch.isfinite(norm):  # the step would spoil the weights, and then a checkpoint
            raise self._diverged(step, f"the gradient has a norm of {float(norm)}")
        rate = learning_rate(training, step)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        found = loss.detach()
        if accelerator.num_processes > 1:
            found = accelerator.reduce(found, reduction="mean")
        return found

    def _diverged(self, step: int, what: str) -> QuantkitError:
        return QuantkitError(
            f"training {self.name}: at step {step + 1} {what}. The checkpoint of an earlier step "
            "stays; lower learning_rate, or clip the gradient (clip_norm)."
        )

    def _note(self, step: int, loss: float) -> None:
        if not loss < float("inf"):
            raise self._diverged(step, f"the loss is {loss}")
        state, records = self.state, self.spec.records
        state.step = step + 1
        state.pending += loss
        state.pending_steps += 1
        if state.step % records.curves_every == 0 or self.finished:
            rate = learning_rate(self.spec.training, step)
            mean = state.pending / state.pending_steps
            state.losses.append(LossPoint(step=state.step, loss=mean, learning_rate=rate))
            state.pending, state.pending_steps = 0.0, 0

    def _measure(self, gauge: Gauge) -> None:
        if not self._accelerator.is_main_process:
            self._accelerator.wait_for_everyone()
            return
        tokens = self.state.step * self.spec.training.batch * self.spec.sizes.context
        self.state.measurements.append(
            gauge.measured(self.bare, step=self.state.step, tokens=tokens)
        )
        self._accelerator.wait_for_everyone()

    def _round_weights(self) -> None:
        """Rounds the weights to float16, as they are written: the last figures are of those."""
        with torch.no_grad():
            for weight in self.bare.parameters():
                weight.copy_(weight.half())

    def _write_checkpoint(self) -> None:
        if self._accelerator.is_main_process:
            whole = {
                "pair": to_plain(self.spec),
                "arm": self.arm,
                "seed": self.seed,
                "model": self.bare.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
                "state": to_plain(self.state),
            }
            with _written(self.folder), written_whole(self.folder / CHECKPOINT) as file:
                torch.save(whole, file)
        self._accelerator.wait_for_everyone()

    def _remove_abandoned(self) -> None:
        """Removes what a process that was killed while it wrote has left."""
        for path in self.folder.glob(f".{CHECKPOINT}.*"):
            path.unlink(missing_ok=True)
        for path in self.folder.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _read_checkpoint(self) -> None:
        path = self.folder / CHECKPOINT
        if not path.is_file():
            return
        try:
            whole = torch.load(path, map_location=self._accelerator.device, weights_only=True)
            theirs = (whole["pair"], whole["arm"], whole["seed"])
        except _UNREADABLE as error:
            raise InputError(
                f"{path} cannot be read ({type(error).__name__}). Remove it to begin this arm anew."
            ) from error
        if theirs != (to_plain(self.spec), self.arm, self.seed):
            raise InputError(
                f"{path} is a checkpoint of another pair or arm: name another --out, or --force."
            )
        self.bare.load_state_dict(whole["model"])
        for optimizer, state in zip(self._optimizers, whole["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.state = decode(whole["state"], State, f"{path}: ", "", False)

    def _write_weights(self) -> None:
        """Writes a transformers folder in float16, with its tokenizer."""
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(self.corpus.tokenizer)
        # by parameters: a tied head is the embedding, which a copy of each would hide
        half = {name: weight.detach().half() for name, weight in self.bare.named_parameters()}
        self.bare.config.dtype = torch.float16
        with (
            _written(self.folder),
            tempfile.TemporaryDirectory(dir=self.folder, prefix=_TEMPORARY) as temporary,
        ):
            tokenizer.save_pretrained(temporary)
            with quiet_transformers():
                self.bare.save_pretrained(temporary, state_dict=half)
            # safetensors' file is its owner's alone
            shutil.copymode(Path(temporary, "config.json"), Path(temporary, WEIGHTS))
            for path in sorted(Path(temporary).iterdir(), key=lambda path: path.name == WEIGHTS):
                os.replace(path, self.folder / path.name)


@contextmanager
def _written(folder: Path) -> Iterator[None]:
    """Says in one line what torch, safetensors and tokenizers each raise for a full disk.

    Raises:
        InputError: the body raised anything.
    """
    try:
        yield
    except QuantkitError:
        raise
    except Exception as error:
        reason = (str(error.__cause__ or error.__context__ or error).splitlines() or [""])[0]
        raise InputError(f"cannot write to {folder}: {reason[:200]}.") from error
