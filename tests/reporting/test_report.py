"""The report: self-contained, escaped, complete, and honest on what is missing."""

from __future__ import annotations

import dataclasses
import html
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quantkit.cli.report import report
from quantkit.errors import InputError
from quantkit.reporting import (
    export_text,
    ranges_text,
    sweep_text,
    terminal_tables,
    topk_text,
    write_report,
)
from quantkit.reporting.collect import FILE_NAMES, collect
from quantkit.reporting.outlier_tables import class_table, topk_table
from quantkit.reporting.sweep_tables import bit_tables
from quantkit.reporting.text import number, plain_table, relative
from quantkit.reporting.verdict import verdict
from quantkit.results import Stats, Sweep, read_json, write_json

V1 = Path(__file__).parent.parent / "results" / "fixtures" / "v1"
HOSTILE = "</style></svg><script>alert(1)</script>\"'&|`*x*`\x1b[31m\nnext"


class Page(HTMLParser):
    """Collects tags and attributes, and checks that tags nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "link", "img", "br", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def rendered(folders: list[Path], out: Path) -> tuple[str, str]:
    page, twin, *_ = write_report(folders, out)
    assert (page.name, twin.name) == ("report.html", "report.md")
    return page.read_text("utf-8"), twin.read_text("utf-8")


def test_the_page_is_self_contained_and_well_formed(tmp_path: Path) -> None:
    page, _ = rendered([V1], tmp_path)
    parsed = Page(page)
    assert parsed.open == []
    assert not {"link", "img", "iframe", "object"} & set(parsed.tags)
    assert parsed.tags.count("script") == 1
    assert not re.search(r"https?://(?!www\.w3\.org/)|url\(|@import", page)
    assert "default-src 'none'" in html.unescape(page)
    assert all(value.startswith("#") for name, value in parsed.attributes if name == "href")
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page
    for svg in re.findall(r"<svg .*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)
    shown = re.sub(r"<script>.*</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"\bnan\b|\bNone\b", shown)


def test_every_section_is_there(tmp_path: Path) -> None:
    page, twin = rendered([V1], tmp_path)
    for text in (page, twin):
        for words in (
            "Table 5", "top-100", "What the bits cost", "Parity", "Latency", "Files", "Provenance",
            "Definitions", "Calibrated ranges", "At 4 bits per tensor diff loses less than base.",
            "the checkpoint was quantized already",
        ):  # fmt: skip
            assert words in text
    for words in ("perplexity against bits", "Hidden states over depth", "by layer and head"):
        assert words in page
    heats = re.findall(r'<figure id="outliers-largest-attention.*?</figure>', page, re.DOTALL)
    assert [figure.count('role="graphics-symbol"') for figure in heats] == [4 * 6] * 3


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    assert rendered([V1], tmp_path / "a") == rendered([V1, V1 / "base"], tmp_path / "b")


def test_verdict_is_three_sentences_with_numbers() -> None:
    outliers, cost, export = verdict(collect([V1]))
    assert "In base the largest |attention logit| is 60.19 (layer 2, head 3, query 17" in outliers
    assert "7,200 (layer 3, token position 0 '<s>', channel 41), 900 times" in outliers
    assert "map 2" in outliers
    assert "diff is 18.00 with float logits, 18.36 at 8 bits (+2.00 %)" in cost
    assert "passed its gates" in export
    assert "4.25 ms instead of 10.5 ms" in export
    assert "17.61 instead of 17.50" in export


@pytest.mark.parametrize("only", ["base/stats.json", "sweep.json"])
def test_what_is_missing_is_said(only: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(V1 / only, tmp_path / "run")
    for text in rendered([tmp_path / "run"], tmp_path / "out"):
        for name in ("stats", "sweep", "export", "sensitivity"):
            assert (f"No {name}.json was found." in text) == (only.split("/")[-1] != f"{name}.json")
        assert "No ranges.json and no calibration.json was found." in text


@pytest.mark.parametrize("only", ["base/ranges.json", "base/export.json"])
def test_a_page_on_one_stage_does_not_list_the_others(only: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(V1 / only, tmp_path / "run")
    for text in rendered([tmp_path / "run"], tmp_path / "out"):
        assert not re.search(r"No (stats|sweep|export|sensitivity)\.json was", text)


def test_the_help_names_every_file() -> None:
    assert not [name for name in FILE_NAMES if name not in (report.__doc__ or "")]


def test_nothing_to_report_is_an_input_error(tmp_path: Path) -> None:
    for folders in ([], [tmp_path], [tmp_path / "none"]):
        with pytest.raises(InputError):
            write_report(folders, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    with pytest.raises(InputError, match=r"other\.json is not one of"):
        write_report([other], tmp_path)


def hostile_run(folder: Path) -> None:
    stats = read_json(V1 / "base/stats.json", Stats)
    model = dataclasses.replace(stats.model, name=HOSTILE, source=HOSTILE, warnings=[HOSTILE])
    data = dataclasses.replace(stats.data, source=HOSTILE)
    entry = dataclasses.replace(
        stats.summary.massive_activations.entries[0], token=HOSTILE, value=math.nan
    )
    massive = dataclasses.replace(stats.summary.massive_activations, entries=[entry])
    summary = dataclasses.replace(stats.summary, massive_activations=massive)
    environment = {HOSTILE: HOSTILE}
    write_json(
        folder / "stats.json",
        dataclasses.replace(
            stats, model=model, data=data, environment=environment, summary=summary
        ),
    )
    sweep = read_json(V1 / "sweep.json", Sweep)
    cells = [dataclasses.replace(cell, model=HOSTILE, task=HOSTILE) for cell in sweep.cells[:4]]
    write_json(folder / "sweep.json", dataclasses.replace(sweep, cells=cells, headline=HOSTILE))


@pytest.mark.kind(8, "report")
def test_hostile_names_stay_text(tmp_path: Path) -> None:
    hostile_run(tmp_path)
    page, twin = rendered([tmp_path], tmp_path / "out")
    parsed = Page(page)
    assert parsed.open == []
    assert parsed.tags.count("script") == page.count("<script") == 1  # its own
    assert not re.search(r"(?<!\\)<script", twin)
    lines = twin.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("| activation | model"))
    columns = len(re.findall(r"(?<!\\)\|", lines[header]))
    assert len(re.findall(r"(?<!\\)\|", lines[header + 2])) == columns
    for text in (terminal_tables(tmp_path), twin, page):
        assert "\x1b" not in text


def test_values_that_cannot_be_drawn_are_noted(tmp_path: Path) -> None:
    sweep = read_json(V1 / "sweep.json", Sweep)
    bad = {8: math.nan, 6: math.inf, 4: 0.0}
    cells = [dataclasses.replace(c, value=bad.get(c.bits, c.value)) for c in sweep.cells]
    write_json(tmp_path / "sweep.json", dataclasses.replace(sweep, cells=cells))
    page, _ = rendered([tmp_path], tmp_path)
    assert "18 values are not finite and not drawn." in page
    cells = [dataclasses.replace(c, value=math.nan) for c in sweep.cells]
    write_json(tmp_path / "sweep.json", dataclasses.replace(sweep, cells=cells))
    write_report([tmp_path], tmp_path)


def test_tables() -> None:
    run = collect([V1])
    assert topk_table(run).rows[1][:3] == ("attention logits", "diff", "10.12")
    assert ("hidden states", "base", "7,200", "240.0") in class_table(run).rows
    (table,) = bit_tables(run)
    assert table.columns[-4:] == ("16 bits", "8 bits", "6 bits", "4 bits")
    assert len(table.rows) == 6
    assert table.rows[0][2] == "18.00 [17.20, 18.80]"
    assert table.rows[1][2] == table.rows[0][2]


def test_models_of_one_name_are_told_apart(tmp_path: Path) -> None:
    stats = read_json(V1 / "base/stats.json", Stats)
    write_json(tmp_path / "a" / "stats.json", stats)
    other = dataclasses.replace(stats, model=dataclasses.replace(stats.model, sha256="99" * 32))
    write_json(tmp_path / "b" / "stats.json", other)
    first, second, ratio = [row[1] for row in topk_table(collect([tmp_path])).rows][:3]
    assert {first, second} == {"base (cdcdcdcd)", "base (99999999)"}
    assert ratio == f"{first} / {second}"
    write_report([tmp_path], tmp_path)


def test_terminal_texts() -> None:
    assert topk_text(V1).splitlines()[1].split() == [
        "activation", "model", "top-1", "top-2", "top-3", "top-10", "top-100", "median"
    ]  # fmt: skip
    assert "At 4 bits" in sweep_text(V1)
    assert sweep_text(V1 / "diff") == ""
    assert topk_text(V1 / "sweep.json") == ""
    assert "passed" in export_text(V1)
    assert "12.25" in ranges_text(V1)
    assert all(line == line.rstrip() for line in plain_table(topk_table(collect([V1]))).split("\n"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (1234567, "1,234,567"), (1234.5, "1,234"), (0.012345, "0.01235"),
        (1e-9, "1.000e-09"), (math.nan, "n/a"), (math.inf, "inf"), (-math.inf, "-inf"),
        (None, "n/a"), (-2.5, "-2.500"),
    ],
)  # fmt: skip
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_relative_changes() -> None:
    assert relative(11.0, 10.0) == "+10.00 %"
    assert relative(500.0, 10.0) == "x50.0"
    assert relative(math.inf, 10.0) == "n/a"
    assert relative(1.0, 0.0) == "n/a"
