"""kill -9 at the worst write points; `benchmarks/kills.py` has all points and random moments.

The benchmark is run as it is, on three commands and two or three points of each. What it finds is
worth as much as its checker, which is tested on folders with one planted fault each.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

from benchmarks.killing.check import differences, half_written, litter, make_old
from benchmarks.killing.points import Points, install
from quantkit.jobs import ExportJob
from quantkit.pipelines.runs import RUN_FILE, check_run, open_run
from quantkit.results import read_plain

ROOT = Path(__file__).parents[2]
WORST = (
    "half of out/.stats.json.*",
    "after the move to out/stats.json",  # the result is there, and nothing says so yet
    "half of out/float/.writing-*/model.onnx.data",
    "before the move to out/model.onnx",  # its weights stand there without it
    "before the move to out/export.json",
    "half of out/baseline-seed0/.checkpoint.pt.*",
    "before the move to out/baseline-seed0/model.safetensors",
    "half of out/diff-seed0/curves.jsonl",
)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the benchmark found, by command."""
    out = tmp_path_factory.mktemp("kills") / "kills.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "kills.py"), "--commands", "stats,export,train",
         "--at", ",".join(WORST), "--random", "0", "--twice", "0", "--out", str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert out.is_file(), done.stderr[-2000:]
    found: dict[str, Any] = json.loads(out.read_text())["commands"]
    return found


@pytest.mark.parametrize(
    ("command", "cases"),
    [
        pytest.param("stats", 2, marks=pytest.mark.kind(9, "stats"), id="stats"),
        pytest.param("export", 3, marks=pytest.mark.kind(9, "export", "calibrate"), id="export"),
        pytest.param("train", 3, marks=pytest.mark.kind(9, "train"), id="train"),
    ],
)
def test_the_next_run_ends_what_a_kill_left(
    killed: dict[str, Any], command: str, cases: int
) -> None:
    assert killed[command]["failures"] == []
    assert killed[command]["cases"]["write point"] == cases  # every pattern was met


def write_all(folder: Path) -> None:
    """Writes a whole file of each kind that runs leave."""
    (folder / "run.json").write_text('{"schema": "quantkit.run/1", "seconds": 1}\n')
    (folder / "config.toml").write_text('schema = "quantkit.config/1"\n')
    (folder / "report.html").write_text("<html><body></body></html>\n")
    (folder / "chart.svg").write_text("<svg></svg><!-- quantkit report 0 -->\n")
    (folder / "cells.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    np.save(folder / "rows.npy", np.arange(8))
    save_file({"w": np.arange(8.0)}, folder / "weights.safetensors")
    weight = numpy_helper.from_array(np.arange(64, dtype=np.float32).reshape(8, 8), "w")
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 8]) for n in "xy")
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    model = helper.make_model(helper.make_graph([node], "g", [x], [y], [weight]))
    onnx.save(
        model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data",
        size_threshold=0,
    )  # fmt: skip


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    folder = tmp_path / "whole"
    folder.mkdir()
    write_all(folder)
    return folder


@pytest.mark.parametrize(
    ("halved", "named"),
    [
        ("run.json", "run.json"),
        ("config.toml", "config.toml"),
        ("report.html", "report.html"),
        ("chart.svg", "chart.svg"),
        ("rows.npy", "rows.npy"),
        ("weights.safetensors", "weights.safetensors"),
        ("model.onnx", "model.onnx"),
        ("model.onnx.data", "model.onnx"),
    ],
)
def test_the_checker_names_a_file_that_is_half_written(
    whole: Path, halved: str, named: str
) -> None:
    assert half_written(whole) == []
    halve(whole / halved)
    (found,) = half_written(whole)
    assert found.startswith(f"{named}: ")


def test_the_checker_reads_no_temporary_file_and_no_unknown_one(whole: Path) -> None:
    (whole / ".run.json.abcdefgh").write_text("{")
    (whole / ".writing-abcdefgh").mkdir()
    (whole / ".writing-abcdefgh" / "model.onnx").write_text("half")
    assert half_written(whole) == []
    assert litter(whole) == [".run.json.abcdefgh", ".writing-abcdefgh"]
    (whole / "what.bin").write_text("?")
    assert half_written(whole) == ["what.bin: ValueError: no reader is known for such files"]


def test_only_a_last_line_may_be_cut_off(whole: Path) -> None:
    with (whole / "cells.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert half_written(whole) == []
    with (whole / "cells.jsonl").open("a") as file:
        file.write('\n{"step": 4}\n')
    assert len(half_written(whole)) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(lambda f: (f / "run.json").unlink(), "run.json: missing", id="missing"),
        pytest.param(
            lambda f: (f / "more.json").write_text("{}"), "more.json: not in the", id="more"
        ),
        pytest.param(
            lambda f: (f / "run.json").write_text('{"schema": "2"}'), "run.json: differs", id="json"
        ),
        pytest.param(
            lambda f: (f / "cells.jsonl").write_text('{"step": 1}\n'), "cells.jsonl: di", id="lines"
        ),
        pytest.param(
            lambda f: np.save(f / "rows.npy", np.arange(9)), "rows.npy: differs", id="bytes"
        ),
    ],
)
def test_the_checker_names_what_came_out_otherwise(
    whole: Path, tmp_path: Path, change: Callable[[Path], object], said: str
) -> None:
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    (again / "run.json").write_text('{"seconds": 2, "schema": "quantkit.run/1"}')
    with (again / "cells.jsonl").open("a") as file:
        file.write('{"step": 2}\n')  # done twice, with one result
    assert differences(again, whole) == []
    change(again)
    (found,) = differences(again, whole)
    assert found.startswith(said)


