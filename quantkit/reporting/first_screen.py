"""The first screen: where the outliers are, what the bits cost, what to do; then the evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from quantkit.recipe import LOGIT_GRANULARITIES, UNQUANTIZED_BITS
from quantkit.reporting import curves, verdict
from quantkit.reporting.against import against_sentence
from quantkit.reporting.blocks import FirstScreen
from quantkit.reporting.collect import Run, everything
from quantkit.reporting.diagnosis_tables import diagnosis_verdict
from quantkit.reporting.drawing import Chart
from quantkit.reporting.groups import HIDDEN, LOGIT
from quantkit.reporting.outlier_tables import figures_of, largest_logits, topk_table
from quantkit.reporting.pair_chance import counts, guess_sentences
from quantkit.reporting.pair_groups import Pair, fewest_level, pair_of
from quantkit.reporting.pair_verdict import pair_verdict, training_verdict
from quantkit.reporting.paper import ALL_READING, BASELINE, DIFF, TABLE_5, VALID_READING
from quantkit.reporting.pareto_charts import pareto_charts
from quantkit.reporting.recommendation import recommendation
from quantkit.reporting.sweep_charts import sweep_charts
from quantkit.reporting.sweep_groups import CHANCE_MARK, OPEN_MARK, Measured
from quantkit.reporting.sweep_rows import BitRow, bit_rows
from quantkit.reporting.sweep_seeds import by_group
from quantkit.reporting.text import NOT_AVAILABLE, Table, first_of, number
from quantkit.reporting.training_charts import loss_chart
from quantkit.reporting.training_groups import arm_colours, trainings
from quantkit.results import Delta


def first_screen(run: Run, earlier: Run | None = None) -> FirstScreen:
    """Returns three sentences with their numbers, Table 5, accuracy against bits, the export.

    With an `earlier` run, what changed since is one sentence more, in front.

    `more` holds what else the verdict of the run says; it stands below them.
    """
    screen = _screen(run)
    if earlier is None:
        return screen
    return replace(screen, sentences=(against_sentence(run, earlier), *screen.sentences))


def _screen(run: Run) -> FirstScreen:
    pair = pair_of(run)
    if pair is not None:
        return _pair_screen(pair, run)
    if run.diagnoses and not everything(run):
        said = diagnosis_verdict(run)
        return FirstScreen(sentences=said[:3], more=said[3:])
    if not everything(run) and trainings(run):
        said = training_verdict(run)
        first = next((f.result for f in run.trainings if f.result.models), None)
        chart = None if first is None else loss_chart("training-loss", first, arm_colours(run))
        return FirstScreen(sentences=said[:3], charts=_there(chart), more=said[3:])
    shipped, task = recommendation(run), _first_task(run)
    sentences = (
        *((verdict.outliers(run),) if run.stats else ()),
        *_bits_sentence(task),
        *((" ".join(shipped.sentences),) if shipped is not None else ()),
    )
    table = topk_table(run, paper=any(f.result.model.maps > 1 for f in run.stats))
    more = verdict.stage_verdicts(run)
    if run.curves and not sentences:
        names = first_of(curves.names(run))
        sentences = (f"What the training of {names} went through, batch by batch, is below.",)
    if not run.stats and not run.sweeps and not run.exports:
        # calibrations and rankings alone: what they found is the first thing to say
        lead, more = more[:2], more[2:]
        sentences = (*lead, *sentences)
    return FirstScreen(
        sentences=sentences or verdict.verdict(run)[:1],
        table=table if table.rows else None,
        charts=_charts(run, None if task is None else task[0]),
        export=shipped,
        more=more,
    )


def _pair_screen(pair: Pair, run: Run) -> FirstScreen:
    shipped = recommendation(run)
    told = _spoken(pair)
    return FirstScreen(
        sentences=(
            _pair_outliers(pair),
            *((_pair_bits(pair, told),) if told is not None else guess_sentences(pair)[:1]),
            *((" ".join(shipped.sentences),) if shipped is not None else ()),
        ),
        table=_papers_reading(topk_table(run, paper=True, narrow=True)),
        charts=_charts(_dynamic(run), told),
        export=shipped,
        more=(*pair_verdict(pair, run), *verdict.stage_verdicts(run)),
    )


def _papers_reading(table: Table) -> Table:
    """Returns Table 5 of the paper's reading alone, where it was measured, without that column.

    Rows of valid positions stand in the table below; here like is compared with like.
    """
    place = table.columns.index("reading") if "reading" in table.columns else -1
    rows = table.rows
    own = [row[place] for row in rows if not row[1].endswith("(paper)")]
    if place < 0 or ALL_READING not in own:
        return table
    gone = {i for i, row in enumerate(rows) if row[place] == VALID_READING}
    # their ratio has no reading of its own, and follows them
    gone |= {i + 1 for i in gone if i + 1 < len(rows) and not rows[i + 1][place]}
    rows = tuple(row for i, row in enumerate(rows) if i not in gone)
    note = (
        f"|x| at each rank, pooled over layers, heads and maps; logits over {ALL_READING}. "
        "(paper): the paper's own, at 2.8B parameters."
    )
    return replace(
        table,
        columns=(*table.columns[:place], *table.columns[place + 1 :]),
        rows=tuple((*row[:place], *row[place + 1 :]) for row in rows),
        text_columns=table.text_columns - 1,
        note=note,
    )


def _dynamic(run: Run) -> Run:
    """Returns the run without logits on static ranges, which are told below."""
    return replace(
        run,
        sweeps=tuple(
            replace(
                found,
                result=replace(
                    found.result,
                    cells=[c for c in found.result.cells if c.range != "static"],
                ),
            )
            for found in run.sweeps
        ),
    )


def _there(chart: Chart | None) -> tuple[Chart, ...]:
    return () if chart is None else (chart,)


def _pair_outliers(pair: Pair) -> str:
    """Returns the differential model's outliers as a share of the baseline's, and the paper's."""
    baseline, diff = pair.stats
    ours, theirs = largest_logits(diff), largest_logits(baseline)
    shared = [r for r in (ALL_READING, VALID_READING) if r in ours and r in theirs]
    paper = {
        (row.point, row.model): row.figures[0] for row in TABLE_5 if row.model in (BASELINE, DIFF)
    }
    parts = []
    if shared:
        reading = shared[0]
        places = [verdict.logit_place(stats) for stats in (diff, baseline)]
        is_valid = reading == VALID_READING
        parts.append(
            f"largest |attention logit| over {reading} is "
            + _beside(
                (ours[reading], theirs[reading]),
                places if is_valid else ("", ""),
                (paper[LOGIT, DIFF], paper[LOGIT, BASELINE]),
            )
            # where the masked ones are is not recorded
            + ("" if is_valid or not all(places) else f" (valid ones: {' against '.join(places)})")
        )
    states = [figures_of(stats, HIDDEN)[0] for stats in (diff, baseline)]
    parts.append(
        "largest |hidden state| "
        + _beside(
            (states[0], states[1]),
            [verdict.hidden_place(stats) for stats in (diff, baseline)],
            (paper[HIDDEN, DIFF], paper[HIDDEN, BASELINE]),
        )
    )
    return f"Against {pair.baseline}, {pair.diff}'s {'; its '.join(parts)}."


