"""The tables and pictures of training curves: several trainings in one figure, over one step axis.

A long training is thinned: a picture shows the largest value of each stretch of steps, because a
spike is what one looks for; the tables say at which step it was.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from quantkit.reporting.charts import Line, Value, heat_map, line_chart
from quantkit.reporting.collect import Run
from quantkit.reporting.drawing import Chart
from quantkit.reporting.hues import hues
from quantkit.reporting.text import NOT_AVAILABLE, Table, number
from quantkit.results import Curves, CurveStep

DEFINITION: Final = (
    "training curves",
    "Largest over layers at each recorded step; logits in float32 over the valid entries of every "
    "sequence and head, hidden states without padding. Loss and learning rate as the training "
    "noted them.",
)
_POINTS: Final = 200
"""Steps a line shows at most; `_MARKS` of them have a marker and a tooltip."""
_MARKS: Final = 25
_COLUMNS: Final = 60
_ROWS: Final = 12
_TICKS: Final = 6
FINE: Final = 10
"""Slots of the step axis between two labelled ticks."""


@dataclass(frozen=True, kw_only=True)
class _Figure:
    """What a picture shows; `of` gives a step's value by attention map (None: has no maps)."""

    title: str
    label: str
    of: Callable[[CurveStep], dict[int | None, float]]


def names(run: Run) -> list[str]:
    """Returns one name a training, in the order of the files."""
    given = [found.result.header.name for found in run.curves]
    again = Counter(given)
    unique = []
    for name, found in zip(given, run.curves, strict=True):
        unique.append(name if again[name] == 1 else f"{name} ({found.place})")
    return unique


def summary_table(run: Run) -> Table:
    """Returns where each training's outliers stood last and at their largest, one row a map."""
    rows = []
    for name, found in zip(names(run), run.curves, strict=True):
        curves = found.result
        for map_ in _maps(curves):
            label = name if len(_maps(curves)) < 2 else f"{name}, map {map_}"
            rows.append((label, found.place, *_summary(curves, map_)))
    return Table(
        title="Outliers over the training",
        columns=(
            "training", "file", "largest at", "steps", "last step", "max |logit|: first", "last",
            "largest", "inf-norm: last", "largest", "kurtosis: last", "largest", "NaN steps",
        ),
        rows=tuple(rows),
        text_columns=3,
        note="Largest over layers. inf-norm is the mean over sequences of max |hidden state|; "
        "steps with a NaN among logits or hidden states are counted.",
    )  # fmt: skip


def _summary(curves: Curves, map_: int) -> tuple[str, ...]:
    steps = curves.steps
    if not steps:
        return (NOT_AVAILABLE, "0", *[NOT_AVAILABLE] * 8, "0")
    logits = [(_logit(step).get(map_, math.nan), step) for step in steps]
    finite = [pair for pair in logits if not math.isnan(pair[0])]
    at, largest = NOT_AVAILABLE, math.nan
    if finite:
        largest, top = max(finite, key=lambda pair: pair[0])
        where = next(c for c in top.logits if c.map == map_ and c.abs_max == largest)
        at = f"step {top.step}, layer {where.layer}, head {where.head}"
    norms = [_hidden(step, "inf_norm_mean") for step in steps]
    kurtoses = [_hidden(step, "kurtosis") for step in steps]
    bad = sum(any(c.nan for c in step.logits) or any(c.nan for c in step.hidden) for step in steps)
    return (
        at,
        number(len(steps)),
        number(steps[-1].step),
        number(logits[0][0]),
        number(logits[-1][0]),
        number(largest),
        number(norms[-1]),
        number(_largest(norms)),
        number(kurtoses[-1]),
        number(_largest(kurtoses)),
        number(bad),
    )


