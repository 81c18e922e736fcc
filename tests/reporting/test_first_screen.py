"""The first screen: three sentences whose every number is in the files, and no claim beyond."""

from __future__ import annotations

import dataclasses
import math
import shlex
from pathlib import Path
from typing import Any

import pytest

from quantkit.reporting.collect import Found, Run, collect
from quantkit.reporting.first_screen import first_screen
from quantkit.reporting.text import number
from quantkit.results import Calibration, Stats, Sweep, read_json, write_json
from tests.reporting.planted_pair import ARMS, TOPS, cell, guessed, write_run
from tests.reporting.planted_sweep import planted

REAL = Path(__file__).parents[2] / "reports" / "pair"
FIXTURES = Path(__file__).parent.parent / "results" / "fixtures"


def test_a_pair_is_told_in_three_sentences(tmp_path: Path) -> None:
    screen = first_screen(collect([write_run(tmp_path)]))
    outliers, bits, ship = screen.sentences
    (base_logits, base_states), (logits, states) = TOPS["baseline"], TOPS["diff"]
    assert f"{logits[0] / base_logits[0]:.3f} times (22.50 in layer 0, head 0, map " in outliers
    assert ", against 36.20 in layer 0, head 0), in the paper 0.122 times" in outliers
    assert f"{states[0] / base_states[0]:.2f} times (17.30 in layer " in outliers
    assert ", against 15.70 in layer 0, channel " in outliers
    assert outliers.endswith("), in the paper 0.468 times.")
    ours = cell("logits4:row", "diff", "perplexity", "perplexity").value
    theirs = cell("logits6:row", "baseline", "perplexity", "perplexity").value
    assert f"({ours:.2f} against {theirs:.2f}" in bits and "n = 64 blocks" in bits
    assert bits.startswith("diff at 4 bits is level with baseline at 6 in perplexity")
    assert "baseline" in ship and "diff" in ship
    assert screen.more and not set(screen.more) & set(screen.sentences)


def test_table_5_is_of_the_papers_reading_where_that_was_measured(tmp_path: Path) -> None:
    planted_table = first_screen(collect([write_run(tmp_path)])).table
    assert planted_table is not None and "reading" in planted_table.columns  # valid ones alone
    assert [row[1] for row in planted_table.rows][:3] == [*ARMS, "diff / baseline"]
    table = first_screen(collect([REAL])).table
    assert table is not None and "reading" not in table.columns
    stats = read_json(REAL / "diff" / "stats.json", Stats).summary.attention_logit_unmasked
    assert stats is not None and table.rows[1][2] == number(stats.abs_top["1"])
    names = [row[1] for row in table.rows if row[0] == "logits"]
    assert names == [
        *ARMS, "diff / baseline", "Transformer 2.8B (paper)", "DIFF 2.8B (paper)",
        "DIFF ratio (paper)",
    ]  # fmt: skip
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert "all of QK^T" in table.note


def test_where_a_model_guesses_its_task_is_not_spoken_of(tmp_path: Path) -> None:
    run = collect([write_run(tmp_path)])
    changed = guessed(run.sweeps[0].result, ("diff",), "perplexity")
    run = dataclasses.replace(run, sweeps=(Found(place="s", result=changed),))
    said = " ".join(first_screen(run).sentences)
    assert "in perplexity" not in said


def test_one_model_without_an_export(tmp_path: Path) -> None:
    stats = read_json(FIXTURES / "v4" / "base" / "stats.json", Stats)
    write_json(tmp_path / "stats.json", stats)
    screen = first_screen(collect([tmp_path]))
    outliers, ship = screen.sentences
    assert number(stats.summary.hidden_state.abs_max) in outliers
    assert "nothing was exported yet" in ship and "--quantize auto" in ship
    assert screen.charts == () and screen.table is not None


