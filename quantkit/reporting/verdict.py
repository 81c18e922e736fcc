"""The sentences that a report opens with: numbers, or what is missing."""

from __future__ import annotations

import math
from typing import Final

from quantkit.recipe import LOGIT_GRANULARITIES, UNQUANTIZED_BITS
from quantkit.reporting import calibration_notes, sensitivity_tables
from quantkit.reporting.calibration_groups import calibrations
from quantkit.reporting.collect import Run
from quantkit.reporting.groups import HIDDEN, LOGIT, of_heads, of_layers, top
from quantkit.reporting.outlier_tables import summaries
from quantkit.reporting.sweep_groups import Measured
from quantkit.reporting.sweep_rows import FLOAT, bit_rows, other_cells
from quantkit.reporting.sweep_seeds import by_group
from quantkit.reporting.text import number, quoted, share, size
from quantkit.results import Cell, Export, GroupStats, Stats, TopEntry

_MOST_COSTS: Final = 8
"""Parts of the sentence on costs; what comes behind them is in the tables."""


def verdict(run: Run) -> tuple[str, ...]:
    """Returns one sentence each on outliers, on what the bits cost, and on the export.

    A calibration report adds one before the costs, a sensitivity ranking one behind them.
    """
    calibration = (_calibration(run),) if run.calibrations else ()
    keep = (_keep(run),) if run.sensitivities else ()
    return (outliers(run), *calibration, _cost(run), *keep, _export(run))


def stage_verdicts(run: Run) -> tuple[str, ...]:
    """Returns the sentences on calibration, sensitivity and export, of those that were found."""
    calibration = (_calibration(run),) if run.calibrations else ()
    keep = (_keep(run),) if run.sensitivities else ()
    export = (_export(run),) if run.exports else ()
    return (*calibration, *keep, *export)


def outliers(run: Run) -> str:
    """Returns the largest magnitudes of every model and where they are."""
    if not run.stats:
        return "No statistics were found: `quantkit stats MODEL` measures the outliers."
    parts = []
    for name, stats in summaries(run):
        logit, hidden = stats.summary.attention_logit, stats.summary.hidden_state
        ratio = hidden.abs_max / hidden.abs_median if hidden.abs_median > 0 else math.nan
        times = f", {number(ratio, 3)} times the median" if math.isfinite(ratio) else ""
        parts.append(
            f"in {name} the largest |attention logit| is {number(logit.abs_max)}"
            f"{_bracketed(logit_place(stats, whole=True))} and the largest |hidden activation| is "
            f"{number(hidden.abs_max)}{_bracketed(hidden_place(stats, whole=True))}{times}"
        )
    return _sentence(parts)


def _calibration(run: Run) -> str:
    return _sentence(
        [
            f"calibration of {name} on {calibration_notes.samples(found.data)}: "
            f"{calibration_notes.worst(found)}, and {calibration_notes.stability(found)}"
            for name, found in calibrations(run)
        ]
    )


def _largest(groups: list[GroupStats]) -> tuple[GroupStats, TopEntry | None] | None:
    """Returns the group with the largest |x| and its top entry; one with an entry wins a tie."""
    known = [group for group in groups if not math.isnan(top(group))]
    if not known:
        return None
    best = max(known, key=lambda group: (top(group), bool(group.top)))
    return best, best.top[0] if best.top else None


def hidden_place(stats: Stats, *, whole: bool = False) -> str:
    """Returns layer and channel of the largest hidden activation, `whole`: and its token."""
    best = _largest([group for _, group in of_layers(stats, HIDDEN)])
    if best is None:
        return ""
    group, entry = best
    if entry is None:
        return f"layer {group.layer}"
    token = f" {quoted(entry.token)}" if entry.token else ""
    position = f", token position {entry.position}{token}" if whole else ""
    return f"layer {group.layer}{position}, channel {entry.channel}"


def logit_place(stats: Stats, *, whole: bool = False) -> str:
    """Returns layer, head and map of the largest valid logit, `whole`: and its tokens' places."""
    best = _largest([group for *_, group in of_heads(stats, LOGIT)])
    if best is None:
        return ""
    group, entry = best
    place = f"layer {group.layer}, head {group.head}"
    place += "" if group.map is None or stats.model.maps < 2 else f", map {group.map}"
    return place + (
        f", query {entry.position}, key {entry.key}" if whole and entry is not None else ""
    )