def test_a_run_dies_at_its_point_with_half_of_what_it_wrote(tmp_path: Path) -> None:
    """Each place to die of one atomic write, counted by hand."""
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    sizes = []
    for kill_at in range(1, 6):
        log = tmp_path / f"log{kill_at}"
        child = os.fork()
        if not child:
            os.setsid()
            handle = os.open(log, os.O_WRONLY | os.O_CREAT)
            install(Points(root=str(inside), kill_at=kill_at, log=handle))
            (outside / "a").write_text("does not count")
            with open(inside / ".new", "w") as file:
                file.write("12345678")
                file.flush()
                os.fsync(file.fileno())
            os.replace(inside / ".new", inside / "new")
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == -signal.SIGKILL, kill_at
        assert len(log.read_text().splitlines()) == kill_at
        sizes.append({path.name: path.stat().st_size for path in inside.iterdir()})
        for path in inside.iterdir():
            path.unlink()
    assert log.read_text().splitlines() == [
        "behind the opening of .new", "all of .new", "half of .new", "before the move to new",
        "after the move to new",
    ]  # fmt: skip
    assert sizes == [{".new": 0}, {".new": 8}, {".new": 4}, {".new": 8}, {"new": 8}]


@pytest.fixture
def forced(tmp_path: Path) -> ExportJob:
    """A finished export whose folder `--force` is about to clear."""
    job = ExportJob(model="m", out=str(tmp_path / "run"))
    run = open_run("export", job)
    for name in ("export.json", "model.onnx", "model.onnx.data", "float/model.onnx",
                 "float/model.onnx.data", "search/trials/a.json"):  # fmt: skip
        path = run.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    run.finish()
    return dataclasses.replace(job, force=True)


class Killed(BaseException):
    """Stands for a signal that cannot be caught: no cleaning up follows where it is raised."""


@pytest.fixture
def dies_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Lets the process end at the n-th file that it removes."""

    def at(number: int) -> None:
        count = 0
        plain = os.unlink

        def unlink(path: Any, *given: Any, **more: Any) -> None:
            nonlocal count
            count += 1
            if count > number:
                raise Killed
            plain(path, *given, **more)

        monkeypatch.setattr(os, "unlink", unlink)

    yield at


@pytest.mark.kind(9, "export", "api")
@pytest.mark.parametrize("removed", range(7))
def test_a_kill_while_force_clears_leaves_an_unfinished_run_of_whole_files(
    forced: ExportJob, dies_at: Callable[[int], None], removed: int, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context(), pytest.raises(Killed):
        dies_at(removed)
        open_run("export", forced)
    folder = tmp_path / "run"
    assert check_run("export", dataclasses.replace(forced, force=False)) == "begun"
    for graph in (folder / "model.onnx", folder / "float" / "model.onnx"):
        assert graph.with_name("model.onnx.data").exists() or not graph.exists()


@pytest.mark.kind(9, "export", "api")
def test_force_clears_what_a_killed_one_left(
    forced: ExportJob, dies_at: Callable[[int], None], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            open_run("export", forced)
    assert [path.name for path in folder.glob(".leaving-*")] != []
    make_old(folder)
    assert not open_run("export", forced).finished
    assert sorted(path.name for path in folder.iterdir()) == ["config.toml", RUN_FILE]
    assert read_plain(folder / RUN_FILE)["finished"] is False


@pytest.mark.kind(9, "export", "calibrate", "api")
def test_half_written_files_of_any_kind_go_when_they_are_old(tmp_path: Path) -> None:
    """A killed process leaves them anywhere below the run; what is not ours to name stays."""
    job = ExportJob(model="m", out=str(tmp_path / "run"))
    folder = open_run("export", job).folder
    ours = (
        ".observations.safetensors.a1b2c3d4", "cells/.m_none_ab12.json.a1b2c3d4",
        "search/trials/.0011.json.a1b2c3d4", "figures/.a-b.svg.a1b2c3d4", ".report.html.a1b2c3d4",
    )  # fmt: skip
    for name in (*ours, ".notes", ".thesis.tex.swp", "cells/.DS_Store"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("half")
    open_run("export", job)
    assert all((folder / name).exists() for name in ours)  # somebody may be writing them
    make_old(folder)
    open_run("export", job)
    left = litter(folder)
    assert left == [".notes", ".thesis.tex.swp", "cells/.DS_Store"]
