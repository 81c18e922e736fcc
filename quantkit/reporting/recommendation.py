"""Which export to ship and what it costs, or the command that would find one."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from quantkit.reporting.blocks import Recommendation
from quantkit.reporting.collect import Run
from quantkit.reporting.export_tables import recipe_of
from quantkit.reporting.text import NOT_AVAILABLE, Table, first_of, number, relative, size
from quantkit.results import Accuracy, AutoResult, Export, ModelInfo, Trial

BUDGET_FRAC: Final = 0.02
"""What an export may lose to be recommended where nobody set a budget: relative for a perplexity,
two points for an accuracy."""


def recommendation(run: Run) -> Recommendation | None:
    """Returns the export to ship, or what is missing for one; None where no model was looked at.

    What `--quantize auto` chose wins. Else it is the fastest export that passed its gates and whose
    loss stays within `BUDGET_FRAC` at the bad end of its 95 % interval; of one without an interval
    nothing is claimed.
    """
    sources: dict[str, str] = {}
    for model in _infos(run):
        sources.setdefault(model.name, model.source or model.name)
    made = {f.result.model.name for f in run.searches} | {f.result.model.name for f in run.exports}
    parts = [_of_model(run, name, source) for name, source in sources.items() if name in made]
    rest = {name: source for name, source in sources.items() if name not in made}
    parts += [_not_exported(rest)] if rest else []
    if not parts:
        return None
    tables = [part.table for part in parts if part.table is not None]
    rows = tuple(row for table in tables for row in table.rows)
    return Recommendation(
        title="The export to ship",
        sentences=tuple(sentence for part in parts for sentence in part.sentences),
        table=_narrow(_table(rows)) if rows else None,
        commands=tuple(command for part in parts for command in part.commands),
    )


def _infos(run: Run) -> list[ModelInfo]:
    """Returns the models of all files, those that say most of an export first."""
    return [
        *(found.result.model for found in run.searches),
        *(found.result.model for found in run.exports),
        *(found.result.model for found in run.stats),
        *(found.result.model for found in run.calibrations),
        *(found.result.model for found in run.ranges),
        *(found.result.model for found in run.sensitivities),
        *(model for found in run.sweeps for model in found.result.models),
    ]


def best_of(exports: Sequence[Export]) -> Export | None:
    """Returns the fastest export within `BUDGET_FRAC`, of as fast ones that which loses least."""
    within = [export for export in exports if _is_within(export)]
    return min(within, key=lambda e: (_latency(e), _missing(e.accuracy)), default=None)


def _of_model(run: Run, name: str, source: str) -> Recommendation:
    searches = [f.result for f in run.searches if f.result.model.name == name]
    exports = [f.result for f in run.exports if f.result.model.name == name]
    if searches:
        return _searched(searches[0], exports, source)
    best = best_of(exports)
    if best is not None:
        return Recommendation(
            title="",
            sentences=(
                f"{name}: ship {recipe_of(best)}, within {_budget(best.accuracy)} of float: "
                f"{cost_words(best)}.",
            ),
            table=_table((_row(best),)),
        )
    search = _search_command(source, BUDGET_FRAC)
    best = min(exports, key=lambda e: (not e.passed, _missing(e.accuracy)))
    none = "the one export" if len(exports) == 1 else f"none of {len(exports)} exports"
    is_not = "is not" if len(exports) == 1 else "is"
    lead = "it has" if len(exports) == 1 else f"{recipe_of(best)} comes closest, with"
    return Recommendation(
        title="",
        sentences=(
            f"{name}: {none} {is_not} shown to stay within {_budget(best.accuracy)} of float: "
            f"{lead} {cost_words(best)}{_miss_words(best.accuracy)}. Try `{search}`.",
        ),
        table=_table(tuple(_row(e) for e in exports)),
        commands=(search,),
    )


def _not_exported(sources: dict[str, str]) -> Recommendation:
    """Returns the command for models (name -> source) without an export, in one sentence."""
    commands = dict.fromkeys(_search_command(s, BUDGET_FRAC) for s in sources.values())
    said = next(iter(commands)) if len(commands) == 1 else _search_command("MODEL", BUDGET_FRAC)
    return Recommendation(
        title="",
        sentences=(
            f"{first_of(list(sources))}: nothing was exported yet; `{said}` finds the fastest "
            f"graph within {share_words(BUDGET_FRAC)} of float.",
        ),
        commands=tuple(commands),
    )


def _searched(found: AutoResult, exports: list[Export], source: str) -> Recommendation:
    budget = _amount(found.max_drop, found.metric)
    command = _search_command(source, found.max_drop, found.task)
    if not found.chosen:
        closest = min(found.trials, key=lambda t: _nan_last(t.loss_high), default=None)
        near = ""
        if closest is not None:
            known = math.isfinite(closest.loss_high)
            lost = _amount(closest.loss_high, found.metric) if known else ""
            near = f" {closest.name} comes closest (at most {lost} lost)." if lost else ""
        return Recommendation(
            title="",
            sentences=(
                f"{found.model.name}: none of {len(found.trials)} graphs stays within {budget} of "
                f"float.{near}",
            ),
            commands=(command,),
        )
    chosen = found.winner
    mine = [e for e in exports if e.recipe == chosen.recipe and e.searched]
    mine = mine or [e for e in exports if e.recipe == chosen.recipe]
    words = (
        cost_words(mine[0])
        if mine
        else f"{_trial_change(found, chosen)}, {chosen.speedup:.2f}x as fast on a prompt "
        f"({number(chosen.latency_ms, 3)} ms), {size(chosen.bytes)}"
    )
    inputs = "input" if len(chosen.kept) == 1 else "inputs"
    kept = f"{len(chosen.kept)} {inputs} left in float" if chosen.kept else "nothing left in float"
    if mine and not mine[0].passed:
        return Recommendation(
            title="",
            sentences=(
                f"{found.model.name}: the search chose {chosen.name}, but its export FAILED its "
                "gates: do not ship it.",
            ),
            table=_table(tuple(map(_row, mine))),
            commands=(command,),
        )
    return Recommendation(
        title="",
        sentences=(
            f"{found.model.name}: ship {chosen.name}, the fastest of {len(found.trials)} graphs "
            f"within {budget} of float: {words}; {kept}.{_again(found, mine)}",
        ),
        table=_table(tuple(map(_row, mine))) if mine else None,
        commands=(command,),
    )


def _trial_change(found: AutoResult, trial: Trial) -> str:
    ends = (trial.change_low, trial.change_high)
    return _change_words(found.metric, trial.change, *ends, found.chosen_on)


def _again(found: AutoResult, mine: list[Export]) -> str:
    """Returns that the budget is not shown to hold on text that took no part in the choice."""
    accuracy = mine[0].accuracy if mine else None
    if accuracy is None or accuracy.metric != found.metric:
        return ""
    if _missing(accuracy) <= found.max_drop:
        return ""
    return " What the choice has not seen does not show it to stay within the budget."


def _search_command(source: str, max_drop: float, task: str = "perplexity") -> str:
    """Returns what finds the fastest graph; of a graph, which has no search, the safest recipe."""
    # behind the dashes nothing is an option
    place = ["--", source] if source.startswith("-") else [source]
    if source.lower().endswith(".onnx"):
        return shlex.join(["quantkit", "export", "--quantize", "w8a8-dynamic", *place])
    words = ["--quantize", "auto", "--max-drop", share_words(max_drop)]
    words += [] if task == "perplexity" else ["--task", task]
    if len(place) == 1:
        return shlex.join(["quantkit", "export", source, *words])
    return shlex.join(["quantkit", "export", *words, *place])


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
                accuracy.units,
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
        parts.append(f"{before / after:.2f}x as fast on a prompt ({number(after, 3)} ms)")
    decode = _decode_ms(result)
    if decode is not None:
        parts.append(f"{decode[0] / decode[1]:.2f}x a token after it")
    parts.append(_size_words(result))
    if not result.passed:
        parts.append("and it FAILED its gates")
    return ", ".join(parts)


def _change_words(
    metric: str, change: float, low: float, high: float, units: int | None = None
) -> str:
    """Returns `perplexity +1.01 % [+0.80 %, +1.30 %]`, or points of an accuracy, with n."""
    count = "" if units is None else f" (n = {units:,})"
    return f"{metric} {_change_text(metric, change, low, high)}{count}"


def _change_text(metric: str, change: float, low: float, high: float) -> str:
    known = math.isfinite(low) and math.isfinite(high)
    if metric == "perplexity":
        span = f" [{relative(low, 1.0)}, {relative(high, 1.0)}]" if known else ""
        return f"{relative(change, 1.0)}{span}"
    span = f" [{100 * low:+.1f}, {100 * high:+.1f}]" if known else ""
    return f"{100 * change:+.1f}{span} points"


def _miss_words(accuracy: Accuracy | None) -> str:
    """Returns by how much the bad end of its interval misses the budget; "" where unknown."""
    over = _missing(accuracy) - BUDGET_FRAC
    if accuracy is None or not 0 < over < math.inf:
        return ""
    is_ratio = accuracy.metric == "perplexity"
    amount = f"{number(100 * over, 3)} {'%' if is_ratio else 'points'}"
    return f"; the far end of its interval is {amount} beyond"


def _decode_ms(result: Export) -> tuple[float, float] | None:
    """Returns milliseconds of a token behind a prompt, float and quantized; None: not measured."""
    before, after = (result.latency_ms.get(f"{side}_decode") for side in ("float", "quantized"))
    return (before, after) if before and after else None


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
    return f"{100 * value:.6g}%" if math.isfinite(value) else NOT_AVAILABLE


def _row(result: Export) -> tuple[str, ...]:
    accuracy = result.accuracy
    before, after = result.latency_ms.get("float"), result.latency_ms.get("quantized")
    decode = _decode_ms(result)
    return (
        result.model.name,
        recipe_of(result),
        "passed" if result.passed else "FAILED",
        _change_cell(accuracy),
        f"{before / after:.2f}x" if before and after else NOT_AVAILABLE,
        f"{decode[0] / decode[1]:.2f}x" if decode is not None else NOT_AVAILABLE,
        _short(_size_words(result).replace(" instead of ", " of ")),
        _short(_memory_words(result)),
        number(len(result.kept)),
    )


def _change_cell(accuracy: Accuracy | None) -> str:
    if accuracy is None or accuracy.change is None:
        return NOT_AVAILABLE
    low, high = (
        math.nan if end is None else end for end in (accuracy.change_low, accuracy.change_high)
    )
    return _change_text(accuracy.metric, accuracy.change, low, high)


def _memory_words(result: Export) -> str:
    after = result.memory_bytes.get("quantized")
    before = result.memory_bytes.get("float")
    if after is None:
        return NOT_AVAILABLE
    return size(after) if before is None else f"{size(after)} of {size(before)}"


def _short(sizes: str) -> str:
    """Returns `7.5 of 16.7 MB`, where the unit of both is one."""
    first, of, second = sizes.partition(" of ")
    unit = f" {second.split()[-1]}" if of else ""
    return f"{first.removesuffix(unit)} of {second}" if unit and first.endswith(unit) else sizes


def _table(rows: tuple[tuple[str, ...], ...]) -> Table:
    return Table(
        title="What it costs",
        columns=(
            "model", "recipe", "gates", "against float", "prefill", "decode", "size", "memory",
            "in float",
        ),
        rows=rows,
        text_columns=3,
        note="Change with its paired 95 % interval; how many times as fast, in ONNX Runtime, on a "
        "prompt and on a token behind it; memory: largest resident set; in float: quantizers that "
        "were left out.",
    )  # fmt: skip


def _narrow(table: Table) -> Table:
    """Returns the table without gates and quantizers in float where none failed, none is."""
    usual = {"gates": "passed", "in float": "0"}
    shown = [
        i
        for i, name in enumerate(table.columns)
        if any(row[i] != usual.get(name) for row in table.rows)
    ]
    return replace(
        table,
        columns=tuple(table.columns[i] for i in shown),
        rows=tuple(tuple(row[i] for i in shown) for row in table.rows),
        text_columns=sum(i < table.text_columns for i in shown),
    )
