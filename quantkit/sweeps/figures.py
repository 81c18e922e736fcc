"""Scores of tasks -> the cells, paired differences and spreads of a sweep. Loads no torch itself.

The margins are fixed here, before anything is measured:

* a share for which higher is better, such as an accuracy: 1 point, absolute;
* a perplexity, and whatever else is neither of the two: 1 % of the figure it is held against;
* a mean log-likelihood beside a perplexity, such as bits per byte: what 1 % of that perplexity is
  on its scale, so that the two agree. (1 % of the bits would be some 3 % of the perplexity.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Final

import numpy as np

from quantkit.errors import InputError
from quantkit.numerics.proportions import chance_p
from quantkit.numerics.resampling import (
    Values,
    interval,
    is_level,
    paired_interval,
    resampled,
)
from quantkit.recipe import UNQUANTIZED_BITS, LogitQuant, Recipe
from quantkit.results import Cell, Delta, Fired, SeedSpread
from quantkit.tasks import Metric, Scores

MARGIN_POINTS: Final = 0.01
"""Of an accuracy, absolute."""
MARGIN_FRAC: Final = 0.01
"""Of a perplexity, relative."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Figures:
    """One model, recipe and task, each metric resampled once for all that is derived from it.

    Attributes:
        group: What the seeds of one model are called together; the model's name where it is alone.
        task: Canonical name.
        items: `Task.item_hashes`.
        fired: What each quantizer did.
        values: A metric each, see `resampled`.
    """

    model: str
    group: str
    recipe: Recipe
    task: str
    items: tuple[str, ...]
    scores: Scores
    fired: Mapping[str, Fired]
    seed: int
    values: tuple[Values, ...]


def figures_of(
    *,
    model: str,
    group: str = "",
    recipe: Recipe,
    task: str,
    items: Sequence[str],
    scores: Scores,
    fired: Mapping[str, Fired],
    seed: int,
) -> Figures:
    """Returns the scores with their resamples.

    Time: two thousand draws of every unit and metric, some 2 s for 100,000 units.

    Raises:
        InputError: a metric that is not over the items, or none at all; one that is declared a
            share, and has an item of which it is none.
    """
    if not scores.metrics or not items:
        raise InputError(f"task {task} gave no figure: it has {len(items)} items.")
    for metric in scores.metrics:
        if not len(metric.total) == len(metric.weight) == len(items):
            raise InputError(
                f"task {task}: metric {metric.name} has {len(metric.total)} totals and "
                f"{len(metric.weight)} weights for {len(items)} items; expected one an item."
            )
        if metric.is_share:
            _require_share(metric, task)
    return Figures(
        model=model,
        group=group or model,
        recipe=recipe,
        task=task,
        items=tuple(items),
        scores=scores,
        fired=fired,
        seed=seed,
        values=tuple(resampled(metric, seed) for metric in scores.metrics),
    )


def cells_of(found: Figures) -> list[Cell]:
    """Returns a cell a metric; quantizers and details stand in the first one's."""
    logits = found.recipe.logits
    cells: list[Cell] = []
    for metric, values in zip(found.scores.metrics, found.values, strict=True):
        stderr, lo, hi = interval(metric, values)
        is_first = not cells
        cells.append(
            Cell(
                model=found.model,
                recipe=str(found.recipe),
                bits=UNQUANTIZED_BITS if logits is None else logits.bits,
                granularity=None if logits is None else logits.granularity,
                range=None if logits is None else logits.range,
                weights=found.recipe.weight_bits,
                activations=found.recipe.activation_bits,
                task=found.task,
                metric=metric.name,
                value=metric.value,
                stderr=stderr,
                ci_low=lo,
                ci_high=hi,
                n=len(metric.total),
                seed=found.seed,
                hits=sum(fired.hits for fired in found.fired.values()),
                group=found.group,
                chance=metric.chance,
                chance_p=_chance_p(metric),
                details=dict(found.scores.details) if is_first else {},
                quantizers=dict(found.fired) if is_first else {},
            )
        )
    return cells


def deltas_of(found: Sequence[Figures]) -> list[Delta]:
    """Returns each quantized row minus its model's float row, by task and metric.

    Raises:
        InputError: a model and task without a float row, or rows over other items than it.
    """
    floats = {(row.model, row.task): row for row in found if row.recipe.is_float}
    deltas = []
    for row in found:
        if row.recipe.is_float:
            continue
        base = floats.get((row.model, row.task))
        if base is None or base.items != row.items:
            wanted = "a float row" if base is None else "the float row's items"
            raise InputError(f"{row.model} {row.recipe}, task {row.task}: expected {wanted}.")
        for index in range(len(row.scores.metrics)):
            deltas.append(_delta(row, base, index, against_model=""))
    return deltas


def between(found: Sequence[Figures]) -> tuple[list[Delta], list[str]]:
    """Returns (differences between models, a sentence for each pair that cannot have one).

    Of two models of different groups, either way round since "level with" has a direction: every
    metric at the same recipe; and, where both are alone in their group, every width of the logits
    against every other (16 is the float row) in the first metric that the two can be compared in.
    Widths are paired with widths of the same granularity, range and grid. Only over the same items,
    and a perplexity only over the same tokens: each unit as many of them.
    """
    alone = {row.group: len({r.model for r in found if r.group == row.group}) == 1 for row in found}
    rows: dict[tuple[str, str], list[Figures]] = {}
    for row in found:
        rows.setdefault((row.task, row.model), []).append(row)
    deltas: list[Delta] = []
    notes: list[str] = []
    for task in dict.fromkeys(row.task for row in found):
        models = [model for known, model in rows if known == task]
        for first, second in permutations(models, 2):
            ours, theirs = rows[task, first], rows[task, second]
            if ours[0].group == theirs[0].group:
                continue
            metrics, note = _comparable(ours[0], theirs[0])
            if note and models.index(first) < models.index(second):
                notes.append(note)
            if metrics:
                are_alone = alone[ours[0].group] and alone[theirs[0].group]
                deltas += _crossed(ours, theirs, metrics, are_alone)
    return deltas, notes


