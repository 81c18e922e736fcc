"""The tables of a report, as finished strings; HTML, Markdown and terminal draw the same ones."""

from __future__ import annotations

import math
from collections.abc import Iterable

from quantkit.recipe import UNQUANTIZED_BITS
from quantkit.reporting.collect import Run, everything, labels
from quantkit.reporting.text import NOT_AVAILABLE, Table, number, relative, share, size
from quantkit.results import TOP_RANKS, Cell, Export, PointSummary, Sweep

MAX_ENTRIES = 20
_POINTS = (("attention_logit", "attention logits"), ("hidden_state", "hidden states"))


def topk_table(run: Run) -> Table:
    """Returns the layout of the Differential Transformer paper's Table 5, one row a model."""
    rows = []
    names = labels([found.result.model for found in run.stats])
    for point, words in _POINTS:
        for name, found in zip(names, run.stats, strict=True):
            summary: PointSummary = getattr(found.result.summary, point)
            tops = tuple(number(summary.abs_top.get(str(rank))) for rank in TOP_RANKS)
            rows.append((words, name, *tops, number(summary.abs_median)))
    return Table(
        title="Largest magnitudes (Table 5 layout)",
        columns=("activation", "model", *(f"top-{rank}" for rank in TOP_RANKS), "median"),
        rows=tuple(rows),
        text_columns=2,
        note="|x| at each rank, pooled over layers, heads and maps; masked positions left out "
        "unless the definition says otherwise.",
    )


def spread_table(run: Run) -> Table:
    """Returns the other figures of each point: signed extremes, kurtosis, counts."""
    rows = []
    names = labels([found.result.model for found in run.stats])
    for point, words in _POINTS:
        for name, found in zip(names, run.stats, strict=True):
            s: PointSummary = getattr(found.result.summary, point)
            figures = (s.max, s.min, s.inf_norm_mean, s.kurtosis, s.count, s.excluded)
            rows.append((words, name, *map(number, figures)))
    return Table(
        title="Spread",
        columns=(
            "activation", "model", "max", "min", "inf_norm_mean", "kurtosis", "count", "excluded"
        ),
        rows=tuple(rows),
        text_columns=2,
        note="kurtosis is Pearson's (a Gaussian has 3); excluded elements were masked.",
    )  # fmt: skip


def outlier_table(run: Run) -> Table:
    """Returns sinks, massive activations and outlier features, one row a model."""
    rows = []
    names = labels([found.result.model for found in run.stats])
    for name, found in zip(names, run.stats, strict=True):
        summary = found.result.summary
        massive, features = summary.massive_activations, summary.outlier_features
        channels = ", ".join(map(str, features.channels[:12]))
        more = ", ..." if len(features.channels) > 12 else ""
        rows.append(
            (
                name,
                share(summary.sink_rate),
                number(massive.count),
                number(massive.count_pooled),
                number(features.count),
                (channels + more) or "none",
            )
        )
    return Table(
        title="Sinks, massive activations, outlier features",
        columns=("model", "sink rate", "massive", "massive (pooled)", "features", "channels"),
        rows=tuple(rows),
    )


def class_table(run: Run) -> Table:
    """Returns the largest |x| of the first token and of the others, one row a model and point."""
    rows = []
    names = labels([found.result.model for found in run.stats])
    for point, words in _POINTS:
        for name, found in zip(names, run.stats, strict=True):
            largest = {"first": math.nan, "others": math.nan}
            for group in found.result.points.get(point, []):
                if group.token_class in largest:
                    top = group.abs_top.get("1", math.nan)
                    known = largest[group.token_class]
                    largest[group.token_class] = top if math.isnan(known) else max(known, top)
            rows.append((words, name, number(largest["first"]), number(largest["others"])))
    return Table(
        title="Largest |x| by token class",
        columns=("activation", "model", "first token", "other tokens"),
        rows=tuple(rows),
        text_columns=2,
        note="A logit's class is its key's.",
    )


def massive_table(run: Run) -> Table:
    """Returns where the massive activations stand, largest first."""
    rows: list[tuple[float, tuple[str, ...]]] = []
    names = labels([found.result.model for found in run.stats])
    for name, found in zip(names, run.stats, strict=True):
        for entry in found.result.summary.massive_activations.entries:
            place = (entry.layer, entry.sequence, entry.position, entry.channel)
            row = (name, entry.token or "", number(entry.value), *map(_index, place))
            rows.append((abs(entry.value), row))
    rows.sort(key=lambda pair: -pair[0])
    note = f"The largest {MAX_ENTRIES} of {len(rows)}." if len(rows) > MAX_ENTRIES else ""
    return Table(
        title="Massive activations",
        columns=("model", "token", "value", "layer", "sequence", "position", "channel"),
        rows=tuple(row for _, row in rows[:MAX_ENTRIES]),
        text_columns=2,
        note=note,
    )


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


