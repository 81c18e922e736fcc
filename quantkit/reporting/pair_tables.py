"""The tables of a pair: what bits do to both, retrieval, attention and lambda."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from quantkit.reporting.pair_chance import guess_note, retrieval_note
from quantkit.reporting.pair_groups import Pair, fewest_level
from quantkit.reporting.paper import (
    FIGURE_8,
    FIGURE_8_NOTE,
    MASSES,
    NEEDLES,
    RETRIEVAL_NOTE,
    PaperLine,
)
from quantkit.reporting.sweep_groups import Measured
from quantkit.reporting.sweep_tables import widths
from quantkit.reporting.text import NOT_AVAILABLE, Table, number, share
from quantkit.results import AttentionMass, Cell, Delta, DifferentialLayer

PAPER_BITS: Final = (16, 8, 6, 4)


def bits_table(pair: Pair, one: Measured) -> Table:
    """Returns the layout of the paper's Figure 8 as numbers: value and mark, bits across."""
    rows = pair.rows(one)
    bits = widths(rows)
    return Table(
        title=f"{one.words} by bits of the attention logits",
        columns=("one scale per", "model", *(str(width) for width in bits)),
        rows=tuple(
            (row.scale, row.model, *(_marked(one, row.cells.get(width)) for width in bits))
            for scale in pair.scales(one)
            for row in rows
            if row.scale == scale
        ),
        text_columns=2,
        note=f"16 = not quantized. {one.notes} {guess_note(pair, one)}".rstrip(),
    )


def _marked(one: Measured, cell: Cell | None) -> str:
    if cell is None:
        return NOT_AVAILABLE
    base = one.float_cell(cell.model)
    # of a model that guesses in float the other columns would only repeat it
    is_said = base is not None and base != cell and one.chance_mark(base)
    return f"{one.value(cell.value)} {'' if is_said else one.mark(cell)}".rstrip()


def level_table(pair: Pair) -> Table:
    """Returns the fewest bits that are level with float, a row a task and model."""
    scales = list(dict.fromkeys(scale for one in pair.firsts for scale in pair.scales(one)))
    rows = []
    for one in pair.firsts:
        found = {(row.model, row.scale): fewest_level(one, row) for row in pair.rows(one)}
        if not found:
            continue
        for model in pair.models:
            base = one.float_cell(model)
            texts = []
            for scale in scales:
                bits, why = found.get((model, scale), (None, NOT_AVAILABLE))
                texts.append(why if bits is None else str(bits))
            start = NOT_AVAILABLE if base is None else one.text(base)
            margins = {one.margin(delta) for delta in one.deltas.values()} - {""}
            rows.append((one.words, model, min(margins, default=NOT_AVAILABLE), start, *texts))
    return Table(
        title="Fewest bits of the logits that are level with the model's own float row",
        columns=("task", "model", "margin", "float", *scales),
        rows=tuple(rows),
        text_columns=3,
        note="level = the paired 95 % interval rules out a loss of more than the margin, at these "
        "bits and at all more that were tried. none shown is no proof of a loss: few items show "
        "little.",
    )


def crossing_table(pair: Pair) -> Table:
    """Returns the differential model at 4 bits against the baseline at 6: the paper's claim."""
    found = {one.task: pair.against(one, 4, 6) for one in pair.firsts}
    scales = list(dict.fromkeys(scale for deltas in found.values() for scale in deltas))
    rows = []
    for task, deltas in found.items():
        texts = [_crossed(pair, deltas.get(scale)) for scale in scales]
        if deltas:
            metric = next(iter(deltas.values())).metric
            words = next(p.words for p in pair.parts if (p.task, p.metric) == (task, metric))
            rows.append((words, *texts))
    baseline, diff = (line.values for line in FIGURE_8)
    if rows:
        paper = f"{diff[4]:.1f} / {baseline[6]:.1f}"
        rows.append(("HellaSwag, % (paper)", paper, *[""] * (len(scales) - 1)))
    return Table(
        title=f"{pair.diff} at 4 bits / {pair.baseline} at 6 bits, one scale per",
        columns=("task", *scales),
        rows=tuple(rows),
        note="On the same items. level = the paired 95 % interval rules out a loss of more than "
        f"the margin; better = all of it is a gain. {FIGURE_8_NOTE}",
    )


def _crossed(pair: Pair, delta: Delta | None) -> str:
    """Returns both values and what they show."""
    found = None if delta is None else pair.crossed(delta)
    return NOT_AVAILABLE if found is None else f"{found.ours} / {found.theirs} {found.word}"


