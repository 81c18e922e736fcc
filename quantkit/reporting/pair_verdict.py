"""The sentences that the page of a pair opens with: no more than its numbers allow.

One pair is one draw of two models. What it shows is of these two; a gap between the architectures
is claimed where several seeds of both show it, and then at their size.
"""

from __future__ import annotations

from statistics import fmean, stdev
from typing import Final

from quantkit.reporting.collect import Run
from quantkit.reporting.groups import HIDDEN, LOGIT
from quantkit.reporting.outlier_tables import figures_of
from quantkit.reporting.pair_groups import Pair, above_chance, fewest_level, scale_words
from quantkit.reporting.pair_groups import logits_alone as grid_of
from quantkit.reporting.pair_seeds import Paired, paired, seeded
from quantkit.reporting.paper import BASELINE, DIFF, FIGURE_8, TABLE_5, PaperRow
from quantkit.reporting.sweep_groups import Measured
from quantkit.reporting.text import number
from quantkit.reporting.training_groups import DIFF_ARM, by_arm, last, millions, trainings
from quantkit.results import Delta, TrainingResult

_PAPER: Final = "The paper, at 2.8B parameters"
_SPOKEN: Final = ("max |logit|", "max |hidden state|", "held-out loss")
"""Figures of the seeds that the verdict names, beside what 4 bits add to the loss."""


def pair_verdict(pair: Pair, run: Run) -> tuple[str, ...]:
    """Returns a sentence or a few each on outliers, bits, the paper's claim, seeds, training."""
    said = [_outliers(pair), *_levels(pair), *_crossing(pair), *seed_sentences(run)]
    said += [_trained(found.result) for found in run.trainings if found.result.models]
    return tuple(filter(None, said))


def _outliers(pair: Pair) -> str:
    baseline, diff = pair.stats
    parts = []
    for point, words in ((LOGIT, "|attention logit|"), (HIDDEN, "|hidden state|")):
        ours, theirs = figures_of(diff, point)[0], figures_of(baseline, point)[0]
        parts.append(
            f"the largest {words} is {number(ours)} in {pair.diff} and {number(theirs)} in "
            f"{pair.baseline}{_times(ours, theirs)}"
        )
    text = "; ".join(parts)
    paper = [_paper_times(point) for point in (LOGIT, HIDDEN)]
    return (
        f"{text[:1].upper()}{text[1:]}. {_PAPER}: {paper[0]} for logits (masked positions counted)"
        f" and {paper[1]} for hidden states."
    )


def _times(ours: float, theirs: float) -> str:
    return f" ({number(ours / theirs, 3)} times)" if theirs > 0 else ""


def _paper_times(point: str) -> str:
    rows: dict[str, PaperRow] = {row.model: row for row in TABLE_5 if row.point == point}
    ours, theirs = (rows[name].figures[0] for name in (DIFF, BASELINE))
    return f"{number(ours)} against {number(theirs)}{_times(ours, theirs)}"


def _levels(pair: Pair) -> list[str]:
    """Returns the fewest level bits, of the first task and of the first accuracy that counts."""
    return [sentence for one in _spoken_tasks(pair) if (sentence := _level(pair, one))]


def _spoken_tasks(pair: Pair) -> list[Measured]:
    """Returns the first task, and the first whose metric is a share above chance in both."""
    firsts = [one for one in pair.firsts if pair.rows(one)]
    able = [one for one in firsts[1:] if one.is_share and above_chance(one, pair.models)]
    return [*firsts[:1], *able[:1]]


def _level(pair: Pair, one: Measured) -> str:
    parts = []
    for model in pair.models:
        base = one.float_cell(model)
        rows = [row for row in pair.rows(one) if row.model == model]
        rows = [row for row in rows if not row.scale.endswith("static")] or rows
        found = [(row.scale, *fewest_level(one, row)) for row in rows]
        texts = [f"{why if bits is None else bits} per {scale}" for scale, bits, why in found]
        start = "" if base is None else f" (float {one.value(base.value)})"
        parts.append(f"{model}{start} {', '.join(texts)}")
    margins = {one.margin(delta) for delta in one.deltas.values()} - {""}
    within = f" (within {min(margins)})" if margins else ""
    return (
        f"Fewest logit bits shown to keep {one.words} level with each model's own float{within}: "
        f"{'; '.join(parts)}."
    )


