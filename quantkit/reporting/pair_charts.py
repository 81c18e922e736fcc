"""The pictures of a pair: Table 5 and Figure 8 as the paper has them, attention, lambda.

Both models keep their hue; the paper's lines have the hue of their counterpart, dots and hollow
markers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from quantkit.recipe import UNQUANTIZED_BITS
from quantkit.reporting.charts import Line, Value, line_panel
from quantkit.reporting.drawing import (
    SMALL_HEIGHT,
    SMALL_WIDTH,
    WIDTH,
    Chart,
    Panel,
    slug,
    together,
)
from quantkit.reporting.groups import HIDDEN, LOGIT
from quantkit.reporting.hues import hues
from quantkit.reporting.outlier_tables import figures_of
from quantkit.reporting.pair_chance import guess_note
from quantkit.reporting.pair_groups import Pair
from quantkit.reporting.pair_tables import (
    PAPER_BITS,
    is_learned_constant,
    lambda_init,
    masses_of,
    paper_masses,
)
from quantkit.reporting.paper import (
    BASELINE,
    FIGURE_8,
    FIGURE_8_NOTE,
    NOTE,
    RETRIEVAL_NOTE,
    TABLE_5,
)
from quantkit.reporting.sweep_charts import axis_words
from quantkit.reporting.sweep_groups import Measured
from quantkit.reporting.sweep_tables import widths
from quantkit.reporting.text import number
from quantkit.results import TOP_RANKS

_PAPER_STYLE: Final = 2
_DODGE: Final = 0.12
"""Of the space of a width: whiskers stand side by side."""
_POINTS: Final = ((LOGIT, "attention logits"), (HIDDEN, "hidden states"))


def colours_of(pair: Pair) -> dict[str, int]:
    """Returns model -> hue, the same as in all pictures."""
    order = hues(pair.run)
    return {model: order.index(model) for model in pair.models}


def outlier_chart(pair: Pair) -> Chart:
    """Returns Table 5 as two pictures: |x| at each rank, of both models and of the paper's."""
    colours = colours_of(pair)
    names = [*(f"top-{rank}" for rank in TOP_RANKS), "median"]
    charts = []
    for point, words in _POINTS:
        found = [
            (model, colours[model], 0, figures_of(stats, point))
            for model, stats in zip(pair.models, pair.stats, strict=True)
        ]
        found += [
            (f"{row.model} (paper)", _paper_colour(pair, row.model), _PAPER_STYLE, row.figures)
            for row in TABLE_5
            if row.point == point
        ]
        lines = [
            Line(
                name=name,
                colour=colour,
                style=style,
                hollow=style == _PAPER_STYLE,
                values=tuple(
                    Value(x=i, y=y, title=f"{name}, {words}, {names[i]}: {number(y)}")
                    for i, y in enumerate(figures)
                ),
            )
            for name, colour, style, figures in found
        ]
        charts.append(_panel(words, "rank", "|x| (log)", names, lines, log=True, width=WIDTH))
    title = "Largest magnitudes: the paper's Table 5"
    return together("pair-outliers", title, charts, note=NOTE)


def _paper_colour(pair: Pair, model: str) -> int:
    return colours_of(pair)[pair.baseline if model == BASELINE else pair.diff]


def bit_chart(pair: Pair, one: Measured, *, with_paper: bool = False) -> Chart | None:
    """Returns Figure 8's layout of one task: a picture a granularity, a line a model.

    `with_paper`: the paper's own stands behind them, marked as the paper's.
    """
    rows = pair.rows(one)
    bits = widths(rows)
    if len(bits) < 2:
        return None
    colours = colours_of(pair)
    log = one.is_logarithmic
    cells = [cell for row in rows for cell in row.cells.values()]
    reach = [y for cell in cells for y in (cell.value, cell.ci_low, cell.ci_high)]
    chances = sorted({cell.chance for cell in cells if cell.chance is not None})
    charts = []
    for scale in pair.scales(one):
        lines = [
            Line(
                name=row.model,
                colour=colours[row.model],
                style=pair.models.index(row.model),
                values=tuple(
                    Value(
                        x=bits.index(width) + (pair.models.index(row.model) - 0.5) * _DODGE,
                        y=cell.value,
                        low=cell.ci_low,
                        high=cell.ci_high,
                        title=f"{row.model}, {scale}, {width} bits: {one.text(cell)}",
                    )
                    for width, cell in sorted(row.cells.items(), reverse=True)
                ),
            )
            for row in rows
            if row.scale == scale
        ]
        charts.append(
            _panel(
                f"one scale per {scale}",
                f"bits ({UNQUANTIZED_BITS} = not quantized)",
                f"{axis_words(one)}{' (log)' if log else ''}",
                [str(width) for width in bits],
                lines,
                log=log,
                reach=reach,
                rules=[(chance, "chance") for chance in chances],
            )
        )
    said = guess_note(pair, one)
    notes = [*([said] if said else []), "Bars are 95 % intervals."]
    if with_paper:
        charts.append(paper_panel(pair))
        notes.append(FIGURE_8_NOTE)
    title = f"{one.words} against bits of the attention logits"
    return together(f"pair-bits-{slug(one.task)}", title, charts, note=" ".join(notes))


