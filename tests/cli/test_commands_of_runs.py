"""The command that a report names for a run is the job again, when the command line parses it."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from quantkit.pipelines.runs import open_run
from quantkit.reporting.provenance import command_of, commands_table
from tests.cli.test_config import JOBS


@pytest.mark.parametrize("name", [name for name in JOBS if not name.startswith("train")])
def test_the_command_of_a_run_is_the_job_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    command = name.split(",")[0]
    job = dataclasses.replace(JOBS[name], out="here/and there")
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
