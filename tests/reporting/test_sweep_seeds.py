"""Several seeds of one model are one row, and what a mark says is true of all of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from quantkit.reporting.sweep_groups import measured
from quantkit.reporting.sweep_seeds import pooled
from quantkit.reporting.sweep_tables import bit_tables, seed_tables, spread_table
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
