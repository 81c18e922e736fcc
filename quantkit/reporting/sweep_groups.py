"""The cells of sweeps by task and metric, and how a metric is written.

Accuracies are shares: `0.470`, their interval `[0.41, 0.53]`, a change `-0.020` (two points). What
is better when it is lower (perplexity, bits per byte) has four digits, and changes in percent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Final

from quantkit.reporting.collect import Run
from quantkit.reporting.sweep_rows import FLOAT
from quantkit.reporting.text import NOT_AVAILABLE, number, relative
from quantkit.results import Cell, ChanceVerdict, Delta, SeedSpread, Sweep, TaskInfo

LEVEL_MARK, CHANCE_MARK, OPEN_MARK = "=", "chance", "chance?"
CHANCE_NOTE: Final = (
    f"{CHANCE_MARK} = guessing does as well (p > 5 %), and the interval ends within 10 points "
    "above chance."
)
OPEN_NOTE: Final = (
    f"{OPEN_MARK} = not shown to be above chance: guessing does as well (p > 5 %), and the "
    "interval is too wide to say more."
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """One metric of one task, over all models and recipes.

    Attributes:
        unit: What is resampled, in the plural; "" in files that did not say.
        is_share: True for accuracies, whose differences are points.
        is_first: Whether it is the task's first metric, which pictures and the terminal show.
        deltas: (model, recipe) -> its paired difference from the float row.
        spreads: (group, recipe) -> how far seeds are apart.
        verdicts: (group, recipe) -> the chance verdict that holds for every seed, where a model of
            the cells stands for several.
        seeds: (group, recipe) -> the cells of each seed, where a model stands for several.
        note: What a reader of the cells has to know.
    """

    task: str
    metric: str
    unit: str
    higher_is_better: bool
    is_share: bool
    is_first: bool
    cells: tuple[Cell, ...]
    deltas: dict[tuple[str, str], Delta] = field(default_factory=dict)
    spreads: dict[tuple[str, str], SeedSpread] = field(default_factory=dict)
    verdicts: dict[tuple[str, str], ChanceVerdict | None] = field(default_factory=dict)
    seeds: dict[tuple[str, str], tuple[Cell, ...]] = field(default_factory=dict)
    note: str = ""

    @property
    def is_pooled(self) -> bool:
        """True where a model of the cells stands for several seeds."""
        return any((cell.model, cell.recipe) in self.spreads for cell in self.cells)

    @property
    def words(self) -> str:
        """Task and metric, once where they are one word."""
        return self.task if self.metric == self.task else f"{self.task} {self.metric}"

    @property
    def is_logarithmic(self) -> bool:
        """True for perplexities, which grow by factors."""
        return not self.higher_is_better and "perplexity" in self.metric

    @property
    def count(self) -> str:
        """What n counts and how many there are, where all cells agree: `n = 64 blocks`."""
        counts = {cell.n for cell in self.cells}
        many = len(counts) > 1
        said = f"n = {min(counts):,}" + (f" to {max(counts):,}" if many else "")
        return f"{said} {self.unit}".rstrip()

    def value(self, value: float) -> str:
        """Returns a figure as all tables show it."""
        if math.isnan(value) or not self.is_share:
            return number(value)
        return f"{value:.3f}"

    def span(self, low: float, high: float) -> str:
        """Returns the interval of a figure in brackets."""
        if math.isnan(low) or math.isnan(high):
            return f"[{NOT_AVAILABLE}]"
        if self.is_share:
            return f"[{low:.2f}, {high:.2f}]"
        return f"[{number(low)}, {number(high)}]"

    def reach(self, cell: Cell) -> str:
        """Returns the interval of a cell in brackets; of several seeds, one's sampling error.

        The latter is no interval of the mean that it stands beside, so it is said in words.
        """
        if (cell.model, cell.recipe) not in self.seeds:
            return self.span(cell.ci_low, cell.ci_high)
        half = cell.ci_high - cell.value
        if math.isnan(half):
            return f"sampling {NOT_AVAILABLE}"
        return f"sampling ±{f'{half:.3f}' if self.is_share else number(half, 3)}"

    def text(self, cell: Cell) -> str:
        """Returns value and `reach` of a cell."""
        comma = "," if (cell.model, cell.recipe) in self.seeds else ""
        return f"{self.value(cell.value)}{comma} {self.reach(cell)}"

    def scatter(self, cell: Cell) -> str:
        """Returns the standard deviation of the seeds behind a cell, or ""."""
        seeds = self.spreads.get((cell.model, cell.recipe))
        return "" if seeds is None else f"sd {self.value(seeds.sd)}"

    def pair(self, cell: Cell, base: Cell) -> tuple[float, float]:
        """Returns both values; of several seeds, the means over those that have both cells.

        NaN where no seed has both.
        """
        mine = self.seeds.get((cell.model, cell.recipe), (cell,))
        bases = self.seeds.get((base.model, base.recipe), (base,))
        starts = {one.model: one.value for one in bases}
        both = [(one.value, starts[one.model]) for one in mine if one.model in starts]
        if not both:
            return math.nan, math.nan
        return fmean(value for value, _ in both), fmean(start for _, start in both)

    def change(self, difference: float, base: float) -> str:
        """Returns a difference from `base`: of shares in their own units, else in percent of it."""
        if not (math.isfinite(difference) and math.isfinite(base)):
            return NOT_AVAILABLE
        if self.is_share:
            return f"{difference:+.3f}"
        if not self.higher_is_better:
            return relative(base + difference, base)
        return f"{difference:+.4g}"

    def changes(self, low: float, high: float, base: float) -> str:
        """Returns the interval of a difference in brackets."""
        return f"[{self.change(low, base)}, {self.change(high, base)}]"

    def level_word(self, delta: Delta) -> str:
        """Returns `better` (all of the interval is a gain), `level`, `not shown` or `n/a`."""
        if delta.is_level is None:
            return NOT_AVAILABLE
        is_gain = delta.ci_low > 0 if self.higher_is_better else delta.ci_high < 0
        return ("better" if is_gain else "level") if delta.is_level else "not shown"

    def float_cell(self, model: str) -> Cell | None:
        """Returns the model's float row."""
        return self._by_recipe.get((model, FLOAT))

    @cached_property
    def _by_recipe(self) -> dict[tuple[str, str], Cell]:
        return {(cell.model, cell.recipe): cell for cell in self.cells}

    def mark(self, cell: Cell) -> str:
        """Returns `chance_mark`, `=` for level with float, or "".

        A row that is level with a float row that may guess has shown nothing, and is not marked.
        """
        chance = self.chance_mark(cell)
        if chance:
            return chance
        base = self.float_cell(cell.model)
        delta = self.deltas.get((cell.model, cell.recipe))
        is_level = delta is not None and delta.is_level is True
        return LEVEL_MARK if is_level and not (base is not None and self.chance_mark(base)) else ""

    def chance_mark(self, cell: Cell) -> str:
        """Returns `chance`, `chance?` where the items are too few to say so, or ""."""
        verdict = self.verdicts.get((cell.model, cell.recipe), cell.chance_verdict)
        return {"at": CHANCE_MARK, "open": OPEN_MARK}.get(verdict or "", "")

    @property
    def marks_note(self) -> str:
        """What the marks mean that are there."""
        marks = {self.mark(cell) for cell in self.cells}
        notes = (
            (LEVEL_MARK, self._level_note), (CHANCE_MARK, CHANCE_NOTE), (OPEN_MARK, OPEN_NOTE)
        )  # fmt: skip
        return " ".join(note for mark, note in notes if mark in marks)

    @property
    def notes(self) -> str:
        """What stands below a table: n, the marks, and `note`."""
        parts = (f"{self.count}.", self.marks_note, self.note)
        return " ".join(part for part in parts if part)

    @property
    def _level_note(self) -> str:
        texts = {self.margin(delta) for delta in self.deltas.values()} - {""}
        margins = sorted(texts, key=lambda text: float(text.split()[0]))
        words = " to ".join(dict.fromkeys([*margins[:1], *margins[-1:]])) or "the margin"
        return (
            f"{LEVEL_MARK} is level with float: the paired 95 % interval rules out a loss of more "
            f"than {words}."
        )

    def margin(self, delta: Delta) -> str:
        """Returns what may be lost: points of accuracy, else percent of the reference."""
        reference = delta.against_model or delta.model
        base = self._by_recipe.get((reference, delta.against))
        if math.isnan(delta.margin):
            return ""
        if self.is_share:
            points = _round(100 * delta.margin)
            return f"{points} point" + ("" if points == "1" else "s")
        if base is None or not base.value > 0:
            return _round(delta.margin)
        return f"{_round(100 * delta.margin / base.value)} %"


