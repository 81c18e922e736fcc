"""What is seen while a command works: lines, a bar on a terminal, nothing with --quiet."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from quantkit.cli.watch import lines

ROOT = Path(__file__).parents[2]


class Clock:
    """Seconds that the test says."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_slow_steps_take_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with lines("loading m", clock=clock) as tell:
        for done in range(4):
            tell("measuring", done, 3)
            clock.now += 2.5
    said = [f"measuring ({done}/3)" for done in range(4)]
    assert capsys.readouterr().err.splitlines() == said


def test_fast_steps_take_a_line_every_two_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with lines("loading m", clock=clock) as tell:
        for done in range(101):
            tell("measuring", done, 100)
            clock.now += 0.1
    said = [int(line.split("(")[1].split("/")[0]) for line in capsys.readouterr().err.splitlines()]
    assert said[0] == 0 and said[-1] == 100
    assert said == sorted(set(said))
    assert all(20 <= later - step <= 21 for step, later in pairwise(said[:-1]))


def test_the_last_step_is_told_also_where_nobody_calls_it_the_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    with lines("loading m", clock=clock) as tell:
        tell("training: loss 9.0", 0, 10)
        tell("training: loss 9.0", 1, 10)
        tell("training: loss 8.0", 3, 10)
        tell("writing", 0, 1)
        tell("writing", 1, 1)
        tell("reading", 0, 5)
        tell("reading", 4, 5)
    assert capsys.readouterr().err.splitlines() == [
        "training: loss 9.0 (0/10)", "training: loss 8.0 (3/10)", "writing", "reading (0/5)",
        "reading (4/5)",
    ]  # fmt: skip


def test_what_comes_first_is_told_where_it_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    with lines("loading m", first_s=0.05) as tell:
        time.sleep(0.4)
        assert capsys.readouterr().err == "loading m\n"
        tell("measuring", 0, 1)
        time.sleep(0.1)
    assert capsys.readouterr().err == "measuring\n"
    with lines("loading m", first_s=0.05):  # done at once, as where a word was mistyped
        pass
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def on_a_terminal(program: str, columns: int) -> str:
    """Returns what a program writes to a terminal that is so wide."""
    main, child = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": str(columns), "LINES": "40"}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=child, stderr=child, env=environment, cwd=ROOT
    ) as process:
        os.close(child)
        text = b""
        while True:
            try:
                part = os.read(main, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            text += part
    os.close(main)
    assert process.returncode == 0, text.decode()
    return text.decode()


WORK = """
import time
from quantkit.cli.watch import watching
with watching({quiet}, "loading [m]") as tell:
    for done in range({steps} + 1):
        tell(f"measuring m: layer {{done}}", done, {steps})
        time.sleep(0.05)
    for work in range({works}):
        tell(f"cell {{work}}", 0, 2)
        tell(f"cell {{work}}", 2, 2)
"""


def test_a_terminal_shows_rate_times_and_what_is_done_now() -> None:
    text = on_a_terminal(WORK.format(quiet=False, steps=20, works=0), 100)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "loading [m]" in plain  # a name is no markup
    assert "measuring m: layer 20" in plain
    assert re.search(r"\d+/20  \d+\.\d steps/s  0:0\d gone  0:0\d left", plain)
    assert re.search(r"20/20  \d+\.\d steps/s  0:0\d gone\s", plain)
    assert max(len(line) for line in re.split(r"[\r\n]+", plain)) <= 100


def test_many_works_do_not_fill_the_screen() -> None:
    text = on_a_terminal(WORK.format(quiet=False, steps=2, works=30), 80)
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).split("cell 29")[-1]
    frame = re.split(r"\x1b\[\d*A", text)[-1]
    assert len(re.findall(r"cell \d+|measuring", frame)) <= 4
    assert "cell 1 " not in last


def test_quiet_shows_nothing_on_a_terminal_either() -> None:
    assert on_a_terminal(WORK.format(quiet=True, steps=3, works=1), 80) == ""


@pytest.mark.parametrize("columns", [60, 100])
def test_help_has_colours_and_panels_on_a_terminal(columns: int) -> None:
    program = (
        "import sys\nfrom quantkit.cli import main\n"
        "sys.argv = ['quantkit', 'stats', '--help']\nmain()\n"
    )
    text = on_a_terminal(program, columns)
    assert "\x1b[1;36m--seq-len" in text
    rows = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).splitlines()
    assert any(row.startswith("╭─ Data ─") for row in rows)
    assert max(map(len, rows)) <= columns
    said = " ".join(" ".join(rows).replace("│", " ").split())
    assert "[default: 512]" in said and "Examples" in said