def _cost(run: Run) -> str:
    """Returns what the bits cost in the first metric of each task, models one after the other."""
    parts = [one for one in by_group(run) if one.is_first]
    if not parts:
        return "No sweep was found: `quantkit sweep MODEL` measures what each bit costs."
    said = [text for one in parts for text in _costs(one)]
    more = len(said) - _MOST_COSTS
    said = said[:_MOST_COSTS] + ([f"{more} more stand in the tables"] if more > 0 else [])
    return _sentence(said)


def _costs(one: Measured) -> list[str]:
    """Returns a part a model and other parts of the recipe.

    Recipes without logits are one part, of models whose logits were not quantized.
    """
    rows = bit_rows(one.cells)
    texts = []
    for model, rest in dict.fromkeys((row.model, row.rest) for row in rows):
        mine = {row.scale: row for row in rows if (row.model, row.rest) == (model, rest)}
        order = [*(word for word in LOGIT_GRANULARITIES if word in mine), *mine]
        row = mine[order[0]]
        base = row.cells.get(UNQUANTIZED_BITS)
        costs = [
            f"{one.value(cell.value)} at {bits} bits" + _change(one, cell, base)
            for bits, cell in sorted(row.cells.items(), reverse=True)
            if bits != UNQUANTIZED_BITS
        ]
        start = [f"{_value(one, base)} with float logits"] if base is not None else []
        layers = "" if rest == "float" else f" with {rest}"
        listed = ", ".join([*start, *costs])
        texts.append(f"{one.words} of {model}{layers} is {listed}, one scale per {order[0]}")
    known = {row.model for row in rows}
    others = [cell for cell in other_cells(one.cells) if cell.model not in known]
    for model in dict.fromkeys(cell.model for cell in others):
        base = one.float_cell(model)
        mine_too = [
            f"{one.value(cell.value)} with {cell.recipe}" + _change(one, cell, base)
            for cell in others
            if cell.model == model and cell.recipe != FLOAT
        ]
        start = [] if base is None else [f"{_value(one, base)} in float"]
        texts.append(f"{one.words} of {model} is {', '.join([*start, *mine_too])}")
    return texts


def _change(one: Measured, cell: Cell, base: Cell | None) -> str:
    if base is None:
        return ""
    value, start = one.pair(cell, base)
    return f" ({one.change(value - start, start)})"


def _value(one: Measured, cell: Cell) -> str:
    mark = one.chance_mark(cell)
    return one.value(cell.value) + (f" ({mark})" if mark else "")


def _keep(run: Run) -> str:
    return _sentence(
        [
            f"in {name}: {sensitivity_tables.suggestion(found)}"
            for name, found in sensitivity_tables.sensitivities(run)
        ]
    )


def _export(run: Run) -> str:
    if not run.exports:
        return (
            "No export was found: `quantkit export MODEL --quantize w8a8` makes and verifies one."
        )
    return _sentence([_export_part(found.result) for found in run.exports])


def _export_part(result: Export) -> str:
    # all that was compared but the model with itself
    shown = [name for name in result.parity if name != "simulation against itself"]
    proofs = [result.parity[name] for name in shown]
    checks = [check for checks in proofs for check in checks]
    text = f"the {result.recipe} export of {result.model.name} "
    if result.kept:
        text += f"({len(result.kept):,} quantizers left in float) "
    text += "passed its gates" if result.passed else "FAILED its gates"
    if checks:
        cosine = min(check.cosine for check in checks)
        top1 = min(check.top1_agreement for check in checks)
        text += f" (lowest cosine {number(cosine, 6)}, lowest top-1 agreement {share(top1)})"
    shipped = [file for file in result.files if not file.name.startswith("float/")]
    text += f", takes {size(sum(file.bytes for file in shipped or result.files))}"
    float_ms = result.latency_ms.get("float", math.nan)
    quantized_ms = result.latency_ms.get("quantized", math.nan)
    if float_ms > 0 and quantized_ms > 0:
        text += f", runs in {number(quantized_ms, 3)} ms instead of {number(float_ms, 3)} ms"
    if result.accuracy is not None:
        accuracy = result.accuracy
        text += (
            f", and its {accuracy.metric} is {number(accuracy.quantized)} "
            f"instead of {number(accuracy.float)}"
        )
    return text


def _sentence(parts: list[str]) -> str:
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] + "."


def _bracketed(place: str) -> str:
    return f" ({place})" if place else ""
