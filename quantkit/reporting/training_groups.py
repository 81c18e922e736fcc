"""The models of a `training.json` by arm, and what was measured of them on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from quantkit.errors import InputError
from quantkit.recipe import Recipe
from quantkit.reporting.collect import Found, Run
from quantkit.reporting.hues import hues
from quantkit.results import Measurement, TrainedModel, TrainingResult

BASELINE_ARM, DIFF_ARM = "baseline", "diff"
LEAST_BITS: Final = 4
"""What the growth of outliers is to cost: the paper's fewest bits."""


@dataclass(frozen=True, kw_only=True)
class Grown:
    """A figure of a measurement; `of` is NaN where the measurement has none."""

    words: str
    of: Callable[[Measurement], float]
    is_accuracy: bool = False
    is_log: bool = False


def trainings(run: Run) -> tuple[Found[TrainingResult], ...]:
    """Returns every training that has a model, those of `training-seeds.json` last."""
    found = (*run.trainings, *run.seed_trainings)
    return tuple(one for one in found if one.result.models)


def by_arm(result: TrainingResult) -> dict[str, list[TrainedModel]]:
    """Returns arm -> its models by seed, the baseline first."""
    order = sorted(result.models, key=lambda m: (m.arm != BASELINE_ARM, m.seed))
    arms: dict[str, list[TrainedModel]] = {}
    for model in order:
        arms.setdefault(model.arm, []).append(model)
    return arms


def arm_colours(run: Run) -> dict[str, int]:
    """Returns arm -> its hue; the models of the other files keep theirs."""
    arms = [arm for found in trainings(run) for arm in by_arm(found.result)]
    order = list(dict.fromkeys([*hues(run), *arms]))
    return {arm: order.index(arm) for arm in arms}


def last(model: TrainedModel) -> Measurement | None:
    """Returns the measurement of the last step that was measured."""
    return max(model.measurements, key=lambda m: m.step, default=None)


def spaced(model: TrainedModel, count: int) -> list[Measurement]:
    """Returns so many measurements, evenly over those that there are, from first to last.

    Where there are fewer, some stand more than once; none of a model that was not measured.
    """
    found = sorted(model.measurements, key=lambda measured: measured.step)
    return [found[i * (len(found) - 1) // (count - 1)] for i in range(count)] if found else []


def figures(result: TrainingResult) -> tuple[Grown, ...]:
    """Returns outliers, loss, what the fewest bits of each granularity add to it, accuracies.

    Of the accuracies first those in float, then those at the same fewest bits.
    """
    seen = [m for model in result.models for m in model.measurements]
    recipes = dict.fromkeys(recipe for m in seen for recipe in m.quantized_loss)
    tasks = dict.fromkeys(task for m in seen for task in m.accuracies)
    return (
        Grown(words="max |logit|", of=lambda m: m.abs_max_logit, is_log=True),
        Grown(words="max |hidden state|", of=lambda m: m.abs_max_hidden, is_log=True),
        Grown(words="kurtosis of hidden states", of=lambda m: m.kurtosis, is_log=True),
        Grown(words="held-out loss", of=lambda m: m.loss),
        *(_added(bits, scale, recipe) for bits, scale, recipe in _fewest(recipes)),
        *(_accuracy(task) for task in tasks),
        *_quantized(seen),
    )


def _added(bits: int, scale: str, recipe: str) -> Grown:
    def of(measured: Measurement) -> float:
        return measured.quantized_loss.get(recipe, math.nan) - measured.loss

    return Grown(words=f"loss added by {bits}-bit logits, per {scale}", of=of)


def _accuracy(task: str) -> Grown:
    def of(measured: Measurement) -> float:
        return measured.accuracies.get(task, math.nan)

    return Grown(words=f"{task} accuracy", of=of, is_accuracy=True)


def _quantized(seen: Iterable[Measurement]) -> Iterator[Grown]:
    """Yields the accuracies with quantized logits, whose keys are `TASK RECIPE`."""
    tasks: dict[str, dict[str, None]] = {}
    for key in dict.fromkeys(key for m in seen for key in m.quantized_accuracies):
        task, _, recipe = key.rpartition(" ")
        tasks.setdefault(task, {})[recipe] = None
    for task, recipes in tasks.items():
        for bits, scale, recipe in _fewest(recipes):
            yield Grown(
                words=f"{task} accuracy at {bits}-bit logits, per {scale}",
                of=partial(_quantized_accuracy, f"{task} {recipe}"),
                is_accuracy=True,
            )


def _quantized_accuracy(key: str, measured: Measurement) -> float:
    return measured.quantized_accuracies.get(key, math.nan)


def _fewest(recipes: dict[str, None]) -> Iterator[tuple[int, str, str]]:
    """Yields (bits, granularity, recipe) of the bits that are nearest to the paper's fewest."""
    grids: dict[str, dict[int, str]] = {}
    for name in recipes:
        try:
            logits = Recipe.parse(name).logits
        except InputError:
            continue
        if logits is not None:
            scale = logits.granularity + (" (static)" if logits.range == "static" else "")
            grids.setdefault(scale, {})[logits.bits] = name
    for scale, widths in grids.items():
        bits = min(widths, key=lambda width: (abs(width - LEAST_BITS), width))
        yield bits, scale, widths[bits]


def millions(count: int) -> str:
    """Returns e.g. `3.70 M`."""
    return f"{count / 1e6:,.2f} M"
