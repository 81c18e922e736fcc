"""The picture of exports: each where its file says, and the front by its definition."""

from __future__ import annotations

import dataclasses
import math
from itertools import product
from typing import Any

from quantkit.reporting.collect import Run
from quantkit.reporting.drawing import Panel
from quantkit.reporting.pareto_charts import front, pareto_charts
from quantkit.results import Accuracy, AutoResult, read_json
from tests.reporting.drawn import axis, layers, marks, rows, series, tips
from tests.reporting.planted_exports import AUTO, accuracy, export, run_of


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
    *graphs, reference = marks(speed)
    assert [(r["x"], r["y"]) for r in graphs] == [
        (trial.latency_ms, trial.change) for trial in auto.trials
    ]
    assert reference["tip"].startswith("float: 1.0000, ") and reference["y"] == 1.0
    times = sorted(trial.float_ms for trial in auto.trials)
    assert times[0] <= reference["x"] <= times[-1]
    # no export says how large float is
    assert [(r["x"], r["y"]) for r in marks(size)] == [
        (1e-6 * trial.bytes, trial.change) for trial in auto.trials
    ]
    for panel in chart.panels:
        best = on_front([(r["x"], r["y"]) for r in marks(panel)])
        assert best == {i for i, tip in enumerate(tips(panel)) if tip.endswith("on the front")}
    for trial, mark in zip(auto.trials, graphs, strict=True):
        place = "within" if trial.is_within else "beyond"
        assert f", {place} the budget" in mark["tip"]
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


def test_a_graph_that_failed_is_drawn_and_keeps_none_off_the_front() -> None:
    (chart,) = pareto_charts(
        run_of(
            export("w8a8", 50.0, accuracy(1.01, 1.0, 1.015)),
            export("w2a8", 10.0, accuracy(1.0, 0.99, 1.01), passed=False),
            export("w4a8", 40.0, accuracy(1.3, 1.2, 1.4)),
        )
    )
    said = {tip.split(":")[0]: tip for tip in tips(chart.panels[0])}
    assert said["w2a8"].endswith("FAILED its gates")
    assert said["w8a8"].endswith("within the budget, recommended, on the front")
    assert said["w4a8"].endswith("beyond the budget, on the front")
    looks = {(line.colour, line.shape, line.hollow) for line in series(chart.panels[0])}
    assert len({shape for _, shape, _ in looks}) == 4, "front, failed, ring and float"
    assert [key.name for key in chart.panels[0].keys] == [
        "on the front: nothing is better in both", "FAILED its gates", "ringed: recommended",
        "float",
    ]  # fmt: skip


def ringed(panel: Panel) -> list[dict[str, Any]]:
    """Where the picture has a ring around a graph."""
    return [row for line in layers(panel) if line["mark"].get("size") == 260 for row in rows(line)]


def test_the_recommended_graph_has_a_ring_where_it_stands() -> None:
    auto = read_json(AUTO, AutoResult)
    chosen = next(trial for trial in auto.trials if trial.name == auto.chosen)
    (chart,) = pareto_charts(run_of(searches=(auto,)))
    for panel, at in zip(chart.panels, (chosen.latency_ms, 1e-6 * chosen.bytes), strict=True):
        assert ringed(panel) == [{"x": at, "y": chosen.change}]
        told = [tip for tip in tips(panel) if ", recommended" in tip]
        assert [tip.split(": ")[0] for tip in told] == [auto.chosen]
    failed = dataclasses.replace(
        export(chosen.recipe, 50.0, accuracy(1.0, 1.0, 1.0), passed=False),
        model=auto.model,
        searched="auto.json",
    )
    (chart,) = pareto_charts(run_of(failed, searches=(auto,)))
    assert not ringed(chart.panels[0])


def test_other_exports_of_a_searched_model_are_drawn_too() -> None:
    auto = read_json(AUTO, AutoResult)
    other = dataclasses.replace(
        export("w2a8", 44.0, accuracy(1.5, 1.4, 1.6)), model=auto.model, searched=""
    )
    chosen = dataclasses.replace(other, recipe="chosen again", searched="auto.json")
    (chart,) = pareto_charts(run_of(other, chosen, searches=(auto,)))
    names = [tip.split(":")[0] for tip in tips(chart.panels[0])]
    assert len(names) == len(auto.trials) + 2
    assert "w2a8" in names and "chosen again" not in names
    assert marks(chart.panels[1])[-1]["x"] == 40.0  # of the float graph, which is now known


def test_accuracies_are_drawn_in_their_units_against_a_budget_below() -> None:
    points = Accuracy(
        metric="acc", float=0.5, quantized=0.49, change=-0.01, change_low=-0.015, change_high=0.0
    )
    old = Accuracy(metric="acc", float=0.5, quantized=0.45)  # a file without changes
    (chart,) = pareto_charts(run_of(export("w8a8", 50.0, points), export("w4", 40.0, old)))
    speed = chart.panels[0]
    assert [round(r["y"], 9) for r in marks(speed)] == [-0.01, -0.05, 0.0]
    (budget,) = [rows(x) for x in layers(speed) if rows(x) == [{"y": -0.02}]]
    assert budget and axis(speed, "y")["scale"]["type"] == "linear"
    assert tips(speed)[0].endswith("within the budget, recommended, on the front")
    assert "beyond the budget" in tips(speed)[1], "nothing is known of its interval"


def test_each_model_has_a_picture_and_foreign_names_are_one_line() -> None:
    one = export("w8a8", 50.0, accuracy(1.01, 1.0, 1.015))
    other = dataclasses.replace(
        one, recipe="<b>\n\x1b[31m", model=dataclasses.replace(one.model, name="<script>")
    )
    first, second = pareto_charts(run_of(one, other))
    assert "base" in first.title and "<script>" in second.title
    assert tips(second.panels[0])[0].startswith("<b>  [31m: ")
