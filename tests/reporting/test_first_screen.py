"""The first screen: three sentences whose every number is in the files, and no claim beyond."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from quantkit.reporting.collect import Found, Run, collect
from quantkit.reporting.first_screen import first_screen
from quantkit.reporting.text import number
from quantkit.results import Stats, Sweep, read_json, write_json
from tests.reporting.planted_pair import ARMS, TOPS, cell, guessed, write_run
from tests.reporting.planted_sweep import planted

REAL = Path(__file__).parents[2] / "reports" / "pair"
FIXTURES = Path(__file__).parent.parent / "results" / "fixtures"


def test_a_pair_is_told_in_three_sentences(tmp_path: Path) -> None:
    screen = first_screen(collect([write_run(tmp_path)]))
    outliers, bits, ship = screen.sentences
    (base_logits, base_states), (logits, states) = TOPS["baseline"], TOPS["diff"]
    for ours, theirs in ((logits, base_logits), (states, base_states)):
        ratio = number(ours[0] / theirs[0], 3)
        assert f"{ratio} times ({number(ours[0])} against {number(theirs[0])})" in outliers
    assert "in the paper 0.122 times (38.80 against 318.0)" in outliers
    assert "in the paper 0.468 times (1,688 against 3,609)" in outliers
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
    assert "none shown" in said


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