def _beside(both: tuple[float, float], places: Sequence[str], paper: tuple[float, float]) -> str:
    """Returns `0.468 times (67.7 in layer 3, channel 63, against 144.6 in layer 2)` and paper's."""
    words = [
        number(value) + (f" in {place}" if place else "")
        for value, place in zip(both, places, strict=True)
    ]
    text = f"{words[0]}{',' if places[0] else ''} against {words[1]}"
    paper_ratio = f"{number(paper[0] / paper[1], 3)} times"
    if both[1] > 0:
        text = f"{number(both[0] / both[1], 3)} times ({text})"
    return f"{text}, in the paper {paper_ratio}"


def _spoken(pair: Pair) -> Measured | None:
    """Returns the first task in which neither model may be guessing, or none."""
    return next((one for one in pair.firsts if pair.rows(one) and counts(pair, one)), None)


def _pair_bits(pair: Pair, one: Measured) -> str:
    """Returns the paper's claim on this pair, for the granularity that is best for both."""
    fewest = "; ".join(
        _fewest(one, [r for r in _dynamic_rows(pair.rows(one)) if r.model == m])
        for m in pair.models
    )
    crossed = {
        scale: (delta, found)
        for scale, delta in pair.against(one, 4, 6).items()
        if "static" not in scale.split() and (found := pair.crossed(delta)) is not None
    }
    if not crossed:
        return f"Fewest bits shown to be level with the own float in {one.words}: {fewest}."
    # the claim's best chance: the finest scale, on the paper's symmetric grid where there is one
    plain = [scale for scale in LOGIT_GRANULARITIES if scale in crossed]
    scale = [*crossed, *plain][-1]
    delta, found = crossed[scale]
    part = next(p for p in pair.parts if (p.task, p.metric) == (delta.task, delta.metric))
    cells = {(cell.model, cell.recipe): cell.value for cell in part.cells}
    base = cells[delta.against_model, delta.against]
    change = f"{part.change(delta.value, base)} {part.changes(delta.ci_low, delta.ci_high, base)}"
    word = _CROSSED.get(found.word, "beside")
    if found.word == "not shown" and _is_worse(part, delta):
        word = "is worse than"
    guess = {CHANCE_MARK: "one of them is at", OPEN_MARK: "one of them may be at"}.get(found.word)
    chance = f", where {guess} chance" if guess else ""
    return (
        f"{pair.diff} at 4 bits {word} {pair.baseline} at 6 in {_short(part)}, one scale per "
        f"{scale} ({found.ours} against {found.theirs}, {change}; {part.count}{chance}). Fewest "
        f"bits shown to be level with the own float: {fewest}."
    )


