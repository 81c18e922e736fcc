"""Which runs the table of commands names, and what it says where no command line can say it.

That the commands are the jobs again is tested beside the command line, `test_commands_of_runs.py`.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from quantkit.reporting.provenance import command_of, commands_table

FIXTURES = Path(__file__).parent.parent / "results" / "fixtures"


def write(folder: Path, command: str, *files: str, saved: bool = True, **config: Any) -> Path:
    """A run folder as a command leaves it, without the figures."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"command": command, "config": config}))
    if saved:
        (folder / "config.toml").write_text("")
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    return folder


def test_only_what_is_no_default_is_written(tmp_path: Path) -> None:
    config = {
        "models": ["m"], "seq_len": 512, "samples": 3, "count_masked": False,
        "both_readings": True, "points": None, "quantiles": [0.99, 0.999],
    }  # fmt: skip
    plain = {"command": "stats", "config": config}
    said = command_of(plain, tmp_path)
    assert said == f"quantkit stats --samples 3 --paper --out {tmp_path} m"


def test_an_option_of_another_version_is_left_out(tmp_path: Path) -> None:
    plain = {"command": "stats", "config": {"models": ["m"], "gone": 7, "also": True}}
    assert command_of(plain, tmp_path) == f"quantkit stats --out {tmp_path} m"
    assert command_of({"command": "gone", "config": {}}, tmp_path) == ""


def test_a_run_below_another_is_told_by_its_own_row(tmp_path: Path) -> None:
    """A comparison's own files are in folders without a `run.json`."""
    base = write(tmp_path / "a b", "compare", "sweep.json", "m/stats.json", "n/stats.json",
                 models=["m", "n"])  # fmt: skip
    write(base / "later", "export", "export.json", "auto.json", model="m", recipe="w8")
    write(base / "later" / "search" / "0", "export", "export.json", model="m")
    write(base / "empty", "stats", models=["m"])
    rows = commands_table([base]).rows
    assert [row[0] for row in rows] == ["export.json, auto.json", "stats.json, sweep.json"]
    assert shlex.split(rows[1][1]) == ["quantkit", "compare", "--out", str(base), "m", "n"]
    assert shlex.split(rows[0][2]) == ["--config", str(base / "later" / "config.toml")]


def test_a_file_stands_for_its_folder(tmp_path: Path) -> None:
    run = write(tmp_path, "stats", "stats.json", models=["m"])
    assert commands_table([run / "stats.json"]) == commands_table([run])


@pytest.mark.parametrize("saved", [True, False], ids=["saved", "an older run"])
def test_a_name_with_a_comma_in_a_list_is_left_to_the_config(saved: bool, tmp_path: Path) -> None:
    write(tmp_path, "stats", "stats.json", saved=saved, models=["m"], layers=["a,b"])
    ((_, command, _),) = commands_table([tmp_path]).rows
    config = str(tmp_path / "config.toml")
    expected = ["quantkit", "stats", "--config", config, "--out", str(tmp_path)]
    assert shlex.split(command) == expected if saved else "run.json has the options" in command


@pytest.mark.parametrize("saved", [True, False], ids=["saved", "an older run"])
def test_a_training_is_its_pair_again(saved: bool, tmp_path: Path) -> None:
    write(tmp_path, "train", "training.json", saved=saved)
    ((files, command, _),) = commands_table([tmp_path]).rows
    assert files == "training.json"
    again = f"quantkit train --out {tmp_path} -- {tmp_path / 'config.toml'}"
    assert command == again if saved else "run.json has the options" in command


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"config": []}', "\xff"], ids=["cut", "list", "empty", "no job", "?"]
)
def test_what_is_no_run_is_no_row(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(text.encode("latin-1"))
    (tmp_path / "stats.json").write_text("{}")
    assert commands_table([tmp_path]).rows == ()


@pytest.mark.parametrize("version", ["v1", "v2", "v3", "v4"])
def test_results_without_a_run_have_no_command(version: str) -> None:
    assert commands_table([FIXTURES / version]).rows == ()
