"""The page of a matched pair: its numbers against numpy, and no claim beyond them."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from quantkit.reporting import terminal_tables, write_report
from quantkit.reporting.collect import collect
from quantkit.reporting.outlier_tables import topk_table
from quantkit.reporting.pair_charts import bit_chart, mass_chart
from quantkit.reporting.pair_groups import fewest_level, needles_of
from quantkit.reporting.pair_seeds import paired, seed_tables, student_t, swept_table
from quantkit.reporting.pair_tables import (
    bits_table,
    crossing_table,
    lambda_table,
    level_table,
    mass_table,
    needles_table,
)
from quantkit.reporting.pair_verdict import pair_verdict
from quantkit.results import Sweep, read_json, write_json
from tests.reporting.drawn import axis, series, symbols, without_names
from tests.reporting.planted_pair import (
    ARMS,
    METRICS,
    SEEDS,
    TOPS,
    cell,
    measurement,
    pair_in,
    recipes,
    stats,
    training,
    write_run,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def page(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out")
    write_report([folder], out)
    return out


def test_the_ratio_is_diff_over_baseline_and_the_papers_rows_are_marked(folder: Path) -> None:
    rows = topk_table(pair_in(folder).run, paper=True).rows
    for place, point in enumerate(("attention logits", "hidden states")):
        mine = [row for row in rows if row[0] == point]
        ratio = next(row for row in mine if row[1] == "diff / baseline")
        expected = np.divide(TOPS["diff"][place], TOPS["baseline"][place])
        assert [float(text.rstrip("x")) for text in ratio[3:]] == pytest.approx(expected, rel=5e-3)
        assert [row[1] for row in mine[3:]] == [
            "Transformer 2.8B (paper)", "DIFF 2.8B (paper)", "DIFF ratio (paper)"
        ]  # fmt: skip
    assert "0.122x" in rows[5]


def test_every_value_of_the_grid_is_the_sweeps(folder: Path) -> None:
    pair = pair_in(folder)
    one = next(part for part in pair.firsts if part.task == "multiple-choice")
    table = bits_table(pair, one)
    assert table.columns[2:] == ("16", "8", "6", "5", "4", "3")
    assert len(table.rows) == 5 * 2
    for scale, model, *texts in table.rows:
        end = {"tensor": "", "tensor static": ":tensor:static", "head static": ":head:static"}
        ending = end.get(scale, f":{scale}")
        names = ["none", *(f"logits{bits}{ending}" for bits in (8, 6, 5, 4, 3))]
        expected = [cell(name, model, "multiple-choice", "acc_norm").value for name in names]
        assert [float(text.split()[0]) for text in texts] == pytest.approx(expected, abs=5e-4)


def test_level_stops_at_the_first_width_that_is_not(folder: Path) -> None:
    pair = pair_in(folder)
    one = pair.firsts[0]
    row = next(r for r in pair.rows(one) if (r.model, r.scale) == ("baseline", "row"))
    assert fewest_level(one, row) == (5, "")
    deltas = dict(one.deltas)
    deltas["baseline", "logits6:row"] = dataclasses.replace(
        deltas["baseline", "logits6:row"], is_level=False
    )
    assert fewest_level(dataclasses.replace(one, deltas=deltas), row) == (8, "")
    deltas["baseline", "logits8:row"] = dataclasses.replace(
        deltas["baseline", "logits8:row"], is_level=False
    )
    assert fewest_level(dataclasses.replace(one, deltas=deltas), row) == (None, "none shown")


def test_level_and_crossing_tables(folder: Path) -> None:
    pair = pair_in(folder)
    assert len(level_table(pair).rows) == 2 * len(METRICS)
    assert level_table(pair).rows[0][-5:] == ("6", "6", "5", "6", "6")
    crossing = crossing_table(pair)
    ours = cell("logits4", "diff", "perplexity", "perplexity").value
    theirs = cell("logits6", "baseline", "perplexity", "perplexity").value
    assert crossing.rows[0][1] == f"{ours:.2f} / {theirs:.2f} not shown"
    assert crossing.rows[0][3].endswith(" level")
    assert crossing.rows[-1][:2] == ("HellaSwag, % (paper)", "58.8 / 58.9")


def test_figure_8_has_a_panel_a_grid_and_the_papers_own(folder: Path) -> None:
    pair = pair_in(folder)
    one = next(part for part in pair.firsts if part.task == "multiple-choice")
    chart = bit_chart(pair, one, with_paper=True)
    assert chart is not None
    *own, paper = chart.panels
    assert [panel.title for panel in own] == [
        "one scale per tensor", "one scale per head", "one scale per row",
        "one scale per tensor static", "one scale per head static",
    ]  # fmt: skip
    # one axis for all, so that heights compare
    assert len({tuple(axis(panel, "y")["scale"]["domain"]) for panel in own}) == 1
    assert all([key.name for key in panel.keys] == list(ARMS) for panel in own)
    for panel, recipe in zip(own, ("logits4", "logits4:head", "logits4:row"), strict=False):
        for arm, line in zip(ARMS, series(panel), strict=True):
            found = cell(recipe, arm, "multiple-choice", "acc_norm")
            four = next(mark for mark in line.marks if ", 4 bits: " in mark["tip"])
            assert four["y"] == found.value
            assert (found.ci_low, found.ci_high) in [(r["y"], r["y2"]) for r in line.spans]
    assert "(paper)" in paper.title
    assert all("(paper)" in key.name and key.hollow for key in paper.keys)
    assert [line.colour for line in series(paper)] == [line.colour for line in series(own[0])]


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("needles:needles=6:queries=2", (6, 2)), ("needles", (4, 2)), ("needles:queries=1", (4, 1)),
        ("needles:needles=2:tokens=512", (2, 2)), ("icl", None), ("perplexity", None),
        ("needles:needles=x", None),
    ],
    ids=str,
)  # fmt: skip
def test_needles_and_queries_of_a_task(task: str, expected: tuple[int, int] | None) -> None:
    assert needles_of(task) == expected


def test_retrieval_stands_beside_the_papers(folder: Path) -> None:
    pair = pair_in(folder)
    table = needles_table(pair)
    assert table.columns[2:] == ("N = 1, R = 1", "N = 2, R = 2", "N = 4, R = 2", "N = 6, R = 2")
    assert table.rows[-1][1:] == ("DIFF (paper)", "1.00", "0.92", "0.84", "0.85")
    masses = mass_table(pair)
    assert "needles=6" in masses.title
    answer = {row[1:3]: row[3:] for row in masses.rows if row[0] == "answer"}
    assert answer["baseline", "signed"] == ("0.080", "0.092", "0.105", "0.118", "0.130")
    assert answer["DIFF (paper)", ""] == ("0.27", "0.30", "0.31", "0.32", "0.40")
    assert ("baseline", "share") not in answer and ("diff", "share") in answer
    chart = mass_chart(pair)
    assert chart is not None and [len(series(panel)) for panel in chart.panels] == [5, 5]


def test_lambda_starts_from_the_papers_schedule(folder: Path) -> None:
    table = lambda_table(pair_in(folder))
    expected = 0.8 - 0.6 * np.exp(-0.3 * np.arange(4))
    assert [float(row[1]) for row in table.rows] == pytest.approx(expected, abs=5e-4)
    assert [row[2] for row in table.rows] == ["0.190", "0.370", "0.440", "0.600"]


def test_students_t_is_that_of_its_density() -> None:
    for freedom in (1, 2, 5, 30):
        x = np.linspace(0, student_t(freedom), 200_001)
        c = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
        density = c * (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
        assert np.trapezoid(density, x) == pytest.approx(0.475, abs=2e-5)
    assert student_t(1000) == student_t(30)


def test_seeds_are_paired_and_a_gap_within_the_spread_is_not_shown() -> None:
    found = {one.words: one for one in paired(training(seeds=SEEDS))}
    hidden = found["max |hidden state|"]
    ours = np.array([measurement(2000, "diff", s).abs_max_hidden for s in SEEDS])
    theirs = np.array([measurement(2000, "baseline", s).abs_max_hidden for s in SEEDS])
    half = 4.303 * np.std(ours - theirs, ddof=1) / np.sqrt(3)
    mean = (ours - theirs).mean()
    assert hidden.interval == pytest.approx((mean - half, mean + half), abs=1e-9)
    assert not hidden.is_shown
    assert found["max |logit|"].is_shown
    added = found["loss added by 4-bit logits, per head"]
    assert added.baseline == pytest.approx([0.038, 0.04, 0.042])


def test_seed_tables_hold_means_and_spreads(folder: Path) -> None:
    run = collect([folder])
    (table,) = seed_tables(run)
    row = next(row for row in table.rows if row[0] == "held-out loss")
    losses = [[measurement(2000, arm, s).loss for s in SEEDS] for arm in ARMS]
    expected = [f(values) for values in losses for f in (np.mean, lambda v: np.std(v, ddof=1))]
    assert [float(text) for text in row[1:5]] == pytest.approx(expected, rel=1e-3)
    assert row[-1] == "not shown"
    swept = swept_table(run, fewest=True)
    assert [row[1:3] for row in swept.rows] == [
        ("none", "baseline"), ("none", "diff"), ("logits4", "baseline"), ("logits4", "diff")
    ]  # fmt: skip
    values = [
        cell("logits4", "diff", "perplexity", "perplexity", s).value
        - cell("none", "diff", "perplexity", "perplexity", s).value
        for s in SEEDS
    ]
    assert float(swept.rows[-1][-2]) == pytest.approx(np.mean(values), rel=1e-3)


def test_the_verdict_claims_what_the_seeds_show(folder: Path) -> None:
    said = " ".join(pair_verdict(pair_in(folder), collect([folder])))
    assert "22.50 in diff and 36.20 in baseline (0.622 times)" in said
    assert "38.80 against 318.0 (0.122 times)" in said
    shown, hidden = said.split("Not shown, since", 1)
    assert "max |logit| 21.7" in shown.split("[95 %]")[1]
    assert "max |hidden state|" in hidden and "held-out loss" in hidden
    assert "not shown per tensor (17.64 against 16.91)" in said
    assert "58.8 against 58.9" in said


def test_one_seed_proves_little(tmp_path: Path) -> None:
    write_run(tmp_path, seeds=False)
    said = pair_verdict(pair_in(tmp_path), collect([tmp_path]))
    assert any("may be chance" in sentence for sentence in said)
    assert not any("minus baseline" in sentence for sentence in said)


def test_the_page_leads_with_the_pair_and_says_nothing_twice(page: Path) -> None:
    text = (page / "report.html").read_text("utf-8")
    titles = re.findall(r'<h2 id="[^"]*">(.*?) <a ', without_names(text))
    assert titles[2:8] == [
        "The pair: outliers", "Outliers by layer and head", "The pair: low bits",
        "The pair: retrieval and attention", "How the models were trained", "Several seeds",
    ]  # fmt: skip
    assert not re.search(r"No \w+\.json was found", text)
    assert titles[:2] == ["Largest magnitudes (Table 5 layout)", "The export to ship"]
    assert "Differential attention over depth" not in text
    shown = re.sub(r"<script>.*</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"<script|https?://(?!www\.w3\.org/)|url\(", shown)
    assert not re.search(r"\bnan\b|\bNone\b", re.sub(r"<desc>.*?</desc>", "", shown))
    for svg in re.findall(r"<svg .*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)


def test_markdown_shows_every_picture_that_was_written(page: Path) -> None:
    twin = (page / "report.md").read_text("utf-8")
    files = {path.name for path in (page / "figures").glob("*.svg")}
    assert set(re.findall(r"\]\(figures/([^)]*\.svg)\)", twin)) == files
    assert {"pair-outliers.svg", "pair-bits-perplexity.svg", "training-loss.svg"} <= files
    for name in files:
        assert symbols((page / "figures" / name).read_text("utf-8"))


def test_what_is_gone_takes_its_pictures_along(folder: Path, tmp_path: Path) -> None:
    write_report([folder], tmp_path)
    own = tmp_path / "figures" / "pair-mine.svg"
    own.write_text("<svg/>")
    alone = tmp_path / "one"
    write_json(alone / "stats.json", stats("diff"))
    write_report([alone], tmp_path)
    assert [path.name for path in (tmp_path / "figures").glob("pair-*.svg")] == [own.name]


@pytest.mark.kind(8, "report")
def test_a_hostile_task_stays_text(tmp_path: Path) -> None:
    write_run(tmp_path, seeds=False)
    found = read_json(tmp_path / "sweep.json", Sweep)
    name = "</style><script>x</script>|`"
    cells = [dataclasses.replace(c, task=name) if c.task == "icl" else c for c in found.cells]
    tasks = [dataclasses.replace(t, name=name) if t.name == "icl" else t for t in found.tasks]
    write_json(tmp_path / "sweep.json", dataclasses.replace(found, cells=cells, tasks=tasks))
    for path in write_report([tmp_path], tmp_path / "out"):
        text = path.read_text("utf-8").replace("\\<", "")
        assert text.count("<script") == (path.name == "report.html")


def test_the_terminal_has_table_5_and_the_grid_in_100_columns(folder: Path) -> None:
    text = terminal_tables(folder)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert "diff / baseline" in text and "perplexity by bits" in text
    assert len(recipes()) == 26
    row = next(line.split() for line in lines if re.match(r"row +baseline", line))
    names = ["none", *(f"logits{bits}:row" for bits in (8, 6, 5, 4, 3))]
    values = [cell(name, "baseline", "perplexity", "perplexity").value for name in names]
    shown = [float(word) for word in row[2:] if word != "="]
    assert shown == pytest.approx(values, rel=1e-3)
