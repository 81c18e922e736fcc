"""What to keep in higher precision: the page and the terminal say what `sensitivity.json` holds."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from quantkit.reporting import sensitivity_text, write_report
from quantkit.reporting.collect import Found, Run, collect, everything
from quantkit.reporting.sensitivity_charts import kept_charts, ranking_charts
from quantkit.reporting.sensitivity_definitions import SENSITIVITY_DEFINITIONS
from quantkit.reporting.sensitivity_tables import notes
from quantkit.reporting.verdict import verdict
from quantkit.results import KeptPoint, Sensitivity, UnitSensitivity, read_json, write_json
from tests.reporting.drawn import names_of, series, without_names

KEPT = Path(__file__).parent.parent / "results/fixtures/v3/base/sensitivity.json"
HOSTILE = "<script>alert(1)</script></svg></title>\"'&|`*x*`\x1b[31m\nnext"
UNITS = 26
TOTAL = 0.75


@pytest.fixture
def ranking() -> Sensitivity:
    """26 units, the best first in the file; each switches one to three quantizers."""
    rng = np.random.default_rng(7)
    alone = np.sort(rng.exponential(0.05, size=UNITS))[::-1]
    without = rng.uniform(0.4, 0.8, size=UNITS)
    errors = rng.uniform(0.001, 0.01, size=(2, UNITS))
    rows = [
        UnitSensitivity(
            name=f"linear_input/model.layers.{i}.mlp.down_proj",
            point="linear_input" if i % 3 else "mixed",
            quantizers=[f"unit {i} of {k}" for k in range(1 + i % 3)],
            rank=i + 1,
            enable_one_kl=float(alone[i]),
            enable_one_stderr=float(errors[0, i]),
            disable_one_kl=float(without[i]),
            removed_frac=float(1 - without[i] / TOTAL),
            removed_stderr_frac=float(errors[1, i]),
            tokens=1022,
        )
        for i in range(UNITS)
    ]
    kls = {1: 0.6, 2: 0.4, 8: 0.03, 4: 0.06, 3: 0.15}
    return dataclasses.replace(
        read_json(KEPT, Sensitivity),
        recipe="w8a8",
        total_kl=TOTAL,
        rows=rows[::-1],
        keep=[name for row in rows[:4] for name in row.quantizers],
        kept=[KeptPoint(units=n, kl=kl, remaining_frac=kl / TOTAL) for n, kl in kls.items()],
    )


class Tables(HTMLParser):
    """Every table of a page by the words before it, as rows of cell texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: dict[str, list[list[str]]] = {}
        self._title, self._into = "", ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("h3", "summary"):
            self._title, self._into = "", "title"
        elif tag == "tr":
            self.found.setdefault(self._title, []).append([])
        elif tag in ("td", "th"):
            self.found[self._title][-1].append("")
            self._into = "cell"

    def handle_endtag(self, tag: str) -> None:
        if tag in ("h3", "summary", "td", "th"):
            self._into = ""

    def handle_data(self, data: str) -> None:
        if self._into == "title":
            self._title += data
        elif self._into == "cell":
            self.found[self._title][-1][-1] += data

    def rows(self, title: str) -> list[list[str]]:
        """The rows below the head of the one table whose title starts so."""
        (rows,) = (rows for name, rows in self.found.items() if name.startswith(title))
        return rows[1:]


def rendered(folder: Path, *results: Sensitivity) -> tuple[str, str]:
    for i, result in enumerate(results):
        write_json(folder / "runs" / str(i) / "sensitivity.json", result)
    page, twin, *_ = write_report([folder / "runs"], folder / "out")
    return without_names(page.read_text("utf-8")), twin.read_text("utf-8")


def value_of(text: str) -> float:
    return math.nan if text == "n/a" else float(text.replace(",", "").removesuffix(" %"))


