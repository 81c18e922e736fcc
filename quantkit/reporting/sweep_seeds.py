"""Several seeds of one model as one row: their mean, and how far they are apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import NormalDist, fmean
from typing import Final

from quantkit.reporting.collect import Run
from quantkit.reporting.sweep_groups import Measured, measured, sweeps
from quantkit.results import AttentionMass, Cell, ChanceVerdict, Delta, SeedSpread

_Z: Final = NormalDist().inv_cdf(0.975)
"""Two-sided 95 % of a Gaussian, for the mean of several seeds."""
SEEDS_NOTE: Final = (
    "Of several seeds: mean, 95 % of one seed's sampling error (no interval of the mean) and sd. "
    "Changes are over seeds with both cells; paired intervals hold those of all, and marks are "
    "true of all."
)


def by_group(run: Run) -> tuple[Measured, ...]:
    """Returns every task and metric with one row for all seeds of a model."""
    return tuple(pooled(one) for one in measured(run))


def pooled(one: Measured) -> Measured:
    """Returns the same with the seeds of each group as one model; itself where there are none.

    `spreads` is then by the name of that model.
    """
    labels = _labels(one)
    if all(name == model for model, name in labels.items()):
        return one
    rows: dict[tuple[str, str], list[Cell]] = {}
    for cell in one.cells:
        rows.setdefault((labels[cell.model], cell.recipe), []).append(cell)
    several = {key: mine for key, mine in rows.items() if key[0] != mine[0].model}
    deltas: dict[tuple[str, str], Delta] = {}
    for (name, recipe), mine in rows.items():
        found = [one.deltas.get((cell.model, recipe)) for cell in mine]
        known = [delta for delta in found if delta is not None]
        if known and len(known) == len(mine):
            deltas[name, recipe] = _delta(name, known)
    return replace(
        one,
        cells=tuple(
            _cell(key[0], mine) if key in several else mine[0] for key, mine in rows.items()
        ),
        deltas=deltas,
        spreads={key: SeedSpread.of(mine) for key, mine in several.items() if len(mine) > 1},
        verdicts={key: _verdict(mine) for key, mine in several.items()},
        seeds={key: tuple(mine) for key, mine in several.items()},
        note=SEEDS_NOTE,
    )


def _labels(one: Measured) -> dict[str, str]:
    """Returns model -> what its row is called."""
    members: dict[str, set[str]] = {}
    for cell in one.cells:
        members.setdefault(cell.group or cell.model, set()).add(cell.model)
    return {
        model: model if len(models) < 2 else f"{group} ({len(models)} seeds)"
        for group, models in members.items()
        for model in models
    }


def _cell(name: str, cells: Sequence[Cell]) -> Cell:
    mean = fmean(cell.value for cell in cells)
    error = math.sqrt(fmean(cell.stderr**2 for cell in cells))
    chances = [cell.chance_p for cell in cells if cell.chance_p is not None]
    details = [key for key in cells[0].details if all(key in cell.details for cell in cells)]
    return replace(
        cells[0],
        model=name,
        value=mean,
        stderr=error,
        ci_low=mean - _Z * error,
        ci_high=mean + _Z * error,
        chance_p=min(chances) if len(chances) == len(cells) else None,
        details={key: fmean(cell.details[key] for cell in cells) for key in details},
    )


def _delta(name: str, deltas: Sequence[Delta]) -> Delta:
    levels = [delta.is_level for delta in deltas]
    return replace(
        deltas[0],
        model=name,
        value=fmean(delta.value for delta in deltas),
        ci_low=min(delta.ci_low for delta in deltas),
        ci_high=max(delta.ci_high for delta in deltas),
        margin=fmean(delta.margin for delta in deltas),
        is_level=None if None in levels else all(levels),
    )


def _verdict(cells: Sequence[Cell]) -> ChanceVerdict | None:
    """Returns what holds for every seed: one that is above chance, and the group is not at it."""
    found = {cell.chance_verdict for cell in cells}
    if None in found:
        return None
    if "above" in found:
        return "above"
    return "open" if "open" in found else "at"


def pooled_masses(run: Run) -> list[AttentionMass]:
    """Returns attention masses with the seeds of each group as one model: their means."""
    found: list[AttentionMass] = []
    for sweep in sweeps(run):
        groups = {cell.model: cell.group for cell in sweep.cells if cell.group}
        models = dict.fromkeys(mass.model for mass in sweep.attention_mass)
        members = [groups.get(model, model) for model in models]
        rows: dict[tuple[str, str, str, float], list[AttentionMass]] = {}
        for mass in sweep.attention_mass:
            group = groups.get(mass.model, mass.model)
            count = members.count(group)
            name = mass.model if count < 2 else f"{group} ({count} seeds)"
            rows.setdefault((name, mass.task, mass.kind, mass.depth_frac), []).append(mass)
        found += [_mass(key[0], masses) for key, masses in rows.items()]
    return found


def _mass(name: str, masses: Sequence[AttentionMass]) -> AttentionMass:
    def mean(part: Callable[[AttentionMass], float]) -> float:
        return fmean(map(part, masses))

    return replace(
        masses[0],
        model=name,
        answer=mean(lambda mass: mass.answer),
        needles=mean(lambda mass: mass.needles),
        noise=mean(lambda mass: mass.noise),
        first=mean(lambda mass: mass.first),
        question=mean(lambda mass: mass.question),
    )