def needles_table(pair: Pair, *, narrow: bool = False) -> Table:
    """Returns accuracy by needles and queries, float models, the paper's rows beside.

    `narrow` leaves the intervals out, for a terminal.
    """
    found = {
        (key, part.metric): part
        for part in reversed(pair.parts)  # of two tasks with the same numbers, the first
        if (key := pair.needles.get(part.task)) is not None
    }
    keys = sorted({key for key, _ in found})
    metrics = list(dict.fromkeys(metric for _, metric in reversed(found)))
    rows = []
    for metric in metrics:
        for model in pair.models:
            texts = (_float_text(found.get((key, metric)), model, narrow) for key in keys)
            rows.append((metric, model, *texts))
    if rows:
        for line in NEEDLES:
            values = (line.values.get(key) for key in keys)
            rows.append(("accuracy", line.label, *(_share(value) for value in values)))
    said = f"N needles, of which R are asked for{'' if narrow else '; 95 % intervals'}."
    return Table(
        title="Multi-needle retrieval, float models (the paper's N and R)",
        columns=("metric", "model", *(f"N = {n}, R = {r}" for n, r in keys)),
        rows=tuple(rows),
        text_columns=2,
        note=" ".join(filter(None, (said, retrieval_note(pair), RETRIEVAL_NOTE))),
    )


def _float_text(part: Measured | None, model: str, narrow: bool) -> str:
    cell = None if part is None else part.float_cell(model)
    if part is None or cell is None:
        return NOT_AVAILABLE
    text = part.value(cell.value) if narrow else part.text(cell)
    return f"{text} {part.chance_mark(cell)}".rstrip()


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def mass_task(pair: Pair) -> str | None:
    """Returns the task whose attention is shown: that with the most needles."""
    masses = pair.sweep.attention_mass
    order = {m.task: (pair.needles.get(m.task, (0, 0)), m.task) for m in masses}
    return max(order, key=lambda task: order[task], default=None)


def masses_of(pair: Pair, part: str) -> dict[tuple[str, str], dict[int, float]]:
    """Returns (model, kind of weights) -> share on the part by depth in percent.

    A model whose weights cannot be negative has one kind.
    """
    task = mass_task(pair)
    found: dict[tuple[str, str], dict[int, float]] = {}
    for model in pair.models:
        for kind in ("signed", "share") if model == pair.diff else ("signed",):
            mine = [
                m
                for m in pair.sweep.attention_mass
                if (m.task, m.model, m.kind) == (task, model, kind)
            ]
            if mine:
                found[model, kind] = {_percent(mass): getattr(mass, part) for mass in mine}
    return found


def _percent(mass: AttentionMass) -> int:
    return round(100 * mass.depth_frac)


def mass_table(pair: Pair) -> Table:
    """Returns attention to the answer and to noise by depth, the paper's rows beside."""
    parts = {part: masses_of(pair, part) for part in ("answer", "noise")}
    depths = sorted({d for found in parts.values() for by in found.values() for d in by})
    rows: list[tuple[str, ...]] = []
    for part, found in parts.items():
        for (model, kind), by_depth in found.items():
            rows.append((part, model, kind, *_depths(by_depth, depths, 3)))
        lines = paper_masses(part) if found else ()
        rows += [(part, line.label, "", *_depths(line.values, depths, 2)) for line in lines]
    counts = {m.n for m in pair.sweep.attention_mass if m.task == mass_task(pair)}
    return Table(
        title=f"Attention by depth of the needle, float models: {mass_task(pair)}",
        columns=("on", "model", "weights", *(f"{depth} %" for depth in depths)),
        rows=tuple(rows),
        text_columns=3,
        note=f"n = {min(counts, default=0):,} questions a depth or more; mean over layers and "
        "heads. signed = the map's own weights; share = |weight| over the row's sum of |weight|. "
        f"{RETRIEVAL_NOTE}",
    )


def paper_masses(part: str) -> tuple[PaperLine[int], ...]:
    """Returns the paper's lines on one part of the context."""
    return tuple(line for line in MASSES if line.part == part)


def _depths(by_depth: Mapping[int, float], depths: list[int], digits: int) -> list[str]:
    return ["" if d not in by_depth else f"{by_depth[d]:.{digits}f}" for d in depths]


def lambda_init(layer: int) -> float:
    """Returns what lambda starts from: 0.8 - 0.6 exp(-0.3 depth), depth counted from 0."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


def is_learned_constant(layers: list[DifferentialLayer]) -> bool:
    """Returns whether lambda is one number a layer: that of V2 is projected from the input."""
    return all(layer.lambda_min == layer.lambda_max for layer in layers)


def lambda_table(pair: Pair) -> Table:
    """Returns lambda by layer, beside what it started from."""
    layers = pair.stats[1].differential
    constant = is_learned_constant(layers)
    rows = tuple(
        (
            str(layer.layer),
            number(lambda_init(layer.layer), 3) if constant else NOT_AVAILABLE,
            number(layer.lambda_mean, 3),
            number(layer.row_sum, 3),
            share(layer.negative_frac),
        )
        for layer in layers
    )
    return Table(
        title=f"lambda by layer: {pair.diff}",
        columns=("layer", "lambda_init", "lambda", "row sum", "negative weights"),
        rows=rows,
        note="lambda_init = 0.8 - 0.6 exp(-0.3 depth), depth from 0; the rows of the effective map "
        "sum to 1 - lambda."
        + ("" if constant else " Here lambda depends on the input: its mean is shown."),
    )
