"""The callback in transformers' `Trainer`, end to end on tiny random models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from quantkit.errors import InputError, ProbeError
from quantkit.monitoring import OutlierCallback, OutlierMonitor
from quantkit.results import read_curves
from tests.monitoring.oracle import assert_line, figures, make_batch, make_model

CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in TrainingArguments.__dataclass_fields__
)
"""What this version of transformers calls it."""


def dataset(rows: int) -> list[dict[str, torch.Tensor]]:
    batch = make_batch(4, rows=rows)
    return [{key: value[row] for key, value in batch.items()} for row in range(rows)]


def make_trainer(folder: Path, model: Any, callbacks: list[Any], **changes: Any) -> Trainer:
    settings: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 3,
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 1,
    }
    return Trainer(
        model=model,
        args=TrainingArguments(**settings | changes),
        train_dataset=dataset(8),  # type: ignore[arg-type]
        eval_dataset=dataset(2),  # type: ignore[arg-type]
        callbacks=callbacks,
    )


class Spy(TrainerCallback):
    """Keeps the weights and the batches of one optimizer step, by its number."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.batches: list[Any] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.is_on = False
        self.handle: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            model = kwargs["model"]
            self.weights = {name: x.clone() for name, x in model.state_dict().items()}
            self.handle = model.register_forward_pre_hook(
                lambda m, a, k: self.batches.append({"input_ids": k["input_ids"].clone()}),
                with_kwargs=True,
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.handle.remove()


@pytest.mark.kind(7, "train")
@pytest.mark.parametrize("family", ["llama", "diffllama"])
def test_a_training_is_recorded_and_stays_as_it_is(tmp_path: Path, family: str) -> None:
    plain = make_model(family)
    make_trainer(tmp_path, plain, []).train()
    model, spy = make_model(family), Spy(4)
    callback = OutlierCallback(tmp_path / "runs" / "curves.jsonl", every=2, name="watched")
    trainer = make_trainer(tmp_path, model, [callback, spy])
    trainer.train()

    curves = read_curves(tmp_path / "runs" / "curves.jsonl")
    assert isinstance(callback, TrainerCallback)
    assert curves.header.name == "watched"
    assert curves.header.maps == (2 if family == "diffllama" else 1)
    assert [step.step for step in curves.steps] == [2, 4, 6]
    assert all(step.forwards == 2 and step.sequences == 4 for step in curves.steps)
    text = (tmp_path / "runs" / "curves.jsonl").read_text("utf-8")
    assert len(text.splitlines()) == 4  # also the step that waited for its log stands once
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    assert not any(module._forward_hooks for module in model.modules())
    # the learning rate of step n, before the scheduler moves on; the loss where it was logged
    assert [step.lr for step in curves.steps] == pytest.approx([5 / 600, 3 / 600, 1 / 600])
    logged = {entry["step"]: entry for entry in trainer.state.log_history if "loss" in entry}
    assert curves.steps[2].loss == logged[6]["loss"]
    assert math.isnan(curves.steps[0].loss) and math.isnan(curves.steps[1].loss)
    frozen = make_model(family)
    frozen.load_state_dict(spy.weights)
    assert len(spy.batches) == 2
    assert_line(curves.steps[1], figures(frozen, spy.batches))


@pytest.mark.kind(7, "train")
def test_bf16_checkpointing_evaluation_and_resuming(tmp_path: Path) -> None:
    path = tmp_path / "curves.jsonl"
    settings: dict[str, Any] = {
        "bf16": True,
        CHECKPOINTING: True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_steps": 2,
    }

    def train(until: int, resume: bool) -> None:
        trainer = make_trainer(
            tmp_path, make_model("llama"), [OutlierCallback(path, every=2)], **settings
        )

        class Stop(TrainerCallback):
            def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                control.should_training_stop = state.global_step >= until

        trainer.add_callback(Stop())
        trainer.train(resume_from_checkpoint=resume)

    train(4, False)
    first = read_curves(path)
    train(6, True)
    curves = read_curves(path)

    assert [step.step for step in first.steps] == [2, 4]
    assert [step.step for step in curves.steps] == [2, 4, 6]
    assert curves.steps[:2] == first.steps
    # neither the repeated layers nor the evaluation counts
    assert all((step.forwards, step.sequences) == (2, 4) for step in curves.steps)
    assert all(math.isfinite(step.loss) for step in curves.steps)


def test_a_step_that_raises_does_not_end_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "curves.jsonl"
    callback = OutlierCallback(path, every=1)
    model = make_model("llama")

    class Fail(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                raise RuntimeError("cut short")

    with pytest.raises(RuntimeError, match="cut short"):
        make_trainer(tmp_path, model, [callback, Fail()]).train()
    assert [step.step for step in read_curves(path).steps] == [1]

    make_trainer(tmp_path, model, [callback], max_steps=3).train()
    assert [step.step for step in read_curves(path).steps] == [1, 2, 3]
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks for module in model.modules())


def test_only_the_first_process_writes(tmp_path: Path) -> None:
    path = tmp_path / "curves.jsonl"
    callback = OutlierCallback(path, every=1)
    trainer = make_trainer(tmp_path, make_model("llama"), [callback], max_steps=2)
    trainer.state.is_world_process_zero = False
    callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
    callback.on_step_begin(trainer.args, trainer.state, trainer.control)
    callback.on_step_end(trainer.args, trainer.state, trainer.control)
    callback.on_log(trainer.args, trainer.state, trainer.control, logs={"loss": 1.0})
    callback.on_train_end(trainer.args, trainer.state, trainer.control)
    assert not path.exists()


def test_mistakes_show_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="every"):
        OutlierCallback(tmp_path / "curves.jsonl", every=0)
    trainer = make_trainer(tmp_path, make_model("llama"), [OutlierCallback(tmp_path)])
    with pytest.raises(InputError, match="is a folder"):
        trainer.train()
    callback = OutlierCallback(tmp_path / "curves.jsonl")
    trainer.args._n_gpu = 2
    with pytest.raises(ProbeError, match="torchrun"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)


def test_the_monitor_and_the_callback_agree(tmp_path: Path) -> None:
    model, batch = make_model("llama"), make_batch(4, rows=8)
    with OutlierMonitor(model, tmp_path / "loop.jsonl", every=1).step(1):
        model(**batch)
    settings = {"max_steps": 1, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    callback = OutlierCallback(tmp_path / "trainer.jsonl", every=1)
    make_trainer(tmp_path, make_model("llama"), [callback], **settings).train()
    (loop,) = read_curves(tmp_path / "loop.jsonl").steps
    (trained,) = read_curves(tmp_path / "trainer.jsonl").steps
    for one, two in zip(loop.logits, trained.logits, strict=True):
        assert one.max == pytest.approx(two.max, rel=1e-5)
    for state, other in zip(loop.hidden, trained.hidden, strict=True):
        assert state.kurtosis == pytest.approx(other.kurtosis, rel=1e-5)
