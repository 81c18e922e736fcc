"""What a person sees while a command works: a bar on a terminal, lines elsewhere; on stderr."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import typer

from quantkit.progress import Progress, silent

if TYPE_CHECKING:
    from rich.progress import Task

_WAIT_S: Final = 2.0
"""Between two lines of one work."""
_FIRST_S: Final = 6.0
"""Until a line says what comes first; importing torch takes two to four of them."""
_BARS: Final = 4
"""That are seen at a time: the one that moves and those before it."""


@contextmanager
def watching(quiet: bool, first: str) -> Iterator[Progress]:
    """Yields a progress callback: a bar on a terminal, else lines.

    Args:
        first: What is being done until somebody tells.
    """
    if quiet:
        yield silent
    elif sys.stderr.isatty():
        with bars() as progress:
            progress(first, 0, 1)
            yield progress
    else:
        with lines(first) as progress:
            yield progress


def work_of(what: str) -> str:
    """Returns the work that is told of: what stands behind a colon, such as a loss, changes."""
    return what.partition(": ")[0]


@contextmanager
def lines(
    first: str, *, clock: Callable[[], float] = time.monotonic, first_s: float = _FIRST_S
) -> Iterator[Progress]:
    """Yields a callback that prints a line a step, but not more often than every two seconds.

    The first and the last step of a work are always told, and so is what stands behind its colon
    when it changes. What is done before anybody tells is
    told where it takes that long: a mistyped word is answered by its error alone.
    """
    lock = threading.Lock()
    last, line, held, told_s = "", "", "", 0.0

    def say(text: str) -> None:
        nonlocal line, held, told_s
        if text != line:
            typer.echo(text, err=True)
        line, held, told_s = text, "", clock()

    def tell(what: str, done: int, total: int) -> None:
        nonlocal last, held
        waiting.cancel()
        with lock:
            is_new = what != last
            if held and work_of(what) != work_of(last):
                say(held)
            last = what
            held = f"{what} ({done}/{total})" if total > 1 else what
            if is_new or (done >= total and total > 1) or clock() - told_s >= _WAIT_S:
                say(held)

    def tell_first() -> None:
        with lock:
            if not last:
                say(first)

    waiting = threading.Timer(first_s, tell_first)
    waiting.daemon = True
    waiting.start()
    try:
        yield tell
    finally:
        waiting.cancel()
        with lock:
            if held:
                say(held)


@contextmanager
def bars() -> Iterator[Progress]:
    """Yields a callback that moves a bar: what is done now, steps, rate, time gone, time left."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, ProgressColumn, TaskID, TextColumn
    from rich.progress import Progress as Bars
    from rich.table import Column
    from rich.text import Text

    class Figures(ProgressColumn):
        """Steps, rate and times: what is known of them."""

        def render(self, task: Task) -> Text:
            return Text(figures(task), style="cyan")

    # what is being done gives way first where the terminal is narrow
    words = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True))
    columns = (words, BarColumn(bar_width=24), Figures(table_column=Column(no_wrap=True)))
    with Bars(*columns, console=Console(stderr=True), expand=True) as drawn:
        tasks: dict[str, TaskID] = {}

        def begin(work: str, what: str) -> None:
            for old in drawn.tasks:
                if old.total is None:  # what had no steps is over when something else begins
                    drawn.update(old.id, total=1, completed=1)
            for old in drawn.tasks[: 1 - _BARS]:
                drawn.update(old.id, visible=False)
            tasks[work] = drawn.add_task(escape(what), total=None)

        def tell(what: str, done: int, total: int) -> None:
            work = work_of(what)
            if work not in tasks:
                begin(work, what)
            known: Any = total if total > 1 or done >= total else None
            drawn.update(tasks[work], completed=done, total=known, description=escape(what))

        yield tell


def figures(task: Task) -> str:
    """Returns e.g. `3/16  1.5 s/step  0:04 gone  0:20 left` for what is known of a task."""
    parts = []
    if task.total is not None and task.total > 1:
        parts.append(f"{task.completed:g}/{task.total:g}")
        speed = task.finished_speed or task.speed
        if speed:
            parts.append(f"{speed:.1f} steps/s" if speed >= 1 else f"{1 / speed:.1f} s/step")
    gone = task.finished_time if task.finished else task.elapsed
    if gone is not None:
        parts.append(f"{_clock(gone)} gone")
    if not task.finished and task.time_remaining is not None:
        parts.append(f"{_clock(task.time_remaining)} left")
    return "  ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