def check_rows(rows: list[list[str]], units: list[UnitSensitivity]) -> None:
    assert [row[0] for row in rows] == [unit.name for unit in units]
    for row, unit in zip(rows, units, strict=True):
        assert row[1] == str(unit.rank)
        figures = [unit.enable_one_kl, unit.enable_one_stderr, unit.disable_one_kl]
        np.testing.assert_allclose([value_of(text) for text in row[2:5]], figures, rtol=0.05)
        shares = [100 * unit.removed_frac, 100 * unit.removed_stderr_frac]
        np.testing.assert_allclose([value_of(text) for text in row[5:7]], shares, atol=0.051)
        assert row[7:] == [str(len(unit.quantizers)), unit.point]


# the page


def test_the_worst_20_come_first_and_the_others_are_folded(
    ranking: Sensitivity, tmp_path: Path
) -> None:
    page, twin = rendered(tmp_path, ranking)
    by_rank = sorted(ranking.rows, key=lambda row: -row.enable_one_kl)
    tables = Tables(page)
    check_rows(tables.rows("Cost of quantizing: the 20 worst"), by_rank[:20])
    check_rows(tables.rows("Cost of quantizing: the others"), by_rank[20:])
    folded = page[page.index("<details>", page.index('id="sensitivity"')) :]
    assert "Cost of quantizing: the others (6 rows)" in folded
    for row in ranking.rows:
        assert row.name.replace("_", r"\_") in twin


def test_a_file_in_another_order_gives_the_same_page(ranking: Sensitivity, tmp_path: Path) -> None:
    turned = dataclasses.replace(ranking, rows=ranking.rows[::-1], kept=ranking.kept[::-1])
    assert rendered(tmp_path / "a", ranking) == rendered(tmp_path / "b", turned)


def test_what_remains_is_listed_by_units_kept(ranking: Sensitivity, tmp_path: Path) -> None:
    page, _ = rendered(tmp_path, ranking)
    rows = Tables(page).rows("Error that remains")
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4", "8"]
    np.testing.assert_allclose(
        [value_of(row[1]) for row in rows], [TOTAL, 0.6, 0.4, 0.15, 0.06, 0.03], rtol=1e-3
    )
    np.testing.assert_allclose(
        [value_of(row[2]) for row in rows], [100, 80, 160 / 3, 20, 8, 4], atol=0.051
    )
    assert [row[4] for row in rows] == ["no", "no", "no", "no", "yes", "yes"]
    keep = Tables(page).rows("Quantizers to keep in float")
    assert [name for (name,) in keep] == ranking.keep


def test_the_charts_draw_what_was_measured(ranking: Sensitivity) -> None:
    run = Run(sensitivities=(Found(place="run", result=ranking),))
    (kept,) = kept_charts(run)
    measured, target = series(kept.panels[0])
    np.testing.assert_allclose(
        [row["y"] for row in measured.marks], [100, 80, 160 / 3, 20, 8, 4], atol=1e-9
    )
    xs = [row["x"] for row in measured.marks]
    assert xs == sorted(set(xs))
    tips = [row["tip"] for row in measured.marks]
    assert tips[0] == "base, w8a8 by tensor, 0 kept in float: 100.0 % remains, KL 0.7500"
    assert tips[-1] == "base, w8a8 by tensor, 8 kept in float: 4.0 % remains, KL 0.03000"
    assert {row["tip"] for row in target.marks} == {"target: 10.0 %"}
    assert [name for name in names_of(kept.panels[0]) if name] == list("012348")
    (ranked,) = ranking_charts(run)
    (panel,) = ranked.panels
    by_rank = sorted(ranking.rows, key=lambda row: row.rank)[:20]
    drawn = sorted((row for line in series(panel) for row in line.marks), key=lambda r: r["y"])
    assert [row["x"] for row in drawn] == [row.enable_one_kl for row in by_rank]
    spans = sorted((row for line in series(panel) for row in line.spans), key=lambda r: r["y"])
    for span, row in zip(spans, by_rank, strict=True):
        assert (span["x"] + span["x2"]) / 2 == pytest.approx(row.enable_one_kl)
        assert (span["x2"] - span["x"]) / 2 == pytest.approx(1.96 * row.enable_one_stderr)


