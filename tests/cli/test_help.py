"""Help pages: what they say, that `docs/cli.md` repeats it, and that every example works."""

from __future__ import annotations

import glob
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.cli.help import HelpPage, Row, plain_page
from quantkit.cli.pages import all_pages, main, markdown

ROOT = Path(__file__).parents[2]
V1 = ROOT / "tests" / "results" / "fixtures" / "v1"
Invoke = Callable[..., tuple[int, str, str]]
PAGES = dict(all_pages())
RUN = {"stats", "calibrate", "sensitivity", "sweep", "export", "diagnose", "compare", "train"}
EXAMPLES = sorted({example for page in PAGES.values() for example in page.examples})


def test_the_document_is_what_the_code_says() -> None:
    """Regenerate it with: python -m quantkit.cli.pages docs/cli.md"""
    written = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert written == markdown(), "run: python -m quantkit.cli.pages docs/cli.md"


def test_writing_the_document(tmp_path: Path) -> None:
    main([str(tmp_path / "new" / "cli.md")])
    assert (tmp_path / "new" / "cli.md").read_text(encoding="utf-8") == markdown()
    with pytest.raises(SystemExit, match="usage"):
        main([])


@pytest.mark.parametrize("command", PAGES)
def test_help_is_the_page_of_the_document(command: str, invoke: Invoke) -> None:
    arguments = command.split()[1:]
    code, out, err = invoke(*arguments, "--help")
    assert (code, err) == (0, "")
    assert out.rstrip("\n") == plain_page(PAGES[command]).rstrip("\n")
    assert invoke(*arguments, "-h")[1] == out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("command", PAGES)
def test_every_option_says_its_default_and_its_unit(command: str) -> None:
    for _, rows in PAGES[command].panels:
        for row in rows:
            assert row.text, row
            if row.name.startswith("-") and row.name not in ("-h, --help", "--version"):
                assert row.default, f"{row.name} says no default"
                assert row.unit or row.default == "default: off", f"{row.name} has no unit"
                assert (
                    row.unit not in ("VALUE", "TEXT")
                    or "description" in row.name
                    or ("licence" in row.name)
                ), row


@pytest.mark.parametrize("command", sorted(RUN))
def test_options_are_in_panels_and_what_all_share_comes_last(command: str) -> None:
    titles = [title for title, _ in PAGES[f"quantkit {command}"].panels]
    assert titles[0] == "Arguments" and titles[-1] == "Output"
    assert "Options" not in titles
    names = [row.name for title, rows in PAGES[f"quantkit {command}"].panels for row in rows]
    assert ("--config" in names) == (command != "train")
    assert len(set(names)) == len(names)


def test_help_and_no_argument_list_the_commands(invoke: Invoke) -> None:
    code, out, _ = invoke("--help")
    assert code == 0
    for command in (*RUN, "report", "calib", "doctor", "models", "completion"):
        assert re.search(rf"^  {command} ", out, re.MULTILINE)
    for title in ("Measure:", "Ship:", "Report:", "Train:", "Look:"):
        assert title in out
    assert invoke()[:2] == (0, out)


def test_the_help_of_compare_says_what_it_does_without_a_model(invoke: Invoke) -> None:
    _, out, _ = invoke("compare", "--help")
    said = "".join(out.split())
    for words in ("--textdocstrings", "--bits16,8,6,5,4,3", "--rangedynamic,static", "--paper"):
        assert words in said


def test_a_page_breaks_at_spaces_alone() -> None:
    row = Row(name="--a-name", unit="N", text="word " * 30 + "last", default="default: one two")
    page = HelpPage(
        usage="quantkit x [OPTIONS]",
        paragraphs=("What it does.",),
        examples=("quantkit x --a-name 3",),
        panels=(("Data", (row, Row(name="--a-name-that-is-much-longer", text="t"))),),
    )
    lines = plain_page(page).splitlines()
    assert lines[:6] == [
        "Usage: quantkit x [OPTIONS]", "", "  What it does.", "", "Examples:",
        "  quantkit x --a-name 3",
    ]  # fmt: skip
    assert lines[8].startswith("  --a-name N                word word")
    assert lines[-3].endswith("[default: one two]")
    assert lines[-2:] == ["  --a-name-that-is-much-longer", " " * 28 + "t"]


@pytest.mark.parametrize("example", [e for e in EXAMPLES if set(e.split()) & RUN], ids=str)
def test_examples_make_a_job(
    example: str,
    pipelines: Any,
    invoke: Invoke,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "quantkit/models/pair/pair.toml", tmp_path)
    words = shlex.split(example)
    arguments = words[words.index("quantkit") + 1 :]
    pipelines.error = KeyboardInterrupt()  # the job is all that is asked for
    code, out, err = invoke(*arguments)
    assert (code, out) == (130, ""), err
    assert type(pipelines.last()).__name__.lower() == f"{arguments[0]}job"


@pytest.mark.parametrize("example", [e for e in EXAMPLES if not set(e.split()) & RUN], ids=str)
def test_cheap_examples_run(
    example: str, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    written: list[Path] = []
    monkeypatch.setattr(
        "quantkit.cli.report.write_report",
        lambda runs, out, against: written.extend([*runs, *([against] if against else [])]) or (),
    )
    (tmp_path / "texts").mkdir()
    (home / "photos").mkdir(parents=True)
    for index in range(300):
        (tmp_path / "texts" / f"{index}.txt").write_text(f"Story {index}. " * 40)
        _image(home / "photos" / f"{index}.png", index)
    for run in (
        "compare-a",
        "train-pair-a",
        "stats-a",
        "stats-b",
        "sweep-a",
        "sweep-new",
        "sweep-old",
    ):
        shutil.copytree(V1 / "base", tmp_path / "reports" / run)
    words = [part for word in shlex.split(example)[1:] for part in _globbed(word)]
    if words[:2] == ["calib", "verify"]:
        assert invoke("calib", "make", "mine", "--from", "texts")[0] == 0
        photos = str(home / "photos")
        assert invoke("calib", "make", "photos", "--from", photos)[0] == 0
    code, _, err = invoke(*words)
    assert (code, err) == (0, "")
    if words[0] == "report":
        assert written and all(path.is_dir() for path in written)


def _globbed(word: str) -> list[str]:
    """What a shell makes of a word."""
    word = os.path.expanduser(word)
    return (sorted(glob.glob(word)) if word.endswith("*") else []) or [word]


def _image(path: Path, shade: int) -> None:
    from PIL import Image

    Image.new("RGB", (8, 8), (shade % 256, shade // 2, 7)).save(path)


def test_help_loads_nothing_that_draws_or_computes() -> None:
    heavy = (
        "torch", "transformers", "altair", "vl_convert", "jinja2", "numpy", "onnxruntime", "rich",
    )  # fmt: skip
    program = (
        "import sys\nfrom quantkit.cli import main\n"
        "sys.argv = ['quantkit', 'sweep', '--help']\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        f"sys.stderr.write(' '.join(name for name in {heavy!r} if name in sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Examples:" in done.stdout
