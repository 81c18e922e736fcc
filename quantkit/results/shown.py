"""What stands for each result in a notebook: its main figures. The report shows more."""

from __future__ import annotations

import math
from functools import singledispatch

from quantkit.results.auto import AutoResult
from quantkit.results.calibration import Calibration
from quantkit.results.curves import Curves
from quantkit.results.diagnosis import Diagnosis
from quantkit.results.export import Export
from quantkit.results.info import DataInfo
from quantkit.results.notebook import MOST_ROWS, Grid, Shown, number
from quantkit.results.ranges import Range, Ranges
from quantkit.results.result import Result
from quantkit.results.sensitivity import Sensitivity
from quantkit.results.stats import TOP_RANKS, PointSummary, Stats
from quantkit.results.sweep import Cell, Sweep
from quantkit.results.training import TrainingResult


@singledispatch
def shown(result: Result) -> Shown:
    """Returns what stands for a result."""
    raise TypeError(f"nothing says how a {type(result).__name__} is shown")


def _percent(share: float | None) -> str:
    return "n/a" if share is None or math.isnan(share) else f"{100 * share:.1f} %"


def _interval(value: float, low: float | None, high: float | None) -> str:
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return number(value)
    return f"{number(value)} [{number(low)}, {number(high)}]"


def _data(data: DataInfo) -> str:
    if data.seq_len:
        return f"{data.sequences:,} x {data.seq_len:,} tokens of {data.source}"
    return f"{data.sequences:,} samples, {data.source}"


@shown.register
def _stats(result: Stats) -> Shown:
    summary = result.summary
    found: list[tuple[str, PointSummary | None]] = [
        ("attention logits", summary.attention_logit),
        ("attention logits, all of QK^T", summary.attention_logit_unmasked),
        ("hidden states", summary.hidden_state),
    ]
    rows = [
        (
            words,
            *(number(point.abs_top.get(str(rank))) for rank in TOP_RANKS),
            number(point.abs_median),
            number(point.kurtosis),
        )
        for words, point in found
        if point is not None
    ]
    features, tokens = summary.outlier_features, summary.outlier_tokens
    rules = (
        f"Sink rate {_percent(summary.sink_rate)}; massive activations: "
        f"{summary.massive_activations.count:,}; outlier features: {features.count:,}; outlier "
        f"tokens: {tokens.count:,}."
    )
    columns = ("|x|", *(f"top-{rank}" for rank in TOP_RANKS), "median", "kurtosis")
    return Shown(
        title=f"{result.model.name}: outliers, {_data(result.data)}",
        grids=(Grid(columns=columns, rows=rows),),
        notes=(rules, *result.warnings),
    )


@shown.register
def _ranges(result: Ranges) -> Shown:
    rows = [
        (name, number(lo), number(hi), kept.method, kept.granularity, f"{kept.count:,}")
        for name, kept in result.tensors.items()
        for lo, hi in [_ends(kept)]
    ]
    return Shown(
        title=f"{result.model.name}: {len(rows):,} ranges, {_data(result.data)}",
        grids=(Grid(columns=("tensor", "lo", "hi", "method", "granularity", "seen"), rows=rows),),
        notes=tuple(result.warnings),
    )


def _ends(kept: Range) -> tuple[float, float]:
    lo, hi = kept.lo, kept.hi
    return (
        min(lo) if isinstance(lo, list) else lo,
        max(hi) if isinstance(hi, list) else hi,
    )


@shown.register
def _calibration(result: Calibration) -> Shown:
    rows = []
    for tensor in result.tensors:
        chosen = next((m for m in tensor.methods if m.method == tensor.chosen), None)
        of_method = (
            ("n/a",) * 4
            if chosen is None
            else (number(chosen.lo), number(chosen.hi), f"{100 * chosen.clipped_frac:.3g} %",
                  number(chosen.inlier_sqnr_db))
        )  # fmt: skip
        rows.append((tensor.name, tensor.chosen, *of_method, number(tensor.bits_wasted)))
    columns = ("tensor", "method", "lo", "hi", "clipped", "inlier SQNR, dB", "bits wasted")
    return Shown(
        title=f"{result.model.name}: calibration, worst first, {_data(result.data)}",
        grids=(Grid(columns=columns, rows=rows, text_columns=2),),
        notes=tuple(result.warnings),
    )


@shown.register
def _sweep(result: Sweep) -> Shown:
    grids = []
    models = list(dict.fromkeys(cell.model for cell in result.cells))
    for task in dict.fromkeys(cell.task for cell in result.cells):
        info = next((found for found in result.tasks if found.name == task), None)
        own = [cell for cell in result.cells if cell.task == task]
        metric = info.metrics[0] if info is not None else own[0].metric
        cells = {(c.recipe, c.model): c for c in own if c.metric == metric}
        what = metric if metric == task else f"{task}: {metric}"
        rows = [
            (
                _recipe(next(cell for (name, _), cell in cells.items() if name == recipe)),
                *(_value(cells.get((recipe, model))) for model in models),
            )
            for recipe in dict.fromkeys(recipe for recipe, _ in cells)
        ]
        grids.append(Grid(columns=(what, *models), rows=rows))
    return Shown(
        title=f"{', '.join(models)}: accuracy against bits, 95 % intervals",
        grids=tuple(grids),
        notes=(result.headline, *result.notes),
    )


def _value(cell: Cell | None) -> str:
    return "n/a" if cell is None else _interval(cell.value, cell.ci_low, cell.ci_high)


