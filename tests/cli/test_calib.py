"""`quantkit calib` in process: what is printed, to which stream, and the exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from quantkit.cli.calib import calib_app
from quantkit.cli.group import OneLineErrors

app = typer.Typer(
    cls=OneLineErrors, name="quantkit", rich_markup_mode=None, pretty_exceptions_enable=False
)
app.add_typer(calib_app, name="calib")
COMMANDS = ("ls", "show", "make", "verify")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["calib", *arguments], prog_name="quantkit")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def fails(*arguments: str) -> str:
    """Returns the one line of an error."""
    code, out, err = invoke(*arguments)
    assert code == 2
    assert re.fullmatch(r"error: [^\n]+\n", err)
    assert "error" not in out
    return err


def test_ls_lists_the_shipped_sets_and_ones_own() -> None:
    Path("a.txt").write_text("some text")
    assert invoke("make", "mine", "--from", "a.txt", "--licence", "CC-BY-4.0")[0] == 0

    code, out, err = invoke("ls")

    assert (code, err) == (0, "")
    rows = [re.split(r"\s{2,}", line) for line in out.splitlines()[1:]]
    assert rows[0] == ["name", "kind", "licence", "where", "samples", "size"]
    assert rows[3] == ["mine", "text", "CC-BY-4.0", "calib/mine", "1", "0.0 kB"]
    assert [row[0] for row in rows[2:]] == [
        "docstrings", "mine", "pydoc", "retrieval", "shapes", "stdlib-source",
    ]  # fmt: skip
    assert rows[5][:5] == ["retrieval", "text", "Apache-2.0", "shipped", "512"]
    assert rows[6] == ["shapes", "images", "Apache-2.0", "shipped", "no end"]


def test_show_prints_the_manifest_and_samples() -> None:
    code, out, err = invoke("show", "retrieval", "--samples", "2")

    assert (code, err) == (0, "")
    assert re.search(r"^source +generator:retrieval\?needles=4&queries=2&sentences=19$", out, re.M)
    assert re.search(r"^licence +Apache-2\.0$", out, re.M)
    assert out.count("\ndocument ") == 2
    assert len(re.findall(r"The magic number of \w+ is \d{6}\.\n", out)) >= 2  # the answers
    assert "\ndocument" not in invoke("show", "retrieval", "--samples", "0")[1]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pydoc", 'character 0\n  The "assert" statement'),
        ("stdlib-source", '"""Bisection algorithms."""'),
        ("shapes", "image 1\n  grating"),
    ],
)
def test_show_works_without_a_model(name: str, said: str) -> None:
    code, out, _ = invoke("show", name)

    assert code == 0
    assert said in out


def test_show_images_and_arrays_and_tokens() -> None:
    Path("photos").mkdir()
    Image.new("RGB", (7, 5)).save("photos/a.png")
    np.savez("a.npz", pixel_values=np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    Path("t.jsonl").write_text('{"input_ids": [5, 6, 7]}')
    for name, source in {"photo": "photos", "array": "a.npz", "token": "t.jsonl"}.items():
        assert invoke("make", name, "--from", source)[0] == 0

    assert "7 x 5 pixels" in invoke("show", "photo")[1]
    assert "pixel_values\n  float32 [2, 3, 4], 0 to 23" in invoke("show", "array")[1]
    assert "row 0\n  3 tokens: 5, 6, 7" in invoke("show", "token")[1]


def test_show_prints_no_control_characters() -> None:
    Path("a.txt").write_text("red \x1b[31m text\nnext line")
    invoke("make", "mine", "--from", "a.txt", "--description", "bell \a")

    out = invoke("show", "mine")[1]

    assert "\x1b" not in out and "\a" not in out
    assert "\n  next line\n" in out


def test_make_says_what_it_made() -> None:
    Path("a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')

    code, out, err = invoke(
        "make", "mine", "--from", "a.jsonl", "--samples", "1", "--seed", "4", "--copy"
    )

    assert (code, out, err) == (0, "calib/mine: text, 1 samples\n", "")
    assert "calib/mine is there already" in fails("make", "mine", "--from", "a.jsonl")
    assert invoke("make", "mine", "--from", "a.jsonl", "--force")[0] == 0


def test_verify_names_what_changed() -> None:
    for name in ("good", "bad", "worse"):
        Path(f"{name}.txt").write_text(name)
        invoke("make", name, "--from", f"{name}.txt")
    assert invoke("verify", "good", "bad")[:2] == (
        0,
        "".join(f"ok  {n}  sha256 {sha(n)}  (calib/{n})\n" for n in ("good", "bad")),
    )
    Path("bad.txt").write_text("other")
    Path("worse.txt").unlink()

    code, out, err = invoke("verify", "bad", "good", "worse")

    assert code == 2
    assert out.startswith("ok  good")
    assert re.fullmatch(r"error: [^\n]*bad\.txt changed[^\n]*worse\.txt: no such file[^\n]*\n", err)


def test_verify_all() -> None:
    code, out, _ = invoke("verify", "--all")

    assert code == 0
    assert [line.split()[1] for line in out.splitlines()] == [
        "docstrings", "pydoc", "retrieval", "shapes", "stdlib-source",
    ]  # fmt: skip


def test_verify_says_that_python_is_another_version() -> None:
    invoke("make", "mine", "--from", "module:bisect")
    path = Path("calib/mine/manifest.toml")
    text = path.read_text()
    ((version, digest),) = re.findall(r'"(3[^"]*)" = "(\w+)"', text)
    other = f'"3.99.0" = "{"0" * 64}"'
    path.write_text(text.replace(f'"{version}" = "{digest}"', other))

    code, out, err = invoke("verify", "mine")

    assert (code, out.split()[:2]) == (0, ["ok", "mine"])
    assert re.fullmatch(r"warning: [^\n]*content of another version of Python[^\n]*\n", err)
    assert "content of another version of Python" in invoke("show", "mine")[1]
    path.write_text(text.replace(f'"{version}" = "{digest}"', other.replace("3.99.0", version)))
    code, _, err = invoke("verify", "mine")
    assert code == 0 and f"bisect: other text than {version} is known to carry" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lss"], "Did you mean 'ls'"),
        (["show"], "Missing argument 'NAME'"),
        (["show", "pydocs"], "Did you mean 'pydoc'"),
        (["show", "pydoc", "--samples", "-1"], "--samples"),
        (["make", "mine"], "Missing option '--from'"),
        (["make", "mine", "--from", "nowhere.txt"], "no such file or folder"),
        (["make", "../mine", "--from", "a"], "expected a name"),
        (["verify"], "name one or more sets, or give --all"),
        (["verify", "pydoc", "--all"], "name one or more sets, or give --all"),
        (["verify", "nothing"], "no calibration set 'nothing'"),
    ],
)
def test_errors_take_one_line(arguments: list[str], said: str) -> None:
    assert said in fails(*arguments)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str) -> None:
    code, out, _ = invoke(command, "--help")

    assert code == 0
    assert f"quantkit calib {command}" in out.split("Examples:")[1]


def test_help_alone_and_with_no_argument() -> None:
    code, out, _ = invoke()

    assert (code, out) == invoke("--help")[:2]
    assert code == 0
    for command in COMMANDS:
        assert re.search(rf"^  {command} ", out, re.MULTILINE)
    assert "..." not in out.split("Commands:")[1]


def test_the_module_loads_no_torch() -> None:
    code = "import sys, quantkit.cli.calib; print('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True
    )

    assert done.stdout.strip() == "False"


def sha(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()[:10]
