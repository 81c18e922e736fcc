"""What the page of a pair may claim: of which models, in which tasks, over which seeds."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from quantkit.reporting import terminal_tables, write_report
from quantkit.reporting.collect import Found, Run, collect
from quantkit.reporting.pair_chance import counts, guess_note
from quantkit.reporting.pair_charts import bit_chart
from quantkit.reporting.pair_groups import pair_of
from quantkit.reporting.pair_seeds import Paired, paired
from quantkit.reporting.pair_tables import (
    bits_table,
    crossing_table,
    needles_table,
)
from quantkit.reporting.pair_verdict import (
    pair_verdict,
    seed_sentences,
    trained_together,
    training_verdict,
)
from quantkit.results import Stats, Sweep, read_json, write_json
from tests.reporting.drawn import without_names
from tests.reporting.planted_pair import (
    ARMS,
    SEEDS,
    guessed,
    pair_in,
    stats,
    sweep,
    training,
    write_run,
)


@pytest.mark.parametrize(
    ("change", "is_pair"),
    [
        ("nothing", True), ("0.1 % more", True), ("one model", False), ("no sweep", False),
        ("two baselines", False), ("0.11 % more", False), ("0.11 % fewer", False),
        ("a layer more", False),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_what_is_a_pair(change: str, is_pair: bool, tmp_path: Path) -> None:
    base = stats("baseline")
    write_json(tmp_path / "a" / "stats.json", base)
    if change != "one model":
        one = stats("baseline" if change == "two baselines" else "diff")
        count = {"0.1 % more": 3_703_700, "0.11 % more": 3_704_070, "0.11 % fewer": 3_695_930}
        info = dataclasses.replace(
            one.model,
            name="diff",
            parameters=count.get(change, one.model.parameters),
            layers=base.model.layers + (change == "a layer more"),
        )
        write_json(tmp_path / "b" / "stats.json", dataclasses.replace(one, model=info))
    if change != "no sweep":
        write_json(tmp_path / "sweep.json", sweep())
    assert (pair_of(collect([tmp_path])) is not None) == is_pair


@pytest.mark.parametrize(
    "change",
    [
        "the models", "other weights", "not hashed", "not hashed, other sizes", "other seeds",
        "none",
    ],
)  # fmt: skip
def test_the_same_rows_are_claimed_of_models_that_a_training_names(
    change: str, tmp_path: Path
) -> None:
    write_run(tmp_path, seeds=False)
    result = training()
    changes: dict[str, dict[str, object]] = {
        "other weights": {"sha256": "0" * 64},
        "not hashed": {"sha256": ""},
        "not hashed, other sizes": {"sha256": "", "parameters": 9},
        "other seeds": {"seed": 5},
    }
    diff = dataclasses.replace(result.models[1], **changes.get(change, {}))  # type: ignore[arg-type]
    write_json(
        tmp_path / "training.json", dataclasses.replace(result, models=[result.models[0], diff])
    )
    if change == "none":
        (tmp_path / "training.json").unlink()
    pair, run = pair_in(tmp_path), collect([tmp_path])
    is_known = change in ("the models", "not hashed")
    assert trained_together(pair, run) == is_known
    said = pair_verdict(pair, run)
    assert any("No training.json here names both" in text for text in said) != is_known
    assert any("same rows" in text for text in said) == (change != "none")


def test_the_tokens_are_of_all_seeds_and_one_arm_shares_nothing() -> None:
    run = Run(trainings=(Found(place="a", result=training(seeds=SEEDS, finished=False)),))
    said = training_verdict(run)[0]
    assert "the arms of a seed: the same rows in the same order" in said
    assert "baseline (3.70 M parameters, 3 seeds, 8.19 M tokens each, held-out loss " in said
    assert "diff (3.70 M parameters, 3 seeds, 4.10 M to 8.19 M tokens each, " in said
    assert said.endswith(", 1 of 3 unfinished).")
    alone = Run(trainings=(Found(place="a", result=training(("diff",))),))
    (only,) = training_verdict(alone)
    assert "same rows" not in only and "8.19 M tokens, held-out" in only


def write_guessing(folder: Path, models: tuple[str, ...], *tasks: str) -> Path:
    write_run(folder, seeds=False)
    write_json(folder / "sweep.json", guessed(sweep(), models, *tasks))
    return folder


def test_a_task_that_both_guess_in_is_named_and_says_nothing(tmp_path: Path) -> None:
    write_guessing(tmp_path, ARMS, "needles", "icl", "multiple-choice")
    pair = pair_in(tmp_path)
    said = pair_verdict(pair, collect([tmp_path]))
    (named,) = [text for text in said if "above chance" in text]
    assert named == (
        "Neither model is above chance in multiple-choice acc_norm, needles (N = 1, R = 1; N = 2, "
        "R = 2; N = 4, R = 2; N = 6, R = 2), icl accuracy: what quantization does there says "
        "nothing."
    )
    rest = [text for text in said if text is not named]
    assert not any(word in " ".join(rest) for word in ("needles", "icl", "multiple-choice"))
    icl = next(one for one in pair.firsts if one.task == "icl")
    here = "Neither model is above chance here: what quantization does here says nothing."
    chart = bit_chart(pair, icl)
    assert chart is not None and chart.note.startswith(here)
    assert bits_table(pair, icl).note.endswith(here)
    assert bits_table(pair, icl).rows[0][2:] == ("0.000 chance", *["0.000"] * 5)
    assert "Neither model is above chance in needles (N = 1" in needles_table(pair).note
    assert "0.000 [0.00, 0.05] chance" in needles_table(pair).rows[0]
    crossed = {row[0]: row[1] for row in crossing_table(pair).rows}
    assert crossed["icl accuracy"] == "0.000 / 0.000 chance"
    assert max(map(len, terminal_tables(tmp_path).splitlines())) <= 100


def test_a_page_of_guesses_puts_them_last(tmp_path: Path) -> None:
    write_guessing(tmp_path, ARMS, "needles", "multiple-choice")
    page, *_ = write_report([tmp_path], tmp_path / "out")
    text = page.read_text("utf-8")
    titles = re.findall(r'<h3 id="[^"]*">(.*?) <a ', without_names(text))
    order = [titles.index(name) for name in ("icl accuracy", "multiple-choice acc_norm")]
    assert order == sorted(order)
    # the paper's own stands beside an accuracy that says something
    assert text.index("HellaSwag, 2.8B parameters (paper)") < text.rindex(
        "Neither model is above chance here"
    )


def test_one_model_that_guesses_is_named_alone(tmp_path: Path) -> None:
    write_guessing(tmp_path, ("diff",), "icl")
    pair = pair_in(tmp_path)
    one = next(part for part in pair.firsts if part.task == "icl")
    assert not counts(pair, one)
    assert guess_note(pair, one) == (
        "diff is not above chance here: what quantization does to it here says nothing."
    )
    # the value at 4 bits may be above chance by luck: the float row is what counts
    cells = [
        dataclasses.replace(c, value=0.4, ci_high=0.5, chance_p=0.01) if c.bits == 4 else c
        for c in pair.sweep.cells
    ]
    write_json(tmp_path / "sweep.json", dataclasses.replace(pair.sweep, cells=cells))
    crossed = {row[0]: row[1] for row in crossing_table(pair_in(tmp_path)).rows}
    assert crossed["icl accuracy"].endswith(" chance")


def test_too_few_items_are_not_called_chance(tmp_path: Path) -> None:
    write_guessing(tmp_path, ARMS, "icl")
    found = read_json(tmp_path / "sweep.json", Sweep)
    wide = [dataclasses.replace(c, ci_high=0.4) if c.task == "icl" else c for c in found.cells]
    write_json(tmp_path / "sweep.json", dataclasses.replace(found, cells=wide))
    pair = pair_in(tmp_path)
    icl = next(one for one in pair.firsts if one.task == "icl")
    assert guess_note(pair, icl).startswith("Neither model is shown to be above chance here")
    assert guess_note(pair, pair.firsts[0]) == ""


@pytest.mark.parametrize("end", [0.0, 1e-12], ids=["no spread", "rounding alone"])
def test_seeds_that_agree_to_the_last_digit_show_nothing(end: float) -> None:
    same = Paired(words="x", arm="diff", baseline=(0.2, 0.3, 0.4), ours=(0.3, 0.4, 0.5 + end))
    assert same.mean == pytest.approx(0.1) and not same.is_shown and same.word == "not shown"
    apart = Paired(words="x", arm="diff", baseline=(0.2, 0.3, 0.4), ours=(0.3, 0.4, 0.501))
    assert apart.word == "shown"
    assert dataclasses.replace(apart, is_accuracy=True).word == "shown for these items"


def test_accuracies_of_seeds_are_shown_for_their_items_alone() -> None:
    found = {one.words: one for one in paired(training(seeds=SEEDS))}
    assert [one.is_accuracy for one in found.values()].count(True) == 4
    # both arms have the same accuracies: no gap, no spread
    assert found["icl accuracy"].word == "not shown"


def test_the_papers_reading_is_compared_with_the_papers(tmp_path: Path) -> None:
    write_run(tmp_path, seeds=False)
    for model, top in (("baseline", 80.0), ("diff", 60.0)):
        path = tmp_path / model / "stats.json"
        found = read_json(path, Stats)
        valid = found.summary.attention_logit
        every = dataclasses.replace(
            valid, abs_top=valid.abs_top | {"1": top}, definition="attention logit: all of QK^T"
        )
        summary = dataclasses.replace(found.summary, attention_logit_unmasked=every)
        write_json(path, dataclasses.replace(found, summary=summary))
    said = pair_verdict(pair_in(tmp_path), collect([tmp_path]))[0]
    assert said.startswith(
        "The largest |attention logit| is 60.00 in diff and 80.00 in baseline (0.750 times) over "
        "all of QK^T, and 22.50 in diff and 36.20 in baseline (0.622 times) over valid positions; "
    )
    assert "38.80 against 318.0 (0.122 times) for logits over all of QK^T, and" in said
    lines = terminal_tables(tmp_path).splitlines()
    assert max(map(len, lines)) <= 100
    assert not any("unmasked" in line for line in lines)


def test_models_that_were_counted_in_two_ways_have_no_ratio(tmp_path: Path) -> None:
    write_run(tmp_path, seeds=False)
    path = tmp_path / "diff" / "stats.json"
    found = read_json(path, Stats)
    every = dataclasses.replace(found.summary.attention_logit, definition="all of QK^T")
    summary = dataclasses.replace(found.summary, attention_logit=every)
    write_json(path, dataclasses.replace(found, summary=summary))
    said = pair_verdict(pair_in(tmp_path), collect([tmp_path]))[0]
    assert said.startswith(
        "The largest |attention logit| is 22.50 in diff over all of QK^T, and 36.20 in baseline "
        "over valid positions; the largest |hidden state|"
    )


def test_a_gap_without_spread_is_said_to_show_nothing() -> None:
    result = training(seeds=SEEDS)
    models = [
        dataclasses.replace(
            model,
            measurements=[
                dataclasses.replace(m, abs_max_logit=20.0 if model.arm == "diff" else 30.0)
                for m in model.measurements
            ],
        )
        for model in result.models
    ]
    found = Found(place="a", result=dataclasses.replace(result, models=models))
    said = " ".join(seed_sentences(Run(seed_trainings=(found,))))
    assert said.count("max |logit|") == 1
    assert "ot shown, since seeds without a spread say nothing of chance: max |logit| 20.0" in said
