"""The command line in process: exit codes, one-line errors, what goes to which stream."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.cli.console import show
from quantkit.errors import GateError, InputError
from quantkit.jobs import (
    PAIR_DEFAULTS,
    CalibrateJob,
    CompareJob,
    ExportJob,
    StatsJob,
    SweepJob,
)

V1 = Path(__file__).parent.parent / "results" / "fixtures" / "v1"
Invoke = Callable[..., tuple[int, str, str]]


def test_options_reach_the_job(pipelines: Any, tmp_path: Path, invoke: Invoke) -> None:
    out = str(tmp_path / "here")
    code, _, _ = invoke(
        "stats", "m", "--calib", "t.txt", "--seq-len", "32", "--samples", "3", "--batch-size", "1",
        "--bos", "never", "--count-masked", "--out", out, "--force",
    )  # fmt: skip
    assert code == 0
    assert pipelines.last() == StatsJob(
        models=("m",), data="t.txt", seq_len=32, samples=3, batch_size=1, bos="never",
        count_masked=True, out=out, force=True,
    )  # fmt: skip
    invoke("sweep", "a", "b", "--bits", "16, 4", "--granularity", "row", "--seed", "7")
    assert pipelines.last() == SweepJob(
        models=("a", "b"), bits=(16, 4), granularity=("row",), seed=7
    )
    invoke("export", "m", "--quantize", "w8", "--attention-bits", "8", "--eval", "e.txt")
    assert pipelines.last() == ExportJob(model="m", recipe="w8", attention_bits=8, eval="e.txt")
    invoke(
        "calibrate", "m", "--method", "mse,attention_key=minmax", "--bits", "8,4", "--points",
        "linear_input,kv_cache", "--symmetric", "none", "--granularity", "tensor", "--smooth",
        "auto", "--until-stable", "2%", "--allow", "zero,constant", "--exclude-first",
    )  # fmt: skip
    job = pipelines.last()
    assert job == CalibrateJob(
        model="m", method="mse,attention_key=minmax", bits=(8, 4), symmetric=(),
        points=("linear_input", "attention_key", "attention_value"), granularity="tensor",
        smooth="auto", until_stable=0.02, allow=("zero", "constant"), exclude_first=True,
    )  # fmt: skip
    assert job.most_samples == 1024 and job.alpha is None
    assert CalibrateJob(model="m", smooth="0.5").alpha == 0.5
    invoke("calibrate", "--from", "reports/run", "--method", "entropy")
    assert pipelines.last() == CalibrateJob(from_run="reports/run", method="entropy")
    invoke(
        "calibrate", "m", "--weights", "group:64", "--weight-method", "upper-percentile:99",
        "--weight-bits", "4",
    )  # fmt: skip
    assert pipelines.last() == CalibrateJob(
        model="m", weights="group:64", weight_method="upper-percentile:99", weight_bits=4
    )
    invoke("compare", "a", "b", "--text", "t.txt", "--eval-samples", "2")
    assert pipelines.last() == CompareJob(models=("a", "b"), text="t.txt", eval_samples=2)
    invoke(
        "compare", "a", "--task", "perplexity,needles", "--items", "9", "--range",
        "dynamic,static", "--paper",
    )  # fmt: skip
    assert pipelines.last() == CompareJob(
        models=("a",), tasks=("perplexity", "needles"), items=9, range=("dynamic", "static"),
        both_readings=True,
    )  # fmt: skip


def test_compare_without_a_model_is_of_the_shipped_pair(pipelines: Any, invoke: Invoke) -> None:
    invoke("compare")
    assert pipelines.last() == CompareJob.of_pair()
    invoke("compare", "--bits", "16,4", "--task", "perplexity", "--eval-samples", "3")
    given = CompareJob.of_pair(bits=(16, 4), tasks=("perplexity",), eval_samples=3)
    assert pipelines.last() == given
    # what is given wins, also where it is what models that are named have by default
    invoke("compare", "--items", "200", "--range", "dynamic", "--text", "pydoc")
    job = pipelines.last()
    assert job == CompareJob.of_pair(items=200, range=("dynamic",), text="pydoc")
    assert (job.items, job.range, job.text, job.bits) == (  # type: ignore[attr-defined]
        200, ("dynamic",), "pydoc", PAIR_DEFAULTS["bits"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("command", "title"),
    [
        ("stats", "Table 5"), ("calibrate", "Calibrated ranges"), ("sweep", "Sweep:"),
        ("export", "Exports"),
    ],
)  # fmt: skip
def test_results_go_to_stdout_and_talk_to_stderr(
    command: str, title: str, pipelines: Any, invoke: Invoke
) -> None:
    code, out, err = invoke(command, "m")
    assert code == 0
    assert title in out
    assert err == (f"loading the model (0/2)\nloading the model (2/2)\ndone: {pipelines.folder}\n")


def test_compare_prints_both_tables_and_writes_the_report(pipelines: Any, invoke: Invoke) -> None:
    code, out, _ = invoke("compare", "a", "b")
    assert code == 0
    pages = ("report.html", "report.md")
    for words in (
        "Table 5",
        "perplexity by bits",
        *(str(pipelines.folder / page) for page in pages),
    ):
        assert words in out
    assert (pipelines.folder / "report.html").is_file()


def test_json_is_the_result_file(pipelines: Any, invoke: Invoke) -> None:
    code, out, _ = invoke("stats", "m", "--json")
    assert code == 0
    assert out == (V1 / "base/stats.json").read_text()
    _, out, _ = invoke("compare", "m", "--json", "--quiet")
    assert {"sweep.json", "base/stats.json", "diff/stats.json"} <= set(json.loads(out))


def test_quiet_says_nothing(pipelines: Any, invoke: Invoke) -> None:
    assert invoke("sweep", "m", "--quiet") == (0, "", "")


def test_a_failed_gate_exits_1_and_still_shows_the_result(
    pipelines: Any, tmp_path: Path, invoke: Invoke
) -> None:
    pipelines.error = GateError("cosine 0.5 is below\n0.999")
    code, out, err = invoke("export", "m", "--out", str(tmp_path / "x"), "--json")
    assert code == 1
    assert json.loads(out)["schema"] == "quantkit.export/1"
    assert err.endswith("error: cosine 0.5 is below 0.999\n")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        pytest.param(InputError("bad"), 2, "error: bad\n", id="input"),
        pytest.param(KeyboardInterrupt(), 130, "finished work is kept", id="interrupt"),
        pytest.param(FileNotFoundError(2, "No such file", "x"), 2, "x: No such file", id="os"),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, said: str, pipelines: Any, invoke: Invoke
) -> None:
    pipelines.error = error
    found, out, err = invoke("stats", "m")
    assert (found, out) == (code, "")
    assert said in err.splitlines(keepends=True)[-1]


def test_a_bug_is_not_hidden(pipelines: Any, invoke: Invoke) -> None:
    pipelines.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        invoke("stats", "m")


def test_report(tmp_path: Path, invoke: Invoke) -> None:
    shutil.copytree(V1, tmp_path / "run")
    code, out, _ = invoke("report", str(tmp_path / "run"))
    assert code == 0
    html, twin = map(Path, out.split())
    figures = list((tmp_path / "run" / "figures").iterdir())
    assert (html, twin) == (tmp_path / "run" / "report.html", tmp_path / "run" / "report.md")
    assert figures and {path.suffix for path in figures} == {".svg"}
    assert all(path.is_file() for path in (html, twin, *figures))
    code, out, _ = invoke(
        "report", str(V1 / "base"), str(V1 / "diff"), "--out", str(tmp_path / "both"), "--quiet"
    )
    assert (code, out) == (0, "")
    assert (tmp_path / "both" / "report.md").is_file()


@pytest.mark.parametrize("arguments", [["--help"], ["doctor"], ["report", str(V1)]])
def test_light_commands_load_no_heavy_package(arguments: list[str], tmp_path: Path) -> None:
    if arguments[0] == "report":
        arguments = [*arguments, "--out", str(tmp_path)]
    program = (
        "import sys\nfrom quantkit.cli import app\n"
        f"try:\n    app({arguments!r})\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "heavy = {'torch', 'transformers', 'onnx', 'onnxruntime', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_json_of_several_files_holds_the_curves_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """curves.jsonl is one object a line, not JSON itself."""
    curves = [{"schema": "quantkit.curves/1"}, {"step": 1, "loss": 2.5}]
    (tmp_path / "diff").mkdir()
    text = "".join(f"{json.dumps(line)}\n" for line in curves)
    (tmp_path / "diff" / "curves.jsonl").write_text(text)
    (tmp_path / "stats.json").write_text('{"a": 1}')
    show(tmp_path, result=None, view=lambda folder: "unseen", as_json=True, quiet=True)
    out, err = capsys.readouterr()
    assert (json.loads(out), err) == ({"stats.json": {"a": 1}, "diff/curves.jsonl": curves}, "")
