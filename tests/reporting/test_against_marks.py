"""What is said of a change: better or worse only beyond its interval, in words, escaped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.reporting.against import against_section
from quantkit.reporting.against_changes import compare
from quantkit.reporting.against_looks import change_text, look
from quantkit.reporting.against_tables import main_tables, other_table
from quantkit.reporting.blocks import FirstScreen, Section
from quantkit.reporting.collect import Found, Run, collect
from quantkit.reporting.report import Page, render_html, render_markdown
from quantkit.results import Cell, Export, Sweep, TaskInfo, read_json, write_json
from tests.reporting.planted_against import V3, planted, sweep_run
from tests.reporting.planted_pair import STEPS, training

HOSTILE = "</style></svg><script>alert(1)</script>\"'&|`*x*`\x1b[31m\nnext"


def moved(low: float, value: float, high: float) -> Callable[[Cell], Cell]:
    def change(cell: Cell) -> Cell:
        is_it = (cell.model, cell.recipe) == ("diff", "logits4:row")
        return dataclasses.replace(cell, value=value, ci_low=low, ci_high=high) if is_it else cell

    return change


NAN = float("nan")


@pytest.mark.parametrize(
    ("interval", "mark"),
    [  # the earlier figure: 22.69 [21.55, 23.82], a perplexity
        pytest.param((23.9, 24.5, 25.1), "worse", id="above and apart"),
        pytest.param((19.0, 20.0, 21.0), "better", id="below and apart"),
        pytest.param((23.0, 24.0, 25.0), "within noise", id="above, intervals overlap"),
        pytest.param((20.0, 21.0, 22.0), "within noise", id="below, intervals overlap"),
        pytest.param((NAN, 12.0, NAN), "changed", id="far below, without an interval"),
    ],
)
def test_a_figure_is_judged_by_its_interval(
    interval: tuple[float, float, float], mark: str
) -> None:
    found = compare(sweep_run(moved(*interval)), sweep_run())
    (entry,) = [entry for entry in found.entries if entry.is_changed]
    assert (entry.subject, entry.look.words, entry.mark) == (
        "diff",
        "perplexity, logits4:row",
        mark,
    )
    (row,) = main_tables(found)[0].rows
    assert row[2] == mark and row[3] == "22.69 [21.55, 23.82]"


def test_an_accuracy_is_better_when_it_is_higher_and_moves_in_points() -> None:
    def accuracy(value: float) -> Run:
        def change(cell: Cell) -> Cell:
            cell = dataclasses.replace(cell, task="needles", metric="acc", value=value)
            return dataclasses.replace(cell, ci_low=value - 0.01, ci_high=value + 0.01)

        sweep = read_json(V3 / "sweep.json", Sweep)
        cells = [change(sweep.cells[0])]
        info = TaskInfo(
            name="needles",
            metrics=["acc"],
            unit="items",
            higher_is_better={"acc": True},
            items=9,
            data=sweep.data,
            sha256="1" * 64,
            shares=["acc"],
        )
        return planted(dataclasses.replace(sweep, deltas=[], cells=cells, tasks=[info]))

    (row,) = main_tables(compare(accuracy(0.62), accuracy(0.5)))[0].rows
    assert row[1:] == (
        "needles acc, float", "better", "0.500 [0.49, 0.51]", "0.620 [0.61, 0.63]", "+12.0 points"
    )  # fmt: skip
    assert main_tables(compare(accuracy(0.4), accuracy(0.5)))[0].rows[0][2] == "worse"


def test_other_data_are_said_first_and_nothing_is_better() -> None:
    data = dataclasses.replace(read_json(V3 / "sweep.json", Sweep).data, sha256="d" * 64)
    now, earlier = sweep_run(moved(1.0, 1.1, 1.2), data=data), sweep_run()
    (entry,) = [e for e in compare(now, earlier).figures if e.is_changed]
    assert entry.mark == "changed"
    section = against_section(now, earlier)
    assert section.notes[0].startswith("The data differ (sweep of all models: data sha256 ")
    assert "not comparable" in section.notes[0] and "not comparable" in section.notes[-1]
    assert ("data sha256", "d" * 16) in {(row[0], row[2]) for row in section.tables[-1].rows}


def test_another_model_of_the_same_name_is_said_and_still_judged() -> None:
    sweep = read_json(V3 / "sweep.json", Sweep)
    models = [dataclasses.replace(model, sha256="e" * 64) for model in sweep.models]
    now = sweep_run(moved(1.0, 1.1, 1.2), models=models)
    assert {e.mark for e in compare(now, sweep_run()).figures if e.is_changed} == {"better"}
    notes = against_section(now, sweep_run()).notes
    assert notes[0].startswith("The model differs (") and "models diff sha256" in notes[0]


@pytest.mark.parametrize(
    ("factor", "processor", "mark"),
    [
        (0.95, "x", "within noise"),
        (1.05, "x", "within noise"),
        (0.5, "x", "better"),
        (2.0, "x", "worse"),
        (0.5, "y", "changed"),
        (0.5, "", "changed"),
    ],
    ids=["5 % less", "5 % more", "half", "double", "other processor", "processor unknown"],
)
def test_latency_is_judged_on_one_processor(
    factor: float, processor: str, mark: str, tmp_path: Path
) -> None:
    export = read_json(V3 / "base" / "export.json", Export)

    def run(name: str, times: float, processor: str) -> Run:
        latency = export.latency_ms | {"quantized": times * export.latency_ms["quantized"]}
        kept = {"processor": processor} if processor else {}
        file = dataclasses.replace(export, latency_ms=latency, environment=kept)
        write_json(tmp_path / name / "export.json", file)
        return collect([tmp_path / name])

    found = compare(run("now", factor, processor), run("then", 1.0, "x"))
    assert [e.mark for e in found.figures if e.is_changed] == [mark]


def test_what_one_run_has_alone_is_one_row_each() -> None:
    sweep = read_json(V3 / "sweep.json", Sweep)
    fewer = dataclasses.replace(sweep, deltas=[], cells=sweep.cells[1:])
    gone = [e for e in compare(planted(fewer), sweep_run()).entries if e.is_changed]
    assert [(e.mark, e.subject, e.look.words) for e in gone] == [
        ("gone", "diff", "perplexity, float")
    ]
    new = [e for e in compare(sweep_run(), planted(fewer)).entries if e.is_changed]
    assert [(e.mark, e.subject) for e in new] == [("new", "diff")]


def test_many_changes_within_noise_are_folded() -> None:
    sweep = read_json(V3 / "sweep.json", Sweep)
    tripled = [
        dataclasses.replace(cell, model=f"{cell.model}{i}")
        for i in range(3)
        for cell in sweep.cells
    ]

    def run(value: Callable[[Cell], float]) -> Run:
        cells = [
            dataclasses.replace(
                cell, value=value(cell), ci_low=value(cell) - 1, ci_high=value(cell) + 1
            )
            for cell in tripled
        ]
        return planted(dataclasses.replace(sweep, deltas=[], cells=cells))

    now = run(lambda cell: cell.value + (9 if cell.recipe == "logits4" else 0.5))
    section = against_section(now, run(lambda cell: cell.value))
    assert [row[2] for row in section.tables[0].rows] == ["worse"] * 6
    assert [row[2] for row in section.folded[0].rows] == ["within noise"] * 54
    assert "54 more are within noise" in section.tables[0].note


def test_the_last_held_out_loss_of_an_arm_is_important() -> None:
    def run(by: dict[int, float]) -> Run:
        result = training()
        (model, *others) = result.models
        measured = [
            dataclasses.replace(m, loss=m.loss + by.get(m.step, 0.0)) for m in model.measurements
        ]
        models = [dataclasses.replace(model, measurements=measured), *others]
        result = dataclasses.replace(result, models=models)
        return Run(trainings=(Found(place="x/training.json", result=result),))

    first, last = STEPS[0], STEPS[-1]
    found = compare(run({first: 1.0, last: -1.0}), run({}))
    (row,) = main_tables(found)[0].rows
    assert row[1:3] == (f"held-out loss at step {last}", "changed") and row[5].startswith("-")
    assert [row[1] for row in other_table(found).rows] == [f"held-out loss at step {first}"]


# the page


def hostile_runs() -> tuple[Run, Run]:
    def renamed(cell: Cell) -> Cell:
        return dataclasses.replace(
            cell, model=f"{HOSTILE}{cell.model}", recipe=HOSTILE + cell.recipe
        )

    models = read_json(V3 / "sweep.json", Sweep).models
    others = [dataclasses.replace(model, name=f"{HOSTILE}{model.name}") for model in models]

    def worse(cell: Cell) -> Cell:
        return renamed(dataclasses.replace(cell, value=9e3, ci_low=8e3, ci_high=1e4))

    return sweep_run(worse, models=others), sweep_run(renamed, models=others)


def page(section: Section) -> Page:
    context: dict[str, object] = {
        "models": [HOSTILE], "warnings": [], "headlines": [], "definitions": []
    }  # fmt: skip
    first = FirstScreen(sentences=section.notes)
    return Page(context=context, first=first, sections=(section,))


@pytest.mark.kind(8, "report")
def test_hostile_names_are_escaped_and_marks_are_words() -> None:
    section = against_section(*hostile_runs())
    text = render_html(page(section))
    assert "<script>alert" not in text and "\x1b" not in text
    assert text.count(">worse</td>") == len(section.tables[0].rows) == 20
    twin = render_markdown(page(section))
    assert "<script>" not in twin and "\x1b" not in twin
    assert "| worse |" in twin


@pytest.mark.parametrize(
    ("now", "earlier", "said"),
    [
        (3.0, 2.0, "+50.00 %"),
        (2.0, -1.0, "+3"),
        (5, 7, "-2"),
        (1.00002, 1.0, "+0.002 %"),
        ([1.0, 2.0, 9.0], [1.0, 2.5, 4.0], "2 of 3 differ, most at [2]: 4.000 to 9.000"),
        (["a", "c"], ["a", "b"], "+ c; - b"),
        ("text", "other", ""),
        (None, 3.0, ""),
    ],
)
def test_the_words_of_a_change(now: Any, earlier: Any, said: str) -> None:
    assert change_text(now, earlier, look("ranges", ("x",), {})) == said
