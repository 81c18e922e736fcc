"""The pictures of trainings: the loss of all arms in one, and how their outliers grow.

Several seeds of an arm are a line each, thin, with their mean; in the small pictures of the growth
the mean, in a band from the lowest seed to the highest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final

from quantkit.reporting.charts import Line, Value, line_panel
from quantkit.reporting.curves import FINE, step_axis
from quantkit.reporting.drawing import (
    HEIGHT,
    SMALL_HEIGHT,
    SMALL_WIDTH,
    Chart,
    Panel,
    together,
)
from quantkit.reporting.text import number
from quantkit.reporting.training_groups import Grown, by_arm, figures
from quantkit.results import TrainingResult

_POINTS: Final = 240
"""Of a line of losses, about; a stretch of more steps is drawn by its mean."""
_MARKS: Final = 25
"""Of them, those with a marker and a tooltip."""
_WIDE: Final = 820
_TICKS_APART: Final = 2
"""A small picture names every other step of the axis."""

_Points = Sequence[tuple[int, float]]


def loss_chart(name: str, result: TrainingResult, colours: Mapping[str, int]) -> Chart | None:
    """Returns the training loss of every arm over the steps, or None without a loss.

    `name` is the picture's.
    """
    arms = {
        arm: {m.seed: [(p.step, p.loss) for p in m.losses] for m in models if m.losses}
        for arm, models in by_arm(result).items()
    }
    steps = [step for seeds in arms.values() for points in seeds.values() for step, _ in points]
    if not steps:
        return None
    axis = step_axis(0, max(steps))
    lines: list[Line] = []
    for arm, seeds in arms.items():
        colour = colours[arm]
        many = len(seeds) > 1
        for index, (seed, points) in enumerate(seeds.items()):
            words = "" if many and index else (f"{arm}, each seed" if many else arm)
            values = _values(_thinned(points), axis, f"{arm}, seed {seed}")
            lines.append(
                Line(
                    name=words, colour=colour, style=0, values=values, thin=many,
                    marked=0 if many else _every(values),
                )
            )  # fmt: skip
        if many:
            mean = [(s, fmean(values)) for s, values in _common([*seeds.values()]).items()]
            words = f"{arm}, mean of {len(seeds)} seeds"
            values = _values(_thinned(mean), axis, words)
            lines.append(
                Line(name=words, colour=colour, style=0, values=values, marked=_every(values))
            )
    panel = _panel("", "nats a token", lines, axis, log=False, width=_WIDE, height=HEIGHT)
    return together(name, f"Training loss: {result.name}", [panel])


def _every(values: Sequence[Value]) -> int:
    return math.ceil(len(values) / _MARKS) or 1


def growth_chart(name: str, result: TrainingResult, colours: Mapping[str, int]) -> Chart | None:
    """Returns a small picture for each figure that was measured on the way, or None."""
    charts = [_growth(result, figure, colours) for figure in figures(result)]
    drawn = tuple(chart for chart in charts if chart is not None)
    if not drawn:
        return None
    several = any(len(models) > 1 for models in by_arm(result).values())
    note = "Measured on the same held-out rows at every step."
    note += " Lines are means over seeds, bands go from the lowest to the highest." * several
    return together(name, f"Growth over the training: {result.name}", drawn, note=note)


def _growth(result: TrainingResult, figure: Grown, colours: Mapping[str, int]) -> Panel | None:
    found: dict[str, dict[int, list[float]]] = {}
    for arm, models in by_arm(result).items():
        seeds = [[(m.step, figure.of(m)) for m in model.measurements] for model in models]
        found[arm] = {
            step: values
            for step, values in _common([seed for seed in seeds if seed]).items()
            if all(map(math.isfinite, values))
        }
    steps = [step for by_step in found.values() for step in by_step]
    if not steps:
        return None
    axis = step_axis(0, max(steps))
    lines = [
        Line(
            name=arm,
            colour=colours[arm],
            style=index % 4,
            values=tuple(
                Value(
                    x=_place(step, axis),
                    y=fmean(values),
                    least=min(values) if len(values) > 1 else math.nan,
                    most=max(values) if len(values) > 1 else math.nan,
                    title=f"{arm}, step {step}: {number(fmean(values))}",
                )
                for step, values in by_step.items()
            ),
        )
        for index, (arm, by_step) in enumerate(found.items())
    ]
    shown = [value.y for line in lines for value in line.values]
    log = figure.is_log and min(shown) > 0 and max(shown) > 10 * min(shown)
    label = "share right" if figure.is_accuracy else ("log" if log else "")
    return _panel(figure.words, label, lines, axis, log=log)


def _panel(
    title: str,
    y_label: str,
    lines: Sequence[Line],
    axis: tuple[int, int, int],
    *,
    log: bool,
    width: int = SMALL_WIDTH,
    height: int = SMALL_HEIGHT,
) -> Panel:
    unit, start, slots = axis
    every = FINE * (_TICKS_APART if width == SMALL_WIDTH else 1)
    return line_panel(
        title=title,
        x_label="step",
        y_label=y_label,
        x_names=tuple(
            f"{start + i // FINE * unit:,}" if i % every == 0 else "" for i in range(slots)
        ),
        lines=lines,
        log=log,
        width=width,
        height=height,
    )


def _values(points: _Points, axis: tuple[int, int, int], words: str) -> tuple[Value, ...]:
    return tuple(
        Value(x=_place(step, axis), y=loss, title=f"{words}, step {step}: {number(loss)}")
        for step, loss in points
    )


def _place(step: int, axis: tuple[int, int, int]) -> float:
    unit, start, _ = axis
    return FINE * (step - start) / unit


def _common(seeds: Sequence[_Points]) -> dict[int, list[float]]:
    """Returns step -> a value of each seed, for the steps that all of them have."""
    if not seeds:
        return {}
    maps = [dict(seed) for seed in seeds]
    steps = sorted(set(maps[0]).intersection(*maps[1:]))
    return {step: [values[step] for values in maps] for step in steps}


def _thinned(points: _Points) -> list[tuple[int, float]]:
    """Returns the points in stretches, each by its last step and its mean: the noise goes."""
    size = math.ceil(len(points) / _POINTS) or 1
    stretches = [points[i : i + size] for i in range(0, len(points), size)]
    return [(stretch[-1][0], fmean(loss for _, loss in stretch)) for stretch in stretches]