def test_the_fewest_level_bits_are_those_of_the_rule() -> None:
    sweep = planted(("base",), 1)
    screen = first_screen(Run(sweeps=(Found(place="run/sweep.json", result=sweep),)))
    (bits, _) = screen.sentences
    level = {
        d.recipe
        for d in sweep.deltas
        if d.metric == "perplexity" and d.is_level and d.against == "none"
    }
    assert level and "level with float in perplexity" in bits
    assert screen.charts[0].title == "perplexity against bits of the attention logits"
    none = dataclasses.replace(
        sweep, deltas=[dataclasses.replace(d, is_level=False) for d in sweep.deltas]
    )
    said = first_screen(Run(sweeps=(Found(place="run/sweep.json", result=none),))).sentences[0]
    assert "base-s0 none shown (8 bits per row: " in said
    untested = dataclasses.replace(
        sweep, deltas=[dataclasses.replace(d, is_level=None) for d in sweep.deltas]
    )
    said = first_screen(Run(sweeps=(Found(place="run/sweep.json", result=untested),))).sentences[0]
    assert "base-s0 not tested (8 bits per row: " in said


@pytest.mark.parametrize("version", ["v1", "v2", "v3", "v4"])
def test_older_runs_have_a_first_screen(version: str) -> None:
    run = collect([FIXTURES / version])
    assert 1 <= len(first_screen(run).sentences) <= 3


def test_an_earlier_run_is_one_sentence_in_front(tmp_path: Path) -> None:
    write_run(tmp_path / "now")
    found = read_json(tmp_path / "now" / "sweep.json", Sweep)
    run = collect([tmp_path / "now"])
    cells = [dataclasses.replace(c, value=c.value * 1.5) for c in found.cells]
    changed = dataclasses.replace(found, cells=cells)
    earlier = dataclasses.replace(run, sweeps=(Found(place="s", result=changed),))
    screen = first_screen(run, earlier)
    assert len(screen.sentences) == 4
    assert screen.sentences[1:] == first_screen(run).sentences
    assert "earlier" in screen.sentences[0]


# the claim of a pair


def crossed(run: Run, scale: str, **changed: Any) -> Run:
    """The run with another difference between 4-bit diff and 6-bit baseline, in perplexity."""
    sweep = run.sweeps[0].result
    deltas = [
        dataclasses.replace(d, **changed)
        if d.against_model and d.task == "perplexity" and d.recipe.endswith(scale)
        else d
        for d in sweep.deltas
    ]
    return dataclasses.replace(
        run, sweeps=(Found(place="s", result=dataclasses.replace(sweep, deltas=deltas)),)
    )


@pytest.mark.parametrize(
    ("low", "high", "is_level", "word"),
    [
        (-0.30, -0.10, True, "is better than"),
        (-0.10, 0.10, True, "is level with"),
        (-0.50, 0.50, False, "is not shown to be level with"),
        (0.10, 0.30, False, "is not shown to be level with"),
        (0.21, 0.30, False, "is worse than"),
        (math.nan, math.nan, None, "was not tested against"),
    ],
    ids=["better", "level", "open", "worse by less than the margin", "refuted", "no interval"],
)
def test_the_claim_is_no_more_than_its_interval(
    low: float, high: float, is_level: bool | None, word: str, tmp_path: Path
) -> None:
    run = collect([write_run(tmp_path)])
    changed = crossed(
        run, ":row", ci_low=low, ci_high=high, value=0.0, margin=0.2, is_level=is_level
    )
    said = first_screen(changed).sentences[1]
    assert said.startswith(f"diff at 4 bits {word} baseline at 6 in perplexity, one scale per row")


def test_the_change_of_the_claim_is_of_the_baseline_at_its_bits(tmp_path: Path) -> None:
    run = collect([write_run(tmp_path)])
    theirs = cell("logits6:row", "baseline", "perplexity", "perplexity").value
    changed = crossed(run, ":row", value=0.01 * theirs, ci_low=0.0, ci_high=0.02 * theirs)
    sweep = changed.sweeps[0].result
    # the differential model's own 6-bit row, first in the file and twice as large, is not its base
    own = [
        dataclasses.replace(c, value=2 * c.value) if c.recipe == "logits6:row" else c
        for c in sweep.cells
        if c.model == "diff"
    ]
    cells = [*own, *(c for c in sweep.cells if c.model != "diff")]
    sweep = dataclasses.replace(sweep, cells=cells)
    changed = dataclasses.replace(changed, sweeps=(Found(place="s", result=sweep),))
    assert "+1.00 % [+0.00 %, +2.00 %]; n = 64 blocks" in first_screen(changed).sentences[1]