def _round(value: float) -> str:
    return f"{value:.3g}"


def sweeps(run: Run) -> tuple[Sweep, ...]:
    """Returns all sweeps; what two files call the same and is not bears its file's place.

    That is a model that they measured differently, and a group of other members: seeds are of one
    file. A group's models get the place together, but for those that no file had before.
    """
    seen: dict[tuple[str, ...], Cell] = {}
    members: dict[str, set[str]] = {}
    found = []
    for one in run.sweeps:
        result = one.result
        mine = _members(result)
        differing = {cell.model for cell in result.cells if seen.get(_key(cell), cell) != cell}
        again = {group for group, models in mine.items()
                 if models & differing or members.get(group, models) != models}  # fmt: skip
        if again:
            known = {model for models in members.values() for model in models}
            moved = {model for group in again for model in mine[group]} & known
            ending = f" [{one.place}]"
            result = _renamed(
                result,
                {model: f"{model}{ending}" for model in moved},
                {group: f"{group}{ending}" for group in again},
            )
        seen |= {_key(cell): cell for cell in result.cells}
        for group, models in _members(result).items():
            members.setdefault(group, models)
        found.append(result)
    return tuple(found)


def _members(sweep: Sweep) -> dict[str, set[str]]:
    """Returns group -> its models."""
    found: dict[str, set[str]] = {}
    for cell in sweep.cells:
        found.setdefault(cell.group or cell.model, set()).add(cell.model)
    return found


