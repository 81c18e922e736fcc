"""Several processes give the file of one, and an error in any of them ends all of them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import InputError, ProbeError
from quantkit.jobs import StatsJob
from quantkit.outliers import collect
from quantkit.pipelines import run_stats
from quantkit.processes import (
    Launched,
    Processes,
    launched,
    lone_launch,
    may_talk,
    uninterrupted,
)
from quantkit.results import Stats, read_json

HERE = Path(__file__).parent
LIMIT_S = 180
KURTOSIS = ("kurtosis", "kurtosis_oft", "mean", "std", "variance", "skewness")
PLACES = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def load_worker() -> Any:
    spec = importlib.util.spec_from_file_location("worker", HERE / "worker.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environ(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"} | more


def start(count: int, *arguments: str, cwd: Path | None = None) -> list[subprocess.Popen[str]]:
    """Starts `count` processes that know of each other, as torchrun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=environ(
                RANK=str(rank),
                WORLD_SIZE=str(count),
                LOCAL_RANK=str(rank),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
        )
        for rank in range(count)
    ]


def finish(started: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Returns (exit code, stdout, stderr) by rank; a process that hangs fails the test."""
    try:
        found = []
        for process in started:
            out, err = process.communicate(timeout=LIMIT_S)
            found.append((process.returncode, out, err))
        return found
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()


@pytest.fixture(scope="module", params=[2, 3], ids=["2 processes", "3 processes"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(number of processes, the folder that they wrote)."""
    folder = tmp_path_factory.mktemp("shared")
    for code, _, err in finish(start(request.param, str(HERE / "worker.py"), str(folder))):
        assert code == 0, err[-3000:]
    return request.param, folder


@pytest.fixture(scope="module")
def worker() -> Any:
    return load_worker()


def differences(one: Any, other: Any, path: str = "", name: str = "") -> Iterator[str]:
    """Yields where two results differ by more than is promised."""
    if dataclasses.is_dataclass(one):
        one, other = (
            {f.name: getattr(side, f.name) for f in dataclasses.fields(side)}
            for side in (one, other)
        )
    if isinstance(one, dict) and one.keys() == other.keys():
        for key in one:
            yield from differences(one[key], other[key], f"{path}.{key}", key)
    elif isinstance(one, (list, tuple)) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{path}[{index}]", name)
    elif isinstance(one, float) and isinstance(other, float):
        exact = name in ("max", "min", "abs_max", "value", "channel_absmax") or "abs_top" in path
        rel = 0.0 if exact else 1e-9 if name in KURTOSIS else 1e-5
        if one != pytest.approx(other, rel=rel, abs=0.0, nan_ok=True):
            yield f"{path}: {one} {other}"
    elif one != other:
        yield f"{path}: {one} {other}"


@pytest.mark.parametrize("case", ["llama", "diffllama", "one batch", "nan", "mixtral"])
@pytest.mark.kind(4, "stats")
def test_the_merged_file_is_that_of_one_process(shared: Any, worker: Any, case: str) -> None:
    count, folder = shared
    merged = read_json(folder / f"{case}.json", Stats)
    alone = worker.measured(case, Processes())
    assert merged.processes == count and alone.processes == 1
    alone = dataclasses.replace(alone, processes=count)
    assert list(differences(merged, alone)) == []
    top = [entry for group in merged.points["hidden_state"] for entry in group.top]
    assert len({entry.sequence for entry in top}) > 1  # of batches of more than one process
    assert any("NaN" in said for said in merged.warnings) == (case == "nan")


def test_nan_on_one_rank_alone_is_counted_and_told(shared: Any) -> None:
    _, folder = shared
    stats = read_json(folder / "nan.json", Stats)
    assert "hidden_state of layer 0 holds" in " ".join(stats.warnings)
    assert stats.summary.hidden_state.count > 0
    assert max(group.nan_count for group in stats.points["hidden_state"]) > 0


def test_an_expert_that_one_rank_never_ran_is_no_error(shared: Any, worker: Any) -> None:
    count, folder = shared
    stats = read_json(folder / "mixtral.json", Stats)
    hits = [hit for hit in stats.hits if "experts" in hit.name]
    assert hits and all(hit.elements for hit in hits)
    rows = worker.rows("mixtral", worker.LENGTHS)
    refused = 0
    for rank in range(count):  # alone, one of them at least would be refused
        ids = tuple(row for n, row in enumerate(rows.ids) if n // 2 % count == rank)
        share = dataclasses.replace(rows, ids=ids)
        try:
            collect(worker.make("mixtral"), share, batch_size=2, points=("mlp_down_input",))
        except ProbeError as error:
            assert "a probe never fired: mlp_down_input" in str(error)
            refused += 1
    assert refused


def test_errors_reach_every_process(shared: Any) -> None:
    count, folder = shared
    for rank in range(count):
        said = json.loads((folder / f"said-{rank}.json").read_text())
        last = rank == count - 1
        assert said == {
            "one": "ProbeError: planted" if last else f"ProbeError: process {count - 1}: planted",
            "all": "InputError: planted",
            "odd": "Unpicklable: two arguments"
            if last
            else "RuntimeError: Unpicklable: two arguments",
            "first": "InputError: planted",
            "none": str(rank),
            "told": "'by 0'",
            "gathered": str(list(range(count)) if rank == 0 else []),
        }


@pytest.fixture
def folder(tmp_path: Path, worker: Any, tokenizer: Any) -> Path:
    """A saved tiny model with a tokenizer, and a text beside it."""
    tiny = worker.LlamaForCausalLM(worker.LlamaConfig(**worker.SIZES | {"vocab_size": 257}))
    tiny.save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 4000)
    return tmp_path


def stats_of(folder: Path, out: str, *more: str) -> list[str]:
    return [
        "-m", "quantkit", "stats", str(folder / "tiny"), "--text", str(folder / "text.txt"),
        "--seq-len", "16", "--samples", "10", "--batch-size", "2", "--out", str(folder / out),
        *more,
    ]  # fmt: skip


@pytest.mark.kind(4, "stats", "cli")
def test_torchrun_writes_the_file_of_one_process(folder: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run(
        [sys.executable, *launch, *stats_of(folder, "three")],
        env=environ(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("done: ") == 1
    job = StatsJob(
        models=(str(folder / "tiny"),),
        data=str(folder / "text.txt"),
        seq_len=16,
        samples=10,
        batch_size=2,
        out=str(folder / "one"),
    )
    run_stats(job)
    stats = [read_json(folder / name / "stats.json", Stats) for name in ("three", "one")]
    assert [one.processes for one in stats] == [3, 1]
    assert list(differences(dataclasses.replace(stats[0], processes=1), stats[1])) == []

    # finished: all say so, nothing is computed again
    before = (folder / "three" / "stats.json").stat().st_mtime_ns
    again = finish(start(2, *stats_of(folder, "three")))
    assert [code for code, _, _ in again] == [0, 0]
    assert again[0][2].splitlines()[-1] == f"done: {folder / 'three'}"
    assert again[1][1:] == ("", "")
    assert (folder / "three" / "stats.json").stat().st_mtime_ns == before


@pytest.mark.kind(4, "stats", "cli")
def test_accelerate_launch_shares_the_batches(folder: Path) -> None:
    """--multi_gpu is how accelerate says "several processes"; no GPU is needed."""
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    rest = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        rest += ["--main_process_port", str(free.getsockname()[1])]
    done = subprocess.run(
        [sys.executable, *launch, *rest, *stats_of(folder, "accelerate")],
        env=environ(), capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert read_json(folder / "accelerate" / "stats.json", Stats).processes == 2


def test_a_bad_path_is_one_line_of_one_process(folder: Path) -> None:
    arguments = stats_of(folder, "bad")
    arguments[3] = str(folder / "tinny")
    first, second = finish(start(2, *arguments))
    assert (first[0], second[0]) == (2, 2)
    *before, last = first[2].splitlines()  # a slow start is told
    assert last.startswith("error: model ") and set(before) <= {f"loading {folder / 'tinny'}"}
    assert second[1:] == ("", "")


@pytest.mark.kind(9, "stats")
def test_a_process_that_is_killed_ends_the_one_that_waits_for_it() -> None:
    code = (
        "import os, signal\n"
        "from quantkit.processes import joined\n"
        "with joined() as processes:\n"
        "    die = lambda: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    processes.everywhere(die if processes.rank else int)\n"
    )
    first, second = finish(start(2, "-c", code))
    assert second[0] == -signal.SIGKILL
    assert first[0] == 1
    assert "QuantkitError: process 0 lost the other processes of the job" in first[2]


def test_an_interrupt_ends_all(folder: Path) -> None:
    started = start(2, *stats_of(folder, "interrupted", "--samples", "10000", "--batch-size", "1"))
    assert started[0].stderr is not None
    line = started[0].stderr.readline()
    assert (line if "loading" not in line else started[0].stderr.readline()).startswith(
        "statistics of tiny"
    )
    time.sleep(0.2)
    for process in started:
        process.send_signal(signal.SIGINT)
    first, second = finish(started)
    assert first[0] == 130 and second[0] == 130
    said = "interrupted: finished work is kept; the same command goes on from there."
    assert first[2].splitlines()[-1] == said
    assert second[1:] == ("", "")


def test_half_an_environment_is_one_line() -> None:
    for given, said in (
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set to '2', but RANK is not set"),
        ({"RANK": "0"}, "RANK is set to '0', but WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "two", "RANK": "0"} | PLACES, "WORLD_SIZE is 'two'"),
        ({"WORLD_SIZE": "2", "RANK": "2"} | PLACES, "expected a rank from 0 to 1"),
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_PORT": "1"}, "MASTER_ADDR is not set"),
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "a"}, "MASTER_PORT is not set"),
    ):
        with pytest.raises(InputError, match=said):
            launched(given)
        assert may_talk(given)


def test_what_launchers_say() -> None:
    assert launched({}) == launched({"WORLD_SIZE": "1"}) == launched(PLACES) == Launched()
    two = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"} | PLACES
    assert launched(two) == Launched(rank=3, count=4, local_rank=1)
    assert not may_talk(two)
    mpi = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "0"}
    assert launched(mpi | PLACES) == Launched(rank=1, count=2, local_rank=0)
    assert launched(mpi) == Launched()  # a scheduler's; nobody asked for a group


def test_accelerate_that_starts_one_process_is_told() -> None:
    lone = {"ACCELERATE_USE_CPU": "True"} | PLACES
    assert "torchrun --nproc-per-node N" in lone_launch(lone)
    assert lone_launch({"ACCELERATE_USE_CPU": "True"}) == lone_launch(PLACES) == ""
    assert lone_launch(lone | {"WORLD_SIZE": "2", "RANK": "0"}) == ""


def test_a_process_without_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert Processes().own_device("cuda") == "cuda"
    assert Processes(rank=1, count=2, local_rank=1).own_device("cuda") == "cuda:1"
    assert Processes(rank=1, count=2, local_rank=1).own_device("cpu") == "cpu"
    with pytest.raises(InputError, match=r"cuda:2, and torch sees 2 GPUs"):
        Processes(rank=2, count=3, local_rank=2).own_device("cuda")


def test_an_interrupt_is_held_back_and_not_lost() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done.append("after it")
    assert done == ["after it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with uninterrupted():
        pass  # none came
    with pytest.raises(KeyError, match="mine"), uninterrupted():
        raise KeyError("mine")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
