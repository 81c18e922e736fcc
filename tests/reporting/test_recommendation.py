"""Which export is recommended, and what it is said to cost: known by hand, with ties and gaps."""

from __future__ import annotations

import dataclasses
import math

import pytest

from quantkit.reporting.collect import Found, Run
from quantkit.reporting.recommendation import cost_words, recommendation
from quantkit.results import Accuracy, AutoResult, Export, Stats, read_json
from tests.reporting.planted_exports import AUTO, V3, accuracy, export, run_of


def test_the_fastest_within_two_percent_at_the_bad_end_wins() -> None:
    found = recommendation(
        run_of(
            export("w4a8", 40.0, accuracy(1.015, 1.01, 1.0201)),  # a hair beyond
            export("w8a8", 50.0, accuracy(1.010, 1.005, 1.0199)),
            export("w8", 60.0, accuracy(1.000, 0.999, 1.001)),
            export("w2a8", 10.0, accuracy(1.0, 0.99, 1.01), passed=False),
        )
    )
    assert found is not None and found.commands == ()
    assert found.sentences == (
        "base: ship w8a8, within 2% of float: perplexity +1.00 % [+0.50 %, +1.99 %], 2.00x as fast "
        "on a prompt (50.0 ms), 10.0 MB instead of 40.0 MB.",
    )
    assert found.table is not None
    assert [row[1] for row in found.table.rows] == ["w8a8"]


@pytest.mark.parametrize(
    "found",
    [
        None,
        accuracy(1.0, None, None),
        accuracy(1.0, math.nan, math.nan),
        accuracy(1.03, 1.02, 1.04),
    ],
    ids=["not measured", "no interval", "one block", "too much"],
)
def test_nothing_is_claimed_without_an_interval_within_the_budget(found: Accuracy | None) -> None:
    said = recommendation(run_of(export("w8a8", 50.0, found)))
    assert said is not None
    assert "ship" not in said.sentences[0]
    assert "the one export is not shown to stay within 2% of float" in said.sentences[0]
    assert said.commands == ("quantkit export ./models/base --quantize auto --max-drop 2%",)


def test_accuracies_are_told_in_points() -> None:
    points = Accuracy(
        metric="acc", float=0.5, quantized=0.49, change=-0.01, change_low=-0.019, change_high=0.0
    )
    assert "acc -1.0 [-1.9, +0.0] points" in cost_words(export("w8a8", 50.0, points))
    found = recommendation(run_of(export("w8a8", 50.0, points)))
    assert found is not None and "ship w8a8" in found.sentences[0]
    beyond = dataclasses.replace(points, change_low=-0.021)
    found = recommendation(run_of(export("w8a8", 50.0, beyond)))
    assert found is not None and "2 points" in found.sentences[0]


def test_what_a_search_chose_is_recommended_with_its_budget() -> None:
    auto = read_json(AUTO, AutoResult)
    found = recommendation(run_of(searches=(auto,)))
    assert found is not None
    chosen = next(trial for trial in auto.trials if trial.name == auto.chosen)
    (sentence,) = found.sentences
    assert sentence.startswith(f"smollm2: ship {auto.chosen}, the fastest of 12 graphs within 2%")
    assert "within 2% of float: perplexity +0.96 % [+0.59 %, +1.32 %] (n = 32), " in sentence
    assert f"{chosen.speedup:.2f}x as fast" in sentence
    assert found.commands == ("quantkit export smollm2 --quantize auto --max-drop 2%",)
    none = recommendation(run_of(searches=(dataclasses.replace(auto, chosen="", reason="R."),)))
    assert none is not None
    best = min(auto.trials, key=lambda trial: trial.loss_high)
    assert f"none of 12 graphs stays within 2% of float. {best.name} comes" in none.sentences[0]
    unknown = [dataclasses.replace(trial, loss_high=math.nan) for trial in auto.trials]
    none = recommendation(run_of(searches=(dataclasses.replace(auto, chosen="", trials=unknown),)))
    assert none is not None and none.sentences[0].endswith("stays within 2% of float.")


