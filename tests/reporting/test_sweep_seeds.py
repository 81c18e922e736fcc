"""Several seeds of one model are one row, and what a mark says is true of all of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from quantkit.reporting.sweep_charts import sweep_charts
from quantkit.reporting.sweep_groups import measured
from quantkit.reporting.sweep_seeds import pooled
from quantkit.reporting.sweep_tables import bit_tables, recipe_tables, seed_tables, spread_table
from quantkit.reporting.verdict import verdict
from quantkit.results import Sweep
from tests.reporting.planted_sweep import planted
from tests.reporting.test_sweep_tables import SIX, TWO, measure, run_of


def test_seeds_are_one_row_with_their_mean_and_spread() -> None:
    single, group = measure(SIX, "acc_norm"), pooled(measure(SIX, "acc_norm"))
    for recipe in ("none", "logits4", "nf4"):
        mine = [c for c in single.cells if (c.recipe, c.group) == (recipe, "diff")]
        values, errors = [c.value for c in mine], [c.stderr for c in mine]
        assert len(values) == 3
        (one,) = [c for c in group.cells if (c.recipe, c.group) == (recipe, "diff")]
        assert one.model == "diff (3 seeds)"
        assert one.value == pytest.approx(np.mean(values))
        reach = 1.959964 * np.sqrt(np.mean(np.square(errors)))
        assert (one.ci_low, one.ci_high) == pytest.approx((one.value - reach, one.value + reach))
        spread = group.spreads["diff (3 seeds)", recipe]
        assert spread.sd == pytest.approx(np.std(values, ddof=1))
        assert (spread.low, spread.high) == (min(values), max(values))


def test_seeds_are_level_only_together() -> None:
    sweep = planted()
    target = ("base-s1", "logits8", "acc_norm")
    deltas = [
        dataclasses.replace(d, is_level=False, ci_low=-0.5)
        if (d.model, d.recipe, d.metric) == target
        else d
        for d in sweep.deltas
    ]
    for changed, mark in ((sweep, "="), (dataclasses.replace(sweep, deltas=deltas), "")):
        one = pooled(measure(run_of(changed), "acc_norm"))
        (found,) = [c for c in one.cells if (c.model, c.recipe) == ("base (3 seeds)", "logits8")]
        assert one.mark(found) == mark
    assert one.deltas["base (3 seeds)", "logits8"].ci_low == -0.5


def test_seeds_are_at_chance_only_together() -> None:
    sweep = planted()
    cells = [
        dataclasses.replace(c, chance_p=0.01) if c.model == "base-s1" and c.chance_p else c
        for c in sweep.cells
    ]
    one = pooled(measure(run_of(dataclasses.replace(sweep, cells=cells)), "exact_match"))
    marks = {c.model: one.mark(c) for c in one.cells if c.recipe == "none"}
    assert marks == {"diff (3 seeds)": "chance", "base (3 seeds)": ""}


@pytest.mark.parametrize(
    ("more", "mark"),
    [({"ci_high": 0.9}, "chance?"), ({"chance_p": None}, "")],
    ids=["an interval too wide", "no test"],
)
def test_what_one_seed_leaves_open_its_group_does(more: dict[str, float | None], mark: str) -> None:
    sweep = planted()
    cells = [
        dataclasses.replace(c, **more) if c.model == "base-s1" and c.chance_p else c  # type: ignore[arg-type]
        for c in sweep.cells
    ]
    one = pooled(measure(run_of(dataclasses.replace(sweep, cells=cells)), "exact_match"))
    marks = {c.model: one.mark(c) for c in one.cells if c.recipe == "none"}
    assert marks == {"diff (3 seeds)": "chance", "base (3 seeds)": mark}


BLOCKS = 1.1
"""What a file of other blocks multiplies its figures by."""


def elsewhere(seeds: int, *, named: str = "") -> Sweep:
    """The same group on other blocks; `named` renames its models."""
    sweep = planted(("base",), seeds)
    return dataclasses.replace(
        sweep,
        cells=[
            dataclasses.replace(
                c, value=c.value * BLOCKS, model=c.model.replace("base-s", named or "base-s")
            )
            for c in sweep.cells
        ],
        deltas=[], spreads=[], attention_mass=[],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("other", "second"),
    [
        pytest.param(elsewhere(1), "base-s0 [run1/sweep.json]", id="one of the seeds"),
        pytest.param(elsewhere(1, named="more"), "more0", id="a seed of another name"),
        pytest.param(
            elsewhere(3), "base [run1/sweep.json] (3 seeds)", id="all seeds on other blocks"
        ),
        pytest.param(
            elsewhere(2, named="more"), "base [run1/sweep.json] (2 seeds)", id="seeds of new names"
        ),
    ],
)
def test_seeds_are_of_one_file(other: Sweep, second: str) -> None:
    first = planted(("base",))
    run = run_of(first, other)
    one = pooled(measure(run, "perplexity"))
    for name, sweep in (("base (3 seeds)", first), (second, other)):
        for recipe in ("none", "logits4"):
            values = [
                c.value for c in sweep.cells if (c.metric, c.recipe) == ("perplexity", recipe)
            ]
            (cell,) = [c for c in one.cells if (c.model, c.recipe) == (name, recipe)]
            assert cell.value == pytest.approx(np.mean(values))
    assert {c.model for c in one.cells} == {"base (3 seeds)", second}
    names = {k.name.split(",")[0]: k.colour for k in sweep_charts(run)[0].keys}
    assert len(set(names.values())) == len(names) == 2


def test_a_file_twice_is_counted_once() -> None:
    once, twice = (pooled(measure(run_of(*[planted()] * n), "acc")) for n in (1, 2))
    assert once.cells == twice.cells


def test_a_change_is_over_the_seeds_that_have_both() -> None:
    sweep = planted(("base",))
    gone = {("base-s0", "none"), ("base-s2", "logits4"), ("base-s2", "nf4")}
    cells = [c for c in sweep.cells if (c.model, c.recipe) not in gone]
    deltas = [d for d in sweep.deltas if d.model != "base-s0"]
    run = run_of(dataclasses.replace(sweep, cells=cells, deltas=deltas))
    # only seed 1 has both; logits4 costs 60 %, whichever seed: over all it would be 58.4 %
    row = next(r for r in bit_tables(run)[0].rows if r[:2] == ("base (3 seeds)", "tensor"))
    assert "(+60.00 %)" in row[-1] and row[-1].startswith("28.94, sampling ±1.70, sd 0.2036")
    nf4 = next(r for r in recipe_tables(run)[0].rows if r[1] == "nf4")
    assert nf4[4] == "+0.80 %"
    assert "28.94 at 4 bits (+60.00 %)" in verdict(run)[1]


def test_seeds_with_no_pair_have_no_change() -> None:
    sweep = planted(("base",))
    cells = [c for c in sweep.cells if (c.recipe == "none") == (c.model == "base-s0")]
    run = run_of(dataclasses.replace(sweep, cells=cells, deltas=[]))
    assert "(n/a)" in bit_tables(run)[0].rows[0][-1]


def test_a_model_alone_stays_itself() -> None:
    assert all(pooled(one) is one for one in measured(TWO))
    assert seed_tables(TWO) == ()
    single = {row[0] for table in seed_tables(SIX) for row in table.rows}
    assert single == {f"{group}-s{seed}" for group in ("diff", "base") for seed in range(3)}
    assert {row[0] for table in bit_tables(SIX) for row in table.rows} == {
        "diff (3 seeds)", "base (3 seeds)"
    }  # fmt: skip


def test_the_spread_table_has_what_the_file_says() -> None:
    rows = spread_table(SIX).rows
    assert len(rows) == len(planted().spreads)
    said = next(s for s in planted().spreads if s.metric == "perplexity" and s.recipe == "nf4")
    row = next(row for row in rows if row[:3] == (said.group, "nf4", "perplexity"))
    assert row[3:] == ("3", "17.41", "0.1724", "17.24 .. 17.58", "0.5223")
