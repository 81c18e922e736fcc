"""Which export to ship and what it costs, or the command that would find one."""

from __future__ import annotations

import math
import shlex
from typing import Final

from quantkit.reporting.blocks import Recommendation
from quantkit.reporting.collect import Run
from quantkit.reporting.export_tables import recipe_of
from quantkit.reporting.text import NOT_AVAILABLE, Table, number, size
from quantkit.results import Accuracy, AutoResult, Export

BUDGET_FRAC: Final = 0.02
"""What an export may lose to be recommended where nobody set a budget: relative for a perplexity,
two points for an accuracy."""


def recommendation(run: Run) -> Recommendation | None:
    """Returns the export to ship, or what is missing for one; None where no model was looked at.

    What `--quantize auto` chose wins. Else it is the fastest export that passed its gates and whose
    loss stays within `BUDGET_FRAC` at the bad end of its 95 % interval; of one without an interval
    nothing is claimed.
    """
    models = dict.fromkeys(_names(run))
    parts = [_of_model(run, name) for name in models]
    if not parts:
        return None
    tables = [part.table for part in parts if part.table is not None]
    rows = tuple(row for table in tables for row in table.rows)
    return Recommendation(
        title="The export to ship",
        sentences=tuple(sentence for part in parts for sentence in part.sentences),
        table=_table(rows) if rows else None,
        commands=tuple(command for part in parts for command in part.commands),
    )


def _names(run: Run) -> list[str]:
    searched = [found.result.model.name for found in run.searches]
    exported = [found.result.model.name for found in run.exports]
    measured = [found.result.model.name for found in run.stats]
    swept = [model.name for found in run.sweeps for model in found.result.models]
    return [*searched, *exported, *measured, *swept]


def _of_model(run: Run, name: str) -> Recommendation:
    searches = [f.result for f in run.searches if f.result.model.name == name]
    exports = [f.result for f in run.exports if f.result.model.name == name]
    sources = [e.model.source for e in exports] + [
        f.result.model.source for f in run.stats if f.result.model.name == name
    ]
    source = shlex.quote([*sources, name][0])
    search = f"quantkit export {source} --quantize auto --max-drop {share_words(BUDGET_FRAC)}"
    if searches:
        return _searched(searches[0], exports, source)
    within = sorted((e for e in exports if _is_within(e)), key=_latency)
    if within:
        best = within[0]
        return Recommendation(
            title="",
            sentences=(f"{name}: ship {recipe_of(best)}, {cost_words(best)}.",),
            table=_table((_row(best),)),
        )
    if exports:
        best = min(exports, key=lambda e: _missing(e.accuracy))
        return Recommendation(
            title="",
            sentences=(
                f"{name}: no export that was made is shown to stay within {_budget(best.accuracy)} "
                f"of float; {recipe_of(best)} has {cost_words(best)}.",
            ),
            table=_table(tuple(_row(e) for e in exports)),
            commands=(search,),
        )
    return Recommendation(
        title="",
        sentences=(f"{name}: nothing was exported yet; `{search}` finds the fastest graph.",),
        commands=(search,),
    )


def _searched(found: AutoResult, exports: list[Export], source: str) -> Recommendation:
    budget = _amount(found.max_drop, found.metric)
    command = f"quantkit export {source} --quantize auto --max-drop {budget.replace(' ', '')}"
    if not found.chosen:
        closest = min(found.trials, key=lambda t: _nan_last(t.loss_high), default=None)
        near = ""
        if closest is not None:
            lost = _amount(closest.loss_high, found.metric)
            near = f" {closest.name} comes closest (at most {lost} lost)."
        return Recommendation(
            title="",
            sentences=(
                f"{found.model.name}: none of {len(found.trials)} graphs stays within {budget} of "
                f"float.{near} {found.reason}",
            ),
            commands=(command,),
        )
    chosen = next(trial for trial in found.trials if trial.name == found.chosen)
    mine = [e for e in exports if e.recipe == chosen.recipe]
    words = (
        cost_words(mine[0])
        if mine
        else f"{number(chosen.speedup, 3)}x as fast, {size(chosen.bytes)}, "
        f"{_change_words(found.metric, chosen.change, chosen.change_low, chosen.change_high)}"
    )
    kept = f"{len(chosen.kept)} inputs in float" if chosen.kept else "nothing left in float"
    return Recommendation(
        title="",
        sentences=(
            f"{found.model.name}: ship {chosen.name}, the fastest of {len(found.trials)} graphs "
            f"within {budget} of float: {words}; {kept}.",
        ),
        table=_table(tuple(map(_row, mine))) if mine else None,
        commands=(command,),
    )


