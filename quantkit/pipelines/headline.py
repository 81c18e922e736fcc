"""The sentences that a sweep says, derived from its numbers and never typed.

The first metric of each task speaks; the first task leads. Of each task, in this order:

1. who is at chance, or not shown to be above it: of such a model nothing else is said there;
2. models against the first one, both ways round; seeds of one model against the first model's,
   by their means and spread, without a claim that two groups are level: a few seeds prove none;
3. of the first task, and of a single model in every task, the fewest logit bits that are level with
   the model's own float row, and what other recipes cost.

"Level with" is `Delta.is_level`: non-inferior within the margin, at 95 %, with enough units; each
row by itself, without a correction for the number of rows that were tried.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from quantkit.numerics.resampling import LEAST_UNITS
from quantkit.recipe import UNQUANTIZED_BITS, LogitQuant, Recipe
from quantkit.results import Cell, Delta, SeedSpread, TaskInfo
from quantkit.sweeps.figures import logits_alone

LEAST_ITEMS: Final = 381
"""Items of an accuracy from which Tango's interval ends within 1 point where none differs."""


def headline(
    cells: Sequence[Cell],
    deltas: Sequence[Delta],
    *,
    tasks: Sequence[TaskInfo],
    spreads: Sequence[SeedSpread] = (),
) -> str:
    """Returns what the sweep found, in a few sentences; empty where there is no cell."""
    said: list[str] = []
    several = len({cell.model for cell in cells}) > 1
    for task in tasks:
        own = [cell for cell in cells if cell.task == task.name]
        found = _Found(
            task=task,
            metric=task.metrics[0],
            cells=[cell for cell in own if cell.metric == task.metrics[0]],
            values={(cell.model, cell.recipe, cell.metric): cell.value for cell in own},
            deltas=[delta for delta in deltas if delta.task == task.name],
            spreads=[spread for spread in spreads if spread.task == task.name],
        )
        said += [chance_sentence(cell) for cell in found.floats if cell.may_guess]
        said += _pairs(found)
        if task is tasks[0] or not several:
            said += _models(found)
    return " ".join(said)


def chance_sentence(cell: Cell) -> str:
    """Returns e.g. `needles: m is at chance (0.020, chance 0.25, p = 0.9, n = 50).`

    Of a cell that may guess. Where too few items say no more, it `is not shown to be above chance`.
    """
    at = "" if cell.recipe == "none" else f" with {cell.recipe}"
    verb = "is at" if cell.chance_verdict == "at" else "is not shown to be above"
    # where a question is asked in several orders, value and p are not of the same outcomes
    value, test = (" over all orders", " in the first") if "order_sd" in cell.details else ("", "")
    return (
        f"{cell.task}: {cell.model}{at} {verb} chance ({_figure(cell.value)}{value}, chance "
        f"{cell.chance:.3g}, p = {cell.chance_p:.2g}{test}, n = {cell.n})."
    )


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What there is of one task; `cells` of its first metric, `values` and `deltas` of all.

    `values` by model, recipe and metric.
    """

    task: TaskInfo
    metric: str
    cells: list[Cell]
    values: dict[tuple[str, str, str], float]
    deltas: list[Delta]
    spreads: list[SeedSpread]

    @property
    def floats(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.recipe == "none"]

    @property
    def groups(self) -> dict[str, list[Cell]]:
        """Float rows by group, without groups of which every seed may be guessing."""
        groups: dict[str, list[Cell]] = {}
        for cell in self.floats:
            groups.setdefault(cell.group or cell.model, []).append(cell)
        return {
            name: rows for name, rows in groups.items() if not all(row.may_guess for row in rows)
        }

    @property
    def is_share(self) -> bool:
        """Whether differences of the first metric are points."""
        return self.metric in (self.task.shares or ())

    def what(self, metric: str = "") -> str:
        """Returns the name of a metric, the first by default, with the task's."""
        metric = metric or self.metric
        return metric if metric == self.task.name else f"{metric} of {self.task.name}"

    def own_deltas(self, model: str) -> list[Delta]:
        """Against the model's float row."""
        return [
            delta
            for delta in self.deltas
            if delta.model == model and not delta.against_model and delta.metric == self.metric
        ]


def _models(found: _Found) -> Iterator[str]:
    """Yields what quantization costs each model, seeds of one taken together."""
    for name, seeds in found.groups.items():
        if len(seeds) == 1:
            yield from _one_model(found, seeds[0])
        else:
            yield from _group_levels(found, name, seeds)


