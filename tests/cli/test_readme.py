"""The README names every command and every module, and nothing that is not there."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.main import get_command

from benchmarks import page, reliability, tables
from quantkit.cli import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_command_is_in_the_table_and_no_other() -> None:
    commands = set(get_command(app).commands)
    named = set(re.findall(r"^\| `quantkit (\w+)", README, flags=re.MULTILINE))
    assert named == commands


def test_every_module_is_named() -> None:
    modules = [path for path in (ROOT / "quantkit").rglob("*.py") if path.stem[0] != "_"]
    in_cli = [path for path in modules if path.parent.name == "cli"]
    stems = {path.stem for path in modules if path not in in_cli}
    missing = sorted(stem for stem in stems if not re.search(rf"\b{stem}\b", README))
    assert not missing


def test_the_makefile_runs_what_the_example_says() -> None:
    recipe = re.sub(r"\s*\\\n\s*", " ", (ROOT / "Makefile").read_text(encoding="utf-8"))
    shown = re.search(r"`(quantkit compare --out[^`]*)`", README)
    assert shown is not None
    assert re.sub(r"\s+", " ", shown[1]) in recipe


def test_tables_are_what_the_benchmarks_wrote() -> None:
    assert sorted(found[2] for found in tables.MARK.finditer(README)) == sorted(
        tables.README_TABLES
    )
    assert tables.quoted(README) == README


def test_a_table_that_says_something_else_is_found() -> None:
    row = next(line for line in README.splitlines() if line.startswith("| NNCF int8 |"))
    assert tables.quoted(README.replace(row, row.replace("1.132", "1.032"))) == README


QUOTES: list[tuple[str, Callable[[], tuple[str, ...]]]] = [
    (
        r"by channel, min-max has perplexity (\S+) and MSE (\S+), though.* in groups of 64\s+"
        r"they are level \((\S+) and (\S+);",
        lambda: tuple(f"{row['perplexity']:.2f}" for row in tables.results("ranges")["weights"]),
    ),
    (
        r"keeping the (\d+) worst of (\d+) inputs in float brings",
        lambda: (
            str(len(tables.results("ranges")["sensitivity"]["keep"])),
            str(tables.results("ranges")["sensitivity"]["units"]),
        ),
    ),
    (
        r"`(\S+)` and the\s+percentiles are as harmful in ours \((\S+) and (\S+) to (\S+)\)",
        lambda: (
            "entropy",
            f"{tables.results('calibration')['perplexity']['quantkit entropy']:,.0f}",
            *(
                f"{value:.0f}"
                for value in sorted(
                    value
                    for name, value in tables.results("calibration")["perplexity"].items()
                    if name.startswith("quantkit") and "percentile" in name
                )
            ),
        ),
    ),
    (
        r"answer (\d+) of (\d+) multiple-choice items as the simulation",
        lambda: (
            str(sum(row["items_agreed"] for row in tables.results("pair_logits")["rows"])),
            str(sum(row["items"] for row in tables.results("pair_logits")["rows"])),
        ),
    ),
]
"""Sentences of the README with figures, and what the benchmarks' files say for them."""


@pytest.mark.parametrize(
    ("sentence", "figures"), QUOTES, ids=["weights", "keep", "entropy", "pair"]
)
def test_sentences_quote_the_benchmarks(
    sentence: str, figures: Callable[[], tuple[str, ...]]
) -> None:
    said = re.search(sentence, README, flags=re.DOTALL)
    assert said is not None
    assert said.groups() == figures()


@pytest.mark.parametrize("name", ["benchmarks", "reliability"])
def test_pages_are_what_their_files_say(name: str) -> None:
    written = (ROOT / "reports" / name / "README.md").read_text(encoding="utf-8")
    assert written == {"benchmarks": page.page, "reliability": reliability.written_page}[name]()
