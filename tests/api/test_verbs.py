"""The verbs write what the commands write, say what the files say, and load nothing early."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import quantkit
from quantkit.api import Calibrated, Comparison
from quantkit.cli import app
from quantkit.errors import GateError, InputError
from quantkit.results import Export, Ranges, Result, Stats, Sweep, dumps, read_json
from tests.exporting.planted_graphs import block, quantized, saved

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "onnx", "onnxruntime", "accelerate", "jinja2", "altair")


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own, in the working folder."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def command(*words: object) -> None:
    result = CliRunner().invoke(app, [*map(str, words), "--quiet"], prog_name="quantkit")
    assert result.exit_code == 0, result.output


def same(found: Result, path: Path) -> None:
    """The result is the file, and the verb wrote the same bytes as the command."""
    assert found.folder is not None and found.folder != path.parent
    assert (found.folder / path.name).read_bytes() == path.read_bytes()
    assert dumps(found) == path.read_text(encoding="utf-8")


def test_stats(tiny_folder: Path, text: Path) -> None:
    command("stats", tiny_folder, "--data", text, "--seq-len", 16, "--samples", 3, "--points",
            "none", "--quantiles", "0.5,0.9", "--paper", "--out", "cli")  # fmt: skip
    found = quantkit.stats(
        tiny_folder, text, seq_len=16, samples=3, points=(), quantiles=[0.5, 0.9], paper=True
    )
    same(found, Path("cli/stats.json"))
    folder = found.folder
    assert folder is not None and folder.parent == Path("reports")
    written = (folder / "stats.json").stat().st_mtime_ns
    again = quantkit.stats(
        str(tiny_folder), text, seq_len=16, samples=3, points=(), quantiles=(0.5, 0.9), paper=True
    )
    assert again.folder == folder and (folder / "stats.json").stat().st_mtime_ns == written


def test_calibrate_and_what_reads_its_ranges(tiny_folder: Path, text: Path) -> None:
    shape: Any = {"seq_len": 16, "samples": 3}
    words = ("--seq-len", 16, "--samples", 3)
    command("calibrate", tiny_folder, "--calib", text, *words, "--bits", "8,4", "--method", "mse",
            "--out", "cli")  # fmt: skip
    found = quantkit.calibrate(tiny_folder, text, **shape, bits=(8, 4), method="mse", out="api")
    same(found.ranges, Path("cli/ranges.json"))
    same(found.calibration, Path("cli/calibration.json"))
    assert found.folder == found.ranges.folder == Path("api")

    chosen = quantkit.calibrate(from_run=found, method="minmax")
    assert chosen.ranges.tensors.keys() == found.ranges.tensors.keys()
    assert {kept.method for kept in chosen.ranges.tensors.values()} == {"minmax"}

    command("sensitivity", tiny_folder, "--ranges", "api", "--eval", text, *words, "--remaining",
            "0.4", "--modes", "enable-one", "--out", "s")  # fmt: skip
    ranked = quantkit.sensitivity(
        tiny_folder, found, eval=text, **shape, remaining=0.4, modes="enable-one"
    )
    same(ranked, Path("s/sensitivity.json"))
    assert ranked.ranges == "api"

    command("sweep", tiny_folder, "--ranges", "api", "--keep", "s", "--eval", text, *words,
            "--bits", 16, "--quantize", "w8a8", "--out", "w")  # fmt: skip
    swept = quantkit.sweep(
        tiny_folder, ranges=found, keep=Path("s"), eval=text, **shape, bits=16, quantize="w8a8"
    )
    same(swept, Path("w/sweep.json"))
    assert [cell.recipe for cell in swept.cells if cell.metric == "perplexity"] == ["none", "w8a8"]
    assert swept.kept == ranked.keep != []


def test_export_and_a_gate_that_fails(tiny_folder: Path, text: Path) -> None:
    found = quantkit.export(
        tiny_folder, quantize="w8a8-dynamic", calib=text, eval=text, seq_len=16, samples=2,
        eval_samples=2, out="mine",
    )  # fmt: skip
    assert found.passed and found.folder == Path("mine")
    assert found.files and all((found.folder / file.name).is_file() for file in found.files)
    assert dumps(found) == Path("mine/export.json").read_text(encoding="utf-8")
    loaded = quantkit.load("mine")
    assert isinstance(loaded, Export) and dumps(loaded) == dumps(found)
    plain = json.loads(Path("mine/export.json").read_text(encoding="utf-8"))
    Path("mine/export.json").write_text(json.dumps({**plain, "passed": False}), encoding="utf-8")
    with pytest.raises(GateError):
        quantkit.export(
            tiny_folder, quantize="w8a8-dynamic", calib=text, eval=text, seq_len=16, samples=2,
            eval_samples=2, out="mine",
        )  # fmt: skip


def test_diagnose(tmp_path: Path) -> None:
    made = block()
    np.savez(tmp_path / "x.npz", x=np.concatenate([feeds["x"] for feeds in made.batches]))
    one = saved(made.model, tmp_path / "float.onnx")
    other = saved(quantized(made, made.clean() | {"act": (0.2 / 255, 128)}), tmp_path / "int8.onnx")
    found = quantkit.diagnose(one, other, calib="x.npz")
    assert found.findings[0].kind == "saturation"
    command("diagnose", one, other, "--calib", "x.npz", "--out", "cli")
    same(found, Path("cli/diagnosis.json"))


def test_compare_writes_everything_and_a_report(tiny_folder: Path, text: Path) -> None:
    small: Any = {
        "text": text, "seq_len": 16, "calib_samples": 2, "eval_samples": 2, "bits": (16, 8),
        "granularity": "row", "quantize": "w8a8-dynamic", "out": "both",
    }  # fmt: skip
    found = quantkit.compare(tiny_folder, **small)
    assert found.folder == Path("both")
    assert found.stats["tiny"].folder == Path("both/tiny")
    same_sweep = read_json(Path("both/sweep.json"), Sweep)
    assert dumps(found.sweep) == dumps(same_sweep)
    assert dumps(found.exports["tiny"]) == Path("both/tiny/export.json").read_text("utf-8")
    assert found.report[:2] == (Path("both/report.html"), Path("both/report.md"))
    assert found.training is None
    loaded = quantkit.load("both")
    assert isinstance(loaded, Comparison) and loaded.report == found.report
    page = found._repr_html_()
    top = found.stats["tiny"].summary.attention_logit.abs_top["1"]
    assert f"{top:.3f}"[:4] in page and "perplexity" in page and "every gate met" in page


def test_compare_of_nothing_is_of_the_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    from quantkit import pipelines
    from quantkit.jobs import CompareJob

    seen: list[CompareJob] = []

    def stop(job: CompareJob, **_: object) -> Path:
        seen.append(job)
        raise InputError("stop")

    monkeypatch.setattr(pipelines, "run_compare", stop)
    with pytest.raises(InputError, match="stop"):
        quantkit.compare(items=3, out="x")
    with pytest.raises(InputError, match="stop"):
        quantkit.compare(["a", "b"])
    assert seen == [CompareJob.of_pair(items=3, out="x"), CompareJob(models=("a", "b"))]


def test_train_takes_a_file_and_an_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    from quantkit import pipelines
    from quantkit.jobs import PairSpec, TrainJob

    seen: list[TrainJob] = []

    def stop(job: TrainJob, **_: object) -> Path:
        seen.append(job)
        raise InputError("stop")

    monkeypatch.setattr(pipelines, "run_train", stop)
    spec = PairSpec.read("pair")
    for pair in ("pair", spec):
        with pytest.raises(InputError, match="stop"):
            quantkit.train(pair, arm="diff", out=Path("x"))
    assert seen == [TrainJob(pair=spec, arms=("diff",), out="x")] * 2


def test_a_report_of_results_of_their_folders_and_of_files(tiny_folder: Path, text: Path) -> None:
    one = quantkit.stats(tiny_folder, text, seq_len=16, samples=2, points=())
    other = quantkit.stats(tiny_folder, text, seq_len=16, samples=3, points=())
    assert one.folder is not None and other.folder is not None
    alone = quantkit.report(one)
    assert alone[:2] == (one.folder / "report.html", one.folder / "report.md")
    assert all(path.is_file() for path in alone)
    both = quantkit.report([one, other.folder / "stats.json"], against=one)
    assert both[0] == Path("reports/report/report.html")
    assert quantkit.report(other.folder, "there")[0] == Path("there/report.html")


@pytest.mark.parametrize("name", [name for name in quantkit.__all__ if name != "__version__"])
def test_every_name_says_what_it_is(name: str) -> None:
    said = inspect.getdoc(getattr(quantkit, name))
    assert said is not None and len(said.splitlines()[0]) > 20
    assert said.splitlines()[0].endswith((".", ":")) or said.splitlines()[1:2] != [""]


def test_reading_and_refusing_load_no_heavy_package(tiny_folder: Path, text: Path) -> None:
    quantkit.stats(tiny_folder, text, seq_len=16, samples=2, out="run")
    code = f"""
import sys, quantkit
from quantkit.errors import InputError
stats = quantkit.load("run")
print(stats.model.name, len(stats._repr_html_()) > 500, str(stats.folder))
for verb in quantkit.api.__all__:
    getattr(quantkit, verb, None)
try:
    quantkit.sweep("m", bit=4)
except InputError:
    print(*(name for name in {HEAVY!r} if name in sys.modules))
"""
    done = python(code)
    assert (done.stdout, done.stderr) == ("tiny True run\n\n", "")


def test_a_verb_prints_nothing(tiny_folder: Path, text: Path) -> None:
    code = (
        f"import quantkit; quantkit.stats({str(tiny_folder)!r}, 'text.txt', seq_len=16, samples=2)"
    )
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_types_are_the_results(tiny_folder: Path, text: Path) -> None:
    found = quantkit.calibrate(tiny_folder, text, seq_len=16, samples=2)
    assert isinstance(found, Calibrated) and isinstance(found.ranges, Ranges)
    assert isinstance(quantkit.stats(tiny_folder, text, seq_len=16, samples=2), Stats)
    assert found.calibration.tensors[0].name in found._repr_html_()