def paper_panel(pair: Pair) -> Panel:
    """Returns the paper's Figure 8, marked as the paper's."""
    lines = [
        Line(
            name=line.label,
            colour=_paper_colour(pair, line.model),
            style=_PAPER_STYLE,
            hollow=True,
            values=tuple(
                Value(
                    x=PAPER_BITS.index(bits),
                    y=value,
                    title=f"{line.label}, {bits} bits: {value:.1f} %",
                )
                for bits, value in line.values.items()
            ),
        )
        for line in FIGURE_8
    ]
    return _panel(
        "HellaSwag, 2.8B parameters (paper)",
        f"bits ({UNQUANTIZED_BITS} = not quantized)",
        "accuracy, %",
        [str(bits) for bits in PAPER_BITS],
        lines,
    )


def mass_chart(pair: Pair) -> Chart | None:
    """Returns attention to the answer and to noise by depth of the needle, or None."""
    colours = colours_of(pair)
    charts = []
    for part in ("answer", "noise"):
        found = masses_of(pair, part)
        depths = sorted({depth for by_depth in found.values() for depth in by_depth})
        lines = [
            _by_depth(
                model if kind == "signed" else f"{model}, share of |weights|",
                colours[model],
                0 if kind == "signed" else 1,
                by_depth,
                depths,
            )
            for (model, kind), by_depth in found.items()
        ]
        lines += [
            _by_depth(
                line.label, _paper_colour(pair, line.model), _PAPER_STYLE, line.values, depths
            )
            for line in paper_masses(part)
        ]
        if depths:
            names = [str(depth) for depth in depths]
            title = f"attention to {'the answer' if part == 'answer' else part}"
            charts.append(_panel(title, "depth, %", "mass", names, lines, width=WIDTH))
    if not charts:
        return None
    title = "Where the models look: the paper's Table 3"
    return together("pair-attention", title, charts, note=RETRIEVAL_NOTE)


def _by_depth(
    name: str, colour: int, style: int, values: Mapping[int, float], depths: Sequence[int]
) -> Line:
    return Line(
        name=name,
        colour=colour,
        style=style,
        hollow=style == _PAPER_STYLE,
        values=tuple(
            Value(x=depths.index(depth), y=y, title=f"{name}, depth {depth} %: {number(y, 3)}")
            for depth, y in sorted(values.items())
            if depth in depths
        ),
    )


def lambda_chart(pair: Pair) -> Chart | None:
    """Returns lambda by layer beside what it started from, or None without lambdas."""
    layers = pair.stats[1].differential
    if not layers:
        return None
    colour = colours_of(pair)[pair.diff]
    found = [("lambda", 0, [layer.lambda_mean for layer in layers])]
    if is_learned_constant(layers):
        found.append(("lambda_init", 1, [lambda_init(layer.layer) for layer in layers]))
    lines = [
        Line(
            name=name,
            colour=colour,
            style=style,
            values=tuple(
                Value(x=i, y=y, title=f"layer {layers[i].layer}, {name}: {number(y, 3)}")
                for i, y in enumerate(values)
            ),
        )
        for name, style, values in found
    ]
    step = max(1, math.ceil(len(layers) / 12))
    names = [str(layer.layer) if i % step == 0 else "" for i, layer in enumerate(layers)]
    panel = _panel("lambda by layer", "layer", "lambda", names, lines)
    return together("pair-lambda", f"lambda of {pair.diff}", [panel])


def _panel(
    title: str,
    x_label: str,
    y_label: str,
    x_names: Sequence[str],
    lines: Sequence[Line],
    *,
    log: bool = False,
    reach: Sequence[float] = (),
    rules: Sequence[tuple[float, str]] = (),
    width: int = SMALL_WIDTH,
) -> Panel:
    return line_panel(
        title=title,
        x_label=x_label,
        y_label=y_label,
        x_names=x_names,
        lines=lines,
        log=log,
        rules=rules,
        reach=reach,
        width=width,
        height=SMALL_HEIGHT,
    )
