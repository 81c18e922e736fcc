"""The command that a report names for a run is the job again, when the command line parses it."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.jobs import (
    CalibrateJob,
    CompareJob,
    DiagnoseJob,
    ExportJob,
    SensitivityJob,
    StatsJob,
    SweepJob,
)
from quantkit.pipelines.runs import open_run
from quantkit.reporting.collect import Found, Run
from quantkit.reporting.provenance import command_of, commands_table
from quantkit.reporting.recommendation import recommendation
from quantkit.results import AutoResult, read_json
from tests.cli.test_config import JOBS
from tests.reporting.planted_exports import AUTO, accuracy, export, run_of

Invoke = Callable[..., tuple[int, str, str]]
DASHED = {
    "stats, of dashes": StatsJob(models=("-m", "--seed", "n"), data="--data", layers=("-a", "--b")),
    "calibrate, of dashes": CalibrateJob(model="--from", calib="-c $(rm)"),
    "sensitivity, of dashes": SensitivityJob(model="-m", ranges="--ranges", eval="-"),
    "sweep, of dashes": SweepJob(models=("-a=m", "--help"), eval="-e", keep=("-a", "-b")),
    "export, of dashes": ExportJob(model="--", calib="-", ranges=None, keep=("-k",)),
    "diagnose, of dashes": DiagnoseJob(float_graph="-a.onnx", quantized_graph="--b.onnx"),
    "compare, of dashes": CompareJob(models=("-m",), text="--out"),
}
ALL = {name: job for name, job in JOBS.items() if not name.startswith("train")} | DASHED


@pytest.mark.parametrize("name", ALL)
def test_the_command_of_a_run_is_the_job_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    command = name.split(",")[0]
    job = dataclasses.replace(ALL[name], out="here/and there")
    folder = open_run(command, job).folder
    plain = json.loads((folder / "run.json").read_text("utf-8"))
    said = command_of(plain, folder)
    pipelines, invoke = (request.getfixturevalue(what) for what in ("pipelines", "invoke"))
    pipelines.error = KeyboardInterrupt()
    program, *words = shlex.split(said)
    assert program == "quantkit" and words[0] == command
    invoke(*words)
    assert pipelines.job == job, said


def test_the_table_has_a_row_a_run_and_skips_what_is_not_one(tmp_path: Path) -> None:
    for name in ("stats", "export"):
        job = dataclasses.replace(JOBS[name], out=str(tmp_path / "runs" / name))
        folder = open_run(name, job).folder
        (folder / f"{name}.json").write_text("{}")
    broken = tmp_path / "runs" / "broken"
    broken.mkdir()
    (broken / "run.json").write_text("{")
    (broken / "sweep.json").write_text("{}")
    (tmp_path / "runs" / "export" / "config.toml").unlink()  # an older run
    rows = commands_table([tmp_path / "runs", tmp_path / "runs" / "stats"]).rows
    assert [row[0] for row in rows] == ["export.json", "stats.json"]
    assert rows[0][1].startswith("quantkit export --out ") and rows[0][2] == ""
    assert rows[1][2] == f"--config {tmp_path / 'runs' / 'stats' / 'config.toml'}"


@pytest.mark.parametrize("source", ["smollm2", "my models/a'b", "-m", "--help", "$(x)"])
def test_the_command_of_a_recommendation_is_a_search(
    source: str, pipelines: Any, invoke: Invoke
) -> None:
    auto = read_json(AUTO, AutoResult)
    searched = dataclasses.replace(
        auto,
        model=dataclasses.replace(auto.model, source=source),
        metric="acc_norm",
        task="multiple-choice=a b.jsonl",
        max_drop=0.0125,
    )
    found = recommendation(Run(searches=(Found(place="auto.json", result=searched),)))
    assert found is not None
    pipelines.error = KeyboardInterrupt()
    invoke(*shlex.split(found.commands[0])[1:])
    assert pipelines.job == ExportJob(
        model=source, recipe="auto", max_drop=0.0125, task="multiple-choice=a b.jsonl"
    )


def test_the_command_for_a_graph_is_one_that_takes_it(pipelines: Any, invoke: Invoke) -> None:
    made = export("w8a8", 50.0, accuracy(1.1, 1.0, 1.2))
    made = dataclasses.replace(made, model=dataclasses.replace(made.model, source="a b.onnx"))
    found = recommendation(run_of(made))
    assert found is not None
    pipelines.error = KeyboardInterrupt()
    invoke(*shlex.split(found.commands[0])[1:])
    assert pipelines.job == ExportJob(model="a b.onnx", recipe="w8a8-dynamic")