def test_the_suggestion_is_one_sentence_in_the_verdict_and_above_the_tables(
    ranking: Sensitivity, tmp_path: Path
) -> None:
    sentence = (
        "kept in float, the 4 worst of 26 leave 8.0 % of the error (KL 0.06000; below 10.0 %)."
    )
    found = verdict(Run(sensitivities=(Found(place="a", result=ranking),)))
    assert found[2] == f"In base, w8a8 by tensor: {sentence}"
    assert len(found) == 4
    assert len(verdict(Run())) == 3
    page, twin = rendered(tmp_path, ranking)
    assert page.count(sentence) == twin.count(sentence) == 2
    command = (
        "quantkit export ./models/base --ranges reports/calibrate-base --quantize w8a8 "
        "--keep RUN, with the folder of this run, leaves them in float: unit 0 of 0"
    )
    assert command in page and command in twin.replace("\\", "")
    assert "unit 0 of 0, unit 1 of 0, unit 1 of 1 and 4 more" in page
    assert "KL 0.7500 +- 0.062 nats a token; ranges by minmax from 8 blocks of 512 tokens" in page


def test_the_export_is_told_on_the_ranges_that_it_was_found_with(
    ranking: Sensitivity, tmp_path: Path
) -> None:
    """Without --ranges it would calibrate anew; the words are those of a shell."""
    model = dataclasses.replace(ranking.model, source="timm:vit tiny")
    result = dataclasses.replace(ranking, model=model, ranges="my runs/a", recipe="w4a8")
    run = Run(sensitivities=(Found(place="a", result=result),))
    (line,) = (line for line in notes(run) if "quantkit export" in line)
    command = line[line.index("quantkit export") : line.index(", with the folder")]
    assert shlex.split(command) == [
        "quantkit", "export", "timm:vit tiny", "--ranges", "my runs/a", "--quantize", "w4a8",
        "--keep", "RUN",
    ]  # fmt: skip


def test_what_was_not_reached_or_need_not_be(ranking: Sensitivity, tmp_path: Path) -> None:
    far = dataclasses.replace(ranking, target_frac=0.01, reached=False, keep=[])
    none = dataclasses.replace(ranking, kept=[], keep=[], total_kl=0.0)
    page, _ = rendered(tmp_path / "far", far)
    assert "no number of them leaves less than 1.0 % of the error: all 8 leave 4.0 %" in page
    assert "--keep RUN" not in page
    assert "Quantizers to keep" not in page
    page, _ = rendered(tmp_path / "none", none)
    assert "there is no error to remove." in page
    assert "Error that remains" not in page


def test_one_mode_leaves_the_other_unknown(ranking: Sensitivity, tmp_path: Path) -> None:
    nan = math.nan
    rows = [
        dataclasses.replace(row, disable_one_kl=nan, removed_frac=nan, removed_stderr_frac=nan)
        for row in ranking.rows
    ]
    page, twin = rendered(tmp_path, dataclasses.replace(ranking, rows=rows))
    for row in Tables(page).rows("Cost of quantizing: the 20 worst"):
        assert row[4:7] == ["n/a"] * 3
        assert value_of(row[2]) > 0
    assert not re.search(r"\bnan\b|\bNone\b", page + twin)


def test_rankings_are_told_apart(ranking: Sensitivity, tmp_path: Path) -> None:
    other = dataclasses.replace(ranking, recipe="w4a8", target_frac=0.2)
    page, _ = rendered(tmp_path, ranking, other, other)
    rows = Tables(page).rows("Cost of quantizing: the 20 worst")
    labels = list(dict.fromkeys(row[0] for row in rows))
    assert labels == [
        "base, w8a8 by tensor",
        "base, w4a8 by tensor (runs/1/sensitivity.json)",
        "base, w4a8 by tensor (runs/2/sensitivity.json)",
    ]
    assert len(rows) == 60
    for label in labels:
        assert f"Cost of quantizing: the others of {label} (6 rows)" in page
    assert "target: 10.0 %" in page and "target: 20.0 %" in page


