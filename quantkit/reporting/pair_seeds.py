"""Several seeds of both arms: how far a difference between two models may be chance.

The arms of one seed share the rows and their order, so differences are taken within a seed. One is
shown where the 95 % interval of its mean over the seeds (Student's t) excludes 0. Seeds that agree
to the last digit show nothing: that is a figure that cannot move, or an accuracy on few items. And
as all seeds answer the same items, a gap in accuracy is shown for those items alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from quantkit.recipe import UNQUANTIZED_BITS
from quantkit.reporting.collect import Run
from quantkit.reporting.sweep_groups import Measured
from quantkit.reporting.sweep_rows import FLOAT
from quantkit.reporting.sweep_seeds import by_group
from quantkit.reporting.text import Table, number
from quantkit.reporting.training_groups import (
    BASELINE_ARM,
    LEAST_BITS,
    Grown,
    by_arm,
    figures,
    trainings,
)
from quantkit.results import Cell, Measurement, TrainedModel, TrainingResult
from quantkit.results.spread import deviation, mean

_T: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t at 97.5 %, for 1 to 30 degrees of freedom; the last one is safe for more."""
NOTE: Final = (
    "sd over seeds, with n - 1. The arms of one seed share the rows and their order: differences "
    "are within a seed, and their interval is Student's t at 95 %. shown = it excludes 0; each row "
    "by itself, without a correction for their number. for these items: all seeds answer the same "
    "ones, and others may give another gap. Differences without any spread show nothing."
)
_ROUNDING: Final = 1e-9
"""Relative: differences that are no further apart than this are equal."""


@dataclass(frozen=True, kw_only=True)
class Paired:
    """One figure over the seeds that both arms have: `ours` and `baseline`, in the same order."""

    words: str
    arm: str
    baseline: tuple[float, ...]
    ours: tuple[float, ...]
    is_accuracy: bool = False

    @property
    def differences(self) -> tuple[float, ...]:
        """Of each seed: the arm minus the baseline."""
        return tuple(a - b for a, b in zip(self.ours, self.baseline, strict=True))

    @property
    def mean(self) -> float:
        """Of the differences."""
        return mean(self.differences)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of `mean`."""
        half = (
            student_t(len(self.ours) - 1) * deviation(self.differences) / math.sqrt(len(self.ours))
        )
        return self.mean - half, self.mean + half

    @property
    def is_shown(self) -> bool:
        """Whether the interval excludes 0, and there is a spread that it is made of."""
        low, high = self.interval
        return self.has_spread and (low > 0 or high < 0)

    @property
    def has_spread(self) -> bool:
        """Whether the differences are apart by more than rounding."""
        largest = max(map(abs, (*self.ours, *self.baseline)))
        return deviation(self.differences) > _ROUNDING * largest

    @property
    def word(self) -> str:
        """What the seeds show."""
        if not self.is_shown:
            return "not shown"
        return "shown for these items" if self.is_accuracy else "shown"


def student_t(freedom: int) -> float:
    """Returns the two-sided 95 % quantile of Student's t."""
    return _T[min(freedom, len(_T)) - 1]


def seeded(run: Run) -> tuple[TrainingResult, ...]:
    """Returns the trainings that have two seeds or more of the baseline and of another arm."""
    return tuple(found.result for found in trainings(run) if paired(found.result))


def paired(result: TrainingResult) -> list[Paired]:
    """Returns every figure of every arm that has two seeds or more in common with the baseline.

    At the last step that all of them were measured at.
    """
    arms = by_arm(result)
    bases = {model.seed: model for model in arms.pop(BASELINE_ARM, [])}
    found = []
    for arm, models in arms.items():
        both = [(bases[model.seed], model) for model in models if model.seed in bases]
        ends = _at_the_end([model for two in both for model in two])
        if len(both) < 2 or not ends:
            continue
        for figure in figures(result):
            one = _paired(figure, arm, ends)
            if all(map(math.isfinite, (*one.ours, *one.baseline))):
                found.append(one)
    return found


