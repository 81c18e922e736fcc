"""The page on outliers and its twin: complete, escaped, marked, also for older files."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from quantkit.reporting import stats_text, write_report
from quantkit.reporting.collect import Found, Run
from quantkit.reporting.definitions import DEFINITIONS
from quantkit.reporting.outlier_charts import heat_maps
from quantkit.reporting.outlier_tables import outlier_table
from quantkit.reporting.verdict import verdict
from quantkit.results import GroupStats, Stats, read_json, write_json
from tests.reporting.drawn import symbols, without_names

V2 = Path(__file__).parent / "fixtures" / "v2"
V1_STATS = Path(__file__).parent.parent / "results" / "fixtures" / "v1" / "base" / "stats.json"
HOSTILE = "</title></svg><script>alert(1)</script>\"'&|`\x1b[31m\n"


def stats_of(name: str) -> Stats:
    return read_json(V2 / name / "stats.json", Stats)


def run_of(*stats: Stats) -> Run:
    return Run(stats=tuple(Found(place=s.model.name, result=s) for s in stats))


def per_head(stats: Stats) -> list[GroupStats]:
    groups = stats.points["attention_logit"]
    found = [g for g in groups if g.layer is not None and g.head is not None]
    return sorted((g for g in found if g.token_class == "all"), key=lambda g: -g.abs_top["1"])


def rendered(folder: Path, out: Path) -> tuple[str, str]:
    page, twin, *_ = write_report([folder], out)
    return without_names(page.read_text("utf-8")), twin.read_text("utf-8")


def without_script(page: str) -> str:
    return re.sub(r"<script>.*</script>", "", page, flags=re.DOTALL)


def test_every_figure_has_marks_and_parses(tmp_path: Path) -> None:
    page, _ = rendered(V2, tmp_path)
    figures = re.findall(r"<figure .*?</figure>", page, re.DOTALL)
    assert len(figures) == 4 + 5 + 2
    for figure in figures:
        svg = re.search(r'<svg [^>]*role="group".*?</svg>', figure, re.DOTALL)
        assert svg is not None
        assert all(words for words, _ in symbols(svg.group()))
        assert len(symbols(svg.group())) >= 3
    assert not re.search(r"\bnan\b|\bNone\b", without_script(page))


def test_page_and_twin_say_the_same(tmp_path: Path) -> None:
    page, twin = rendered(V2, tmp_path)
    for words in (
        "Transformer 2.8B (paper)", "Other points", "Outlier tokens", "Probe hits",
        "32 sampled query rows", "Differential attention by layer", "arXiv 2306.12929",
        "By layer: linear-layer inputs of diff",
    ):  # fmt: skip
        assert words in page
        assert words in twin
    folded = re.findall(r"<details>\n<summary id=", page)
    assert len(folded) == twin.count("<details>") == twin.count("</details>")
    assert re.search(r"<summary id=\"[^\"]+\">Probe hits", page)
    for line in twin.split("\n"):
        assert not (line.startswith("| ") and re.search(r"\| \|(?! )", line))


def test_the_papers_rows_are_left_out_where_no_model_is_differential(tmp_path: Path) -> None:
    page, twin = rendered(V2 / "base", tmp_path)
    assert "(paper)" not in page + twin


def test_warnings_of_the_run_are_on_the_page(tmp_path: Path) -> None:
    said = "hidden_state of layer 8 holds 3 NaN and 0 inf values."
    write_json(tmp_path / "stats.json", dataclasses.replace(stats_of("base"), warnings=[said]))
    page, twin = rendered(tmp_path, tmp_path)
    assert f"<li>base: {said}</li>" in page
    assert "> base: " + said.replace("_", r"\_") in twin


def unknown(group: GroupStats) -> GroupStats:
    """The same group, had all of its elements been NaN."""
    nothing = dict.fromkeys(group.abs_top, math.nan)
    return dataclasses.replace(
        group, abs_top=nothing, abs_median=math.nan, abs_max=math.nan, top=[], channel_absmax=[]
    )


def test_models_with_nothing_finite_or_no_points_render(tmp_path: Path) -> None:
    stats = stats_of("diff")
    points = {name: [unknown(group) for group in stats.points[name]] for name in stats.points}
    write_json(tmp_path / "bad" / "stats.json", dataclasses.replace(stats, points=points))
    write_json(tmp_path / "none" / "stats.json", dataclasses.replace(stats, points={}))
    page, _ = rendered(tmp_path, tmp_path)
    assert "values are not finite and not drawn" in page
    assert not re.search(r"\bnan\b|\bNone\b", without_script(page))
    assert "Other statistics" in stats_text(tmp_path)


def test_logits_that_the_model_modified_have_their_own_maps(tmp_path: Path) -> None:
    stats = stats_of("base")
    points = stats.points | {"logits_modified": stats.points["attention_logit"]}
    write_json(tmp_path / "stats.json", dataclasses.replace(stats, points=points))
    page, twin = rendered(tmp_path, tmp_path)
    assert "Largest |modified logit| by layer and head: base" in page
    for text in (page, twin):
        assert "By layer: modified logits of base, the head with the largest" in text


@pytest.mark.kind(8, "report")
def test_hostile_tokens_stay_text(tmp_path: Path) -> None:
    write_json(tmp_path / "stats.json", poisoned(stats_of("diff")))
    page, twin = rendered(tmp_path, tmp_path / "out")
    assert page.count("<script") == 1  # its own
    assert not re.search(r"(?<!\\)<script", twin)
    assert "&lt;script&gt;" in page
    for text in (page, twin, stats_text(tmp_path)):
        assert "\x1b" not in text
    for svg in re.findall(r"<svg .*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)


def poisoned(value: Any) -> Any:
    """The same with hostile text for every token, module and warning."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: poisoned(getattr(value, f.name)) for f in dataclasses.fields(value)}
        for name in ("token", "name", "warnings"):
            if isinstance(changes.get(name), str):
                changes[name] = HOSTILE
            elif name in changes and isinstance(changes[name], list):
                changes[name] = [HOSTILE]
        return dataclasses.replace(value, **changes)
    if isinstance(value, list):
        return [poisoned(item) for item in value]
    if isinstance(value, dict):
        return {key: poisoned(item) for key, item in value.items()}
    return value


