"""One model through tasks x recipes: a cell each, written when it ends.

Time: one plain forward over each task's items, and up to about two for each quantized cell. Memory
as one forward, and one row of numbers an item. Of several processes each runs its share of the
batches; batches are the same for any number of them, so the rows are, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np

from quantkit.errors import ProbeError
from quantkit.models import LoadedModel
from quantkit.processes import Processes
from quantkit.progress import Progress, silent
from quantkit.quantization import FloatFeatures, fake_quantized
from quantkit.recipe import BitsAndBytes, Recipe
from quantkit.results import Fired
from quantkit.sweeps.cells import CellStore, Finished, digest
from quantkit.sweeps.subject import Subject
from quantkit.tasks import Rows, Scores, Task
from quantkit.tasks.forward import image_forward, text_forward

ALONE: Final = Processes()
FLOAT_FEATURES: Final = "float_features_frac"
"""Of `Cell.details`: inputs that LLM.int8 left in float, a mean over layers and sequences."""
_WEIGHT: Final = "weight/"


@dataclass(frozen=True, kw_only=True, eq=False)
class Share:
    """What one process has of a cell.

    Attributes:
        rows: By batch.
        fired, float_features: Of its own batches, as `Quantizers` has them.
    """

    rows: Mapping[int, Rows]
    fired: Mapping[str, Fired] = field(default_factory=dict)
    float_features: Mapping[str, FloatFeatures] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """One recipe and task of one model."""

    recipe: Recipe
    task: Task[Any]
    scores: Scores
    fired: Mapping[str, Fired]


def run_cells(
    subject: Subject,
    recipes: Sequence[Recipe],
    *,
    store: Path,
    processes: Processes = ALONE,
    progress: Progress = silent,
) -> list[Measured]:
    """Returns a cell for each task and recipe, in that order, the same in every process.

    Args:
        store: Folder for one file a finished cell; a cell that is there is not computed again.

    Raises:
        InputError: see `Subject.require`.
        ProbeError: a quantizer that never fired, or figures of an item that are not numbers.
    """
    subject.require(recipes)
    cells = store_of(subject, store)
    found: list[Measured] = []
    total = len(subject.tasks) * len(recipes)
    for task in subject.tasks:
        for recipe in recipes:
            name, own = str(recipe), identity_of(subject, task, recipe)
            what = f"{subject.loaded.name} {name}, {task.name} (cell {len(found) + 1} of {total})"
            kept = processes.at_first(partial(cells.read, name, task.name, **own))
            if kept is None:
                kept = _measured(subject, task, recipe, processes, what, progress)
                if processes.is_first:
                    cells.write(name, task.name, kept, **own)
            scores = task.scores(kept.rows)
            scores = replace(scores, details={**scores.details, **kept.details})
            found.append(Measured(recipe=recipe, task=task, scores=scores, fired=kept.fired))
    return found


def store_of(subject: Subject, folder: Path) -> CellStore:
    """Returns where the cells of a model lie."""
    identity = {"model_sha256": subject.loaded.sha256, "dtype": subject.loaded.info().dtype}
    return CellStore(folder=folder, model=subject.loaded.name, identity=identity)


def identity_of(subject: Subject, task: Task[Any], recipe: Recipe) -> dict[str, str]:
    """Returns what a cell depends on beside the model, its recipe and the task's name."""
    items = digest([list(task.item_hashes), [list(batch) for batch in task.batches]])
    read = "" if recipe.is_float else subject.digest
    return {"items_sha256": items, "data_sha256": task.data.sha256, "ranges_sha256": read}


def forward_of(loaded: LoadedModel) -> Callable[..., Any]:
    """Returns the model as the callable that tasks of its kind score."""
    return image_forward(loaded) if loaded.modality == "image" else text_forward(loaded)


