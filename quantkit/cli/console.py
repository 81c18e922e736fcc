"""What a person sees while a command runs and when it is done. Talk: stderr; results: stdout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from quantkit.errors import GateError, QuantkitError
from quantkit.processes import lone_launch, may_talk
from quantkit.progress import Progress, silent


@contextmanager
def watching(quiet: bool) -> Iterator[Progress]:
    """Yields a progress callback: a bar on a terminal, else a line for each kind of work."""
    if quiet:
        yield silent
    elif sys.stderr.isatty():
        with _bar() as progress:
            yield progress
    else:
        yield _lines()


def _lines() -> Progress:
    last = ""

    def tell(what: str, _done: int, total: int) -> None:
        nonlocal last
        if what != last:
            last = what
            steps = f" ({total} steps)" if total > 1 else ""
            typer.echo(f"{what}{steps}", err=True)

    return tell


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def tell(what: str, done: int, total: int) -> None:
            # what stands behind a colon changes on the way, such as a loss: it is the same bar
            work = what.partition(": ")[0]
            if work not in tasks:
                tasks[work] = bars.add_task(escape(what), total=total)
            bars.update(tasks[work], completed=done, total=total, description=escape(what))

        yield tell


def run_stage(
    stage: Callable[[Progress], Path],
    *,
    folder: Path,
    result: str | None,
    view: Callable[[Path], str],
    as_json: bool,
    quiet: bool,
) -> Path:
    """Runs one stage and shows its result; returns the folder it wrote.

    Args:
        stage: The one function that the command calls.
        folder: Where the stage writes: shown also where a gate failed after the work was done.
        result: Name of the result file, or None for all result files below the folder.
        view: Text for a person.
    """
    is_first = may_talk()  # of several processes one talks
    quiet = quiet or not is_first
    if not quiet and (note := lone_launch()):
        typer.echo(note, err=True)
    # these bars would be drawn over ours, and nobody asked for their talk
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        with watching(quiet) as progress:
            folder = stage(progress)
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


def _json(folder: Path, result: str | None) -> str:
    if result is not None:
        return (folder / result).read_text(encoding="utf-8")
    from quantkit.reporting.collect import FILE_NAMES

    found = sorted(path for name in FILE_NAMES for path in folder.rglob(name))
    texts = {p.relative_to(folder).as_posix(): json.loads(p.read_text("utf-8")) for p in found}
    return json.dumps(texts, indent=1, ensure_ascii=False) + "\n"
