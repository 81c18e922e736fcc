"""What a sweep would do, and about how long it would take: `--dry-run`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from quantkit.progress import Progress, silent
from quantkit.recipe import Recipe
from quantkit.results import PlannedCell
from quantkit.sweeps.run import forward_of, identity_of, quantized, store_of
from quantkit.sweeps.subject import Subject
from quantkit.tasks import Task

_TRIES: Final = 2
"""The first run of a recipe loads what it needs; the faster of the two is taken."""


def planned(
    subject: Subject, recipes: Sequence[Recipe], *, store: Path, progress: Progress = silent
) -> list[PlannedCell]:
    """Returns the cells of one model, with the time that they would take here and now.

    The first task's smallest batch runs twice with each recipe, every other task's with the float
    model; the rest follows from the tokens. An underestimate where sequences are much longer than
    in those batches, since attention grows faster than they do. Nothing is written.

    Raises:
        InputError: see `Subject.require`.
    """
    subject.require(recipes)
    cells = store_of(subject, store)
    steps = len(recipes) + len(subject.tasks) - 1
    what = f"timing {subject.loaded.name}"
    entering: dict[Recipe, float] = {}
    per_token: dict[Recipe, float] = {}
    for done, recipe in enumerate(recipes):
        progress(what, done, steps)
        entering[recipe], per_token[recipe] = _timed(subject, subject.tasks[0], recipe)
    base = recipes[0]
    found: list[PlannedCell] = []
    for index, task in enumerate(subject.tasks):
        scale = 1.0
        if index:
            progress(what, len(recipes) + index - 1, steps)
            scale = _timed(subject, task, base)[1] / per_token[base]
        for recipe in recipes:
            name, own = str(recipe), identity_of(subject, task, recipe)
            finished = cells.read(name, task.name, **own) is not None
            seconds = entering[recipe] + per_token[recipe] * scale * sum(task.tokens)
            found.append(
                PlannedCell(
                    model=subject.loaded.name,
                    recipe=name,
                    task=task.name,
                    items=len(task.item_hashes),
                    batches=len(task.batches),
                    tokens=sum(task.tokens),
                    finished=finished,
                    seconds=0.0 if finished else seconds,
                )
            )
    progress(what, steps, steps)
    return found


def _timed(subject: Subject, task: Task[Any], recipe: Recipe) -> tuple[float, float]:
    """Returns the seconds that entering the recipe takes, and those of a token of the task."""
    forward = forward_of(subject.loaded)
    smallest = min(range(len(task.batches)), key=lambda n: task.tokens[n])
    began = time.perf_counter()
    with quantized(subject, recipe):
        entered = time.perf_counter() - began
        took = []
        for _ in range(_TRIES):
            began = time.perf_counter()
            task.run(forward, task.batches[smallest])
            took.append(time.perf_counter() - began)
    return entered, min(took) / task.tokens[smallest]
