"""What the Tab key offers, and the scripts that a shell reads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Invoke = Callable[..., tuple[int, str, str]]


def offered(words: str, folder: Path = ROOT) -> list[str]:
    """Returns what is offered for the last word, by the variables that the script sets."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
        "_QUANTKIT_COMPLETE": "complete_bash",
    }
    done = subprocess.run(
        [sys.executable, "-m", "quantkit"],
        capture_output=True, text=True, check=True, env=environment, cwd=folder,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        pytest.param("quantkit st", ["stats"], id="command"),
        pytest.param("quantkit calib m", ["make"], id="command of a group"),
        pytest.param("quantkit sweep a --gr", ["--granularity", "--grid"], id="option"),
        pytest.param("quantkit stats s", ["smollm2"], id="model"),
        pytest.param("quantkit compare baseline d", ["diff", "dinov2-small"], id="second model"),
        pytest.param("quantkit stats m --data do", ["docstrings"], id="set"),
        pytest.param("quantkit calib show re", ["retrieval"], id="set by name"),
        pytest.param("quantkit train p", ["pair"], id="recipe of training"),
        pytest.param("quantkit export m --quantize w8a8-", ["w8a8-dynamic"], id="recipe"),
        pytest.param("quantkit stats m --dtype b", ["bfloat16"], id="choice"),
        pytest.param("quantkit completion z", ["zsh"], id="shell"),
        pytest.param("quantkit stats ./", [], id="the shell's own files"),
    ],
)
def test_words_are_completed(words: str, found: list[str]) -> None:
    assert sorted(offered(words)) == found


def test_sets_of_the_working_directory_are_completed(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("Once upon a time. " * 400)
    assert invoke("calib", "make", "my-own", "--from", "t.txt")[0] == 0
    assert offered("quantkit calibrate m --calib my", tmp_path) == ["my-own"]


@pytest.mark.parametrize(
    ("shell", "said"),
    [
        ("bash", "complete -o default -F _quantkit_completion quantkit"),
        ("zsh", "compdef _quantkit_completion quantkit"),
        ("fish", "complete --command quantkit"),
        ("powershell", "Register-ArgumentCompleter -Native -CommandName quantkit"),
    ],
)
def test_scripts_ask_by_the_variable_that_is_read(shell: str, said: str, invoke: Invoke) -> None:
    code, out, err = invoke("completion", shell)
    assert (code, err) == (0, "")
    assert said in out
    assert "_QUANTKIT_COMPLETE" in out


def test_bash_completes(tmp_path: Path) -> None:
    """The script in a real bash, with a `quantkit` on the path as an installation puts it."""
    command = tmp_path / "quantkit"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m quantkit "$@"\n')
    command.chmod(0o755)
    program = (
        "source <(quantkit completion bash)\n"
        "COMP_WORDS=(quantkit stats smo) COMP_CWORD=2\n"
        "_quantkit_completion quantkit\n"
        'echo "${COMPREPLY[@]}"\n'
        "complete -p quantkit\n"
    )
    environment = os.environ | {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        ["bash", "--norc", "-c", program],
        capture_output=True, text=True, check=True, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.splitlines()[0] == "smollm2"
    assert "-F _quantkit_completion quantkit" in done.stdout