def steps_table(run: Run) -> Table:
    """Returns the curves at a dozen steps each: what the pictures show, for reading."""
    rows = []
    for name, found in zip(names(run), run.curves, strict=True):
        steps = found.result.steps
        last = len(steps) - 1
        chosen = sorted({round(i * last / (_ROWS - 1)) for i in range(_ROWS)}) if steps else []
        for index in chosen:
            step = steps[index]
            signed = [curve.max for curve in step.logits]
            figures = (
                step.loss,
                step.lr,
                _largest(signed),
                _largest(_logit(step).values()),
                _hidden(step, "abs_max"),
                _hidden(step, "inf_norm_mean"),
                _hidden(step, "kurtosis"),
            )
            rows.append((name, str(step.step), *map(number, figures)))
    return Table(
        title="Training curves",
        columns=(
            "training", "step", "loss", "lr", "max logit", "max |logit|", "abs_max",
            "inf_norm_mean", "kurtosis",
        ),
        rows=tuple(rows),
        text_columns=1,
        note="Largest over layers and maps; evenly chosen among the recorded steps.",
    )  # fmt: skip


def line_charts(run: Run, *, with_loss: bool = True) -> tuple[Chart, ...]:
    """Returns max |logit|, inf-norm, kurtosis and, where it was noted, loss over the steps."""
    figures = (
        _Figure(title="Largest |attention logit|", label="max |logit|", of=_logit),
        _Figure(
            title="Largest inf-norm of the hidden states",
            label="inf_norm_mean",
            of=lambda step: {None: _hidden(step, "inf_norm_mean")},
        ),
        _Figure(
            title="Largest kurtosis of the hidden states",
            label="kurtosis",
            of=lambda step: {None: _hidden(step, "kurtosis")},
        ),
        _Figure(title="Loss", label="loss", of=lambda step: {None: step.loss}),
    )
    charts = (_chart(run, figure) for figure in (figures if with_loss else figures[:-1]))
    return tuple(chart for chart in charts if chart is not None)


def _chart(run: Run, figure: _Figure) -> Chart | None:
    """Returns the picture of one figure, or None where no step has it."""
    every = [step.step for found in run.curves for step in found.result.steps]
    if not every:
        return None
    unit, start, slots = step_axis(min(every), max(every))
    colours = list(dict.fromkeys([*hues(run), *names(run)]))  # a model keeps its hue
    lines = []
    for name, found in zip(names(run), run.curves, strict=True):
        colour = colours.index(name)
        values: dict[int | None, list[tuple[int, float]]] = {}
        for step in found.result.steps:
            for map_, value in figure.of(step).items():
                values.setdefault(map_, []).append((step.step, value))
        for map_, pairs in values.items():
            label = name if map_ is None or found.result.header.maps < 2 else f"{name}, map {map_}"
            drawn = tuple(
                Value(
                    x=FINE * (step - start) / unit,
                    y=value,
                    title=f"{label}, step {step}: {number(value)}",
                )
                for step, value in _thinned(pairs, _POINTS)
            )
            style = 0 if map_ is None else (map_ - 1) % 4
            every_mark = math.ceil(len(drawn) / _MARKS) or 1
            lines.append(
                Line(name=label, colour=colour, style=style, values=drawn, marked=every_mark)
            )
    shown = [v.y for line in lines for v in line.values if math.isfinite(v.y)]
    if not shown:
        return None
    # a logarithm where curves span more than a decade; a value of 0 or below has none
    log = min(shown) > 0 and max(shown) > 10 * min(shown)
    return line_chart(
        title=f"{figure.title} over the training",
        x_label="step",
        y_label=f"{figure.label}{' (log)' if log else ''}",
        x_names=tuple(
            f"{start + i // FINE * unit:,}" if i % FINE == 0 else "" for i in range(slots)
        ),
        lines=lines,
        log=log,
    )


def step_axis(first: int, last: int) -> tuple[int, int, int]:
    """Returns (steps between ticks, step of slot 0, slots) of a linear axis with round ticks."""
    raw = max(1.0, (last - first) / _TICKS)
    base = 10 ** math.floor(math.log10(raw))
    unit = max(1, next(m * base for m in (1, 2, 5, 10) if m * base >= raw))
    start = first // unit * unit
    return unit, start, math.ceil(FINE * (last - start) / unit) + 1