def _paired(figure: Grown, arm: str, ends: Sequence[Measurement]) -> Paired:
    return Paired(
        words=figure.words,
        arm=arm,
        baseline=tuple(map(figure.of, ends[::2])),
        ours=tuple(map(figure.of, ends[1::2])),
        is_accuracy=figure.is_accuracy,
    )


def _at_the_end(models: Sequence[TrainedModel]) -> list[Measurement]:
    """Returns a measurement of each model, all of the last step that they share; else []."""
    by_step = [{found.step: found for found in model.measurements} for model in models]
    steps = set(by_step[0]).intersection(*by_step[1:]) if by_step else set()
    return [found[max(steps)] for found in by_step] if steps else []


def seed_tables(run: Run) -> tuple[Table, ...]:
    """Returns a table a training: both arms' mean and spread, and their paired difference."""
    tables = []
    for result in seeded(run):
        for arm in dict.fromkeys(one.arm for one in paired(result)):
            mine = [one for one in paired(result) if one.arm == arm]
            tables.append(
                Table(
                    title=f"{arm} against {BASELINE_ARM} over {len(mine[0].ours)} seeds: "
                    f"{result.name}",
                    columns=(
                        "figure", f"{BASELINE_ARM}: mean", "sd", f"{arm}: mean", "sd",
                        "difference", "sd", "95 % interval", "",
                    ),
                    rows=tuple(map(_row, mine)),
                    text_columns=1,
                    note=NOTE,
                )
            )  # fmt: skip
    return tuple(tables)


def _row(one: Paired) -> tuple[str, ...]:
    low, high = one.interval
    return (
        one.words,
        *(number(f(values)) for values in (one.baseline, one.ours) for f in (mean, deviation)),
        f"{one.mean:+.4g}",
        number(deviation(one.differences)),
        f"[{low:+.3g}, {high:+.3g}]",
        one.word,
    )


def swept_table(run: Run, *, fewest: bool) -> Table:
    """Returns what the seeds of each group reach in the first metric of each task, by recipe.

    `fewest`: of the float row and of the fewest bits down to 4 alone. The change from float is
    within each model, so that a seed's own level drops out.
    """
    rows = []
    for one in by_group(Run(sweeps=run.seed_sweeps)):
        if not one.is_first:
            continue
        widths = {cell.bits for cell in one.cells if cell.bits >= LEAST_BITS}
        shown = {UNQUANTIZED_BITS, min(widths, default=UNQUANTIZED_BITS)}
        recipes = dict.fromkeys(
            cell.recipe for cell in one.cells if cell.bits in shown or not fewest
        )
        rows += [
            _swept(one, cell)
            for recipe in recipes
            for cell in one.cells
            if cell.recipe == recipe and (cell.model, cell.recipe) in one.seeds
        ]
    return Table(
        title="Seeds in the sweep: value, and change from each model's own float row"
        + ("" if fewest else "; all recipes"),
        columns=("task", "recipe", "model", "seeds", "mean", "sd", "change", "sd"),
        rows=tuple(rows),
        text_columns=3,
        note="sd over seeds, with n - 1; the recipe none is float.",
    )


def _swept(one: Measured, cell: Cell) -> tuple[str, ...]:
    seeds = one.seeds[cell.model, cell.recipe]
    bases = {c.model: c.value for c in one.seeds.get((cell.model, FLOAT), ())}
    changes = [] if cell.recipe == FLOAT else _changes(seeds, bases)
    spread = one.spreads.get((cell.model, cell.recipe))
    return (
        one.words,
        cell.recipe,
        cell.group or cell.model,
        number(len(seeds)),
        f"{one.value(cell.value)} {one.chance_mark(cell)}".rstrip(),
        "" if spread is None else one.value(spread.sd),
        f"{mean(changes):+.4g}" if changes else "",
        number(deviation(changes)) if len(changes) > 1 else "",
    )


def _changes(seeds: Sequence[Cell], bases: dict[str, float]) -> list[float]:
    return [cell.value - bases[cell.model] for cell in seeds if cell.model in bases]
