"""What was measured -> `sweep.json`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from quantkit.pipelines.headline import chance_sentence, headline
from quantkit.progress import Progress
from quantkit.results import AttentionMass, Sweep, TaskInfo
from quantkit.results.environment import environment
from quantkit.sweeps import Measured, Subject, ranges_digest
from quantkit.sweeps.figures import Figures, between, cells_of, deltas_of, figures_of, spreads_of
from quantkit.tasks import Task


def sweep_of(
    subjects: Sequence[Subject],
    measured: Sequence[Sequence[Measured]],
    *,
    seed: int,
    progress: Progress,
) -> Sweep:
    """Returns the whole result: cells, differences, spreads, where each model attends.

    Args:
        measured: The cells of each subject.
        seed: Of the bootstrap.
    """
    found = [
        _figures(subject, one, seed)
        for subject, cells in zip(subjects, measured, strict=True)
        for one in cells
    ]
    cells = [cell for figures in found for cell in cells_of(figures)]
    across, notes = between(found)
    deltas = [*deltas_of(found), *across]
    spreads = spreads_of(cells)
    tasks = [_task_info(task, subjects[0], measured[0]) for task in subjects[0].tasks]
    first = {task.name: task.metrics[0] for task in tasks}
    guessed = [
        chance_sentence(cell)
        for cell in cells
        if cell.recipe != "none" and cell.metric == first[cell.task] and cell.may_guess
    ]
    return Sweep(
        models=[subject.loaded.info() for subject in subjects],
        data=tasks[0].data,
        environment=environment(),
        cells=cells,
        deltas=deltas,
        headline=headline(cells, deltas, tasks=tasks, spreads=spreads),
        ranges_sha256=ranges_digest([subject.digest for subject in subjects]),
        kept=list(subjects[0].keep),
        tasks=tasks,
        spreads=spreads,
        attention_mass=[mass for one in subjects for mass in _attention(one, progress)],
        notes=[*dict.fromkeys([*_warnings(subjects), *notes, *guessed])],
    )


def _warnings(subjects: Sequence[Subject]) -> list[str]:
    """Returns what no other field says: of other models' items, and of groups of weights."""
    found = [
        f"{subject.loaded.name}, {task}: {warning}"
        for subject in subjects[1:]
        for task, data in subject.data.items()
        for warning in data.warnings
    ]
    for subject in subjects:
        ranges = subject.weight_ranges
        if ranges is not None and ranges.group_size is not None:
            found.append(
                f"{subject.loaded.name}: weights have the calibration's ranges, one for each group "
                f"of {ranges.group_size}, also where the recipe names no group."
            )
    return found


def _figures(subject: Subject, one: Measured, seed: int) -> Figures:
    return figures_of(
        model=subject.loaded.name,
        group=subject.group,
        recipe=one.recipe,
        task=one.task.name,
        items=one.task.item_hashes,
        scores=one.scores,
        fired=one.fired,
        seed=seed,
    )


def _task_info(task: Task[Any], subject: Subject, cells: Sequence[Measured]) -> TaskInfo:
    metrics = next(one.scores.metrics for one in cells if one.task is task)
    return TaskInfo(
        name=task.name,
        metrics=[metric.name for metric in metrics],
        unit=task.unit,
        higher_is_better={metric.name: metric.higher_is_better for metric in metrics},
        items=len(task.item_hashes),
        data=subject.data.get(task.name, task.data),
        sha256=hashlib.sha256("".join(task.item_hashes).encode()).hexdigest(),
        shares=[metric.name for metric in metrics if metric.is_share],
    )


def _attention(subject: Subject, progress: Progress) -> list[AttentionMass]:
    """Returns where the float model looks, in the tasks that ask for it."""
    found: list[AttentionMass] = []
    for task in subject.tasks:
        attention = getattr(task, "attention", None)
        if attention is not None:
            progress(f"{subject.loaded.name}, {task.name}: where it attends", 0, 1)
            found += attention(subject.loaded.model, subject.loaded.name)
    return found