_CROSSED: Final = {
    "not shown": "is not shown to be level with",
    "level": "is level with",
    "better": "is better than",
    CHANCE_MARK: "cannot be held against",
    OPEN_MARK: "cannot be held against",
    NOT_AVAILABLE: "was not tested against",
}


def _is_worse(one: Measured, delta: Delta) -> bool:
    """Returns whether the whole interval is a loss of more than the margin."""
    least = -delta.ci_high if one.higher_is_better else delta.ci_low
    return least > delta.margin


def _dynamic_rows(rows: list[BitRow]) -> list[BitRow]:
    """Returns the rows without static ranges, where there are others."""
    return [row for row in rows if "static" not in row.scale.split()] or rows


def _first_task(run: Run) -> tuple[Measured, list[BitRow]] | None:
    """Returns the first task in which a model is above chance, and its rows of logits alone.

    Where all guess in all tasks, the first one; None without logits that were quantized alone.
    """
    parts = []
    for one in by_group(run):
        rows = [row for row in bit_rows(one.cells) if row.rest == "float"] if one.is_first else []
        if rows:
            parts.append((one, _dynamic_rows(rows)))
    able = [(one, rows) for one, rows in parts if not all(_guesses(one, row) for row in rows)]
    return next(iter([*able, *parts]), None)


def _charts(run: Run, task: Measured | None) -> tuple[Chart, ...]:
    """Returns accuracy against bits in that task; of a run without, its exports."""
    charts = sweep_charts(run)
    own = [chart for chart in charts if task and chart.title.startswith(f"{task.words} against")]
    return (*own, *charts, *pareto_charts(run))[:1]


def _bits_sentence(found: tuple[Measured, list[BitRow]] | None) -> tuple[str, ...]:
    """Returns the fewest bits that are level with float, a model after the other; () without."""
    if found is None:
        return ()
    one, rows = found
    models = dict.fromkeys(row.model for row in rows)
    said = [_fewest(one, [row for row in rows if row.model == model]) for model in models]
    return (
        f"The fewest bits of the attention logits that are level with float in {_short(one)} "
        f"({one.count}): {'; '.join(said)}.",
    )


def _short(one: Measured) -> str:
    """Returns task and metric; of a file its last part alone."""
    word, equals, source = one.task.partition("=")
    last = source.replace("\\", "/").rstrip("/").split("/")[-1]
    return replace(one, task=f"{word}{equals}{last}" if equals else word).words


def _guesses(one: Measured, row: BitRow) -> bool:
    base = row.cells.get(UNQUANTIZED_BITS)
    return base is not None and bool(one.chance_mark(base))


def _fewest(one: Measured, rows: list[BitRow]) -> str:
    """Returns the fewest level bits over the granularities, with what they cost, or that none is.

    Of several that need as few, the first, which is the coarsest.
    """
    model = rows[0].model
    if any(_guesses(one, row) for row in rows):
        return f"{model} is not shown to be above chance, so that its bits say nothing"
    found = [(bits, row) for row in rows if (bits := fewest_level(one, row)[0]) is not None]
    if found:
        bits, row = min(found, key=lambda pair: pair[0])
        return f"{model} {bits} bits per {row.scale} ({_cost(one, row, bits)})"
    # none: then what the most bits on the finest scale cost
    known = [row for row in rows if UNQUANTIZED_BITS in row.cells]
    if not known:
        return f"{model} has no float row"
    most = [max(row.cells.keys() - {UNQUANTIZED_BITS}) for row in known]
    bits, row = max(most), known[len(most) - 1 - most[::-1].index(max(most))]
    deltas = [one.deltas.get((r.model, c.recipe)) for r in rows for c in r.cells.values()]
    is_tested = any(delta is not None and delta.is_level is not None for delta in deltas)
    none = "none shown" if is_tested else "not tested"
    return f"{model} {none} ({bits} bits per {row.scale}: {_cost(one, row, bits)})"


def _cost(one: Measured, row: BitRow, bits: int) -> str:
    """Returns the figure at some bits, float's, and the change with its interval."""
    cell, base = row.cells[bits], row.cells[UNQUANTIZED_BITS]
    value, start = one.pair(cell, base)
    delta = one.deltas.get((cell.model, cell.recipe))
    span = "" if delta is None else f" {one.changes(delta.ci_low, delta.ci_high, start)}"
    change = one.change(value - start, start)
    return f"{one.value(value)} against {one.value(start)}, {change}{span}"