def _one_model(found: _Found, base: Cell) -> Iterator[str]:
    rows = {c.recipe: c for c in found.cells if c.model == base.model and c.recipe != "none"}
    quantized = {name: cell for name, cell in rows.items() if _grid(name) is not None}
    others = [
        f"{name} {_figure(cell.value)} ({_change(found, cell, base)})"
        for name, cell in rows.items()
        if name not in quantized
    ]
    if others:
        yield (f"{base.model}: {found.what()} {_figure(base.value)} in float, {', '.join(others)}.")
    if not quantized:
        if not others:
            yield (
                f"{base.model}: float {found.what()} {_figure(base.value)}; no quantized logits "
                "were tried."
            )
        return
    own = [delta for delta in found.own_deltas(base.model) if delta.recipe in quantized]
    level = [quantized[delta.recipe] for delta in own if delta.is_level]
    within = _within(found, own[0].margin, base.value) if own else "the margin"
    if not level:
        yield f"{base.model}: {_none_level(found, own, within, base)}{_seen(own)}."
        return
    best = min(level, key=lambda cell: (cell.bits, _loss(found, found.metric, cell.value)))
    yield (
        f"{base.model}: attention logits at {_width(best.recipe)} keep the {found.what()} within "
        f"{within} of float ({_figure(best.value)} against {_figure(base.value)}, n = {best.n} "
        f"{found.task.unit})."
    )


def _none_level(found: _Found, own: Sequence[Delta], within: str, base: Cell) -> str:
    """Returns that nothing is shown, which with few units says nothing about the bits."""
    float_row = f"within {within} of the float {found.what()} {_figure(base.value)} at 95 %"
    needed = LEAST_ITEMS if found.metric in (found.task.shares or ()) else LEAST_UNITS
    if base.n < needed:
        return (
            f"n = {base.n} {found.task.unit} are too few to show that a width of the attention "
            f"logits stays {float_row} ({needed} are needed, or more)"
        )
    return f"no tried width of the attention logits is shown to stay {float_row}"


def _seen(own: Sequence[Delta]) -> str:
    """Returns the difference of the most bits, of the scale that came nearest."""
    if not own:
        return ""
    most = max(_bits(delta.recipe) for delta in own)
    rows = [delta for delta in own if _bits(delta.recipe) == most]
    best = min(rows, key=lambda delta: abs(delta.value))
    return f"; {_width(best.recipe)} differ by {_with_interval(best)} (n = {best.n})"


def _group_levels(found: _Found, group: str, seeds: Sequence[Cell]) -> Iterator[str]:
    """Yields the fewest logit bits that are level with float in every seed."""
    own = [delta for seed in seeds for delta in found.own_deltas(seed.model)]
    own = [delta for delta in own if _grid(delta.recipe) is not None]
    if not own:
        return
    level = Counter(delta.recipe for delta in own if delta.is_level)
    every = [recipe for recipe, count in level.items() if count == len(seeds)]
    within = _within(found, own[0].margin, seeds[0].value)
    who = f"{group} ({len(seeds)} seeds)"
    if not every:
        least = f", {LEAST_UNITS} are needed" if seeds[0].n < LEAST_UNITS else ""
        yield (
            f"{who}: no tried width of the attention logits is shown to keep every seed's "
            f"{found.what()} within {within} of its float row at 95 % (n = {seeds[0].n} "
            f"{found.task.unit} each{least})."
        )
        return
    best = min(every, key=_bits)
    yield (
        f"{who}: attention logits at {_width(best)} keep every seed's {found.what()} within "
        f"{within} of its float row (n = {seeds[0].n} {found.task.unit} each)."
    )


def _pairs(found: _Found) -> Iterator[str]:
    """Yields what holds between the first model that can do the task and each other one."""
    groups = found.groups
    names = list(groups)
    for name in names[1:]:
        first, second = groups[names[0]], groups[name]
        if len(first) == 1 and len(second) == 1:
            yield _two_models(found, first[0], second[0])
        else:
            yield _two_groups(found, names[0], name)


def _two_models(found: _Found, a: Cell, b: Cell) -> str:
    across = [d for d in found.deltas if {d.model, d.against_model} == {a.model, b.model}]
    if not across:
        return (
            f"{a.model} and {b.model}: {found.what()} {_figure(a.value)} and {_figure(b.value)} in "
            "float, which cannot be compared: they are over other items or tokens."
        )
    metric = next(name for name in found.task.metrics if any(d.metric == name for d in across))
    # Of a row that only guesses, being level with it says nothing.
    hopeless = {(c.model, c.recipe) for c in found.cells if c.may_guess}
    across = [
        delta
        for delta in across
        if delta.metric == metric
        and _grid_or_float(delta.recipe)
        and _grid_or_float(delta.against)
        and (delta.model, delta.recipe) not in hopeless
        and (delta.against_model, delta.against) not in hopeless
    ]
    said = [
        _level_sentence(found, delta)
        for model in (a.model, b.model)
        for delta in _strongest([d for d in across if d.model == model], found)
    ]
    if said:
        return " ".join(said)
    seen = [d for d in across if d.model == a.model and d.recipe == d.against]
    by_bits = {_bits(d.recipe): d for d in reversed(seen)}
    chosen = [by_bits[bits] for bits in sorted(by_bits)]
    shown = [chosen[-1], *chosen[:-1][:1]] if chosen else []
    parts = [
        f"at {_width(d.recipe)} {a.model} minus {b.model} is {_with_interval(d)}" for d in shown
    ]
    tail = f": {'; '.join(parts)} (n = {shown[0].n} {found.task.unit})" if parts else ""
    return (
        f"{a.model} and {b.model}: neither is shown to be level with the other in "
        f"{found.what(metric)}{tail}."
    )


