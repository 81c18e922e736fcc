"""The matched pair among the files of a run: a differential model, its baseline, their sweep."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from quantkit.recipe import UNQUANTIZED_BITS, LogitQuant, Recipe
from quantkit.reporting.collect import Run
from quantkit.reporting.sweep_groups import Measured, measured
from quantkit.reporting.sweep_rows import BitRow, bit_rows
from quantkit.results import Cell, Delta, ModelInfo, Stats, Sweep

MATCHED_FRAC: Final = 0.001
"""Parameters by which two models may differ and still be a matched pair."""
_NEEDLES: Final = "needles"


@dataclass(frozen=True, kw_only=True)
class Crossed:
    """The differential model at some bits against the baseline at more, as it is written.

    Attributes:
        metric: The words of task and metric.
        scale: What shares a scale of the logits.
        ours, theirs: Both values.
        word: What the comparison shows; of what may be guessing, that.
    """

    metric: str
    scale: str
    ours: str
    theirs: str
    word: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """Both models by name; `run` holds their statistics and their sweep, and nothing else."""

    baseline: str
    diff: str
    run: Run

    @property
    def models(self) -> tuple[str, str]:
        """The baseline, as in the paper's tables, then the differential model."""
        return self.baseline, self.diff

    @property
    def sweep(self) -> Sweep:
        """The sweep of both."""
        return self.run.sweeps[0].result

    @property
    def stats(self) -> tuple[Stats, Stats]:
        """The baseline's, then the other's."""
        first, second = (found.result for found in self.run.stats)
        return first, second

    @cached_property
    def parts(self) -> tuple[Measured, ...]:
        """Every task and metric."""
        return measured(self.run)

    @property
    def firsts(self) -> tuple[Measured, ...]:
        """Every task, by its first metric."""
        return tuple(one for one in self.parts if one.is_first)

    @cached_property
    def needles(self) -> dict[str, tuple[int, int]]:
        """Task -> (needles, queries), of the tasks that are retrieval."""
        found = {one.task: needles_of(one.task) for one in self.parts}
        return {task: key for task, key in found.items() if key is not None}

    def rows(self, one: Measured) -> list[BitRow]:
        """Returns the rows of logits that are quantized alone: the baseline's, then the other's."""
        rows = [row for row in bit_rows(one.cells) if row.rest == "float"]
        return [row for model in self.models for row in rows if row.model == model]

    def scales(self, one: Measured) -> list[str]:
        """Returns what shares a scale of the logits, in the order of the sweep."""
        return list(dict.fromkeys(row.scale for row in self.rows(one)))

    def against(self, one: Measured, bits: int, other_bits: int) -> dict[str, Delta]:
        """Returns scale -> the differential model at `bits` minus the baseline at `other_bits`.

        In the first metric of the task in which the two models were compared.
        """
        found: dict[str, Delta] = {}
        metrics = [part.metric for part in self.parts if part.task == one.task]
        own = [d for d in self.sweep.deltas if d.task == one.task]
        own = [d for d in own if (d.model, d.against_model) == (self.diff, self.baseline)]
        metric = next((name for name in metrics if any(d.metric == name for d in own)), None)
        for delta in own:
            grid, other = logits_alone(delta.recipe), logits_alone(delta.against)
            if delta.metric != metric or grid is None or other is None:
                continue
            if (grid.bits, other.bits) == (bits, other_bits):
                found[scale_words(grid)] = delta
        return found

    def crossed(self, delta: Delta) -> Crossed | None:
        """Returns what a difference of `against` shows; None where one of its cells is missing."""
        part = next(p for p in self.parts if (p.task, p.metric) == (delta.task, delta.metric))
        cells = {(cell.model, cell.recipe): cell for cell in part.cells}
        ours = cells.get((delta.model, delta.recipe))
        theirs = cells.get((delta.against_model, delta.against))
        grid = logits_alone(delta.recipe)
        if ours is None or theirs is None or grid is None:
            return None
        # a model that guesses in float has nothing to lose, whatever chance makes of its few bits
        floats = [cell for model in self.models if (cell := part.float_cell(model)) is not None]
        guesses = [mark for cell in (ours, theirs, *floats) if (mark := part.chance_mark(cell))]
        return Crossed(
            metric=part.words,
            scale=scale_words(grid),
            ours=part.value(ours.value),
            theirs=part.value(theirs.value),
            word=[*guesses, part.level_word(delta)][0],
        )


def pair_of(run: Run) -> Pair | None:
    """Returns the pair, or None where a run holds none, or more than one.

    That is: statistics of two models with as many layers and, within `MATCHED_FRAC`, as many
    parameters, one of which has two attention maps a head, and one sweep over these two.
    """
    if len(run.stats) != 2 or len(run.sweeps) != 1:
        return None
    ordered = sorted(run.stats, key=lambda found: found.result.model.maps)
    baseline, diff = (found.result.model for found in ordered)
    if baseline.maps != 1 or diff.maps < 2 or baseline.name == diff.name:
        return None
    if not _is_matched(baseline, diff):
        return None
    swept = {cell.model for cell in run.sweeps[0].result.cells}
    if swept != {baseline.name, diff.name}:
        return None
    alone = Run(stats=tuple(ordered), sweeps=run.sweeps)
    return Pair(baseline=baseline.name, diff=diff.name, run=alone)


def _is_matched(baseline: ModelInfo, diff: ModelInfo) -> bool:
    apart = abs(diff.parameters - baseline.parameters)
    return baseline.layers == diff.layers and apart <= MATCHED_FRAC * baseline.parameters


def needles_of(task: str) -> tuple[int, int] | None:
    """Returns (needles, queries) of a task by its name, or None of another task."""
    word, *options = task.split(":")
    if word != _NEEDLES:
        return None
    given = dict(option.partition("=")[::2] for option in options)
    try:
        return int(given.get("needles", 4)), int(given.get("queries", 2))
    except ValueError:
        return None


def logits_alone(recipe: str) -> LogitQuant | None:
    """Returns the grid of the logits where nothing else is quantized, else None."""
    parsed = Recipe.parse(recipe)
    return parsed.logits if parsed == Recipe(logits=parsed.logits) else None


def scale_words(grid: LogitQuant) -> str:
    """Returns what shares a scale, as rows of bits call it."""
    words: list[str] = [grid.granularity]
    words += ["static"] if grid.range == "static" else []
    return " ".join(words + ([] if grid.symmetric else ["asymmetric"]))


def fewest_level(one: Measured, row: BitRow) -> tuple[int | None, str]:
    """Returns the fewest bits that are level with float, and "" or why there are none.

    Down from the most bits, up to the first that is not: one that is level below it may be so by
    chance.
    """
    base = row.cells.get(UNQUANTIZED_BITS)
    if base is None:
        return None, "no float row"
    if one.chance_mark(base):
        return None, one.chance_mark(base)
    fewest = None
    for bits, cell in sorted(row.cells.items(), reverse=True):
        if bits == UNQUANTIZED_BITS:
            continue
        if not _is_level(one, cell):
            break
        fewest = bits
    return fewest, "" if fewest is not None else "none shown"


def _is_level(one: Measured, cell: Cell) -> bool:
    delta = one.deltas.get((cell.model, cell.recipe))
    return delta is not None and delta.is_level is True
