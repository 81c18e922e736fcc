"""The first screen: where the outliers are, what the bits cost, what to do; then the evidence."""

from __future__ import annotations

from dataclasses import replace

from quantkit.recipe import UNQUANTIZED_BITS
from quantkit.reporting import verdict
from quantkit.reporting.against import against_sentence
from quantkit.reporting.blocks import FirstScreen
from quantkit.reporting.collect import Run, everything
from quantkit.reporting.diagnosis_tables import diagnosis_verdict
from quantkit.reporting.drawing import Chart
from quantkit.reporting.groups import HIDDEN, LOGIT
from quantkit.reporting.outlier_tables import figures_of, largest_logits, topk_table
from quantkit.reporting.pair_chance import counts
from quantkit.reporting.pair_groups import Pair, fewest_level, pair_of
from quantkit.reporting.pair_verdict import pair_verdict, training_verdict
from quantkit.reporting.paper import ALL_READING, BASELINE, DIFF, TABLE_5, VALID_READING
from quantkit.reporting.recommendation import recommendation
from quantkit.reporting.sweep_charts import sweep_charts
from quantkit.reporting.sweep_groups import Measured
from quantkit.reporting.sweep_rows import BitRow, bit_rows
from quantkit.reporting.sweep_seeds import by_group
from quantkit.reporting.text import Table, number
from quantkit.reporting.training_charts import loss_chart
from quantkit.reporting.training_groups import arm_colours, trainings
from quantkit.results import Stats


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
    shipped = recommendation(run)
    sentences = (
        *((verdict.outliers(run),) if run.stats else ()),
        *_bits_sentence(run),
        *((" ".join(shipped.sentences),) if shipped is not None else ()),
    )
    table = topk_table(run, paper=any(f.result.model.maps > 1 for f in run.stats))
    return FirstScreen(
        sentences=sentences or verdict.verdict(run)[:1],
        table=table if table.rows else None,
        charts=sweep_charts(run)[:1],
        export=shipped,
        more=verdict.stage_verdicts(run),
    )


def _pair_screen(pair: Pair, run: Run) -> FirstScreen:
    shipped = recommendation(run)
    told = _spoken(pair)
    return FirstScreen(
        sentences=(
            _pair_outliers(pair),
            *(() if told is None else (_pair_bits(pair, told),)),
            *((" ".join(shipped.sentences),) if shipped is not None else ()),
        ),
        table=_papers_reading(topk_table(run, paper=True, narrow=True)),
        charts=sweep_charts(_dynamic(run))[:1],
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
                    cells=[c for c in found.result.cells if not c.recipe.endswith(":static")],
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
        parts.append(
            f"largest |attention logit| is {_beside(ours[reading], theirs[reading])} over "
            f"{reading}, in the paper {_beside(paper[LOGIT, DIFF], paper[LOGIT, BASELINE])}"
        )
    states = [figures_of(stats, HIDDEN)[0] for stats in (diff, baseline)]
    parts.append(
        f"largest |hidden state| {_beside(states[0], states[1])}{_place(diff)}, in the paper "
        f"{_beside(paper[HIDDEN, DIFF], paper[HIDDEN, BASELINE])}"
    )
    return f"Against {pair.baseline}, {pair.diff}'s {'; its '.join(parts)}."


def _place(stats: Stats) -> str:
    """Returns where the largest hidden state stands, in words."""
    place = verdict.hidden_place(stats).strip(" ()")
    return f" (in {place})" if place else ""


def _beside(ours: float, theirs: float) -> str:
    times = f"{number(ours / theirs, 3)} times" if theirs > 0 else "beside"
    return f"{times} ({number(ours)} against {number(theirs)})"


def _spoken(pair: Pair) -> Measured | None:
    """Returns the first task in which neither model may be guessing, or none."""
    return next((one for one in pair.firsts if pair.rows(one) and counts(pair, one)), None)


def _pair_bits(pair: Pair, one: Measured) -> str:
    """Returns the paper's claim on this pair, for the granularity that is best for both."""
    fewest = "; ".join(
        _fewest(one, [r for r in pair.rows(one) if r.model == m]) for m in pair.models
    )
    crossed = [
        (scale, delta, found)
        for scale, delta in pair.against(one, 4, 6).items()
        if (found := pair.crossed(delta)) is not None and not scale.endswith("static")
    ]
    if not crossed:
        return f"Fewest bits shown to be level with float in {one.words}: {fewest}."
    # the finest scale last: the claim's best chance
    scale, delta, found = crossed[-1]
    base = next((c for c in one.cells if c.recipe == delta.against), None)
    change = ""
    if base is not None and delta.metric == one.metric:
        change = (
            f", {one.change(delta.value, base.value)} "
            f"{one.changes(delta.ci_low, delta.ci_high, base.value)}"
        )
    word = {
        "not shown": "is not shown to be level with",
        "level": "is level with",
        "better": "is better than",
    }.get(found.word, f"({found.word}) beside")
    return (
        f"{pair.diff} at 4 bits {word} {pair.baseline} at 6 in {one.words}, one scale per {scale} "
        f"({found.ours} against {found.theirs}{change}; {one.count}). Fewest bits that are level "
        f"with the own float: {fewest}."
    )


def _bits_sentence(run: Run) -> tuple[str, ...]:
    """Returns the fewest bits that are level with float, a model after the other; () without."""
    for one in by_group(run):
        rows = [row for row in bit_rows(one.cells) if row.rest == "float"] if one.is_first else []
        if not rows:
            continue
        models = dict.fromkeys(row.model for row in rows)
        parts = [_fewest(one, [row for row in rows if row.model == model]) for model in models]
        return (
            f"The fewest bits of the attention logits that are level with float in {one.words} "
            f"({one.count}): {'; '.join(parts)}.",
        )
    return ()


def _fewest(one: Measured, rows: list[BitRow]) -> str:
    """Returns the fewest level bits over the granularities, with what they cost, or that none is.

    Of several that need as few, the first, which is the coarsest.
    """
    found = [(bits, row) for row in rows if (bits := fewest_level(one, row)[0]) is not None]
    model = rows[0].model
    if not found:
        reasons = {fewest_level(one, row)[1] for row in rows}
        return f"{model}: {', '.join(sorted(reasons))}"
    bits, row = min(found, key=lambda pair: pair[0])
    cell, base = row.cells[bits], row.cells[UNQUANTIZED_BITS]
    delta = one.deltas.get((cell.model, cell.recipe))
    span = "" if delta is None else f" {one.changes(delta.ci_low, delta.ci_high, base.value)}"
    start, value = base.value, cell.value
    return (
        f"{model} {bits} bits per {row.scale} ({one.value(value)} against {one.value(start)}, "
        f"{one.change(value - start, start)}{span})"
    )