def _crossing(pair: Pair) -> list[str]:
    """Returns whether 4-bit DIFF is level with the 6-bit baseline, and what the paper reads."""
    said = []
    for one in _spoken_tasks(pair):
        found = pair.against(one, 4, 6)
        texts = [
            text
            for scale, delta in found.items()
            if not scale.endswith("static") and (text := _crossed(pair, delta))
        ]
        if texts:
            said.append(f"in {texts[0][0]} {', '.join(text for _, text in texts)}")
    baseline, diff = (line.values for line in FIGURE_8)
    paper = (
        f"{_PAPER}, on HellaSwag: {diff[4]} against {baseline[6]}, from {diff[16]} and "
        f"{baseline[16]} unquantized."
    )
    if not said:
        return []
    return [
        f"Is {pair.diff} at 4 bits level with {pair.baseline} at 6? Here {'; '.join(said)}. {paper}"
    ]


def _crossed(pair: Pair, delta: Delta) -> tuple[str, str] | None:
    """Returns the metric's words, and what the comparison shows; None where it says nothing."""
    part = next(p for p in pair.parts if (p.task, p.metric) == (delta.task, delta.metric))
    cells = {(c.model, c.recipe): c for c in part.cells}
    ours = cells.get((delta.model, delta.recipe))
    theirs = cells.get((delta.against_model, delta.against))
    grid = grid_of(delta.recipe)
    if ours is None or theirs is None or grid is None:
        return None
    guesses = part.chance_mark(ours) or part.chance_mark(theirs)
    word = guesses or part.level_word(delta)
    text = f"{word} per {scale_words(grid)} ({part.value(ours.value)} against "
    return part.words, f"{text}{part.value(theirs.value)})"


def seed_sentences(run: Run) -> list[str]:
    """Returns what several seeds show of a gap, or that no spread is known."""
    results = seeded(run)
    if not results:
        return [
            "One seed of each model: how far two seeds of one model would be apart is not known "
            "here, so a gap between the two may be chance."
        ]
    return [_seeds(result) for result in results]


def _seeds(result: TrainingResult) -> str:
    """Returns the gaps that the seeds show, and those that they do not."""
    rows = [one for one in paired(result) if one.arm == DIFF_ARM] or paired(result)
    arm = rows[0].arm
    size = millions(by_arm(result)[arm][0].parameters)
    added = [one.words for one in rows if "-bit logits" in one.words]
    chosen = [one for one in rows if one.words in (*_SPOKEN, *added[:1])]
    parts = [
        f"{words}: {'; '.join(map(_gap, mine))}."
        for words, mine in (
            ("shown", [one for one in chosen if one.is_shown]),
            (
                "not shown, since the spread over seeds would fit no gap at all as well",
                [one for one in chosen if not one.is_shown],
            ),
        )
        if mine
    ]
    start = (
        f"Over {len(rows[0].ours)} seeds of both ({result.name}, {size} parameters), {arm} minus "
        "baseline within a seed [95 %]: "
    )
    return start + " ".join(text if not i else text[:1].upper() + text[1:]
                            for i, text in enumerate(parts))  # fmt: skip


def _gap(one: Paired) -> str:
    low, high = one.interval
    return (
        f"{one.words} {number(fmean(one.ours), 3)} (sd {number(stdev(one.ours), 2)}) against "
        f"{number(fmean(one.baseline), 3)} (sd {number(stdev(one.baseline), 2)}), "
        f"{one.mean:+.2g} [{low:+.2g}, {high:+.2g}]"
    )


def _trained(result: TrainingResult) -> str:
    """Returns how the models were trained, and the loss that each reached."""
    parts = []
    for arm, models in by_arm(result).items():
        ends = [end for model in models if (end := last(model)) is not None]
        loss = f", held-out loss {number(fmean(end.loss for end in ends))}" if ends else ""
        unfinished = "" if all(model.finished for model in models) else ", unfinished"
        parts.append(
            f"{arm} ({millions(models[0].parameters)} parameters, "
            f"{millions(models[0].tokens)} tokens{loss}{unfinished})"
        )
    return f"Trained on the same rows in the same order: {'; '.join(parts)}."


def training_verdict(run: Run) -> tuple[str, ...]:
    """Returns what trainings came to, of a run that holds nothing else."""
    said = [_trained(found.result) for found in trainings(run)]
    has_pair = any(len(by_arm(found.result)) > 1 for found in trainings(run))
    return (*said, *(seed_sentences(run) if has_pair else ()))
