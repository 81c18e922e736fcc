"""Steps by hand, the rows of every arm, and that a killed training ends in the same weights."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import AutoTokenizer

from quantkit.errors import InputError
from quantkit.jobs import PairSpec, TrainJob
from quantkit.pipelines import run_train
from quantkit.results import TrainedModel, TrainingResult, read_json
from quantkit.results.curves import read_curves
from quantkit.training.arms import new_model
from quantkit.training.corpus import Corpus, prepare_corpus
from quantkit.training.loop import CHECKPOINT, WEIGHTS, ArmTraining
from quantkit.training.measure import Gauge

LIMIT_S = 300
DRIVER = """
import os, signal, sys
import torch
from quantkit.cli import main
from quantkit.training import loop

how, arm, step = sys.argv.pop(1).split(",")
note, save = loop.ArmTraining._note, torch.save

def die_after_a_step(self, at, loss):
    note(self, at, loss)
    if self.arm == arm and self.state.step == int(step):
        os.kill(os.getpid(), signal.SIGKILL)

def die_while_writing(whole, file):
    if whole["arm"] == arm and whole["state"]["step"] == int(step):
        file.write(b"half of it")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    save(whole, file)

if how == "step":
    loop.ArmTraining._note = die_after_a_step
elif how == "write":
    torch.save = die_while_writing