def _key(cell: Cell) -> tuple[str, ...]:
    return cell.model, cell.recipe, cell.task, cell.metric


def _renamed(sweep: Sweep, models: dict[str, str], groups: dict[str, str]) -> Sweep:
    def name(old: str) -> str:
        return models.get(old, old)

    return replace(
        sweep,
        cells=[
            replace(c, model=name(c.model), group=groups.get(c.group, c.group)) for c in sweep.cells
        ],
        deltas=[
            replace(d, model=name(d.model), against_model=name(d.against_model))
            for d in sweep.deltas
        ],
        spreads=[
            replace(s, group=groups.get(s.group, s.group), models=[name(m) for m in s.models])
            for s in sweep.spreads
        ],
        attention_mass=[replace(m, model=name(m.model)) for m in sweep.attention_mass],
    )


def hue_names(run: Run) -> dict[str, str]:
    """Returns model -> what has its colour in pictures: its group, where that has several."""
    cells = [cell for sweep in sweeps(run) for cell in sweep.cells]
    members: dict[str, set[str]] = {}
    for cell in cells:
        members.setdefault(cell.group, set()).add(cell.model)
    return {c.model: c.group if c.group and len(members[c.group]) > 1 else c.model for c in cells}


def measured(run: Run) -> tuple[Measured, ...]:
    """Returns every task and metric, in the order of the files; a task's first metric leads."""
    found = sweeps(run)
    cells = list(dict((_key(c), c) for sweep in found for c in sweep.cells).values())
    tasks: dict[str, TaskInfo] = {}
    for sweep in found:
        for task in sweep.tasks:
            tasks.setdefault(task.name, task)
    names = list(dict.fromkeys([*tasks, *(cell.task for cell in cells)]))
    parts = []
    for name in names:
        mine = [cell for cell in cells if cell.task == name]
        info = tasks.get(name)
        listed = info.metrics if info else []
        metrics = list(dict.fromkeys([*listed, *(cell.metric for cell in mine)]))
        there = [metric for metric in metrics if any(c.metric == metric for c in mine)]
        for i, metric in enumerate(there):
            better = info.higher_is_better.get(metric) if info else None
            if better is None:
                better = "perplexity" not in metric and metric != "bits_per_byte"
            shares = info.shares if info else None
            own = tuple(cell for cell in mine if cell.metric == metric)
            parts.append(
                Measured(
                    task=name,
                    metric=metric,
                    unit=info.unit if info else "",
                    higher_is_better=better,
                    is_share=_looks_a_share(own, better) if shares is None else metric in shares,
                    is_first=i == 0,
                    cells=own,
                    deltas={
                        (d.model, d.recipe): d
                        for sweep in found
                        for d in sweep.deltas
                        if (d.task, d.metric, d.against) == (name, metric, FLOAT)
                        and d.against_model in ("", d.model)
                    },
                    spreads={
                        (s.group, s.recipe): s
                        for sweep in found
                        for s in sweep.spreads
                        if (s.task, s.metric) == (name, metric) and len(s.models) > 1
                    },
                )
            )
    return tuple(parts)


def _looks_a_share(cells: Iterable[Cell], higher_is_better: bool) -> bool:
    """Guesses from the values whether a metric is an accuracy, for files that do not say."""
    known = [cell.value for cell in cells if not math.isnan(cell.value)]
    return higher_is_better and all(0 <= value <= 1 for value in known)
