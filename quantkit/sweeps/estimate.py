"""What a sweep would do, and about how long it would take: `--dry-run`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from quantkit.progress import Progress, silent
from quantkit.recipe import Recipe
from quantkit.results import PlannedCell
from quantkit.sweeps.run import (
    Subject,
    forward_of,
    identity_of,
    quantized,
    store_of,
)

_TRIES: Final = 2
"""The first run of a recipe loads what it needs; the faster of the two is taken."""


def planned(
    subject: Subject, recipes: Sequence[Recipe], *, store: Path, progress: Progress = silent
) -> list[PlannedCell]:
    """Returns the cells of one model, with the time that they would take here and now.

    Each recipe runs the task's smallest batch twice and the faster one is scaled by the tokens: an
    underestimate for long sequences, since attention grows faster than they do. Nothing is written.

    Raises:
        InputError: see `Subject.require`.
    """
    subject.require(recipes)
    cells = store_of(subject, store)
    forward = forward_of(subject.loaded)
    found: list[PlannedCell] = []
    for task in subject.tasks:
        smallest = min(range(len(task.batches)), key=lambda n: task.tokens[n])
        for recipe in recipes:
            name, own = str(recipe), identity_of(subject, task, recipe)
            finished = cells.read(name, task.name, **own) is not None
            seconds = 0.0
            if not finished:
                what = f"timing {subject.loaded.name}, {task.name}"
                progress(what, len(found), len(subject.tasks) * len(recipes))
                entering = time.perf_counter()
                with quantized(subject, recipe):
                    entered = time.perf_counter() - entering
                    took = []
                    for _ in range(_TRIES):
                        began = time.perf_counter()
                        task.run(forward, task.batches[smallest])
                        took.append(time.perf_counter() - began)
                seconds = entered + min(took) * sum(task.tokens) / task.tokens[smallest]
            found.append(
                PlannedCell(
                    model=subject.loaded.name,
                    recipe=name,
                    task=task.name,
                    items=len(task.item_hashes),
                    batches=len(task.batches),
                    tokens=sum(task.tokens),
                    finished=finished,
                    seconds=seconds,
                )
            )
    return found
