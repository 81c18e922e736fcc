"""Who owns a run folder: what goes on, what is done, what is refused."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest

from quantkit.errors import InputError
from quantkit.jobs import StatsJob, SweepJob
from quantkit.jobs.config_file import CONFIG_FILE, CONFIG_SCHEMA
from quantkit.pipelines.runs import RUN_FILE, RUN_SCHEMA, open_run, running
from quantkit.results import read_plain


@pytest.fixture
def job(tmp_path: Path) -> StatsJob:
    return StatsJob(models=("tiny",), samples=2, out=str(tmp_path / "run"))


def test_a_new_folder_is_made_and_says_what_it_holds(job: StatsJob) -> None:
    run = open_run("stats", job)
    assert not run.finished
    plain = read_plain(run.folder / RUN_FILE)
    assert (plain["schema"], plain["command"]) == (RUN_SCHEMA, "stats")
    assert plain["finished"] is False
    assert plain["config"]["samples"] == 2
    assert not {"out", "force"} & plain["config"].keys()


def test_an_empty_folder_is_taken(job: StatsJob, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert open_run("stats", job).folder == tmp_path / "run"


@pytest.mark.kind(4, "api")
def test_the_same_config_unfinished_goes_on(job: StatsJob) -> None:
    folder = open_run("stats", job).folder
    (folder / "cells").mkdir()
    (folder / "cells" / "a.json").write_text("{}")
    again = open_run("stats", job)
    assert not again.finished
    assert (folder / "cells" / "a.json").exists()


def test_the_same_config_finished_is_done(job: StatsJob) -> None:
    run = open_run("stats", job)
    (run.folder / "stats.json").write_text("{}")
    run.finish()
    again = open_run("stats", job)
    assert again.finished
    assert (run.folder / "stats.json").exists()
    assert read_plain(run.folder / RUN_FILE)["finished"] is True


@pytest.mark.parametrize("finished", [False, True])
def test_another_config_is_refused_and_nothing_touched(job: StatsJob, finished: bool) -> None:
    run = open_run("stats", job)
    (run.folder / "stats.json").write_text("{}")
    if finished:
        run.finish()
    before = {path.name: path.read_bytes() for path in run.folder.iterdir()}
    with pytest.raises(InputError, match=r"another run \(stats, config [0-9a-f]{10}\).*--force"):
        open_run("stats", dataclasses.replace(job, samples=3))
    assert {path.name: path.read_bytes() for path in run.folder.iterdir()} == before


def test_another_command_is_refused(job: StatsJob) -> None:
    open_run("stats", job)
    with pytest.raises(InputError, match="another run"):
        open_run("sweep", SweepJob(models=("tiny",), out=job.out))


@pytest.mark.parametrize("samples", [2, 3])
def test_force_clears_results_and_keeps_what_is_not_ours(job: StatsJob, samples: int) -> None:
    run = open_run("stats", job)
    ours = ["stats.json", "ranges.json", "sweep.json", "model.onnx", "cells/a.json"]
    ours.append("tiny/stats.json")
    for name in (*ours, "notes.txt"):
        path = run.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    run.finish()
    forced = open_run("stats", dataclasses.replace(job, samples=samples, force=True))
    assert not forced.finished
    assert not [name for name in ours if (run.folder / name).exists()]
    assert (run.folder / "notes.txt").exists()
    assert read_plain(run.folder / RUN_FILE)["config"]["samples"] == samples


def test_a_foreign_folder_is_refused(job: StatsJob, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match="not empty and holds no run"):
        open_run("stats", job)
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]
    with pytest.raises(InputError, match="nothing in it is touched"):
        open_run("stats", dataclasses.replace(job, force=True))
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


def test_force_clears_graphs_and_leaves_other_runs(job: StatsJob, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    open_run("stats", job)
    for name in ("float/model.onnx", "quantizers.json", "model.onnx", "model.onnx.data"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("old")
    for name in ("model/stats.json", "another run/stats.json", "another run/run.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    open_run("stats", dataclasses.replace(job, force=True))
    left = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))
    assert left == ["another run/run.json", "another run/stats.json", "config.toml", "run.json"]


def test_a_file_is_refused(job: StatsJob, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(InputError, match="is a file; expected a folder"):
        open_run("stats", job)


@pytest.mark.kind(9, "api")
def test_temporary_files_go_when_nobody_can_be_writing_them(job: StatsJob, tmp_path: Path) -> None:
    folder = open_run("stats", job).folder
    now = time.time()
    for name, age_s in ((".training.json.a1b2c3d4", 500), (".training.json.e5f6g7h8", 700)):
        (folder / name).write_text("half")
        os.utime(folder / name, (now - age_s, now - age_s))
    open_run("stats", job)
    assert sorted(path.name for path in folder.iterdir()) == [
        ".training.json.a1b2c3d4",
        CONFIG_FILE,
        RUN_FILE,
    ]


@pytest.mark.kind(9, "api")
def test_a_folder_of_temporary_files_alone_is_taken(job: StatsJob, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".run.json.a1b2c3d4").write_text("half")
    assert not open_run("stats", job).finished
    assert (tmp_path / "run" / ".run.json.a1b2c3d4").exists()


def test_a_run_begins_with_the_config_that_repeats_it(job: StatsJob) -> None:
    text = (open_run("stats", job).folder / CONFIG_FILE).read_text(encoding="utf-8")
    assert text.startswith(f'schema = "{CONFIG_SCHEMA}"\ncommand = "stats"\nmodel = ["tiny"]\n')
    assert "samples = 2\n" in text and "quantiles = [0.99, 0.999]\n" in text


def test_the_config_of_a_finished_run_stays(job: StatsJob) -> None:
    run = open_run("stats", job)
    (run.folder / "stats.json").write_text("{}")
    run.finish()
    (run.folder / CONFIG_FILE).unlink()  # as of a run from before there were any
    assert open_run("stats", job).finished
    assert not (run.folder / CONFIG_FILE).exists()


def test_force_replaces_the_config(job: StatsJob) -> None:
    open_run("stats", job)
    folder = open_run("stats", dataclasses.replace(job, samples=3, force=True)).folder
    assert "samples = 3\n" in (folder / CONFIG_FILE).read_text(encoding="utf-8")


def test_a_mistyped_word_leaves_no_folder(job: StatsJob) -> None:
    with pytest.raises(InputError, match="typo"), running("stats", job) as run:
        assert {path.name for path in run.folder.iterdir()} == {RUN_FILE, CONFIG_FILE}
        raise InputError("typo")
    assert not run.folder.exists()


def test_a_name_that_is_no_text_is_refused_before_anything_is_made(job: StatsJob) -> None:
    broken = dataclasses.replace(job, models=("\udcff",))
    with pytest.raises(InputError, match="no Unicode text"):
        open_run("stats", broken)
    assert not Path(str(job.out)).exists()
