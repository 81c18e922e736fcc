"""Trainings in processes of their own: killed, or two that share each batch; the same weights."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantkit.jobs import PairSpec, TrainJob
from quantkit.pipelines import run_train
from quantkit.results import TrainedModel, TrainingResult, read_json
from quantkit.results.curves import read_curves
from quantkit.training.loop import CHECKPOINT, WEIGHTS

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


@pytest.mark.kind(9, "train")
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


@pytest.mark.kind(4, "train")
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
