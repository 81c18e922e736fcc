"""The page of failures names tests that are there, and marks that it knows."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import reliability

ROOT = Path(__file__).parents[2]


def test_every_failure_names_a_test_that_is_there() -> None:
    entries = reliability.found()
    assert {each["kind"] for each in entries} <= set(reliability.KINDS)
    for each in entries:
        path, _, name = each["test"].partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {name or 'test_'}" in text, each["test"]


@pytest.mark.parametrize("kind", reliability.KINDS)
def test_every_kind_is_tried(kind: int) -> None:
    """By the marks in the files; the page's counts are pytest's, a case each."""
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    assert len(re.findall(rf"mark\.kind\({kind}\b", text)) >= 2


def test_cases_are_counted_once_a_kind_and_once_a_stage(pytester_items: Counter[str]) -> None:
    assert pytester_items == {"all": 2, "stats": 2, "sweep": 1}


@pytest.fixture
def pytester_items(tmp_path: Path) -> Counter[str]:
    """What the collector counts of two cases, one of which shows a kind twice."""
    file = tmp_path / "test_planted.py"
    file.write_text(
        "import pytest\n"
        "@pytest.mark.kind(3, 'stats', 'sweep')\n@pytest.mark.kind(3, 'stats')\n"
        "def test_one(): pass\n"
        "@pytest.mark.kind(3, 'stats')\ndef test_two(): pass\n"
        "def test_three(): pass\n"
    )
    collector = reliability.Collector()
    arguments = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-o", "addopts="]
    arguments += ["-c", "/dev/null", f"--rootdir={tmp_path}", str(file)]
    assert pytest.main(arguments, plugins=[collector]) == 0
    return collector.counts["3"]
