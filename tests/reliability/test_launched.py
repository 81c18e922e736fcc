"""Kind 4: how many processes a launcher started never changes what a command leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from quantkit.cli import app
from quantkit.errors import InputError
from quantkit.processes import require_shared

TWO = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
OF_ONE = {
    "sensitivity": ("sensitivity", "m", "--ranges", "r"),
    "export": ("export", "m", "--quantize", "w8a8-dynamic"),
    "auto": ("export", "m", "--quantize", "auto", "--max-drop", "2%"),
    "diagnose": ("diagnose", "a.onnx", "b.onnx"),
    "compare": ("compare", "a", "b"),
}


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(arguments, marks=pytest.mark.kind(4, stage, "cli"), id=stage)
        for stage, arguments in OF_ONE.items()
    ],
)
def test_two_processes_do_not_both_write_what_is_the_work_of_one(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """One line from the first process, none from the second; no folder, no model asked for."""
    out = tmp_path / "out"
    for rank, lines in (("0", 1), ("1", 0)):
        found = CliRunner().invoke(app, [*arguments, "--out", str(out)], env={**TWO, "RANK": rank})
        assert found.exit_code == 2
        assert found.stdout == "" and len(found.stderr.splitlines()) == lines
        if lines:
            assert f"quantkit {arguments[0]} is the work of one process, and 2 were started" in (
                found.stderr
            )
    assert not out.exists()


@pytest.mark.kind(4, "stats", "calibrate", "sweep", "train")
@pytest.mark.parametrize("command", ["stats", "calibrate", "sweep", "train"])
def test_what_can_be_shared_is_not_refused(command: str) -> None:
    two = {**TWO, "RANK": "1"}
    require_shared(command, two)
    with pytest.raises(InputError, match=rf"Several processes share .*\b{command}\b"):
        require_shared("export", two)


@pytest.mark.kind(4, "export")
def test_one_process_of_a_launcher_is_enough_for_all() -> None:
    require_shared("export", {})
    require_shared("export", {**TWO, "WORLD_SIZE": "1", "RANK": "0"})