def spreads_of(cells: Sequence[Cell]) -> list[SeedSpread]:
    """Returns how far the seeds of each group lie apart, in every cell that two or more have."""
    grouped: dict[tuple[str, str, str, str], list[Cell]] = {}
    for cell in cells:
        group = cell.group or cell.model
        grouped.setdefault((group, cell.recipe, cell.task, cell.metric), []).append(cell)
    return [SeedSpread.of(seeds) for seeds in grouped.values() if len(seeds) > 1]


def margin_of(scores: Scores, index: int) -> float:
    """Returns what a row may lose in a metric and still be level with one of these scores.

    In the metric's units; the rule is that of this file's first lines.
    """
    metric = scores.metrics[index]
    if metric.higher_is_better and metric.is_share:
        return MARGIN_POINTS
    if metric.link == "identity" and not metric.higher_is_better:
        beside = next((other for other in scores.metrics if other.link == "exp"), None)
        if beside is not None:
            nats = float(beside.total.sum() / beside.weight.sum())
            if nats > 0:
                return metric.value * math.log1p(MARGIN_FRAC) / nats
    return MARGIN_FRAC * abs(metric.value)


def logits_alone(recipe: Recipe) -> LogitQuant | None:
    """Returns the grid of the logits where nothing else is quantized, else None."""
    return recipe.logits if replace(recipe, logits=None).is_float else None


def _require_share(metric: Metric, task: str) -> None:
    is_between = (metric.total >= 0) & (metric.total <= metric.weight) & (metric.weight > 0)
    if metric.link != "identity" or not is_between.all():
        at = int(np.argmin(is_between))
        raise InputError(
            f"task {task}: metric {metric.name} is declared a share, and item {at} has "
            f"{metric.total[at]:g} of {metric.weight[at]:g}; expected 0 to a positive weight, and "
            "no exponential."
        )


def _chance_p(metric: Metric) -> float | None:
    if metric.chance is None or not (metric.trials or metric.successes is not None):
        return None
    counted = metric.total if metric.successes is None else metric.successes
    return chance_p(round(float(counted.sum())), len(counted), metric.chance)


def _comparable(a: Figures, b: Figures) -> tuple[list[int], str]:
    """Returns (metrics that the two can be compared in, why not in all)."""
    if a.items != b.items:
        note = f"{a.task}: {a.model} and {b.model} were not measured on the same items"
        if any(metric.link == "exp" for metric in a.scores.metrics):
            note += (
                ": blocks are cut by tokens, and another tokenizer cuts the text elsewhere. "
                "Documents that fit --seq-len (a folder or a .jsonl) compare in bits per byte"
            )
        return [], f"{note}."
    fits, other = [], []
    theirs = {metric.name: metric for metric in b.scores.metrics}
    for index, metric in enumerate(a.scores.metrics):
        same = theirs.get(metric.name)
        if same is None or (
            metric.link == "exp" and not np.array_equal(metric.weight, same.weight)
        ):
            other.append(metric.name)
        else:
            fits.append(index)
    if not other:
        return fits, ""
    return fits, (
        f"{a.task}: {', '.join(other)} of {a.model} and {b.model} cannot be compared, since they "
        "are over different tokens."
    )


def _crossed(
    ours: Sequence[Figures], theirs: Sequence[Figures], metrics: Sequence[int], are_alone: bool
) -> Iterator[Delta]:
    for row in ours:
        for other in theirs:
            if row.recipe == other.recipe:
                chosen = metrics
            elif are_alone and _on_one_axis(row.recipe, other.recipe):
                chosen = metrics[:1]
            else:
                continue
            for index in chosen:
                yield _delta(row, other, index, against_model=other.model)


def _on_one_axis(a: Recipe, b: Recipe) -> bool:
    """Returns whether the two differ in nothing but the width of the logits."""
    grid_a, grid_b = logits_alone(a), logits_alone(b)
    if grid_a is None or grid_b is None:
        return (a.is_float or grid_a is not None) and (b.is_float or grid_b is not None)
    return replace(grid_a, bits=grid_b.bits) == grid_b


def _delta(row: Figures, base: Figures, index: int, *, against_model: str) -> Delta:
    ours = row.scores.metrics[index]
    names = [metric.name for metric in base.scores.metrics]
    at = names.index(ours.name)
    theirs = base.scores.metrics[at]
    bounds = paired_interval(ours, theirs, row.values[index], base.values[at])
    margin = margin_of(base.scores, at)
    return Delta(
        model=row.model,
        recipe=str(row.recipe),
        against=str(base.recipe),
        task=row.task,
        metric=ours.name,
        value=ours.value - theirs.value,
        ci_low=bounds[0],
        ci_high=bounds[1],
        n=len(ours.total),
        against_model=against_model,
        margin=margin,
        is_level=is_level(
            ours, theirs, bounds, margin=margin, higher_is_better=ours.higher_is_better
        ),
    )
