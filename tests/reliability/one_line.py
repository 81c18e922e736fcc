"""The command line in this process: what a refusal and a success look like, whatever the cause."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quantkit.cli import app


def refused(*arguments: object) -> str:
    """Returns the one line on stderr; exit code 2, nothing on stdout, no traceback."""
    code, out, err = _invoke(*arguments)
    assert (code, out) == (2, ""), (code, out, err)
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n"), err
    return err


def ran(*arguments: object) -> None:
    """Returns where the command was done and had nothing to say; it is given `--quiet`."""
    assert _invoke(*arguments) == (0, "", "")


def _invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(word) for word in arguments], prog_name="quantkit")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps transformers off the network and the terminal."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")


@contextlib.contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """The kernel refuses to write behind `size` bytes of any file, as it does on a full disk.

    It works for any user on any disk. Python ignores the signal that comes with it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the files below a folder, hidden ones too."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
