"""What `quantkit sweep` prints: the headline first, every figure with its interval, 100 columns."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from quantkit.reporting import sweep_text
from quantkit.results import Sweep, write_json
from tests.reporting.planted_sweep import METRICS, RECIPES, cell, delta, planted


def text_of(sweep: Sweep, folder: Path) -> str:
    write_json(folder / "sweep.json", sweep)
    return sweep_text(folder)


@pytest.mark.parametrize(
    ("groups", "seeds"),
    [(("base",), 1), (("diff", "base"), 1), (("diff", "base"), 3)],
    ids=["one model", "two models", "two models of three seeds"],
)
def test_the_terminal_has_100_columns(groups: tuple[str, ...], seeds: int, tmp_path: Path) -> None:
    sweep = planted(groups, seeds)
    text = text_of(sweep, tmp_path)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == sweep.headline
    assert "..." not in "".join(line for line in lines if " 0.470" in line)
    titles = (
        "Sweep: perplexity by bits of the attention logits (n = 64 blocks)",
        "Sweep: multiple-choice acc_norm by bits of the attention logits (n = 400 items)",
        "Sweep: perplexity, other recipes against float",
        "Attention mass by depth of the needle",
        "needles:needles=4: every model is at chance",
    )
    at = [next(i for i, line in enumerate(lines) if line.startswith(title)) for title in titles]
    assert at[0] < at[2] < at[1] < at[3] < at[4]
    assert len(lines) < (120 if seeds == 1 and len(groups) == 1 else 170)


def test_a_value_stands_above_its_interval(tmp_path: Path) -> None:
    lines = text_of(planted(seeds=1), tmp_path).splitlines()
    at = next(i for i, line in enumerate(lines) if re.match(r"base-s0 +tensor", line))
    assert lines[at].split()[2:] == ["18.00", "18.04", "=", "18.68", "28.80"]
    spans = re.findall(r"\[[^]]*\]", lines[at + 1])
    assert spans == ["[16.94, 19.06]", "[16.98, 19.10]", "[17.58, 19.77]", "[27.11, 30.49]"]
    for value, span in zip(re.finditer(r"[0-9.]+( =)?(?=  |$)", lines[at][15:]), spans,
                           strict=True):  # fmt: skip
        assert lines[at + 1].index(span) + len(span) == 15 + value.end()


def test_the_spread_of_seeds_is_a_line_of_its_own(tmp_path: Path) -> None:
    lines = text_of(planted(), tmp_path).splitlines()
    at = next(i for i, line in enumerate(lines) if re.match(r"diff \(3 seeds\) +tensor", line))
    # 1.96 times 3 % of 17.1, 17.27 and 17.44 (root mean square), and so on
    spans = ["±1.02", "±1.02", "±1.03", "±1.20"]
    assert lines[at + 1].split() == [word for span in spans for word in ("sampling", span)]
    assert lines[at + 2].split() == ["sd", "0.1710", "sd", "0.1711", "sd", "0.1729", "sd", "0.2018"]
    # no bracket beside a mean: each row of the float figures is of seeds here
    floats = [line for line in lines if line.startswith("diff (3 seeds)") and " none " in line]
    assert floats and all("sampling ±" in x and "[" not in x for x in floats)
    assert not {"sd", "sampling"} & set(text_of(planted(seeds=1), tmp_path).split())


def test_many_bits_go_on_in_a_further_table(tmp_path: Path) -> None:
    base = cell("logits8", "base", 0, "perplexity", "perplexity")
    cells = [cell("none", "base", 0, "perplexity", "perplexity")]
    cells += [
        dataclasses.replace(base, recipe=f"logits{bits}", bits=bits, value=100.0 + bits)
        for bits in range(15, 1, -1)
    ]
    sweep = dataclasses.replace(planted(("base",), 1), cells=cells, deltas=[], attention_mass=[])
    text = text_of(sweep, tmp_path)
    assert max(map(len, text.splitlines())) <= 100
    assert text.count(", continued") == 2
    for bits in range(2, 16):
        assert re.search(rf"\b{bits} bits\b", text)
        assert f"{100 + bits}.0" in text


def test_other_metrics_and_quantizers_are_counted(tmp_path: Path) -> None:
    text = text_of(planted(seeds=1), tmp_path)
    assert re.search(r"bits_per_byte +base-s0 +0\.9000 +\[0\.8471, 0\.9529\]", text)
    # 15 quantized recipes x 2 models x 3 tasks, two quantizers each
    assert "Quantizers: 180 fired in 90 cells, 30,840 times on 3.084e+07 elements" in text
    assert "attention_logit/" not in text


def paired(recipes: tuple[str, ...], tasks: tuple[str, ...], groups: tuple[str, str]) -> Sweep:
    """Returns two models with their differences at the same recipes, both ways round."""
    deltas = [
        delta(*(cell(recipe, group, 0, task, metric) for group in pair),
              against_model=f"{pair[1]}-s0")
        for task in tasks
        for pair in (groups, groups[::-1])
        for recipe in recipes
        for metric in METRICS[task]
    ]  # fmt: skip
    sweep = planted(seeds=1)
    return dataclasses.replace(sweep, deltas=[*sweep.deltas, *deltas])


def differences(text: str) -> tuple[list[list[str]], str]:
    """Returns the words of each line of the table of two models, and its note."""
    lines = text[text.index("diff-s0 minus base-s0 at the same recipe") :].split("\n\n")[0]
    body = lines.splitlines()[3:]
    note = next(i for i, line in enumerate(body) if line.startswith("level = "))
    return [re.split(r"  +", line) for line in body[:note]], " ".join(body[note:])


def test_two_models_have_their_differences_at_the_same_recipe(tmp_path: Path) -> None:
    sweep = paired(("none", "logits4"), ("perplexity", "multiple-choice"), ("diff", "base"))
    text = text_of(sweep, tmp_path)
    assert max(map(len, text.splitlines())) <= 100
    rows, note = differences(text)
    # perplexity 17.10 against 18.00, and 17.10 * 1.18 against 18 * 1.6, give or take half of 1 %;
    # acc_norm 0.47 * 0.82 against 0.47 * 0.4, give or take half a point
    assert rows == [
        ["perplexity", "none", "better", "not shown", "-5.00 %", "[-5.50 %, -4.50 %]"],
        ["perplexity", "logits4", "better", "not shown", "-29.94 %", "[-30.44 %, -29.44 %]"],
        ["multiple-choice acc_norm", "none", "level", "level", "+0.000", "[-0.005, +0.005]"],
        ["multiple-choice acc_norm", "logits4", "better", "not shown", "+0.197",
         "[+0.192, +0.202]"],
    ]  # fmt: skip
    assert note == (
        "level = the model does not lose more than the margin (1 % or 1 point) against the other, "
        "by the paired 95 % interval; better = all of the interval is a gain."
    )
    header = next(line for line in text.splitlines() if re.match("task  +recipe  +diff", line))
    assert header.split()[:4] == ["task", "recipe", "diff-s0", "base-s0"]


def test_six_differences_are_printed_the_first_of_each_task(tmp_path: Path) -> None:
    tasks = ("perplexity", "multiple-choice", "needles:needles=4")
    rows, note = differences(text_of(paired(RECIPES, tasks, ("diff", "base")), tmp_path))
    assert [row[:2] for row in rows] == [
        ["perplexity", "none"], ["perplexity", "logits8"],
        ["multiple-choice acc_norm", "none"], ["multiple-choice acc_norm", "logits8"],
        ["needles:needles=4 exact_match", "none"], ["needles:needles=4 exact_match", "logits8"],
    ]  # fmt: skip
    assert note.endswith(f"The report has {3 * len(RECIPES) - 6} more.")
    # both models guess there: that they are level says nothing
    assert [row[2:4] for row in rows[4:]] == [["n/a", "n/a"]] * 2


def test_tokens_that_differ_leave_bits_per_byte(tmp_path: Path) -> None:
    sweep = paired(("none",), ("perplexity",), ("diff", "base"))
    kept = [d for d in sweep.deltas if d.metric != "perplexity"]
    rows, _ = differences(text_of(dataclasses.replace(sweep, deltas=kept), tmp_path))
    assert [row[:2] for row in rows] == [["perplexity bits_per_byte", "none"]]


@pytest.mark.parametrize(("groups", "seeds"), [(("base",), 1), (("diff", "base"), 2)],
                         ids=["one model", "seeds"])  # fmt: skip
def test_only_two_models_alone_have_that_table(
    groups: tuple[str, ...], seeds: int, tmp_path: Path
) -> None:
    sweep = planted(groups, seeds)
    more = paired(("none",), ("perplexity",), ("diff", "base")).deltas
    text = text_of(dataclasses.replace(sweep, deltas=[*sweep.deltas, *more]), tmp_path)
    assert "at the same recipe" not in text


def test_only_the_float_row(tmp_path: Path) -> None:
    sweep = planted(("base",), 1)
    cells = [c for c in sweep.cells if c.recipe == "none"]
    sweep = dataclasses.replace(sweep, cells=cells, deltas=[], headline="")
    text = text_of(sweep, tmp_path)
    assert text.startswith("Sweep: perplexity, other recipes against float\n")
    assert re.search(r"base-s0 +none +18\.00 +\[16\.94, 19\.06\]", text)


def test_long_and_hostile_names_stay_on_their_line(tmp_path: Path) -> None:
    sweep = planted(seeds=1)
    name = "long " * 30 + "\x1b[31m\nname"
    cells = [dataclasses.replace(c, model=name, group=name, task=name) for c in sweep.cells]
    notes = [f"\x1b]0;title\x07 {name}"]
    text = text_of(
        dataclasses.replace(sweep, cells=cells, deltas=[], notes=notes, headline=name), tmp_path
    )
    assert "\x1b" not in text and "\x07" not in text
    assert max(map(len, text.splitlines())) <= 100
