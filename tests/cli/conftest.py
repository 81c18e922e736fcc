"""The command line in process, and a stand-in for the pipelines that it calls."""

from __future__ import annotations

import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quantkit.cli import app
from quantkit.jobs import CompareJob, SweepJob
from quantkit.progress import Progress

V1 = Path(__file__).parent.parent / "results" / "fixtures" / "v1"
COMMANDS = (
    "stats", "calibrate", "sensitivity", "sweep", "export", "diagnose", "compare", "train",
)  # fmt: skip


class Pipelines(types.ModuleType):
    """Stands in for `quantkit.pipelines`: copies kept results, remembers the job."""

    def __init__(self, folder: Path) -> None:
        super().__init__("quantkit.pipelines")
        self.folder = folder
        self.job: Any = None
        self.error: BaseException | None = None
        for name in COMMANDS:
            setattr(self, f"run_{name}", self.run)

    def last(self) -> object:
        return self.job

    def plan_sweep(self, job: object, *, progress: Progress) -> None:
        self.job = job
        raise KeyboardInterrupt  # a plan needs models

    def run(self, job: object, *, progress: Progress) -> Path:
        self.job = job
        out = Path(getattr(job, "out", None) or self.folder)
        for step in range(3):
            progress("loading the model", step, 2)
        source = V1 if isinstance(job, SweepJob | CompareJob) else V1 / "base"
        shutil.copytree(source, out, dirs_exist_ok=True)
        if self.error is not None:
            raise self.error
        return out


@pytest.fixture
def pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pipelines:
    module = Pipelines(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "quantkit.pipelines", module)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    return module


@pytest.fixture
def invoke() -> Callable[..., tuple[int, str, str]]:
    """Runs a command line in this process; returns its exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, list(arguments), prog_name="quantkit")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr

    return run