def test_a_claim_in_bits_per_byte_is_told_as_such(tmp_path: Path) -> None:
    """Models with other tokenizers are compared in the second metric."""
    run = collect([write_run(tmp_path)])
    changed = crossed(run, "", metric="bits_per_byte")
    said = first_screen(changed).sentences[1]
    ours = cell("logits4:row", "diff", "perplexity", "bits_per_byte").value
    assert "in perplexity bits_per_byte, one scale per row" in said
    assert f"({number(ours)} against " in said


def test_a_pair_that_guesses_everywhere_says_so(tmp_path: Path) -> None:
    run = collect([write_run(tmp_path)])
    sweep = run.sweeps[0].result
    for task in dict.fromkeys(c.task for c in sweep.cells):
        sweep = guessed(sweep, ARMS, task)
    screen = first_screen(dataclasses.replace(run, sweeps=(Found(place="s", result=sweep),)))
    assert len(screen.sentences) == 3
    assert screen.sentences[1].startswith("Neither model is ")
    assert "4 bits" not in screen.sentences[1]


# single models


def test_a_task_at_chance_is_no_evidence_of_what_bits_cost() -> None:
    """Of a sweep whose first task is guessed in, the second is told, with its picture."""
    sweep = planted(("base",), 1)
    order = ["needles:needles=4", "perplexity"]
    tasks = [next(t for t in sweep.tasks if t.name == name) for name in order]
    cells = [c for name in order for c in sweep.cells if c.task == name]
    both = dataclasses.replace(sweep, tasks=tasks, cells=cells)
    screen = first_screen(Run(sweeps=(Found(place="s", result=both),)))
    assert "level with float in perplexity" in screen.sentences[0]
    assert screen.charts[0].title.startswith("perplexity against bits")
    alone = dataclasses.replace(
        both, tasks=tasks[:1], cells=[c for c in cells if c.task == order[0]]
    )
    said = first_screen(Run(sweeps=(Found(place="s", result=alone),))).sentences[0]
    assert "base-s0 is not shown to be above chance" in said and "per row" not in said


def test_two_seeds_are_one_model_and_level_only_together() -> None:
    sweep = planted(("base",), 2)
    run = Run(sweeps=(Found(place="s", result=sweep),))
    said = first_screen(run).sentences[0]
    assert "base (2 seeds) " in said and "none shown" not in said
    one = [
        dataclasses.replace(d, is_level=False) if d.model == "base-s1" else d for d in sweep.deltas
    ]
    changed = dataclasses.replace(sweep, deltas=one)
    said = first_screen(Run(sweeps=(Found(place="s", result=changed),))).sentences[0]
    assert "base (2 seeds) none shown" in said


def test_static_ranges_do_not_lead() -> None:
    """Only dynamic rows are told where there are both."""
    sweep = planted(("base",), 1)
    deltas = [dataclasses.replace(d, is_level="static" in d.recipe) for d in sweep.deltas]
    changed = dataclasses.replace(sweep, deltas=deltas)
    said = first_screen(Run(sweeps=(Found(place="s", result=changed),))).sentences[0]
    assert "base-s0 none shown (8 bits per row" in said and "static" not in said


def test_a_calibration_alone_is_told_first_and_names_the_next_step(
    calibration: Calibration,
) -> None:
    run = Run(calibrations=(Found(place="run/calibration.json", result=calibration),))
    first, ship = first_screen(run).sentences
    assert first.startswith("Calibration of base on ")
    assert "nothing was exported yet" in ship


@pytest.mark.kind(8, "report")
def test_names_are_told_as_they_are() -> None:
    """Escaping is the template's: nothing is escaped twice."""
    hostile = "<script>alert(1)</script>`|*"
    sweep = planted(("base",), 1)
    cells = [dataclasses.replace(c, model=hostile, group=hostile) for c in sweep.cells]
    deltas = [dataclasses.replace(d, model=hostile) for d in sweep.deltas]
    models = [dataclasses.replace(m, name=hostile, source=hostile) for m in sweep.models]
    changed = dataclasses.replace(sweep, cells=cells, deltas=deltas, models=models)
    screen = first_screen(Run(sweeps=(Found(place="s", result=changed),)))
    assert all(hostile in sentence for sentence in screen.sentences)
    assert screen.export is not None and shlex.split(screen.export.commands[0])[2] == hostile


def test_curves_alone_are_no_missing_statistics() -> None:
    (said,) = first_screen(collect([FIXTURES / "v1-curves"])).sentences
    assert "diff" in said and "training" in said
