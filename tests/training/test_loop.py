"""Steps by hand, the rows of every arm, and that a training goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from quantkit.errors import InputError, QuantkitError
from quantkit.jobs import PairSpec
from quantkit.training.arms import new_model
from quantkit.training.corpus import Corpus
from quantkit.training.loop import CHECKPOINT, WEIGHTS, ArmTraining

ARMS = ("baseline", "diff", "diff-v2")
Train = Callable[..., ArmTraining]
Short = Callable[..., PairSpec]


def seen_rows(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Notes the rows of every forward pass in training mode."""
    seen: list[Any] = []
    real = ArmTraining._step

    def step(self: ArmTraining, number: int) -> Any:
        def note(_module: Any, _args: Any, given: dict[str, Any]) -> None:
            seen.append(given["input_ids"].numpy().copy())

        handle = self.bare.register_forward_pre_hook(note, with_kwargs=True)
        try:
            return real(self, number)
        finally:
            handle.remove()

    monkeypatch.setattr(ArmTraining, "_step", step)
    return seen


def test_all_arms_of_a_seed_see_the_same_rows_in_the_same_order(
    short: Short,
    corpus_of: Corpus,
    train_arm: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = short(ARMS)
    seen = seen_rows(monkeypatch)
    by_run: dict[tuple[int, str], Any] = {}
    for seed, arm in product((0, 1), ARMS):
        seen.clear()
        done = train_arm(pair, arm, tmp_path / f"{arm}{seed}", seed=seed)
        assert done.finished and done.state.losses[-1].loss < 6.2  # chance is ln 400 = 5.99
        by_run[seed, arm] = np.stack(seen)
    rows = np.asarray(corpus_of.rows)
    for (seed, arm), found in by_run.items():
        assert found.shape == (4, 4, 32)
        assert np.array_equal(found, by_run[seed, "baseline"]), arm
        places = [int(np.flatnonzero((rows == row).all(1))[0]) for row in found.reshape(16, 32)]
        assert len(set(places)) == 16  # no row twice before all have been seen
    assert not np.array_equal(by_run[0, "diff"], by_run[1, "diff"])


def test_the_steps_are_those_of_a_plain_loop(
    short: Short, corpus_of: Corpus, train_arm: Train, tmp_path: Path
) -> None:
    pair = short(steps=3, warmup_steps=0, clip_norm=0.5, decay_queries_keys=False)
    found = train_arm(pair, "diff", tmp_path / "diff")

    model = new_model("diff", pair.sizes, seed=0).train()
    held, free = [], []
    for name, weight in model.named_parameters():
        is_free = weight.ndim < 2 or "q_proj" in name or "k_proj" in name
        (free if is_free else held).append(weight)
    plain = torch.optim.AdamW(
        [{"params": held, "weight_decay": 0.1}, {"params": free, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        foreach=False,
    )
    losses = []
    for step, rate in enumerate((2e-3, 2e-3 * 0.55, 2e-4)):  # half a cosine, down to a tenth
        rows = np.asarray(corpus_of.rows)[corpus_of.order(0, step, 4)].astype("int64")
        ids = torch.from_numpy(rows)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.stack([w.grad.norm() for w in model.parameters() if w.grad is not None]).norm()
        for weight in model.parameters():
            weight.grad.mul_(min(1.0, 0.5 / float(norm)))
        for group in plain.param_groups:
            group["lr"] = rate
        plain.step()
        plain.zero_grad()
        losses.append(loss.item())
    (point,) = found.state.losses
    assert point.loss == pytest.approx(np.mean(losses), rel=1e-5)
    for name, weight in found.bare.state_dict().items():
        # 2e-6: an element whose gradient is about 0 moves by its noise
        assert torch.allclose(weight, model.state_dict()[name].half().float(), rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"dropout": 0.3}, id="dropout"),
        pytest.param({"autocast": "bfloat16"}, id="bfloat16"),
        pytest.param({"optimizer": "muon", "decay_queries_keys": False}, id="muon"),
    ],
)
@pytest.mark.kind(4, "train")
def test_it_goes_on_identically(
    short: Short, train_arm: Train, tmp_path: Path, changes: dict[str, Any]
) -> None:
    arm = "baseline" if "dropout" in changes else "diff"  # a differential arm has none
    pair = short((arm,), **changes)
    straight = train_arm(pair, arm, tmp_path / "straight")
    assert train_arm(pair, arm, tmp_path / "cut", until=3).state.step == 3
    torch.manual_seed(12345)  # another process has drawn other numbers
    cut = train_arm(pair, arm, tmp_path / "cut")
    plain = train_arm(short((arm,)), arm, tmp_path / "plain")
    assert cut.state.losses == straight.state.losses
    differs = False
    for name, weight in straight.bare.state_dict().items():
        assert torch.equal(weight, cut.bare.state_dict()[name]), name
        differs = differs or not torch.equal(weight, plain.bare.state_dict()[name])
    assert differs  # the change was heard


