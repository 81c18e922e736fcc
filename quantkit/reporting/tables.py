"""The tables of sweeps, ranges and provenance, as finished strings for HTML, Markdown, terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable

from quantkit.recipe import UNQUANTIZED_BITS
from quantkit.reporting.collect import Run, everything, labels
from quantkit.reporting.text import NOT_AVAILABLE, Table, number, relative
from quantkit.results import Cell, Export, Range, Sweep


def sweep_table(run: Run, *, intervals: bool = True) -> Table:
    """Returns one row a model, task, granularity and other parts of the recipe; bits across.

    Without `intervals` the table is narrow enough for a terminal.
    """
    cells = [cell for found in run.sweeps for cell in found.result.cells]
    bits = sorted({cell.bits for cell in cells}, reverse=True)
    span = " [95 % interval]" if intervals else ""
    rows = []
    for key, row in sweep_rows(cells).items():
        base = row.get(UNQUANTIZED_BITS)
        texts = [_cell_text(row.get(width), base, intervals) for width in bits]
        rows.append((*key, *texts))
    return Table(
        title=f"Sweep: value{span} by bits of the attention logits",
        columns=("model", "task", "linear layers", "granularity", *(f"{b} bits" for b in bits)),
        rows=tuple(rows),
        text_columns=4,
        note="16 bits = logits not quantized. Change against 16 bits in round brackets.",
    )


RowKey = tuple[str, str, str, str]


def sweep_rows(cells: Iterable[Cell]) -> dict[RowKey, dict[int, Cell]]:
    """Returns (model, task, linear layers, granularity) -> bits -> cell.

    Unquantized logits have no granularity: their cell starts every row of its model and task.
    """
    cells = list(cells)
    rows: dict[RowKey, dict[int, Cell]] = {}
    shared: dict[RowKey, Cell] = {}
    for cell in cells:
        words = cell.task if cell.metric == cell.task else f"{cell.task} {cell.metric}"
        linear = (f"w{cell.weights}" if cell.weights else "") + (
            f"a{cell.activations}" if cell.activations else ""
        )
        start = (cell.model, words, linear or "float", "")
        if cell.bits == UNQUANTIZED_BITS:
            shared[start] = cell
        else:
            static = "" if cell.range in (None, "dynamic") else f" {cell.range}"
            key = (*start[:3], f"{cell.granularity or 'none'}{static}")
            rows.setdefault(key, {})[cell.bits] = cell
    for start, cell in shared.items():
        keys = [key for key in rows if key[:3] == start[:3]]
        for key in keys:
            rows[key][UNQUANTIZED_BITS] = cell
        if not keys:
            rows[(*start[:3], "none")] = {UNQUANTIZED_BITS: cell}
    return rows


def _cell_text(cell: Cell | None, base: Cell | None, intervals: bool) -> str:
    if cell is None:
        return NOT_AVAILABLE
    text = number(cell.value)
    if intervals:
        text += f" [{number(cell.ci_low)}, {number(cell.ci_high)}]"
    if base is None or cell is base:
        return text
    if cell.metric == "perplexity":
        return f"{text} ({relative(cell.value, base.value)})"
    return f"{text} ({cell.value - base.value:+.4f})"


def delta_table(run: Run) -> Table:
    """Returns the paired differences."""
    deltas = [delta for found in run.sweeps for delta in found.result.deltas]
    return Table(
        title="Paired differences",
        columns=(
            "model", "recipe", "against", "task", "metric", "difference", "95 % interval", "n"
        ),
        rows=tuple(
            (
                d.model, d.recipe, d.against, d.task, d.metric, number(d.value),
                f"[{number(d.ci_low)}, {number(d.ci_high)}]", number(d.n),
            )
            for d in deltas
        ),
        text_columns=5,
        note="The recipe minus what it is compared with, resampled in pairs.",
    )  # fmt: skip


def ranges_table(run: Run) -> Table:
    """Returns how many tensors were calibrated, how, and the widest range of each point."""
    rows = []
    names = labels([found.result.model for found in run.ranges])
    for name, found in zip(names, run.ranges, strict=True):
        points: dict[str, dict[str, Range]] = {}
        for tensor, span in found.result.tensors.items():
            points.setdefault(span.point, {})[tensor] = span
        for point, tensors in points.items():
            widest = max(tensors, key=lambda tensor: _reach(tensors[tensor]))
            reach = _reach(tensors[widest])
            methods = dict.fromkeys(span.method for span in tensors.values())
            rows.append(
                (
                    name, point, widest, ", ".join(methods), number(len(tensors)),
                    number(math.nan if reach < 0 else reach),
                )
            )  # fmt: skip
    return Table(
        title="Calibrated ranges",
        columns=("model", "point", "widest tensor", "method", "tensors", "widest |x|"),
        rows=tuple(rows),
        text_columns=4,
    )


def _reach(span: Range) -> float:
    """Returns the largest magnitude of the interval, over its groups; -1 where none is known."""
    ends = [
        end for ends in (span.lo, span.hi) for end in (ends if isinstance(ends, list) else [ends])
    ]
    return max((abs(end) for end in ends if not math.isnan(end)), default=-1.0)


def provenance_table(run: Run) -> Table:
    """Returns where every number comes from: file, model, text."""
    rows = []
    for found in everything(run):
        result = found.result
        models = result.models if isinstance(result, Sweep) else [result.model]
        data = result.data
        for model in models:
            rows.append(
                (
                    found.place, model.name, model.source, model.sha256[:16], model.architecture,
                    f"{model.dtype} on {model.device}", data.source, data.sha256[:16], data.bos,
                    data.python, number(model.parameters),
                    f"{data.sequences} x {data.seq_len}", number(data.tokens),
                    number(data.batch_size), number(data.skipped_blocks),
                )
            )  # fmt: skip
    return Table(
        title="Provenance",
        columns=(
            "file", "model", "source", "model sha256", "architecture", "computed", "text",
            "text sha256", "bos", "python", "parameters", "blocks", "tokens", "batch",
            "blocks skipped",
        ),
        rows=tuple(rows),
        text_columns=10,
    )  # fmt: skip


def environment_table(run: Run) -> Table:
    """Returns the environments; files that share one stand in one row a fact."""
    places: dict[tuple[str, str], list[str]] = {}
    known = [
        (found.place, found.result.environment)
        for found in everything(run)
        if not isinstance(found.result, Export)
    ]
    for place, environment in known:
        for key, value in environment.items():
            places.setdefault((key, value), []).append(place)
    return Table(
        title="Environment",
        columns=("what", "value", "files"),
        rows=tuple(
            (key, value, "all" if len(files) == len(known) else ", ".join(files))
            for (key, value), files in places.items()
        ),
        text_columns=3,
    )
