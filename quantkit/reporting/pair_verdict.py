"""The sentences that the page of a pair opens with: no more than its numbers allow.

One pair is one draw of two models. What it shows is of these two; a gap between the architectures
is claimed where several seeds of both show it, and then at their size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from quantkit.reporting.collect import Run
from quantkit.reporting.groups import HIDDEN, LOGIT
from quantkit.reporting.outlier_tables import figures_of, largest_logits
from quantkit.reporting.pair_chance import counts, guess_sentences
from quantkit.reporting.pair_groups import MATCHED_FRAC, Pair, fewest_level
from quantkit.reporting.pair_seeds import Paired, paired, seeded
from quantkit.reporting.paper import (
    ALL_READING,
    BASELINE,
    DIFF,
    FIGURE_8,
    TABLE_5,
    VALID_READING,
    PaperRow,
)
from quantkit.reporting.sweep_groups import CHANCE_MARK, OPEN_MARK, Measured
from quantkit.reporting.text import number
from quantkit.reporting.training_groups import DIFF_ARM, by_arm, last, millions, trainings
from quantkit.results import ModelInfo, TrainedModel, TrainingResult
from quantkit.results.spread import deviation, mean

_PAPER: Final = "The paper, at 2.8B parameters"
_SPOKEN: Final = ("max |logit|", "max |hidden state|", "held-out loss")
"""Figures of the seeds that the verdict names, beside what 4 bits add to the loss."""
_MARKS: Final = {CHANCE_MARK: "at chance", OPEN_MARK: "not shown to be above chance"}


def pair_verdict(pair: Pair, run: Run) -> tuple[str, ...]:
    """Returns a sentence or a few each on outliers, bits, the paper's claim, seeds, training.

    A task that a model guesses in is named once, and enters no other sentence.
    """
    said = [_outliers(pair), *_levels(pair), *_crossing(pair), *guess_sentences(pair)]
    said += seed_sentences(run)
    said += [_trained(found.result) for found in run.trainings if found.result.models]
    said.append(_matched(pair, run))
    return tuple(filter(None, said))


def _outliers(pair: Pair) -> str:
    baseline, diff = pair.stats
    ours, theirs = largest_logits(diff), largest_logits(baseline)
    # the paper's reading first: it is the one that its figures can be held against
    shared = [reading for reading in (ALL_READING, VALID_READING) if reading in {*ours} & {*theirs}]
    logits = [
        f"{number(ours[reading])} in {pair.diff} and {number(theirs[reading])} in {pair.baseline}"
        f"{_times(ours[reading], theirs[reading])} over {reading}"
        for reading in shared
    ]
    if not logits:
        each = ((pair.diff, ours), (pair.baseline, theirs))
        logits = [
            f"{number(value)} in {model} over {reading}"
            for model, found in each
            for reading, value in found.items()
        ]
    states = [figures_of(stats, HIDDEN)[0] for stats in (diff, baseline)]
    paper = [_paper_times(point) for point in (LOGIT, HIDDEN)]
    return (
        f"The largest |attention logit| is {', and '.join(logits)}; the largest |hidden state| is "
        f"{number(states[0])} in {pair.diff} and {number(states[1])} in {pair.baseline}"
        f"{_times(*states)}. {_PAPER}: {paper[0]} for logits over {ALL_READING}, and {paper[1]} "
        "for hidden states."
    )


def _times(ours: float, theirs: float) -> str:
    return f" ({number(ours / theirs, 3)} times)" if theirs > 0 else ""


def _paper_times(point: str) -> str:
    rows: dict[str, PaperRow] = {row.model: row for row in TABLE_5 if row.point == point}
    ours, theirs = (rows[name].figures[0] for name in (DIFF, BASELINE))
    return f"{number(ours)} against {number(theirs)}{_times(ours, theirs)}"


def _levels(pair: Pair) -> list[str]:
    """Returns the fewest level bits of the tasks that are spoken of."""
    return [sentence for one in _spoken_tasks(pair) if (sentence := _level(pair, one))]


def _spoken_tasks(pair: Pair) -> list[Measured]:
    """Returns the first task and the first accuracy behind it, of those that nobody guesses in."""
    able = [one for one in pair.firsts if pair.rows(one) and counts(pair, one)]
    return [*able[:1], *[one for one in able[1:] if one.is_share][:1]]


def _level(pair: Pair, one: Measured) -> str:
    parts = []
    for model in pair.models:
        base = one.float_cell(model)
        rows = [row for row in pair.rows(one) if row.model == model]
        rows = [row for row in rows if "static" not in row.scale.split()] or rows
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
        found = [
            crossed
            for scale, delta in pair.against(one, 4, 6).items()
            if "static" not in scale.split() and (crossed := pair.crossed(delta))
        ]
        texts = [
            f"{_MARKS.get(c.word, c.word)} per {c.scale} ({c.ours} against {c.theirs})"
            for c in found
        ]
        if texts:
            said.append(f"in {found[0].metric} {', '.join(texts)}")
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
                [one for one in chosen if one.has_spread and not one.is_shown],
            ),
            (
                "not shown, since seeds without a spread say nothing of chance",
                [one for one in chosen if not one.has_spread],
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
        f"{one.words} {number(mean(one.ours), 3)} (sd {number(deviation(one.ours), 2)}) against "
        f"{number(mean(one.baseline), 3)} (sd {number(deviation(one.baseline), 2)}), "
        f"{one.mean:+.2g} [{low:+.2g}, {high:+.2g}]"
    )


def _trained(result: TrainingResult) -> str:
    """Returns how the models were trained, and the loss that each reached."""
    arms = by_arm(result)
    parts = []
    for arm, models in arms.items():
        ends = [end for model in models if (end := last(model)) is not None]
        loss = f", held-out loss {number(mean([end.loss for end in ends]))}" if ends else ""
        unfinished = sum(not model.finished for model in models)
        of = "" if len(models) == 1 else f"{unfinished} of {len(models)} "
        seeds = "" if len(models) == 1 else f", {len(models)} seeds"
        parts.append(
            f"{arm} ({_span(model.parameters for model in models)} parameters{seeds}, "
            f"{_span(model.tokens for model in models)} tokens"
            f"{' each' if seeds else ''}{loss}{f', {of}unfinished' if unfinished else ''})"
        )
    shared = " (the arms of a seed: the same rows in the same order)" if len(arms) > 1 else ""
    return f"Training {result.name}{shared}: {'; '.join(parts)}."


def _span(found: Iterable[int]) -> str:
    """Returns a count in millions, or the least and the most."""
    values = sorted(found)
    ends = dict.fromkeys(millions(value) for value in (values[0], values[-1]))
    return " to ".join(ends)


def _matched(pair: Pair, run: Run) -> str:
    """Returns what is known of how the two are matched."""
    if trained_together(pair, run):
        return ""
    return (
        f"No training.json here names both {pair.diff} and {pair.baseline}: as many layers, and as "
        f"many parameters within {100 * MATCHED_FRAC:g} %, is all that is known of how they match."
    )


def trained_together(pair: Pair, run: Run) -> bool:
    """Returns whether a training has both models, of one seed.

    By the hash of the weights; where the training has none yet, by arm and number of parameters.
    """
    infos = [stats.model for stats in pair.stats]
    return any(
        all(any(_is_of(info, model) for model in models if model.seed == seed) for info in infos)
        for models in (found.result.models for found in trainings(run))
        for seed in {model.seed for model in models}
    )


def _is_of(info: ModelInfo, model: TrainedModel) -> bool:
    if model.sha256:
        return model.sha256 == info.sha256
    return (model.arm, model.parameters) == (info.name, info.parameters)


def training_verdict(run: Run) -> tuple[str, ...]:
    """Returns what trainings came to, of a run that holds nothing else."""
    said = [_trained(found.result) for found in trainings(run)]
    has_pair = any(len(by_arm(found.result)) > 1 for found in trainings(run))
    return (*said, *(seed_sentences(run) if has_pair else ()))