def cost_words(result: Export) -> str:
    """Returns what an export costs and gains: accuracy with its interval, speed, size."""
    accuracy = result.accuracy
    parts = []
    if accuracy is not None and accuracy.change is not None:
        low, high = accuracy.change_low, accuracy.change_high
        parts.append(
            _change_words(
                accuracy.metric,
                accuracy.change,
                math.nan if low is None else low,
                math.nan if high is None else high,
            )
        )
    elif accuracy is not None:
        parts.append(
            f"{accuracy.metric} {number(accuracy.quantized)} instead of {number(accuracy.float)}"
        )
    else:
        parts.append("accuracy not measured")
    before, after = result.latency_ms.get("float"), result.latency_ms.get("quantized")
    if before and after:
        parts.append(f"{before / after:.2f}x as fast ({number(after, 3)} ms a prompt)")
    parts.append(_size_words(result))
    if not result.passed:
        parts.append("and it FAILED its gates")
    return ", ".join(parts)


def _change_words(metric: str, change: float, low: float, high: float) -> str:
    """Returns `1.010 [1.008, 1.013] of float's perplexity`, or points of an accuracy."""
    known = not (math.isnan(low) or math.isnan(high))
    if metric == "perplexity":
        span = f" [{low:.4f}, {high:.4f}]" if known else ""
        return f"{change:.4f}{span} of float's perplexity"
    span = f" [{100 * low:+.1f}, {100 * high:+.1f}]" if known else ""
    return f"{metric} {100 * change:+.1f}{span} points"


def _size_words(result: Export) -> str:
    shipped = sum(f.bytes for f in result.files if "/" not in f.name)
    whole = sum(f.bytes for f in result.files if f.name.startswith("float/"))
    return f"{size(shipped)} instead of {size(whole)}" if whole else size(shipped)


def _is_within(result: Export) -> bool:
    accuracy = result.accuracy
    return result.passed and accuracy is not None and _missing(accuracy) <= BUDGET_FRAC


def _missing(accuracy: Accuracy | None) -> float:
    """Returns the loss at the bad end of its interval; infinite where none is known."""
    if accuracy is None or accuracy.change_low is None or accuracy.change_high is None:
        return math.inf
    bad = accuracy.change_high - 1.0 if accuracy.metric == "perplexity" else -accuracy.change_low
    return _nan_last(bad)


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _latency(result: Export) -> float:
    return _nan_last(result.latency_ms.get("quantized", math.nan))


def _budget(accuracy: Accuracy | None) -> str:
    return _amount(BUDGET_FRAC, "perplexity" if accuracy is None else accuracy.metric)


def _amount(drop: float, metric: str) -> str:
    """Returns a loss: in percent of a perplexity, else in points."""
    return share_words(drop) if metric == "perplexity" else f"{100 * drop:g} points"


def share_words(value: float) -> str:
    """Returns a fraction in percent, as options take it: `2%`."""
    return f"{100 * value:.3g}%" if math.isfinite(value) else NOT_AVAILABLE


def _row(result: Export) -> tuple[str, ...]:
    accuracy = result.accuracy
    before, after = result.latency_ms.get("float"), result.latency_ms.get("quantized")
    decode = result.latency_ms.get("float_decode"), result.latency_ms.get("quantized_decode")
    return (
        result.model.name,
        recipe_of(result),
        "passed" if result.passed else "FAILED",
        _change_cell(accuracy),
        f"{before / after:.2f}x" if before and after else NOT_AVAILABLE,
        f"{decode[0] / decode[1]:.2f}x" if decode[0] and decode[1] else NOT_AVAILABLE,
        _size_words(result).replace(" instead of ", " of "),
    )


def _change_cell(accuracy: Accuracy | None) -> str:
    if accuracy is None or accuracy.change is None:
        return NOT_AVAILABLE
    low, high = accuracy.change_low, accuracy.change_high
    is_ratio = accuracy.metric == "perplexity"
    text = f"{accuracy.change:.4f}" if is_ratio else f"{100 * accuracy.change:+.1f} points"
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return text
    span = f"{low:.4f}, {high:.4f}" if is_ratio else f"{100 * low:+.1f}, {100 * high:+.1f}"
    return f"{text} [{span}]"


def _table(rows: tuple[tuple[str, ...], ...]) -> Table:
    return Table(
        title="What it costs",
        columns=("model", "recipe", "gates", "against float", "prefill", "decode", "size"),
        rows=rows,
        text_columns=3,
        note="Perplexity as quantized / float, paired 95 % interval; speed in ONNX Runtime.",
    )