def heat_maps(run: Run) -> tuple[Chart, ...]:
    """Returns layer x step maps of max |logit|, one a training and attention map, on one scale."""
    found_rows: dict[str, tuple[dict[int, list[tuple[int, float]]], list[int]]] = {}
    for name, found in zip(names(run), run.curves, strict=True):
        steps = [step.step for step in found.result.steps]
        for map_ in _maps(found.result):
            rows: dict[int, list[tuple[int, float]]] = {}
            for step in found.result.steps:
                for curve in step.logits:
                    if curve.map == map_:
                        rows.setdefault(curve.layer, []).append((step.step, curve.abs_max))
            if rows:
                label = name if found.result.header.maps < 2 else f"{name}, map {map_}"
                found_rows[label] = (rows, steps)
    best = {label: _columns(label, *pair) for label, pair in found_rows.items()}
    values = [value for cells in best.values() for value, _ in cells.values()] or [0.0]
    scale = (min(values), max(values))
    return tuple(
        _heat_map(label, cells, found_rows[label][1], scale)
        for label, cells in best.items()
        if cells
    )


def _columns(
    name: str, rows: dict[int, list[tuple[int, float]]], steps: list[int]
) -> dict[tuple[int, int], tuple[float, str]]:
    """Returns (layer, column) -> (the column's largest value, what it is)."""
    column_of = _column_of(steps)
    best: dict[tuple[int, int], tuple[float, str]] = {}
    for layer, pairs in rows.items():
        for step, value in pairs:
            place = (layer, column_of[step])
            if math.isfinite(value) and value > best.get(place, (-1.0, ""))[0]:
                best[place] = (value, f"{name}, layer {layer}, step {step}: {number(value)}")
    return best


def _column_of(steps: list[int]) -> dict[int, int]:
    columns = min(_COLUMNS, len(steps))
    return {step: i * columns // len(steps) for i, step in enumerate(steps)}


def _heat_map(
    name: str,
    cells: dict[tuple[int, int], tuple[float, str]],
    steps: list[int],
    scale: tuple[float, float],
) -> Chart:
    first_of: dict[int, int] = {}
    for step, column in _column_of(steps).items():
        first_of.setdefault(column, step)
    return heat_map(
        f"Largest |attention logit| by layer and step: {name}",
        cells,
        across="step",
        column_names=[f"{first_of[column]:,}" for column in sorted(first_of)],
        scale=scale,
    )


def _thinned(pairs: Sequence[tuple[int, float]], count: int) -> list[tuple[int, float]]:
    """Returns at most `count` pairs: of each stretch of steps the one with the largest value.

    A stretch that has a value that is not finite shows that instead: it is counted below the
    picture.
    """
    if len(pairs) <= count:
        return list(pairs)
    stretches: dict[int, list[tuple[int, float]]] = {}
    for index, pair in enumerate(pairs):
        stretches.setdefault(index * count // len(pairs), []).append(pair)
    return [
        max(stretch, key=lambda pair: (not math.isfinite(pair[1]), pair[1]))
        for stretch in stretches.values()
    ]


def _maps(curves: Curves) -> list[int]:
    return sorted({curve.map for step in curves.steps for curve in step.logits}) or [1]


def _logit(step: CurveStep) -> dict[int | None, float]:
    """Returns max |logit| over layers, by map."""
    by_map: dict[int | None, list[float]] = {}
    for curve in step.logits:
        by_map.setdefault(curve.map, []).append(curve.abs_max)
    return {map_: _largest(values) for map_, values in by_map.items()}


def _hidden(step: CurveStep, what: str) -> float:
    """Returns the largest of a figure over layers."""
    return _largest(getattr(curve, what) for curve in step.hidden)


def _largest(values: Iterable[float]) -> float:
    """Returns the largest value that is not NaN; NaN where there is none."""
    known = [value for value in values if not math.isnan(value)]
    return max(known) if known else math.nan