main()
"""


def start(die: str, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    """Starts `quantkit train ...`, which kills itself at (how, arm, step); as many threads."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    kept |= {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, die, "train", *arguments],
        env=kept | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Returns (exit code, stdout, stderr); a process that hangs fails the test."""
    try:
        out, err = process.communicate(timeout=LIMIT_S)
        return process.returncode, out, err
    finally:
        process.kill()


def models_of(folder: Path) -> dict[str, TrainedModel]:
    result = read_json(folder / "training.json", TrainingResult)
    return {model.folder: model for model in result.models}


def assert_same_end(folder: Path, whole: Path, rel: float = 1e-6) -> None:
    """Asserts that two runs have the same losses and measurements; returns nothing."""
    found, expected = models_of(folder), models_of(whole)
    assert found.keys() == expected.keys()
    for name, model in found.items():
        assert model.finished and model.steps == 24
        for one, other in zip(model.losses, expected[name].losses, strict=True):
            assert one.step == other.step
            assert one.loss == pytest.approx(other.loss, rel=rel)
        for seen, before in zip(model.measurements, expected[name].measurements, strict=True):
            assert seen.step == before.step
            assert seen.loss == pytest.approx(before.loss, rel=rel)
            assert seen.max_logit == pytest.approx(before.max_logit, rel=100 * rel)


def assert_same_weights(folder: Path, whole: Path) -> None:
    for name in models_of(whole):
        assert (folder / name / WEIGHTS).read_bytes() == (whole / name / WEIGHTS).read_bytes(), name


def test_killed_twice_it_ends_in_the_same_weights(
    write_pair: Callable[..., Path], whole: Path, tmp_path: Path
) -> None:
    path, out = write_pair(tmp_path), tmp_path / "out"
    command = (str(path), "--out", str(out), "--quiet")

    # in the middle of a step of the first arm
    assert ended(start("step,baseline,13", *command))[0] == -signal.SIGKILL
    (known,) = models_of(out).values()
    assert (known.arm, known.steps, known.finished, known.sha256) == ("baseline", 8, False, "")
    assert [point.step for point in known.losses] == [4, 8]
    assert (out / "baseline-seed0" / CHECKPOINT).is_file()
    assert not (out / "baseline-seed0" / WEIGHTS).exists()

    # while the second arm's checkpoint is written
    code, _, err = ended(start("write,diff,16", *command))
    assert code == -signal.SIGKILL, err[-2000:]
    assert {name: model.steps for name, model in models_of(out).items()} == {
        "baseline-seed0": 24,
        "diff-seed0": 8,
    }
    assert len(list((out / "diff-seed0").glob(f".{CHECKPOINT}.*"))) == 1
    assert json.loads((out / "run.json").read_text())["finished"] is False

    run_train(TrainJob(pair=PairSpec.read(path), out=str(out)))
    assert_same_end(out, whole)
    assert_same_weights(out, whole)
    assert list(out.glob("*/.*")) == []
    curves = read_curves(out / "baseline-seed0" / "curves.jsonl")
    assert [line.step for line in curves.steps] == [4, 8, 12, 16, 20, 24]
    assert json.loads((out / "run.json").read_text())["finished"] is True


def test_two_processes_give_the_weights_of_one(
    write_pair: Callable[..., Path], whole: Path, tmp_path: Path
) -> None:
    path, out = write_pair(tmp_path), tmp_path / "out"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    places = [
        {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_PORT": port}
        for rank in ("0", "1")
    ]
    started = [
        start("no,,", str(path), "--out", str(out), MASTER_ADDR="127.0.0.1", **place)
        for place in places
    ]
    (code, said, err), other = (ended(process) for process in started)
    assert (code, other[0]) == (0, 0), err[-2000:] + other[2][-2000:]
    assert other[1:] == ("", "")  # the first one talks
    assert said and err.count("done: ") == 1
    assert read_json(out / "training.json", TrainingResult).processes == 2
    assert_same_end(out, whole, rel=1e-5)
    for name in models_of(whole):
        one, two = (
            torch.load(folder / name / CHECKPOINT, weights_only=True)["model"]
            for folder in (whole, out)
        )
        for key, weight in one.items():
            # rounded to float16 at the end: one of its steps
            assert torch.allclose(weight, two[key], rtol=1e-3, atol=2e-5), key
        apart = [float((weight != two[key]).float().mean()) for key, weight in one.items()]
        assert max(apart) < 0.02
    curves = read_curves(out / "diff-seed0" / "curves.jsonl")
    assert [line.step for line in curves.steps] == [4, 8, 12, 16, 20, 24]


@pytest.fixture(scope="module")
def corpus_of(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    return prepare_corpus(tiny(), folder, cache=folder / "cache")


@pytest.fixture
def gauge(corpus_of: Corpus, tiny: Any) -> Gauge:
    tokenizer = AutoTokenizer.from_pretrained(corpus_of.tokenizer)
    pair = tiny()
    return Gauge(
        replace(pair, records=replace(pair.records, measure_rows=1, measure_bits=())),
        corpus_of.held_out,
        tokenizer,
    )


def trained(
    pair: PairSpec,
    arm: str,
    corpus: Corpus,
    folder: Path,
    gauge: Gauge,
    *,
    seed: int = 0,
    until: int | None = None,
) -> ArmTraining:
    """Trains one arm; to `until`, as if it had been killed there."""
    folder.mkdir(exist_ok=True)
    training = ArmTraining(pair, arm, seed, corpus, folder, Accelerator(cpu=True))

    def stop(_what: str, done: int, _total: int) -> None:
        if done == until:
            raise KeyboardInterrupt

    try:
        training.run(gauge, lambda: None, stop)
    except KeyboardInterrupt:
        assert until is not None
    return training


def short(pair: PairSpec, **changes: Any) -> PairSpec:
    values = {"steps": 4, "warmup_steps": 1} | changes
    records = replace(pair.records, checkpoint_every=2, measure_every=100)
    return replace(pair, training=replace(pair.training, **values), records=records)


def seen_rows(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
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
    tiny: Any, corpus_of: Corpus, gauge: Gauge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = short(tiny(arms=("baseline", "diff", "diff-v2"), seeds="0, 1"))
    seen = seen_rows(corpus_of, monkeypatch)
    by_run: dict[tuple[int, str], Any] = {}
    for seed, arm in pair.runs:
        seen.clear()
        done = trained(pair, arm, corpus_of, tmp_path / f"{arm}{seed}", gauge, seed=seed)
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
    tiny: Any, corpus_of: Corpus, gauge: Gauge, tmp_path: Path
) -> None:
    pair = short(tiny(), steps=3, warmup_steps=0, clip_norm=0.5, decay_queries_keys=False)
    found = trained(pair, "diff", corpus_of, tmp_path / "diff", gauge)

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
def test_it_goes_on_identically(
    tiny: Any, corpus_of: Corpus, gauge: Gauge, tmp_path: Path, changes: dict[str, Any]
) -> None:
    arm = "baseline" if "dropout" in changes else "diff"  # a differential arm has none
    usual = tiny(arms=(arm,))
    pair = short(usual, **changes)
    straight = trained(pair, arm, corpus_of, tmp_path / "straight", gauge)
    assert trained(pair, arm, corpus_of, tmp_path / "cut", gauge, until=3).state.step == 3
    torch.manual_seed(12345)  # another process has drawn other numbers
    cut = trained(pair, arm, corpus_of, tmp_path / "cut", gauge)
    plain = trained(short(usual), arm, corpus_of, tmp_path / "plain", gauge)
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


@pytest.mark.parametrize("damage", TORN.values(), ids=TORN.keys())
def test_a_checkpoint_that_cannot_be_read(
    damage: Any, tiny: Any, corpus_of: Corpus, gauge: Gauge, tmp_path: Path
) -> None:
    pair = short(tiny(), steps=1)
    trained(pair, "baseline", corpus_of, tmp_path / "a", gauge)
    damage(tmp_path / "a" / CHECKPOINT)
    with pytest.raises(InputError, match=r"cannot be read .*Remove it to begin this arm anew"):
        trained(pair, "baseline", corpus_of, tmp_path / "a", gauge)


def test_a_checkpoint_of_another_pair(
    tiny: Any, corpus_of: Corpus, gauge: Gauge, tmp_path: Path
) -> None:
    trained(short(tiny(), steps=1), "baseline", corpus_of, tmp_path / "a", gauge)
    with pytest.raises(InputError, match="of another pair or arm"):
        trained(short(tiny(), steps=2), "baseline", corpus_of, tmp_path / "a", gauge)
    with pytest.raises(InputError, match="of another pair or arm"):
        trained(short(tiny(), steps=1), "baseline", corpus_of, tmp_path / "a", gauge, seed=1)