def test_a_batch_that_processes_cannot_share(tiny: Any, corpus_of: Corpus, tmp_path: Path) -> None:
    three: Any = SimpleNamespace(num_processes=3)
    with pytest.raises(InputError, match="batch: 4 rows cannot be shared by 3 processes"):
        ArmTraining(tiny(), "diff", 0, corpus_of, tmp_path, three)


TORN = {
    "garbage": lambda path: path.write_bytes(b"no checkpoint at all"),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:5000]),
    "empty": lambda path: path.write_bytes(b""),
    "other content": lambda path: torch.save({"weights": 1}, path),
    "a list": lambda path: torch.save([1], path),
}


@pytest.mark.kind(8, "train")
@pytest.mark.parametrize("damage", TORN.values(), ids=TORN.keys())
def test_a_checkpoint_that_cannot_be_read(
    damage: Any, short: Short, train_arm: Train, tmp_path: Path
) -> None:
    pair = short(steps=1)
    train_arm(pair, "baseline", tmp_path / "a")
    damage(tmp_path / "a" / CHECKPOINT)
    with pytest.raises(InputError, match=r"cannot be read .*Remove it to begin this arm anew"):
        train_arm(pair, "baseline", tmp_path / "a")


def test_a_checkpoint_of_another_pair(short: Short, train_arm: Train, tmp_path: Path) -> None:
    train_arm(short(steps=1), "baseline", tmp_path / "a")
    with pytest.raises(InputError, match="of another pair or arm"):
        train_arm(short(steps=2), "baseline", tmp_path / "a")
    with pytest.raises(InputError, match="of another pair or arm"):
        train_arm(short(steps=1), "baseline", tmp_path / "a", seed=1)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_the_file_holds_each_weight_once_in_float16(
    arm: str, is_tied: bool, short: Short, train_arm: Train, tmp_path: Path
) -> None:
    pair = short((arm,), steps=1, warmup_steps=0)
    pair = replace(pair, sizes=replace(pair.sizes, tie_embeddings=is_tied))
    done = train_arm(pair, arm, tmp_path / "a")
    with safe_open(tmp_path / "a" / WEIGHTS, "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    assert {weight.dtype for weight in found.values()} == {torch.float16}
    assert ("lm_head.weight" in found) is not is_tied
    assert sum(weight.numel() for weight in found.values()) == done.parameters

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32)
    head = loaded.lm_head.weight
    assert (head is loaded.model.embed_tokens.weight) is is_tied
    for name, weight in done.bare.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name


@pytest.mark.parametrize("clip_norm", [1.0, 0.0], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_a_gradient_that_is_no_number_leaves_the_checkpoint_good(
    wrong: float,
    clip_norm: float,
    short: Short,
    train_arm: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = short(clip_norm=clip_norm)
    straight = train_arm(pair, "diff", tmp_path / "straight")
    real = ArmTraining._step

    def step(self: ArmTraining, number: int) -> Any:
        weight = self.bare.model.layers[0].self_attn.q_proj.weight
        handle = weight.register_hook(lambda grad: grad + wrong if number == 3 else grad)
        try:
            return real(self, number)
        finally:
            handle.remove()

    with monkeypatch.context() as patch:
        patch.setattr(ArmTraining, "_step", step)
        # the loss is good, and after step 4 a checkpoint would be written
        with pytest.raises(QuantkitError, match=r"diff, seed 0: at step 4 the gradient has a norm"):
            train_arm(pair, "diff", tmp_path / "cut")
    left = torch.load(tmp_path / "cut" / CHECKPOINT, weights_only=True)
    assert left["state"]["step"] == 2
    assert all(weight.isfinite().all() for weight in left["model"].values())
    assert not (tmp_path / "cut" / WEIGHTS).exists()
    cut = train_arm(pair, "diff", tmp_path / "cut")
    assert cut.state.losses == straight.state.losses
    for name, weight in straight.bare.state_dict().items():
        assert torch.equal(weight, cut.bare.state_dict()[name]), name