def parity_table(run: Run) -> Table:
    """Returns every comparison of ONNX Runtime with torch, by graph and shape."""
    rows = []
    for found in run.exports:
        for graph, checks in found.result.parity.items():
            for check in checks:
                shape = f"{check.batch} x {check.seq_len} + {check.cached}"
                figures = (check.max_abs, check.cosine, check.top1_agreement)
                verdict = "passed" if check.passed else "FAILED"
                texts = (number(figures[0]), number(figures[1], 7), share(figures[2]))
                name = found.result.model.name
                rows.append((name, graph, check.reference, verdict, shape, *texts))
    return Table(
        title="Parity",
        columns=(
            "model", "graph", "reference", "gate", "batch x tokens + cached", "max abs", "cosine",
            "top-1",
        ),
        rows=tuple(rows),
        text_columns=4,
        note="max abs: largest difference of an output logit; top-1: share of positions with the "
        "same best token.",
    )  # fmt: skip


def export_table(run: Run) -> Table:
    """Returns recipe, size, latency and accuracy, one row an export."""
    rows = []
    for found in run.exports:
        result = found.result
        latency = result.latency_ms
        float_ms = latency.get("float", math.nan)
        quantized_ms = latency.get("quantized", math.nan)
        known = float_ms > 0 and quantized_ms > 0
        accuracy = result.accuracy
        figures = (
            number(accuracy.float if accuracy else None),
            number(accuracy.quantized if accuracy else None),
        )
        rows.append(
            (
                result.model.name,
                result.recipe,
                "passed" if result.passed else "FAILED",
                accuracy.metric if accuracy else NOT_AVAILABLE,
                *figures,
                number(float_ms),
                number(quantized_ms),
                f"{float_ms / quantized_ms:.2f}x" if known else NOT_AVAILABLE,
                size(sum(file.bytes for file in result.files)),
                number(len(result.quantizers)),
            )
        )
    return Table(
        title="Exports",
        columns=(
            "model", "recipe", "gates", "metric", "float", "quantized", "float ms", "quantized ms",
            "speed-up", "size", "quantizers",
        ),
        rows=tuple(rows),
        text_columns=4,
        note="Latency in ONNX Runtime, milliseconds a call, paired runs.",
    )  # fmt: skip


def latency_table(run: Run) -> Table:
    """Returns every latency that was measured."""
    return Table(
        title="Latency",
        columns=("model", "recipe", "what", "ms"),
        rows=tuple(
            (found.result.model.name, found.result.recipe, what, number(value))
            for found in run.exports
            for what, value in found.result.latency_ms.items()
        ),
        text_columns=3,
    )


def file_table(run: Run) -> Table:
    """Returns the files of the exports with sizes and hashes."""
    return Table(
        title="Files",
        columns=("file", "sha256", "size", "bytes"),
        rows=tuple(
            (file.name, file.sha256[:16], size(file.bytes), number(file.bytes))
            for found in run.exports
            for file in found.result.files
        ),
        text_columns=2,
    )


def ranges_table(run: Run) -> Table:
    """Returns how many tensors were calibrated, and the widest range of each point."""
    rows = []
    names = labels([found.result.model for found in run.ranges])
    for name, found in zip(names, run.ranges, strict=True):
        widest: dict[str, tuple[float, str, int]] = {}
        for tensor, span in found.result.tensors.items():
            lows = span.lo if isinstance(span.lo, list) else [span.lo]
            highs = span.hi if isinstance(span.hi, list) else [span.hi]
            top = max((abs(value) for value in (*lows, *highs)), default=math.nan)
            best, where, count = widest.get(span.point, (-1.0, "", 0))
            widest[span.point] = (
                (top, tensor, count + 1) if top > best else (best, where, count + 1)
            )
        for point, (top, tensor, count) in widest.items():
            rows.append((name, point, tensor, found.result.method, number(count), number(top)))
    return Table(
        title="Calibrated ranges",
        columns=("model", "point", "widest tensor", "method", "tensors", "widest |x|"),
        rows=tuple(rows),
        text_columns=4,
    )


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


def _index(value: int | None) -> str:
    return "-" if value is None else str(value)
