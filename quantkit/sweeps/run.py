"""One model through tasks x recipes: a cell each, written when it ends.

Time: one plain forward over each task's items, and up to about two for each quantized cell. Memory
as one forward, and one row of numbers an item. Of several processes each runs its share of the
batches; batches are the same for any number of them, so the rows are, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from quantkit.calibration import WeightRanges
from quantkit.errors import ProbeError
from quantkit.models import LoadedModel
from quantkit.processes import Processes
from quantkit.progress import Progress, silent
from quantkit.quantization import fake_quantized, require_ranges
from quantkit.recipe import Recipe
from quantkit.results import Fired, Ranges
from quantkit.sweeps.cells import CellStore, Finished, digest
from quantkit.sweeps.forward import image_forward, text_forward
from quantkit.tasks import Rows, Scores, Task

ALONE: Final = Processes()
ONCE: Final = "weight/"
"""Quantizers that run on entering, in every process: their counts are not added up."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A model with what its quantized rows read.

    Attributes:
        group: What the seeds of one model are called together.
        tasks: Its items: two models with one tokenizer have the same.
        ranges: For static grids; their smoothing is applied to every quantized row.
        weight_ranges: Those that `ranges.weights` describes.
        keep: Quantizers that stay in float in every row.
    """

    loaded: LoadedModel
    group: str
    tasks: Sequence[Task[Any]]
    ranges: Ranges | None = None
    weight_ranges: WeightRanges | None = None
    keep: Collection[str] = ()

    @property
    def digest(self) -> str:
        """The hash of what a quantized cell reads beside model and items; empty for nothing."""
        return digest_of(self.ranges, self.keep)

    def require(self, recipes: Sequence[Recipe]) -> None:
        """Returns if every recipe can run.

        Raises:
            InputError: ranges that were chosen for another width than a recipe has, or are missing;
                an unknown name in `keep`.
        """
        tensors = {} if self.ranges is None else self.ranges.tensors
        for recipe in recipes:
            require_ranges(self.loaded.model, recipe, tensors, keep=self.keep)
            if self.weight_ranges is not None and recipe.weight_bits is not None:
                self.weight_ranges.require_width(recipe.weight_bits)


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
    return processes.at_first(lambda: _joined(task, what, parts))


def _own_share(
    subject: Subject,
    task: Task[Any],
    recipe: Recipe,
    processes: Processes,
    what: str,
    progress: Progress,
) -> tuple[dict[int, Rows], dict[str, Fired]]:
    """Returns the rows of this process's batches, by batch, and what its quantizers did."""
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
    return rows, dict(quantizers.fired) if quantizers is not None else {}


def _joined(
    task: Task[Any], what: str, parts: Sequence[tuple[dict[int, Rows], dict[str, Fired]]]
) -> Finished:
    """Returns the rows of all processes in the order of the items."""
    by_batch = {index: rows for mine, _ in parts for index, rows in mine.items()}
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
    fired: dict[str, Fired] = {}
    for _, theirs in parts:
        for name, more in theirs.items():
            known = fired.get(name)
            if known is None or name.startswith(ONCE):
                fired[name] = more
            else:
                hits, elements = known.hits + more.hits, known.elements + more.elements
                fired[name] = Fired(hits=hits, elements=elements)
    return Finished(rows=whole, fired=fired)


def digest_of(ranges: Ranges | None, keep: Collection[str] = ()) -> str:
    """Returns the hash of what a quantized cell reads beside model and text; empty for nothing."""
    if ranges is None and not keep:
        return ""
    read: list[Any] = [sorted(keep)]
    if ranges is not None:
        read += [ranges.tensors, ranges.smoothing, ranges.weights and ranges.weights.sha256]
    return digest(read)


def ranges_digest(digests: Sequence[str]) -> str:
    """Returns one hash for all models: that of one where they are the same."""
    different = sorted(set(digests))
    return different[0] if len(different) == 1 else digest(different)