def test_the_file_has_its_place_in_provenance_and_its_warnings(
    ranking: Sensitivity, tmp_path: Path
) -> None:
    said = "this text and calibration's share 3 blocks: it is not held out."
    data = dataclasses.replace(ranking.data, shared_blocks=3, warnings=[said])
    result = dataclasses.replace(ranking, data=data, warnings=["Few blocks.", said])
    page, twin = rendered(tmp_path, result)
    assert [row[0] for row in Tables(page).rows("Provenance")] == ["runs/0/sensitivity.json"]
    for text in (page, twin):
        assert text.count("it is not held out.") == 1
        assert "base, w8a8 by tensor: Few blocks." in text
    assert "base: 3 blocks that runs/0/sensitivity.json was measured on are calibration" in page
    (found,) = everything(collect([tmp_path / "runs"]))
    assert found.result == result


def test_without_a_file_it_says_how_to_get_one(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("ranges.json", "stats.json"):
        (tmp_path / "run" / name).write_bytes(KEPT.with_name(name).read_bytes())
    page, twin, *_ = (
        p.read_text("utf-8") for p in write_report([tmp_path / "run"], tmp_path / "out")
    )
    words = "No sensitivity.json was found. `quantkit sensitivity MODEL --ranges RUN` writes it."
    for text in (page, twin):
        assert words in text
        assert not any(entry.term in text for entry in SENSITIVITY_DEFINITIONS[2:4])


def test_words_are_defined_where_there_is_a_ranking(ranking: Sensitivity, tmp_path: Path) -> None:
    page, _ = rendered(tmp_path, ranking)
    terms = set(re.findall(r"<dt>(.*?)</dt>", page))
    assert {"KL", "unit", "enable-one (alone)", "disable-one (all but it)"} <= terms
    assert "nats a token; p: float model" in page


def test_hostile_names_stay_text(ranking: Sensitivity, tmp_path: Path) -> None:
    bad = dataclasses.replace(
        ranking,
        rows=[
            dataclasses.replace(row, name=f"{HOSTILE}{row.rank}", point=HOSTILE)
            for row in ranking.rows
        ],
        keep=[HOSTILE] * 5,
        warnings=[HOSTILE],
        recipe=HOSTILE,
        method=HOSTILE,
        group=HOSTILE,
        ranges=HOSTILE,
        model=dataclasses.replace(ranking.model, name=HOSTILE),
        data=dataclasses.replace(ranking.data, source=HOSTILE, shared_blocks=1),
    )
    page, twin = rendered(tmp_path, bad)
    assert page.count("<script") == 1  # its own
    assert "&lt;script&gt;alert(1)" in page
    assert not re.search(r"(?<!\\)<script", twin)
    assert not re.search(r"https?://(?!www\.w3\.org/)|url\(|@import|<link|<img", page)
    assert "\x1b" not in page + twin + sensitivity_text(tmp_path / "runs")
    for svg in re.findall(r"<svg .*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)


# the terminal


def test_the_terminal_has_the_worst_and_the_suggestion(
    ranking: Sensitivity, tmp_path: Path
) -> None:
    write_json(tmp_path / "sensitivity.json", ranking)
    lines = sensitivity_text(tmp_path, 3).splitlines()
    assert lines[0] == "Sensitivity: base, w8a8, 2 x 512 tokens; KL 0.7500 nats a token in all"
    assert " ".join(lines[1].split()) == "rank tensor alone +- all but it removes +-"
    assert [line.split()[0] for line in lines[3:6]] == ["1", "2", "3"]
    names = {row.rank: row.name for row in ranking.rows}
    assert [line.split()[1] for line in lines[3:6]] == [names[1], names[2], names[3]]
    assert lines[6:] == [
        "23 more in sensitivity.json.",
        "WARNING: 2 blocks are few.",
        "kept in float, the 4 worst of 26 leave 8.0 % of the error (KL 0.06000; below 10.0 %).",
    ]
    assert "6 more in sensitivity.json." in sensitivity_text(tmp_path)
    assert "more in sensitivity.json" not in sensitivity_text(tmp_path, 26)


def test_nothing_is_printed_of_a_run_without_it(tmp_path: Path) -> None:
    (tmp_path / "ranges.json").write_bytes(KEPT.with_name("ranges.json").read_bytes())
    assert sensitivity_text(tmp_path) == ""
