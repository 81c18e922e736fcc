"""The table that people quote, and what `quantkit stats` prints."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from quantkit.reporting import stats_text, topk_text
from quantkit.reporting.collect import Found, Run
from quantkit.reporting.outlier_tables import spread_table, topk_table
from quantkit.reporting.paper import TABLE_5
from quantkit.reporting.text import Table, clipped, number, plain_table, quoted, share
from quantkit.results import Stats, read_json, write_json

V2 = Path(__file__).parent / "fixtures" / "v2"
V1_STATS = Path(__file__).parent.parent / "results" / "fixtures" / "v1" / "base" / "stats.json"


def stats_of(name: str) -> Stats:
    return read_json(V2 / name / "stats.json", Stats)


def run_of(*stats: Stats) -> Run:
    return Run(stats=tuple(Found(place=s.model.name, result=s) for s in stats))


def masked(stats: Stats) -> Stats:
    """The same, as --count-masked would have said it."""
    logit = dataclasses.replace(
        stats.summary.attention_logit,
        definition="attention logit, masked positions counted too: all of QK^T",
    )
    return dataclasses.replace(
        stats, summary=dataclasses.replace(stats.summary, attention_logit=logit)
    )


def rows_of(table: Table, *start: str) -> list[tuple[str, ...]]:
    return [row[len(start) :] for row in table.rows if row[: len(start)] == start]


# the table that people quote


def test_top_k_rows_equal_the_json() -> None:
    table = topk_table(run_of(stats_of("base"), stats_of("diff")))
    assert table.columns == (
        "activation", "model", "top-1", "top-2", "top-3", "top-10", "top-100", "median"
    )  # fmt: skip
    for name in ("base", "diff"):
        for words, point in (("attention logits", "logit"), ("hidden states", "hidden")):
            summary = stats_of(name).summary
            p = summary.attention_logit if point == "logit" else summary.hidden_state
            expected = [number(p.abs_top[rank]) for rank in ("1", "2", "3", "10", "100")]
            (row,) = rows_of(table, words, name)
            assert list(row) == [*expected, number(p.abs_median)]


def test_the_ratio_is_differential_over_the_other_in_either_order() -> None:
    base, diff = stats_of("base"), stats_of("diff")
    expected = diff.summary.attention_logit.abs_top["1"] / base.summary.attention_logit.abs_top["1"]
    for run in (run_of(base, diff), run_of(diff, base)):
        (row,) = rows_of(topk_table(run), "attention logits", "diff / base")
        assert row[0] == f"{number(expected, 3)}x"


def test_the_ratio_of_two_of_a_kind_is_the_first_over_the_second() -> None:
    base = stats_of("base")
    other = dataclasses.replace(base, model=dataclasses.replace(base.model, name="other"))
    (row,) = rows_of(topk_table(run_of(other, base)), "hidden states", "other / base")
    assert row == ("1.00x",) * 6


@pytest.mark.parametrize("count", [1, 3])
def test_one_model_or_three_have_no_ratio(count: int) -> None:
    table = topk_table(run_of(*[stats_of("base")] * count))
    assert len(table.rows) == 2 * count


def test_logits_that_were_counted_in_two_ways_are_not_divided() -> None:
    table = topk_table(run_of(masked(stats_of("base")), stats_of("diff")))
    assert rows_of(table, "attention logits", "base")[0][0] == "all of QK^T"
    assert rows_of(table, "attention logits", "diff")[0][0] == "valid positions"
    assert set(rows_of(table, "attention logits", "diff / base")[0]) == {"", "n/a"}
    assert "n/a" not in rows_of(table, "hidden states", "diff / base")[0]
    assert "not divided" in table.note


def test_the_papers_rows_are_its_own_and_marked() -> None:
    table = topk_table(run_of(stats_of("base"), stats_of("diff")), paper=True)
    papers = [row for row in table.rows if "paper" in row[1]]
    ratios = [row for row in papers if "ratio" in row[1]]
    assert [(row[0], row[3], row[-1]) for row in ratios] == [
        ("attention logits", "0.122x", "0.611x"), ("hidden states", "0.468x", "2.00x")
    ]  # fmt: skip
    assert [row for row in papers if row not in ratios] == [
        ("attention logits", "Transformer 2.8B (paper)", "all of QK^T", "318.0", "308.2", "304.9",
         "284.7", "251.5", "5.4"),
        ("attention logits", "DIFF 2.8B (paper)", "all of QK^T", "38.8", "38.8", "37.3", "32.0",
         "27.4", "3.3"),
        ("hidden states", "Transformer 2.8B (paper)", "", "3,608.6", "3,607.4", "3,603.6",
         "3,552.1", "2,448.2", "0.6"),
        ("hidden states", "DIFF 2.8B (paper)", "", "1,688.2", "1,672.5", "1,672.1", "1,624.3",
         "740.9", "1.2"),
    ]  # fmt: skip
    assert len(TABLE_5) == 4
    for words in ("arXiv 2410.05258v2, Table 5", "2.8B parameters", "0.4M tokens", "all of QK^T"):
        assert words in table.note
    assert "paper" not in str(topk_table(run_of(stats_of("base"))))
    assert topk_table(Run(), paper=True).rows == ()


# the terminal


@pytest.mark.parametrize("folder", ["base", "diff", "."])
def test_a_terminal_of_100_columns_is_enough(folder: str) -> None:
    for text in (topk_text(V2 / folder, True), stats_text(V2 / folder, True)):
        assert max(map(len, text.splitlines())) <= 100
        assert "DIFF 2.8B (paper)" in text
    one = stats_text(V2 / "diff")
    assert len(one.splitlines()) <= 45
    assert "paper" not in one


def test_long_names_are_clipped_in_the_middle(tmp_path: Path) -> None:
    stats = stats_of("base")
    model = dataclasses.replace(stats.model, name=f"start-{'x' * 90}-end")
    write_json(tmp_path / "stats.json", dataclasses.replace(stats, model=model))
    text = topk_text(tmp_path, True)
    assert max(map(len, text.splitlines())) <= 100
    assert re.search(r"start-x*\.\.\.x*-end", text)
    assert clipped("abcdefghij", 7) == "ab...ij"


def test_stats_text_has_every_statistic_and_place() -> None:
    stats = stats_of("diff")
    text = stats_text(V2 / "diff")
    assert text.index("Table 5 layout") < text.index("Other statistics")
    lines = {line[:30].strip(): line for line in text.splitlines()}
    for word, values in (
        ("max (signed)", (number(stats.summary.attention_logit.max),)),
        ("min", (number(stats.summary.attention_logit.min),)),
        ("inf_norm_mean", (number(stats.summary.hidden_state.inf_norm_mean),)),
        ("kurtosis", (number(stats.summary.attention_logit.kurtosis),)),
        ("sink rate", (share(stats.summary.sink_rate),)),
        ("entropy, nats", (number(stats.summary.attention_entropy),)),
        ("massive activations", ("9 (9 pooled)",)),
        ("outlier tokens", ("9 (9 pooled)",)),
        ("outlier features", ("0 (none)",)),
        ("span of the middle 99.9 %", ("67.2 %", "99.6 %")),
    ):
        assert all(value in lines[word] for value in values), word
    assert "lambda -0.8590 (layer 1) .. 1.799 (layer 0)" in text
    assert "by layer: 1.80, -0.859, 1.03" in text


def test_several_models_are_told_apart_and_one_block_each() -> None:
    text = stats_text(V2)
    assert "base: Other statistics" in text
    assert "diff: Other statistics" in text
    assert text.count("Table 5 layout") == 1


def test_what_is_not_finite_comes_first_and_loud(tmp_path: Path) -> None:
    said = [f"hidden_state of layer {i} holds 3 NaN and 0 inf values." for i in range(9)]
    write_json(tmp_path / "stats.json", dataclasses.replace(stats_of("base"), warnings=said))
    lines = stats_text(tmp_path).splitlines()
    assert lines[0] == f"WARNING base: {said[0]}"
    assert lines[5] == "WARNING base: and 4 more, in stats.json."


def test_nan_counts_without_a_sentence_are_said_too(tmp_path: Path) -> None:
    stats = stats_of("base")
    hidden = dataclasses.replace(stats.summary.hidden_state, nan_count=7)
    summary = dataclasses.replace(stats.summary, hidden_state=hidden)
    changed = dataclasses.replace(stats, summary=summary)
    write_json(tmp_path / "stats.json", changed)
    assert "WARNING base: hidden states hold 7 NaN" in stats_text(tmp_path).splitlines()[0]
    assert spread_table(run_of(changed)).columns[-1] == "NaN, inf"
    assert spread_table(run_of(stats)).columns[-1] == "excluded"


def test_no_stats_no_text(tmp_path: Path) -> None:
    curves = V1_STATS.parent.parent.parent / "v1-curves" / "curves.jsonl"
    (tmp_path / "curves.jsonl").write_bytes(curves.read_bytes())
    assert (stats_text(tmp_path), topk_text(tmp_path, True)) == ("", "")


def test_plain_tables_wrap_notes_and_keep_numbers() -> None:
    table = Table(title="t", columns=("name", "x"), rows=(("n" * 60, "1.5"),), note="word " * 30)
    lines = plain_table(table, 40).splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[3].endswith("1.5")
    assert len(plain_table(table).splitlines()[3]) == 65
    assert quoted(None) == "" and quoted(" a\x1b") == "' a\\x1b'"
    assert len(quoted("x" * 99)) == 24
