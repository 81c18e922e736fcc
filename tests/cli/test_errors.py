"""Every wrong command line is answered with one line that says what to do; exit code 2."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Invoke = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(["swep"], "Did you mean 'sweep'", id="command"),
        pytest.param(["sweep", "m", "--bit", "4"], "--bits", id="option"),
        pytest.param(["stats"], "Missing argument 'MODEL'", id="no model"),
        pytest.param(["sweep"], "Missing argument", id="no models"),
        pytest.param(["zzz"], "Available: calib, calibrate", id="no command like it"),
        pytest.param(["calib", "shwo"], "Did you mean 'show'", id="command of a group"),
        pytest.param(["--vresion"], "Did you mean '--version'", id="option of none"),
        pytest.param(["stats", "m", "-x"], "no option -x", id="short option"),
        pytest.param(["stats", "m", "--samples"], "requires an argument", id="no value"),
        pytest.param(["stats", "m", "--quiet=1"], "does not take a value", id="value of a flag"),
        pytest.param(["calibrate", "a", "b"], "extra argument", id="one too many"),
        pytest.param(["diagnose", "a.onnx"], "For example: quantkit diagnose", id="example"),
        pytest.param(["sensitivity", "m"], "--ranges reports/", id="required option"),
        pytest.param(["completion", "tcsh"], "Available: bash", id="shell"),
        pytest.param(["stats", "m", "--seq-len", "many"], "a whole number", id="no number"),
        pytest.param(
            ["sensitivity", "m", "--ranges", "r", "--remaining", "x"],
            "--remaining takes a number. (quantkit sensitivity --help)",
            id="no fraction",
        ),
        pytest.param(["stats", "m", "--seq-len", "0"], "at least 2", id="too short"),
        pytest.param(["stats", "m", "--dtype", "flaot32"], "Did you mean 'float32'", id="dtype"),
        pytest.param(["stats", "m", "--bos", "alway"], "Did you mean 'always'", id="bos"),
        pytest.param(["sweep", "m", "--bits", "8,x"], "whole numbers", id="bits"),
        pytest.param(["sweep", "m", "--bits", "8,,4"], "comma-separated", id="empty part"),
        pytest.param(["sweep", "m", "--bits", "8,8"], "twice", id="twice"),
        pytest.param(["sweep", "m", "--bits", "32"], "2 to 15", id="range"),
        pytest.param(["sweep", "m", "--granularity", "heads"], "Did you mean 'head'", id="gran"),
        pytest.param(["calibrate", "m", "--method", "max"], "minmax", id="method"),
        pytest.param(["calibrate"], "takes a MODEL, or --from RUN", id="no model to calibrate"),
        pytest.param(["calibrate", "m", "--from", "r"], "one of the two", id="model and run"),
        pytest.param(["calibrate", "m", "--points", "logits"], "attention_logit", id="points"),
        pytest.param(["calibrate", "m", "--symmetric", "q"], "attention_query", id="symmetric"),
        pytest.param(["calibrate", "m", "--until-stable", "1"], "below 100%", id="share"),
        pytest.param(["calibrate", "m", "--until-stable", "x"], "such as 1%", id="no share"),
        pytest.param(["calibrate", "m", "--bits", "17"], "2 to 16", id="calibrated bits"),
        pytest.param(["calibrate", "m", "--allow", "nan"], "nonfinite", id="guard"),
        pytest.param(["calibrate", "m", "--granularity", "row"], "head", id="range granularity"),
        pytest.param(["calibrate", "m", "--smooth", "2"], "from 0 to 1", id="alpha"),
        pytest.param(["calibrate", "--from", "r", "--smooth", "0.5"], "--smooth out", id="no pass"),
        pytest.param(["calibrate", "--from", "r", "--seq-len", "64"], "--seq-len out", id="unused"),
        pytest.param(["calibrate", "--from", "r", "--calib", "t.txt"], "--calib", id="no data"),
        pytest.param(
            ["calibrate", "m", "--points", "linear_input", "--method", "linear_output=mse"],
            "which is not among the points",
            id="method of no point",
        ),
        pytest.param(
            ["calibrate", "m", "--points", "linear_input", "--symmetric", "kv_cache"],
            "names attention_key",
            id="grid of no point",
        ),
        pytest.param(["sweep", "m", "--ranges", "r"], "neither is given", id="ranges unread"),
        pytest.param(["calibrate", "m", "--weights", "row"], "group:N", id="weights"),
        pytest.param(["calibrate", "m", "--weights", "group:0"], "at least 1", id="weight group"),
        pytest.param(
            ["calibrate", "m", "--weight-bits", "4"], "--weights channel", id="no weights"
        ),
        pytest.param(
            ["calibrate", "m", "--weights", "channel", "--weight-method", "entropy"],
            "minmax, upper-percentile or mse",
            id="method of weights",
        ),
        pytest.param(
            ["calibrate", "m", "--weights", "channel", "--weight-bits", "1"],
            "2 to 16",
            id="bits of weights",
        ),
        pytest.param(
            ["calibrate", "m", "--method", "mse,logits=minmax"],
            "unknown point",
            id="method's point",
        ),
        pytest.param(["export", "m", "--quantize", "w8b8"], "Did you mean 'w8a8'", id="recipe"),
        pytest.param(["export", "m", "--attention-bits", "5"], "16, 4, 6, 8", id="attention"),
        pytest.param(["compare", "--task", "perplexty"], "Did you mean 'perplexity'", id="compare"),
        pytest.param(["report", "nowhere"], "no such run folder", id="report"),
    ],
)
def test_errors_take_one_line(arguments: list[str], said: str, invoke: Invoke) -> None:
    code, out, err = invoke(*arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: [^\n]+\n", err)
    assert said in err


def test_ctrl_c_while_commands_are_imported_is_no_traceback() -> None:
    program = (
        "import sys\n"
        "class Key:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'quantkit.cli.commands':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Key())\n"
        "import runpy\n"
        "sys.argv = ['quantkit', 'doctor']\n"
        "runpy.run_module('quantkit', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_ctrl_c_while_a_stage_is_imported_is_no_traceback(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(name: str) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("quantkit.cli.console.importlib.import_module", stopped)
    code, out, err = invoke("stats", "m", "--quiet")
    assert (code, out) == (130, "")
    assert err.startswith("interrupted") and err.count("\n") == 1