def quantized(subject: Subject, recipe: Recipe) -> Any:
    """Returns the context in which the model computes on the recipe's grids."""
    ranges = subject.ranges
    return fake_quantized(
        subject.loaded.model,
        recipe,
        None if ranges is None else ranges.tensors,
        keep=subject.keep,
        smoothing=None if ranges is None or recipe.is_float else ranges.smoothing,
        weight_ranges=subject.weight_ranges,
    )


def _measured(
    subject: Subject,
    task: Task[Any],
    recipe: Recipe,
    processes: Processes,
    what: str,
    progress: Progress,
) -> Finished:
    """Returns a cell of all processes together, at every one of them."""
    mine = processes.everywhere(
        lambda: _own_share(subject, task, recipe, processes, what, progress)
    )
    parts = list(processes.gather(mine))
    return processes.at_first(lambda: _joined(task, recipe, what, parts))


def _own_share(
    subject: Subject,
    task: Task[Any],
    recipe: Recipe,
    processes: Processes,
    what: str,
    progress: Progress,
) -> Share:
    """Returns the rows of this process's batches, and what its quantizers did there."""
    batches = task.batches
    shares = [index for index in range(len(batches)) if processes.mine(index)]
    forward = forward_of(subject.loaded)
    rows: dict[int, Rows] = {}
    # a process without a batch must not enter: its quantizers would never fire
    with quantized(subject, recipe) if shares else nullcontext() as quantizers:
        for index in shares:
            progress(what, index, len(batches))
            rows[index] = task.run(forward, batches[index])
    progress(what, len(batches), len(batches))
    if quantizers is None:
        return Share(rows=rows)
    return Share(rows=rows, fired=quantizers.fired, float_features=quantizers.float_features)


def _joined(task: Task[Any], recipe: Recipe, what: str, parts: Sequence[Share]) -> Finished:
    """Returns the rows of all processes in the order of the items."""
    by_batch = {index: rows for part in parts for index, rows in part.rows.items()}
    width = next(iter(by_batch.values())).shape[1]
    whole = np.full((len(task.item_hashes), width), np.nan)
    for index, batch in enumerate(task.batches):
        whole[list(batch)] = by_batch[index]
    if not np.isfinite(whole).all():
        item = int(np.flatnonzero(~np.isfinite(whole).all(axis=1))[0])
        raise ProbeError(
            f"{what}: the figures of item {item} are not finite: the model computes NaN or "
            "infinities there."
        )
    frac = _float_features_frac([part.float_features for part in parts])
    return Finished(
        rows=whole,
        fired=_fired_together(recipe, [part.fired for part in parts]),
        details={} if frac is None else {FLOAT_FEATURES: frac},
    )


def _fired_together(recipe: Recipe, parts: Sequence[Mapping[str, Fired]]) -> dict[str, Fired]:
    """Returns the counts of all processes, added up; of weights that run once, those of one."""
    weights = recipe.weights
    every_call = isinstance(weights, BitsAndBytes) and weights.format == "llm-int8"
    fired: dict[str, Fired] = {}
    for part in parts:
        for name, more in part.items():
            known = fired.get(name)
            if known is None:
                fired[name] = more
            elif every_call or not name.startswith(_WEIGHT):
                hits, elements = known.hits + more.hits, known.elements + more.elements
                fired[name] = Fired(hits=hits, elements=elements)
    return fired


def _float_features_frac(parts: Sequence[Mapping[str, FloatFeatures]]) -> float | None:
    """Returns the share that stayed in float, the mean over modules; None without LLM.int8.

    Whole numbers are added up first, so that any number of processes gives the same figure.
    """
    fracs = []
    for name in dict.fromkeys(name for part in parts for name in part):
        seen = [part[name] for part in parts if name in part]
        sequences, kept = sum(one.sequences for one in seen), sum(one.kept for one in seen)
        if sequences:  # else an expert that no token was sent to
            fracs.append(kept / (seen[0].width * sequences))
    return fmean(fracs) if fracs else None
