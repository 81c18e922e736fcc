"""Which export is recommended, and the picture of all: known by hand, with ties and gaps."""

from __future__ import annotations

import dataclasses
import math
from itertools import product
from pathlib import Path

import pytest

from quantkit.reporting.collect import Found, Run
from quantkit.reporting.pareto_charts import front, pareto_charts
from quantkit.reporting.recommendation import cost_words, recommendation
from quantkit.results import Accuracy, AutoResult, Export, FileInfo, Stats, read_json
from tests.reporting.drawn import axis, layers, marks, rows, series

V3 = Path(__file__).parent.parent / "results" / "fixtures" / "v3" / "base"
AUTO = Path(__file__).parents[2] / "benchmarks" / "results" / "auto_smollm2.json"
FILES = [
    FileInfo(name="model.onnx", bytes=1_000_000, sha256="a" * 64),
    FileInfo(name="model.onnx.data", bytes=9_000_000, sha256="b" * 64),
    FileInfo(name="float/model.onnx", bytes=40_000_000, sha256="c" * 64),
]


def accuracy(change: float, low: float | None, high: float | None) -> Accuracy:
    return Accuracy(
        metric="perplexity", float=10.0, quantized=10.0 * change, change=change, change_low=low,
        change_high=high,
    )  # fmt: skip


def export(recipe: str, ms: float, found: Accuracy | None, *, passed: bool = True) -> Export:
    kept = read_json(V3 / "export.json", Export)
    return dataclasses.replace(
        kept, recipe=recipe, accuracy=found, passed=passed, files=FILES, kept=[], smoothed={},
        latency_ms={"float": 100.0, "quantized": ms},
    )  # fmt: skip


def run_of(*exports: Export, searches: tuple[AutoResult, ...] = ()) -> Run:
    return Run(
        exports=tuple(Found(place=f"run/{e.recipe}/export.json", result=e) for e in exports),
        searches=tuple(Found(place="run/auto.json", result=found) for found in searches),
    )


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
        "base: ship w8a8, 1.0100 [1.0050, 1.0199] of float's perplexity, 2.00x as fast "
        "(50.0 ms a prompt), 10.0 MB instead of 40.0 MB.",
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
    assert "ship" not in said.sentences[0] and "is shown to stay within 2%" in said.sentences[0]
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
    assert f"{chosen.change:.4f} [{chosen.change_low:.4f}, {chosen.change_high:.4f}]" in sentence
    assert found.commands == ("quantkit export smollm2 --quantize auto --max-drop 2%",)
    none = recommendation(run_of(searches=(dataclasses.replace(auto, chosen="", reason="R."),)))
    assert none is not None
    best = min(auto.trials, key=lambda trial: trial.loss_high)
    assert f"none of 12 graphs stays within 2% of float. {best.name} comes" in none.sentences[0]


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


# the front


def on_front(points: list[tuple[float, float]]) -> set[int]:
    """By definition: no other is as good in both and better in one."""
    return {
        i
        for i, (x, y) in enumerate(points)
        if not math.isnan(x + y)
        and not any(u <= x and v <= y and (u, v) != (x, y) for u, v in points)
    }


def test_the_front_is_what_nothing_beats() -> None:
    grid = [0.0, 1.0, 2.0, math.nan]
    for points in product(product(grid, grid), repeat=3):
        assert front(list(points)) == on_front(list(points)), points


def test_every_graph_is_drawn_where_the_file_says() -> None:
    auto = read_json(AUTO, AutoResult)
    (chart,) = pareto_charts(run_of(searches=(auto,)))
    speed, size = chart.panels
    assert sorted((r["x"], r["y"]) for r in marks(speed)) == sorted(
        (trial.latency_ms, trial.change) for trial in auto.trials
    )
    assert sorted((r["x"], r["y"]) for r in marks(size)) == sorted(
        (1e-6 * trial.bytes, trial.change) for trial in auto.trials
    )
    told = {r["tip"].split(":")[0] for r in marks(speed) if r["tip"].endswith("on the front")}
    expected = on_front([(trial.latency_ms, trial.change) for trial in auto.trials])
    assert len(told) <= len(expected) == sum("front" in r["tip"] for r in marks(speed))
    (budget,) = [
        rows(x) for x in layers(speed) if x["mark"]["type"] == "rule" and "x" not in x["encoding"]
    ]
    assert budget == [{"y": 1.02}]
    low, high = axis(speed, "y")["scale"]["domain"]
    assert all(low < r["y"] < high for r in marks(speed))
    for line in series(speed):
        for span, mark in zip(line.spans, line.marks, strict=False):
            assert span["y"] <= mark["y"] <= span["y2"]


def test_exports_without_a_search_are_drawn_with_float() -> None:
    (chart,) = pareto_charts(
        run_of(
            export("w8a8", 50.0, accuracy(1.01, 1.0, 1.02)),
            export("w4", 70.0, accuracy(1.2, 1.1, 1.3)),
            export("w8", 60.0, None),  # not measured: no place on the axis
        )
    )
    tips = [row["tip"] for row in marks(chart.panels[0])]
    assert [tip.split(":")[0] for tip in tips] == ["w8a8", "w4", "float"]
    assert [row["x"] for row in marks(chart.panels[1])] == [10.0, 10.0, 40.0]
    assert pareto_charts(run_of(export("w8", 60.0, None))) == ()
    assert pareto_charts(Run()) == ()