def test_without_an_export_the_command_is_named_and_quoted() -> None:
    stats = read_json(V3 / "stats.json", Stats)
    model = dataclasses.replace(stats.model, source="my models/a; rm -rf x")
    result = dataclasses.replace(stats, model=model)
    found = recommendation(Run(stats=(Found(place="run/stats.json", result=result),)))
    assert found is not None
    assert found.commands == (
        "quantkit export 'my models/a; rm -rf x' --quantize auto --max-drop 2%",
    )
    assert recommendation(Run()) is None


def test_of_two_as_fast_the_better_one_wins() -> None:
    worse, better = accuracy(1.01, 1.005, 1.015), accuracy(1.005, 1.0, 1.01)
    for order in ([worse, better], [better, worse]):
        names = {id(worse): "w4a8", id(better): "w8a8"}
        found = recommendation(run_of(*(export(names[id(one)], 50.0, one) for one in order)))
        assert found is not None and found.sentences[0].startswith("base: ship w8a8, ")


def test_one_whose_speed_is_unknown_is_not_the_fastest() -> None:
    known, fine = export("w8a8", 90.0, accuracy(1.0, 0.99, 1.01)), accuracy(1.0, 0.99, 1.001)
    unknown = dataclasses.replace(export("w8", 1.0, fine), latency_ms={})
    found = recommendation(run_of(unknown, known))
    assert found is not None and found.sentences[0].startswith("base: ship w8a8, ")


def test_where_none_is_within_the_closest_is_told_with_what_it_misses() -> None:
    found = recommendation(
        run_of(
            export("w4a8", 40.0, accuracy(1.20, 1.10, 1.30)),
            export("w8a8", 50.0, accuracy(1.02, 1.01, 1.03)),
            export("w2a8", 10.0, accuracy(1.0, 0.999, 1.001), passed=False),
            export("w8", 60.0, None),
        )
    )
    assert found is not None
    assert found.sentences[0].startswith(
        "base: none of 4 exports is shown to stay within 2% of float: w8a8 comes closest, with "
        "perplexity +2.00 % [+1.00 %, +3.00 %], "
    )
    assert "end of its interval is 1.00 % beyond. Try `quantkit export " in found.sentences[0]
    assert found.table is not None
    gates = {row[1]: row[2] for row in found.table.rows}
    assert gates == {"w4a8": "passed", "w8a8": "passed", "w2a8": "FAILED", "w8": "passed"}


def test_a_failed_gate_is_never_shipped() -> None:
    found = recommendation(run_of(export("w8a8", 1.0, accuracy(1.0, 1.0, 1.0), passed=False)))
    assert found is not None
    assert "ship" not in found.sentences[0] and "FAILED its gates" in found.sentences[0]
    auto = read_json(AUTO, AutoResult)
    chosen = next(trial for trial in auto.trials if trial.name == auto.chosen)
    failed = of_search(auto, export(chosen.recipe, 50.0, accuracy(1.0, 1.0, 1.0), passed=False))
    found = recommendation(run_of(failed, searches=(auto,)))
    assert found is not None and found.sentences == (
        f"smollm2: the search chose {auto.chosen}, but its export FAILED its gates: do not ship "
        "it.",
    )


def of_search(auto: AutoResult, made: Export) -> Export:
    """The export as that search wrote it."""
    return dataclasses.replace(made, model=auto.model, searched="auto.json")


