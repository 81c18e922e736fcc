"""How a command runs its stage and shows what came of it. Talk: stderr; results: stdout."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from quantkit.cli.watch import watching
from quantkit.errors import GateError, QuantkitError
from quantkit.jobs import Job, default_out
from quantkit.processes import lone_launch, may_talk, require_shared


def run_job(
    command: str,
    job: Job,
    *,
    result: str | None,
    view: Callable[[Path], str],
    as_json: bool,
    quiet: bool,
) -> Path:
    """Runs `run_<command>` of the pipelines and shows its result; returns the folder it wrote.

    Where a gate failed after the work was done, the result is shown too.

    Args:
        result: Name of the result file, or None for all result files below the folder.
        view: Text for a person.
    """
    run: Callable[..., Path]
    require_shared(command)
    folder = default_out(command, job)
    is_first = may_talk()  # of several processes one talks
    quiet = quiet or not is_first
    if not quiet and (note := lone_launch()):
        typer.echo(note, err=True)
    # these bars would be drawn over ours, and nobody asked for their talk
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        with watching(quiet, f"loading {_subjects(job)}") as progress:
            run = getattr(importlib.import_module("quantkit.pipelines"), f"run_{command}")
            folder = run(job, progress=progress)
    except GateError:
        if (folder / result).is_file() if result else folder.is_dir():
            try:
                show(folder, result=result, view=view, as_json=as_json, quiet=quiet)
            except QuantkitError as error:  # the gate is the news; this only explains a blank
                typer.echo(f"note: nothing to show: {error}", err=True)
        raise
    if is_first:
        show(folder, result=result, view=view, as_json=as_json, quiet=quiet)
    return folder


def show(
    folder: Path, *, result: str | None, view: Callable[[Path], str], as_json: bool, quiet: bool
) -> None:
    """Prints the result: the file itself with --json, else a text, and where the folder is."""
    text = view(folder)
    if as_json:
        typer.echo(_json(folder, result), nl=False)
    elif text and not quiet:
        typer.echo(text, nl=False)
    if not quiet:
        typer.echo(f"done: {folder}", err=True)


def _subjects(job: Any) -> str:
    """Returns what a job loads, as the user named it."""
    named = getattr(job, "models", ()) or (getattr(job, "model", None) or job.from_run,)
    return ", ".join(named)


def _json(folder: Path, result: str | None) -> str:
    if result is not None:
        return (folder / result).read_text(encoding="utf-8")
    from quantkit.reporting.collect import FILE_NAMES

    found = sorted(path for name in FILE_NAMES for path in folder.rglob(name))
    files = {path.relative_to(folder).as_posix(): _parsed(path) for path in found}
    return json.dumps(files, indent=1, ensure_ascii=False) + "\n"


def _parsed(path: Path) -> Any:
    """Returns what a result file says; of JSON lines, a list."""
    text = path.read_text(encoding="utf-8")
    is_lines = path.suffix == ".jsonl"
    return [json.loads(line) for line in text.splitlines()] if is_lines else json.loads(text)
