"""Tables of a sweep: a row for each recipe, marks as the file says, the seeds of a model pooled."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from quantkit.numerics.resampling import LEAST_UNITS
from quantkit.reporting.collect import Found, Run
from quantkit.reporting.data_notes import overlaps
from quantkit.reporting.sweep_definitions import sweep_definitions
from quantkit.reporting.sweep_groups import Measured, measured
from quantkit.reporting.sweep_rows import bit_rows, other_cells, split_recipe
from quantkit.reporting.sweep_seeds import by_group, pooled_masses
from quantkit.reporting.sweep_tables import (
    bit_tables,
    delta_table,
    detail_tables,
    fired_table,
    mass_table,
    notes,
    recipe_tables,
    seed_tables,
    spread_table,
    task_table,
)
from quantkit.reporting.verdict import verdict
from quantkit.results import Sweep, read_json
from tests.reporting.planted_sweep import METRICS, OTHERS, RECIPES, cell, planted

FIXTURES = Path(__file__).parent.parent / "results" / "fixtures"


def run_of(*found: Sweep) -> Run:
    return Run(sweeps=tuple(Found(place=f"run{i}/sweep.json", result=s) for i, s in
                            enumerate(found)))  # fmt: skip


def measure(run: Run, metric: str) -> Measured:
    (one,) = [one for one in measured(run) if one.metric == metric]
    return one


TWO = run_of(planted(seeds=1))
SIX = run_of(planted())


@pytest.mark.parametrize(
    ("recipe", "rest", "scale"),
    [
        ("none", "float", ""),
        ("logits4", "float", "tensor"),
        ("logits4:row", "float", "row"),
        ("logits4:head:static:asymmetric", "float", "head static asymmetric"),
        ("logits4:asymmetric", "float", "tensor asymmetric"),
        ("w8a8+logits4:head", "w8a8", "head"),
        ("w8a8:token+logits4:head", "w8a8:token", "head"),
        ("qk8", "qk8", ""),
        ("logits4+kv8", "kv8", "tensor"),
        ("of another version", "of another version", ""),
    ],
)
def test_a_recipe_is_its_logits_and_the_rest(recipe: str, rest: str, scale: str) -> None:
    assert split_recipe(recipe) == (rest, scale)


@pytest.mark.parametrize("metric", [name for names in METRICS.values() for name in names])
def test_every_cell_is_in_exactly_one_place(metric: str) -> None:
    one = measure(TWO, metric)
    rows, others = bit_rows(one.cells), other_cells(one.cells)
    in_rows = [c for row in rows for bits, c in row.cells.items() if bits != 16]
    quantized = [c for c in others if c.recipe != "none"]
    assert sorted(c.recipe for c in in_rows + quantized) == sorted(2 * RECIPES[1:])
    assert {c.recipe for c in quantized} == set(OTHERS[:-1])
    for row in rows:
        assert {c.model for c in row.cells.values()} == {row.model}
        assert row.cells[16].recipe == "none"
    assert [row.scale for row in rows[:4]] == ["tensor", "head", "row", "head static asymmetric"]


def test_other_parts_have_their_own_float_column() -> None:
    base = cell("none", "diff", 0, "perplexity", "perplexity")
    names = {"none": 1.0, "w8a8": 2.0, "w8a8+logits4": 3.0, "w8a8:token": 4.0, "logits4": 5.0}
    cells = [
        dataclasses.replace(
            base, recipe=name, value=value, bits=4 if "logits" in name else 16,
            granularity="tensor" if "logits" in name else None,
        )
        for name, value in names.items()
    ]  # fmt: skip
    rows = {row.rest: {bits: c.value for bits, c in row.cells.items()} for row in bit_rows(cells)}
    assert rows == {"w8a8": {16: 2.0, 4: 3.0}, "float": {16: 1.0, 4: 5.0}}
    (table,) = bit_tables(run_of(dataclasses.replace(planted(), cells=cells, tasks=[])))
    assert [row[:3] for row in table.rows] == [
        (base.model, "w8a8", "tensor"), (base.model, "float", "tensor")
    ]  # fmt: skip
    assert [c.recipe for c in other_cells(cells)] == ["none", "w8a8:token"]


def test_the_table_of_bits_by_hand() -> None:
    perplexity, _, accuracy, *_ = bit_tables(TWO)
    assert perplexity.columns[2:] == ("16 bits", "8 bits", "6 bits", "4 bits")
    start = ("base-s0", "tensor")
    row = next(row for row in perplexity.rows if row[:2] == start)
    # 18 perplexity; 4 bits cost 60 %, 6 bits 3.75 %, 8 bits 0.234 %, each give or take 5.88 %
    assert row[2:] == (
        "18.00 [16.94, 19.06]",
        "18.04 [16.98, 19.10] (+0.23 %) =",
        "18.68 [17.58, 19.77] (+3.75 %)",
        "28.80 [27.11, 30.49] (+60.00 %)",
    )
    row = next(row for row in accuracy.rows if row[:2] == start)
    assert row[2] == "0.470 [0.42, 0.52]"
    assert row[5] == "0.188 [0.15, 0.23] (-0.282)"
    assert "n = 400 items" in accuracy.note
    assert "a loss of more than 1 point." in accuracy.note
    assert "a loss of more than 1 %." in perplexity.note


@pytest.mark.parametrize("metric", ["perplexity", "bits_per_byte", "acc_norm", "acc"])
def test_marks_are_what_the_file_says(metric: str) -> None:
    one = measure(TWO, metric)
    said = {(d.model, d.recipe): d.is_level for d in planted(seeds=1).deltas
            if d.metric == metric and not d.against_model}  # fmt: skip
    marks = {(c.model, c.recipe): one.mark(c) for c in one.cells}
    assert {key for key, mark in marks.items() if mark == "="} == {k for k, v in said.items() if v}
    assert len({mark for mark in marks.values()}) == 2


def test_what_is_at_chance_is_said_and_never_level() -> None:
    table = next(table for table in bit_tables(TWO) if "exact_match" in table.title)
    assert all(text.endswith(" chance") for row in table.rows for text in row[2:] if text != "n/a")
    assert "chance = guessing does as well (p > 5 %), and the interval ends within" in table.note
    assert "chance?" not in table.note
    others = next(table for table in recipe_tables(TWO) if "exact_match" in table.title)
    assert {row[-1] for row in others.rows} == {"", "n/a"}
    assert any(delta.is_level for delta in planted().deltas if delta.metric == "exact_match")
    assert "0.080 (chance) with float logits" in verdict(TWO)[1]


def test_what_may_guess_and_has_a_wide_interval_is_marked_with_a_doubt() -> None:
    """Of 50 samples with 0.26 the interval reaches to 0.38: 13 points above chance."""
    table = next(table for table in bit_tables(TWO) if "query_accuracy" in table.title)
    assert all(text.endswith(" chance?") for row in table.rows for text in row[2:] if text != "n/a")
    assert "chance? = not shown to be above chance" in table.note
    assert "chance = " not in table.note
    others = next(table for table in recipe_tables(TWO) if "query_accuracy" in table.title)
    assert {row[-1] for row in others.rows} == {"", "n/a"}
    assert all(row[2] == "0.260 chance?" for row in others.rows)


def test_level_with_a_float_row_at_chance_is_no_mark() -> None:
    sweep = planted(seeds=1)
    cells = [
        dataclasses.replace(c, chance_p=0.4 if c.recipe == "none" else 0.01)
        if c.metric == "exact_match"
        else c
        for c in sweep.cells
    ]
    one = measure(run_of(dataclasses.replace(sweep, cells=cells)), "exact_match")
    assert {one.mark(c) for c in one.cells if c.recipe == "none"} == {"chance"}
    assert {one.mark(c) for c in one.cells if c.recipe != "none"} == {""}
    assert all(delta.is_level for delta in one.deltas.values())


def test_other_recipes_have_value_change_interval_and_level() -> None:
    table = next(table for table in recipe_tables(TWO) if "acc_norm" in table.title)
    assert table.rows[0] == ("diff-s0", "none", "0.470", "[0.42, 0.52]", "", "", "")
    # w8a8:token costs 0.4 % of 0.47, give or take half a point; kv8 2 %
    assert table.rows[1][2:] == (
        "0.468", "[0.42, 0.52]", "-0.002", "[-0.007, +0.003]", "level"
    )  # fmt: skip
    assert table.rows[5][1:5] == ("kv8", "0.461", "[0.41, 0.51]", "-0.009")
    assert table.rows[5][6] == "not shown"


def test_files_that_say_no_level_show_none() -> None:
    for version in ("v1", "v2", "v3"):
        run = run_of(read_json(FIXTURES / version / "sweep.json", Sweep))
        (table,) = bit_tables(run)
        assert "=" not in "".join(text for row in table.rows for text in row)
        assert not {"margin", "level"} & set(delta_table(run).columns)
        assert recipe_tables(run) == detail_tables(run) == seed_tables(run) == ()
        empty = (spread_table(run), mass_table(run), fired_table(run), task_table(run))
        assert not any(table.rows for table in empty)
        assert sweep_definitions(run) == notes(run) == ()


# attention, quantizers, provenance


def test_attention_mass_has_depths_across() -> None:
    table = mass_table(SIX)
    assert table.columns == ("on", "model", "weights", "0 %", "25 %", "50 %", "75 %", "100 %")
    assert table.rows[0][:3] == ("answer", "diff (3 seeds)", "signed")
    found = [float(text) for text in table.rows[0][3:]]
    assert found == pytest.approx([0.27 + 0.05 * i / 4 for i in range(5)], abs=0.00051)
    assert [row[0] for row in table.rows] == ["answer"] * 4 + ["noise"] * 4
    (mass,) = [
        m for m in pooled_masses(SIX)
        if (m.model, m.kind, m.depth_frac) == ("base (3 seeds)", "share", 1.0)
    ]  # fmt: skip
    assert mass.answer == pytest.approx(0.08)


def test_quantizers_details_tasks_and_notes() -> None:
    row = fired_table(TWO).rows[0]
    assert row == ("diff-s0", "logits8", "perplexity", "2", "128", "128,000")
    (details,) = detail_tables(TWO)
    assert details.columns == ("model", "recipe", "exact_match at 0.25")
    assert len(details.rows) == 2 * len(RECIPES)
    assert task_table(TWO).rows[1] == (
        "run0/sweep.json", "multiple-choice", "acc_norm, acc", "pydoc", "7" * 16, "400 items"
    )  # fmt: skip
    assert notes(TWO)[1] == "Kept in float in every row: linear_input/model.layers.0.mlp.down_proj."
    guessed = [f"icl: m with logits{n} is at chance (0.250, chance 0.25, n = 9)." for n in range(9)]
    sweep = TWO.sweeps[0].result
    few, many = (
        notes(run_of(dataclasses.replace(sweep, notes=["Else.", *said])))
        for said in (guessed[:6], guessed)
    )
    assert few[:7] == ("Else.", *guessed[:6])
    assert many[:2] == (
        "Else.",
        "9 figures are at chance or not shown to be above it, in icl: what bits do to them says "
        "nothing. The tables mark them.",
    )
    terms = [definition.term for definition in sweep_definitions(SIX)]
    assert terms == [
        "bits per byte (bits_per_byte)", "acc_norm", "acc", "exact match (exact_match)",
        "query_accuracy", "level with", "chance", "spread of seeds", "attention mass",
    ]  # fmt: skip
    assert "spread of seeds" not in [d.term for d in sweep_definitions(TWO)]


def test_order_robustness_is_defined_where_it_is_shown() -> None:
    sweep = planted(seeds=1)
    cells = [dataclasses.replace(c, details={"order_sd": 0.1}) for c in sweep.cells]
    terms = [d.term for d in sweep_definitions(run_of(dataclasses.replace(sweep, cells=cells)))]
    assert "order_min, order_max, order_sd, order_range" in terms


def test_margins_that_differ_are_a_span() -> None:
    sweep = planted(seeds=1)
    deltas = [
        dataclasses.replace(d, margin=(0.034 if d.model == "diff-s0" else 0.27) * 10)
        for d in sweep.deltas
    ]
    one = measure(run_of(dataclasses.replace(sweep, deltas=deltas)), "perplexity")
    # of 17.1 and of 18
    assert "a loss of more than 1.99 % to 15 %." in one.notes


def test_differences_between_models_name_the_other_model() -> None:
    (row,) = [row for row in delta_table(TWO).rows if " " in row[2]]
    assert row[:7] == (
        "diff-s0", "logits4", "base-s0 logits6", "multiple-choice", "acc_norm", "1 point",
        "not shown",
    )  # fmt: skip
    assert {len(r) for r in delta_table(TWO).rows} == {10}


@pytest.mark.parametrize(
    ("metric", "ends", "word"),
    [
        pytest.param("acc_norm", (0.001, 0.02), "better", id="a gain"),
        pytest.param("acc_norm", (-0.004, 0.02), "level", id="zero inside"),
        pytest.param("acc_norm", (0.0, 0.02), "level", id="zero at the end"),
        pytest.param("perplexity", (-0.2, -0.1), "better", id="a gain in perplexity"),
        pytest.param("perplexity", (0.01, 0.02), "level", id="a small loss in perplexity"),
    ],
)
def test_better_is_an_interval_that_is_all_gain(
    metric: str, ends: tuple[float, float], word: str
) -> None:
    sweep = planted(seeds=1)
    key = ("base-s0", "nf4", metric)
    for is_level, said in ((True, word), (False, "not shown")):
        deltas = [
            dataclasses.replace(d, ci_low=ends[0], ci_high=ends[1], is_level=is_level)
            if (d.model, d.recipe, d.metric) == key
            else d
            for d in sweep.deltas
        ]
        run = run_of(dataclasses.replace(sweep, deltas=deltas))
        (row,) = [r for r in delta_table(run).rows if (r[0], r[1], r[4]) == key]
        assert row[6] == said
        table = next(t for t in recipe_tables(run) if f" {metric}," in t.title)
        (row,) = [r for r in table.rows if r[:2] == key[:2]]
        assert row[6] == said


def test_the_definition_of_level_names_what_else_must_hold() -> None:
    (level,) = [d for d in sweep_definitions(TWO) if d.term == "level with"]
    assert f"at least {LEAST_UNITS} units" in level.meaning.replace("\n", " ")
    assert "perplexities and bits per byte also pass Student's t" in level.meaning


def test_two_files_that_measured_a_model_differently_are_both_there() -> None:
    sweep = planted(("base",), 1)
    cells = [dataclasses.replace(c, value=c.value * 1.1) for c in sweep.cells]
    both = run_of(sweep, sweep, dataclasses.replace(sweep, cells=cells))
    models = {row[0] for row in bit_tables(both)[0].rows}
    assert models == {"base-s0", "base-s0 [run2/sweep.json]"}


def test_blocks_shared_by_a_later_task_are_a_warning() -> None:
    sweep = planted(seeds=1)
    tasks = [
        dataclasses.replace(t, data=dataclasses.replace(t.data, shared_blocks=9 * i))
        for i, t in enumerate(sweep.tasks)
    ]
    assert overlaps(TWO) == []
    (line,) = overlaps(run_of(dataclasses.replace(sweep, tasks=tasks)))
    assert "18 blocks that run0/sweep.json" in line


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        pytest.param("acc_norm", 0.4701, "0.470", id="share"),
        pytest.param("perplexity", 18.0, "18.00", id="perplexity"),
        pytest.param("perplexity", math.nan, "n/a", id="NaN"),
        pytest.param("acc_norm", math.nan, "n/a", id="NaN of a share"),
        pytest.param("perplexity", math.inf, "inf", id="infinite"),
    ],
)
def test_figures(metric: str, value: float, text: str) -> None:
    assert measure(TWO, metric).value(value) == text


def test_a_score_beyond_one_is_no_share() -> None:
    """Of files that do not say what is a share, whose values decide."""
    sweep = planted(seeds=1)
    tasks = [dataclasses.replace(task, shares=None) for task in sweep.tasks]
    cells = [dataclasses.replace(c, value=c.value * 100) if c.metric == "acc" else c
             for c in sweep.cells]  # fmt: skip
    run = run_of(dataclasses.replace(sweep, tasks=tasks, cells=cells))
    bleu = measure(run, "acc")
    assert (bleu.value(27.123), bleu.span(20.0, 30.0)) == ("27.12", "[20.00, 30.00]")
    assert bleu.change(-1.5, 27.0) == "-1.5"
    shares = [False, False, True, False, True, True]
    assert [one.is_share for one in by_group(run)] == shares
    assert [one.is_share for one in by_group(TWO)] == [False, False, True, True, True, True]


def test_what_is_a_share_is_what_the_file_says() -> None:
    sweep = planted(seeds=1)
    declared = {"multiple-choice": ["acc"], "perplexity": ["bits_per_byte"]}
    tasks = [dataclasses.replace(t, shares=declared.get(t.name, [])) for t in sweep.tasks]
    found = measured(run_of(dataclasses.replace(sweep, tasks=tasks)))
    assert {one.metric for one in found if one.is_share} == {"acc", "bits_per_byte"}
    norm = next(one for one in found if one.metric == "acc_norm")
    assert (norm.value(0.47), norm.change(-0.02, 0.47)) == ("0.4700", "-0.02")
    bits = next(one for one in found if one.metric == "bits_per_byte")
    assert (bits.value(0.9), bits.change(0.02, 0.9)) == ("0.900", "+0.020")


def test_the_verdict_keeps_to_first_metrics_and_a_few_parts() -> None:
    cost = verdict(SIX)[1]
    assert cost.startswith("Perplexity of diff (3 seeds) is 17.27 with float logits, 17.28 at 8")
    assert "multiple-choice acc_norm of base (3 seeds) is 0.475 with float logits" in cost
    assert "bits_per_byte" not in cost
    assert cost.count(";") == 5 and "nf4" not in cost
    others = [c for c in planted(seeds=1).cells if "logits" not in c.recipe]
    cost = verdict(run_of(dataclasses.replace(planted(seeds=1), cells=others)))[1]
    assert "perplexity of base-s0 is 18.00 in float, 18.07 with w8a8:token (+0.40 %)" in cost
