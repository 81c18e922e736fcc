"""The pictures of a sweep: what each bit of the attention logits costs, and other recipes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from quantkit.recipe import LOGIT_GRANULARITIES
from quantkit.reporting.charts import Line, Value, line_chart
from quantkit.reporting.collect import Run
from quantkit.reporting.dot_charts import Dot, dot_chart
from quantkit.reporting.drawing import Chart, slug
from quantkit.reporting.hues import hues
from quantkit.reporting.sweep_groups import CHANCE_MARK, LEVEL_MARK, OPEN_MARK, Measured
from quantkit.reporting.sweep_rows import FLOAT, BitRow, bit_rows, other_cells
from quantkit.reporting.sweep_seeds import by_group
from quantkit.reporting.sweep_tables import widths
from quantkit.reporting.text import clipped
from quantkit.results import Cell

_LOOKS: Final = (
    *((style, False) for style in range(len(LOGIT_GRANULARITIES))),
    (0, True), (1, True), (2, True), (3, False), (3, True),
)  # fmt: skip
"""(dash and marker, hollow marker): first the granularities, then other grids."""
_DODGE: Final = 0.07  # of the space of a width, so that whiskers stand side by side
_MARKERS: Final = 4
_METRIC: Final = 16  # characters that the axis has room for


def sweep_charts(run: Run, *, with_bits: bool = True) -> tuple[Chart, ...]:
    """Returns a picture of the first metric against the bits for every task.

    One more for each recipe of other parts that logits were quantized beside; without `with_bits`
    those alone.
    """
    return tuple(chart for (_, rest), chart in named_charts(run) if with_bits or rest)


def named_charts(run: Run) -> tuple[tuple[tuple[str, str], Chart], ...]:
    """Returns the pictures with (task, other parts of the recipe, "" for none)."""
    colours = hues(run)
    found = []
    for one in by_group(run):
        rows = bit_rows(one.cells) if one.is_first else []
        for rest in dict.fromkeys(row.rest for row in rows):
            mine = [row for row in rows if row.rest == rest]
            if len(widths(mine)) > 1:
                beside = "" if rest == "float" else rest
                found.append(((one.task, beside), _bits(one, mine, beside, colours)))
    return tuple(found)


def _bits(one: Measured, rows: Sequence[BitRow], beside: str, colours: list[str]) -> Chart:
    bits = widths(rows)
    scales = list(dict.fromkeys(row.scale for row in rows))
    known: list[str] = list(LOGIT_GRANULARITIES)
    known += [scale for scale in scales if scale not in known]
    dodge = min(_DODGE, 0.7 / len(rows))
    lines = []
    for i, row in enumerate(rows):
        style, hollow = _LOOKS[known.index(row.scale) % len(_LOOKS)]
        values = []
        for width, cell in sorted(row.cells.items(), reverse=True):
            seeds = one.spreads.get((cell.model, cell.recipe))
            values.append(
                Value(
                    x=bits.index(width) + (i - (len(rows) - 1) / 2) * dodge,
                    y=cell.value,
                    low=cell.ci_low,
                    high=cell.ci_high,
                    least=math.nan if seeds is None else seeds.low,
                    most=math.nan if seeds is None else seeds.high,
                    title=f"{row.model}, {row.scale}, {width} bits: {_words(one, cell)}",
                )
            )
        lines.append(
            Line(
                name=f"{row.model}, {row.scale}",
                colour=colours.index(_hue(one, row.cells.values())),
                style=style,
                values=tuple(values),
                hollow=hollow,
            )
        )
    return line_chart(
        name=f"sweep-{slug(one.task)}{f'-{slug(beside)}' if beside else ''}",
        title=f"{one.words} against bits of the attention logits"
        + (f" ({beside} beside)" if beside else ""),
        x_label="bits (16 = not quantized)",
        y_label=f"{axis_words(one)}{' (log)' if one.is_logarithmic else ''}",
        x_names=tuple(str(width) for width in bits),
        lines=lines,
        log=one.is_logarithmic,
        rules=_chances(row.cells[width] for row in rows for width in row.cells),
        note=_note(one),
    )


def recipe_charts(run: Run) -> tuple[Chart, ...]:
    """Returns a dot chart of the other recipes for every task that has two or more."""
    return tuple(chart for _, chart in named_recipe_charts(run))


def named_recipe_charts(run: Run) -> tuple[tuple[str, Chart], ...]:
    """Returns the dot charts with their tasks."""
    colours = hues(run)
    found = []
    for one in by_group(run):
        cells = other_cells(one.cells) if one.is_first else []
        if len({cell.recipe for cell in cells} - {FLOAT}) < 2:
            continue
        models = list(dict.fromkeys(cell.model for cell in cells))
        recipes = list(dict.fromkeys([FLOAT, *(cell.recipe for cell in cells)]))
        dots = [
            Dot(
                row="float" if cell.recipe == FLOAT else cell.recipe,
                name=cell.model,
                colour=colours.index(_hue(one, [cell])),
                style=models.index(cell.model) % _MARKERS,
                x=cell.value,
                low=cell.ci_low,
                high=cell.ci_high,
                title=f"{cell.model}, {cell.recipe}: {_words(one, cell)}",
            )
            for cell in sorted(cells, key=lambda cell: recipes.index(cell.recipe))
        ]
        chart = dot_chart(
            name=f"sweep-{slug(one.task)}-recipes",
            title=f"{one.words} of other recipes",
            x_label=f"{axis_words(one)}{' (log)' if one.is_logarithmic else ''}",
            dots=dots,
            log=one.is_logarithmic,
            rules=_chances(cells),
            note=_note(one),
        )
        found.append((one.task, chart))
    return tuple(found)


def _hue(one: Measured, cells: Iterable[Cell]) -> str:
    """Returns what has the cells' colour: the model, or the group of several seeds."""
    found = {c.group if (c.model, c.recipe) in one.seeds else c.model for c in cells}
    return min(found)


def _words(one: Measured, cell: Cell) -> str:
    """Returns value, interval, spread and mark, for a tooltip."""
    text = one.text(cell)
    seeds = one.spreads.get((cell.model, cell.recipe))
    if seeds is not None:
        text += f", seeds from {one.value(seeds.low)} to {one.value(seeds.high)}"
    marks = {
        LEVEL_MARK: ", level with float",
        CHANCE_MARK: ", at chance",
        OPEN_MARK: ", not shown to be above chance",
    }
    return text + marks.get(one.mark(cell), "")


def _note(one: Measured) -> str:
    """Returns what the marks are."""
    if one.is_pooled:
        return (
            "Seeds are drawn by their mean: bars are 95 % intervals of one seed's sampling error, "
            "bands along lines go from the lowest seed to the highest."
        )
    return "Bars are 95 % intervals."


def axis_words(one: Measured) -> str:
    """Returns the title of a metric's axis, with what is better."""
    better = "higher" if one.higher_is_better else "lower"
    return f"{clipped(one.metric, _METRIC)}, {better} is better"


def _chances(cells: Iterable[Cell]) -> list[tuple[float, str]]:
    """Returns the level that guessing reaches, where it has one."""
    found = {cell.chance for cell in cells if cell.chance is not None}
    return [(chance, "chance") for chance in sorted(found)]