def test_verdict_names_a_head_and_a_layer() -> None:
    outliers, *_ = verdict(run_of(stats_of("base"), stats_of("diff")))
    worst = per_head(stats_of("diff"))[0]
    assert f"layer {worst.layer}, head {worst.head}, map {worst.map}" in outliers
    assert "None" not in outliers


def test_files_of_version_1_still_render(tmp_path: Path) -> None:
    stats = read_json(V1_STATS, Stats)
    write_json(tmp_path / "stats.json", stats)
    page, _ = rendered(V1_STATS, tmp_path / "out")
    assert "Hidden states over depth" in page
    assert "By layer: hidden states of base" in page
    assert not re.search(r"\bnan\b|\bNone\b", without_script(page))
    (row,) = outlier_table(run_of(stats)).rows
    assert row[-2:] == ("n/a", "n/a")  # not looked for, which is not zero
    assert re.search(r"outlier tokens +n/a$", stats_text(V1_STATS), re.MULTILINE)
    assert heat_maps(run_of(stats))


def test_every_definition_is_complete_and_there_once() -> None:
    terms = [entry.term for entry in DEFINITIONS]
    assert len(terms) == len(set(terms))
    assert all(entry.meaning.endswith(".") for entry in DEFINITIONS)
    measured = {entry.term: entry for entry in DEFINITIONS}
    for term in (
        "abs_max", "inf_norm_mean", "kurtosis", "kurtosis_oft", "massive activation",
        "outlier feature", "outlier token", "max", "entropy", "sink rate", "effective map",
        "99.9 % span (span_999_frac)", "channel ratio",
    ):  # fmt: skip
        assert measured[term].formula and measured[term].unlike, term


def test_reporting_loads_no_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from quantkit.reporting import *; "
        f"stats_text(Path({str(V2)!r}), True); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