@pytest.mark.parametrize(
    ("high", "is_shown"), [(1.0199, True), (1.0201, False), (math.nan, False)]
)  # fmt: skip
def test_a_choice_is_held_against_what_it_has_not_seen(high: float, is_shown: bool) -> None:
    auto = read_json(AUTO, AutoResult)
    chosen = next(trial for trial in auto.trials if trial.name == auto.chosen)
    measured = dataclasses.replace(accuracy(1.01, 1.0, high), units=64)
    mine = of_search(auto, export(chosen.recipe, 50.0, measured))
    # another export of that recipe is not what the search chose, though it stands first
    other = dataclasses.replace(mine, searched="", accuracy=accuracy(1.3, 1.2, 1.4))
    found = recommendation(run_of(other, mine, searches=(auto,)))
    assert found is not None and "perplexity +1.00 %" in found.sentences[0]
    said = "What the choice has not seen does not show it to stay within the budget."
    assert (said not in found.sentences[0]) == is_shown
    assert ("(n = 64)" in found.sentences[0]) and ("nothing left in float." in found.sentences[0])


def test_a_budget_in_points_is_an_option_of_the_search() -> None:
    auto = read_json(AUTO, AutoResult)
    task = "multiple-choice=my items.jsonl"
    changed = dataclasses.replace(auto, metric="acc_norm", task=task, max_drop=0.0175)
    found = recommendation(run_of(searches=(changed,)))
    assert found is not None and "within 1.75 points of float" in found.sentences[0]
    assert found.commands == (
        f"quantkit export smollm2 --quantize auto --max-drop 1.75% --task '{task}'",
    )


def test_a_graph_is_not_sent_to_the_search_that_refuses_it() -> None:
    made = export("w8a8", 50.0, accuracy(1.1, 1.05, 1.2))
    made = dataclasses.replace(made, model=dataclasses.replace(made.model, source="a/Model.ONNX"))
    found = recommendation(run_of(made))
    assert found is not None
    assert found.commands == ("quantkit export --quantize w8a8-dynamic a/Model.ONNX",)


def test_every_model_has_a_sentence_and_a_row() -> None:
    fine = export("w8a8", 50.0, accuracy(1.0, 0.99, 1.01))
    other = dataclasses.replace(fine, model=dataclasses.replace(fine.model, name="-x|`"))
    found = recommendation(run_of(fine, other))
    assert found is not None and found.table is not None
    assert [sentence.split(":")[0] for sentence in found.sentences] == ["base", "-x|`"]
    assert [row[0] for row in found.table.rows] == ["base", "-x|`"]
    assert all(len(row) == len(found.table.columns) for row in found.table.rows)


def test_models_without_an_export_are_one_sentence() -> None:
    stats = read_json(V3 / "stats.json", Stats)
    models = [
        dataclasses.replace(stats.model, name=name, source=source)
        for name, source in (("a", "./x"), ("b", "./y"), ("c", "./x"), ("base", "./models/base"))
    ]
    found = tuple(
        Found(place=model.name, result=dataclasses.replace(stats, model=model)) for model in models
    )
    made = export("w8a8", 50.0, accuracy(1.0, 0.99, 1.01))
    said = recommendation(dataclasses.replace(run_of(made), stats=found))
    assert said is not None
    first, second = said.sentences
    assert first.startswith("base: ship w8a8, ")
    assert second.startswith("a, b, c: nothing was exported yet; `quantkit export MODEL --quantize")
    end = "--quantize auto --max-drop 2%"
    assert said.commands == (f"quantkit export ./x {end}", f"quantkit export ./y {end}")


def test_memory_and_what_stayed_in_float_stand_in_the_table() -> None:
    made = export("w8a8", 50.0, accuracy(1.0, 0.99, 1.01))
    made = dataclasses.replace(
        made, memory_bytes={"float": 90_000_000, "quantized": 30_000_000}, kept=["a", "b"]
    )
    found = recommendation(run_of(made))
    assert found is not None and found.table is not None
    row = dict(zip(found.table.columns, found.table.rows[0], strict=True))
    assert row["memory"] == "30.0 of 90.0 MB" and row["in float"] == "2"
    assert row["against float"] == "+0.00 % [-1.00 %, +1.00 %]" and row["prefill"] == "2.00x"
