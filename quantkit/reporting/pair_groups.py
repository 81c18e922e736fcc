"""The matched pair among the files of a run: a differential model, its baseline, their sweep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from quantkit.recipe import UNQUANTIZED_BITS, LogitQuant, Recipe
from quantkit.reporting.collect import Run
from quantkit.reporting.sweep_groups import Measured, measured
from quantkit.reporting.sweep_rows import BitRow, bit_rows
from quantkit.results import Cell, Delta, Stats, Sweep


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


def pair_of(run: Run) -> Pair | None:
    """Returns the pair, or None where a run holds none, or more than one.

    That is: statistics of two models, one of which has two attention maps a head, and one sweep
    over these two.
    """
    if len(run.stats) != 2 or len(run.sweeps) != 1:
        return None
    ordered = sorted(run.stats, key=lambda found: found.result.model.maps)
    baseline, diff = (found.result.model for found in ordered)
    if baseline.maps != 1 or diff.maps < 2 or baseline.name == diff.name:
        return None
    swept = {cell.model for cell in run.sweeps[0].result.cells}
    if swept != {baseline.name, diff.name}:
        return None
    alone = Run(stats=tuple(ordered), sweeps=run.sweeps)
    return Pair(baseline=baseline.name, diff=diff.name, run=alone)


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


def above_chance(one: Measured, models: Iterable[str]) -> bool:
    """Returns whether each model's float row is there, and not what guessing may reach."""
    cells = [one.float_cell(model) for model in models]
    return all(cell is not None and not one.chance_mark(cell) for cell in cells)