def _recipe(cell: Cell) -> str:
    """Returns e.g. `4 bits per row (static)` for quantized logits alone, else the recipe."""
    if cell.recipe == "none":
        return "float (16 bits)"
    if cell.granularity is None or cell.weights is not None or cell.activations is not None:
        return cell.recipe
    # the recipe says what else differs, e.g. the grid
    return f"{cell.bits} bits per {cell.granularity} ({cell.recipe})"


@shown.register
def _sensitivity(result: Sensitivity) -> Shown:
    rows = [
        (str(row.rank), row.name, row.point, number(row.enable_one_kl), _percent(row.removed_frac))
        for row in result.rows
    ]
    columns = ("rank", "switched", "point", "KL alone", "of the whole, when kept")
    keep = f"Keep in float: {', '.join(result.keep)}." if result.keep else ""
    left = _percent(result.target_frac)
    reached = "" if result.reached else f"No number of them leaves less than {left}."
    return Shown(
        title=f"{result.model.name}: what {result.recipe} costs, KL {number(result.total_kl)} nats",
        grids=(Grid(columns=columns, rows=rows, text_columns=3),),
        notes=(keep, reached, *result.warnings),
    )


@shown.register
def _export(result: Export) -> Shown:
    rows: list[tuple[str, str, str, str]] = []
    accuracy = result.accuracy
    if accuracy is not None:
        change = _interval(
            math.nan if accuracy.change is None else accuracy.change,
            accuracy.change_low,
            accuracy.change_high,
        )
        values = number(accuracy.float), number(accuracy.quantized)
        rows.append((accuracy.metric, *values, f"change {change}"))
    for words, end in (("prompt, ms", ""), ("one token, ms", "_decode")):
        one = result.latency_ms.get(f"float{end}")
        other = result.latency_ms.get(f"quantized{end}")
        if one is not None and other:
            rows.append((words, number(one), number(other), f"{one / other:.2f}x as fast"))
    parity = [
        (graph, found.reference, f"{found.cosine:.6f}", _percent(found.top1_agreement))
        for graph, all_found in result.parity.items()
        for found in all_found
    ]
    files = [(file.name, f"{file.bytes / 1e6:,.1f} MB") for file in result.files]
    return Shown(
        title=(
            f"{result.model.name} as {result.recipe}: "
            f"{'every gate met' if result.passed else 'a gate FAILED'}"
        ),
        grids=(
            *([Grid(columns=("", "float", "quantized", ""), rows=rows)] if rows else []),
            Grid(columns=("graph", "against", "cosine", "top-1"), rows=parity, text_columns=2),
            Grid(columns=("file", "size"), rows=files),
        ),
    )


@shown.register
def _auto(result: AutoResult) -> Shown:
    rows = [
        (
            trial.name,
            number(trial.value),
            _interval(trial.change, trial.change_low, trial.change_high),
            f"{trial.speedup:.2f}x",
            f"{trial.bytes / 1e6:,.1f} MB",
            "chosen" if trial.name == result.chosen else "yes" if trial.is_within else "no",
        )
        for trial in result.trials
    ]
    columns = ("export", result.metric, "change", "as fast as float", "size", "within the budget")
    return Shown(
        title=f"{result.model.name}: {len(rows)} exports tried, budget {number(result.max_drop)}",
        grids=(Grid(columns=columns, rows=rows),),
        notes=(result.reason, *result.warnings),
    )


@shown.register
def _diagnosis(result: Diagnosis) -> Shown:
    rows = [
        (found.severity, found.where, found.kind, found.what, found.advice, _percent(found.share))
        for found in result.findings
    ]
    columns = ("severity", "where", "kind", "what", "try", "of the damage")
    begins = f"The error begins at {result.begins}." if result.begins else ""
    return Shown(
        title=(
            f"{result.quantized_graph.source} against {result.float_graph.source}: {result.metric} "
            f"{number(result.total)}"
        ),
        grids=(Grid(columns=columns, rows=rows, text_columns=5),),
        notes=(begins, *result.warnings),
    )


@shown.register
def _training(result: TrainingResult) -> Shown:
    rows = []
    for model in result.models:
        last = model.measurements[-1] if model.measurements else None
        of_last = (
            ("n/a",) * 3
            if last is None
            else (number(last.loss), number(last.abs_max_logit), number(last.kurtosis))
        )
        rows.append(
            (model.arm, str(model.seed), f"{model.parameters:,}", f"{model.tokens:,}", *of_last)
        )
    columns = ("arm", "seed", "parameters", "tokens", "held-out loss", "max |logit|", "kurtosis")
    unfinished = [f"{m.arm}-seed{m.seed}" for m in result.models if not m.finished]
    return Shown(
        title=f"{result.name}: {len(rows)} trained models",
        grids=(Grid(columns=columns, rows=rows),),
        notes=(f"Not finished: {', '.join(unfinished)}." if unfinished else "",),
    )


@shown.register
def _curves(result: Curves) -> Shown:
    steps = result.steps
    if len(steps) > MOST_ROWS:  # evenly, with the first and the last
        last = len(steps) - 1
        steps = tuple(steps[round(at * last / (MOST_ROWS - 1))] for at in range(MOST_ROWS))
    rows = [
        (
            f"{step.step:,}",
            number(step.loss),
            number(max((logit.abs_max for logit in step.logits), default=math.nan)),
            number(max((hidden.abs_max for hidden in step.hidden), default=math.nan)),
            number(max((hidden.kurtosis for hidden in step.hidden), default=math.nan)),
        )
        for step in steps
    ]
    columns = ("step", "loss", "max |logit|", "max |hidden state|", "largest kurtosis")
    return Shown(
        title=f"{result.header.name}: {len(result.steps):,} recorded steps",
        grids=(Grid(columns=columns, rows=rows, text_columns=0),),
    )