def _strongest(deltas: Sequence[Delta], found: _Found) -> list[Delta]:
    """Returns what no other true statement implies: fewer bits against more, each way round.

    Widths that the other model had less of say nothing for this one; equal ones only where there
    is no saving, and then the most bits.
    """
    level = [d for d in deltas if d.is_level and _bits(d.recipe) <= _bits(d.against)]
    kept: list[Delta] = []
    level.sort(key=lambda d: (_bits(d.recipe), -_bits(d.against), _loss(found, d.metric, d.value)))
    for delta in level:
        if not kept or _bits(delta.against) > _bits(kept[-1].against):
            kept.append(delta)
    savings = [delta for delta in kept if _bits(delta.recipe) < _bits(delta.against)]
    return savings or kept[-1:]


def _level_sentence(found: _Found, delta: Delta) -> str:
    better = delta.ci_low > 0 if found.task.higher_is_better[delta.metric] else delta.ci_high < 0
    verb = "better than" if better else "level with"
    ours = found.values[delta.model, delta.recipe, delta.metric]
    theirs = found.values[delta.against_model, delta.against, delta.metric]
    return (
        f"{delta.model} at {_width(delta.recipe)} is {verb} {delta.against_model} at "
        f"{_width(delta.against)} in {found.what(delta.metric)} ({_figure(ours)} "
        f"against {_figure(theirs)}, difference {_with_interval(delta)}, margin "
        f"{_figure(delta.margin)}, n = {delta.n} {found.task.unit})."
    )


def _two_groups(found: _Found, first: str, second: str) -> str:
    """Says the means at 16 bits and at the fewest that both groups have."""
    names = {c.recipe for c in found.cells if (c.group or c.model) == first}
    names &= {c.recipe for c in found.cells if (c.group or c.model) == second}
    widths = sorted((name for name in names if _grid_or_float(name)), key=lambda n: (_bits(n), n))
    chosen = [name for name in dict.fromkeys(["none", *widths[:1]]) if name in names]
    parts = [
        f"at {_width(name)} {_mean(found, first, name)} against {_mean(found, second, name)}"
        for name in chosen
    ]
    return f"{first} and {second} in {found.what()}: {'; '.join(parts)}."


def _mean(found: _Found, group: str, recipe: str) -> str:
    for spread in found.spreads:
        if (spread.group, spread.recipe, spread.metric) == (group, recipe, found.metric):
            return (
                f"{_figure(spread.mean)} ({len(spread.models)} seeds, sd {_figure(spread.sd)}, "
                f"sampling error {_figure(spread.sampling_stderr)})"
            )
    cell = next(c for c in found.cells if (c.group or c.model) == group and c.recipe == recipe)
    return f"{_figure(cell.value)} (one seed, sampling error {_figure(cell.stderr)})"


def _grid(recipe: str) -> LogitQuant | None:
    return logits_alone(Recipe.parse(recipe))


def _grid_or_float(recipe: str) -> bool:
    return recipe == "none" or _grid(recipe) is not None


def _bits(recipe: str) -> int:
    grid = _grid(recipe)
    return UNQUANTIZED_BITS if grid is None else grid.bits


def _width(recipe: str) -> str:
    """Returns e.g. `6 bits per row`, `8 bits per head (static, asymmetric)`, `16 bits`."""
    grid = _grid(recipe)
    if grid is None:
        return f"{UNQUANTIZED_BITS} bits"
    options = ["static"] if grid.range == "static" else []
    options += [] if grid.symmetric else ["asymmetric"]
    return f"{grid.bits} bits per {grid.granularity}" + (
        f" ({', '.join(options)})" if options else ""
    )


def _loss(found: _Found, metric: str, value: float) -> float:
    """Returns what grows as the metric gets worse."""
    return -value if found.task.higher_is_better[metric] else value


def _within(found: _Found, margin: float, base: float) -> str:
    if found.is_share:
        return f"{100 * margin:.3g} point"
    return f"{100 * margin / abs(base):.3g} %" if base else _figure(margin)


def _change(found: _Found, cell: Cell, base: Cell) -> str:
    change = cell.value - base.value
    if found.is_share:
        return f"{100 * change:+.1f} points"
    return f"{100 * change / abs(base.value):+.1f} %" if base.value else _signed(change)


def _figure(value: float) -> str:
    """Three decimals for what is near a share, two above."""
    return f"{value:.2f}" if abs(value) >= 2 else f"{value:.3f}"


def _with_interval(delta: Delta) -> str:
    if math.isnan(delta.ci_low):
        return f"{_signed(delta.value)} (no interval from n = {delta.n})"
    return f"{_signed(delta.value)} [{_signed(delta.ci_low)}, {_signed(delta.ci_high)}]"


def _signed(value: float) -> str:
    return f"{value:+.2f}" if abs(value) >= 2 else f"{value:+.3f}"
