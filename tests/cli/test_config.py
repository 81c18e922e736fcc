"""`--config`: a run's config.toml is the job again; a wrong file is answered with one line."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.cli.pages import all_pages
from quantkit.jobs import (
    CalibrateJob,
    CompareJob,
    DiagnoseJob,
    ExportJob,
    PairSpec,
    SensitivityJob,
    StatsJob,
    SweepJob,
    TrainJob,
)
from quantkit.jobs.config_file import option_of
from quantkit.pipelines.runs import open_run

Invoke = Callable[..., tuple[int, str, str]]
PAGES = dict(all_pages())
ODD = 'a "b"\\c, ü\t#.txt'
"""A path with everything that a shell, TOML or a list between commas could stumble on."""

JOBS: dict[str, Any] = {
    "stats": StatsJob(models=("m",)),
    "stats, all of it": StatsJob(
        models=(ODD, "n"), data=ODD, seq_len=32, samples=3, batch_size=1, dtype="bfloat16",
        device_map="auto", max_memory=("cpu=1GB", "0=2GiB"), bos="never", count_masked=True,
        both_readings=True, points=("mlp_input", "linear_input"), quantiles=(0.1, 1 / 3), rows=0,
        seed=7, layers=("a.*", "b,c"), linear=("x,y",), allow_unseen=("e.*",),
    ),
    "stats, no points": StatsJob(models=("m",), points=(), quantiles=()),
    "calibrate": CalibrateJob(model="m"),
    "calibrate, all of it": CalibrateJob(
        model=ODD, calib=ODD, seq_len=32, samples=3, batch_size=1, dtype="float16", bos="always",
        method="mse,attention_key=minmax", points=("linear_input", "attention_key"), bits=(8, 4),
        symmetric=("attention_key",), granularity="tensor", exclude_first=True, smooth="0.5",
        until_stable=0.013, weights="group:64", weight_method="mse", weight_bits=4,
        allow=("zero", "mask"), allow_unseen=("e.*",),
    ),
    "calibrate, from a run": CalibrateJob(from_run=ODD, symmetric=()),
    "sensitivity": SensitivityJob(model="m", ranges="r"),
    "sensitivity, all of it": SensitivityJob(
        model=ODD, ranges=ODD, recipe="w8a8+logits6:head:static", eval=ODD, seq_len=32, samples=3,
        batch_size=1, dtype="float16", modes=("enable-one",), group="layer", weights=True,
        target_frac=0.25, allow_overlap=True,
    ),
    "sweep": SweepJob(models=("m",)),
    "sweep, all of it": SweepJob(
        models=("a=m", "a=n"), tasks=(f"multiple-choice={ODD}", "perplexity", "needles:queries=1"),
        eval=ODD, calib=None, recipes=("w8a8:token", "nf4"), keep=("a/b", "c"),
        allow_overlap=True, bits=(16, 4), granularity=("row",), grid=("symmetric", "asymmetric"),
        seq_len=32, samples=3, items=5, calib_samples=0, batch_size=1, dtype="float16",
        bos="never", seed=9,
    ),
    "sweep, of ranges": SweepJob(
        models=("m",), ranges=(ODD,), range=("dynamic", "static"), granularity=("head",)
    ),
    "export": ExportJob(model="m"),
    "export, all of it": ExportJob(
        model=ODD, recipe="w4:group32", calib=ODD, eval=ODD, seq_len=32, samples=3, eval_samples=2,
        batch_size=1, bos="never", opset=22, attention_bits=8, storage="qdq", layout="optimum",
        method="mse", keep=("a/b", "c"), allow_overlap=True, seed=9,
    ),
    "export, auto": ExportJob(
        model="m", recipe="auto", max_drop=0.017, task="icl:shots=8", search_samples=3
    ),
    "export, of ranges": ExportJob(model="m", ranges=ODD),
    "export, of a graph": ExportJob(model="m.onnx", tokenizer=ODD),
    "diagnose": DiagnoseJob(float_graph="a.onnx", quantized_graph="b.onnx"),
    "diagnose, all of it": DiagnoseJob(
        float_graph=f"{ODD}.onnx", quantized_graph="b.onnx", calib=ODD, tokenizer=ODD, seq_len=32,
        samples=3, bos="never", measure=0, alone_samples=2,
    ),
    "compare": CompareJob(models=("m",)),
    "compare, the pair": CompareJob.of_pair(),
    "compare, all of it": CompareJob(
        models=("a=m", "n"), text=ODD, seq_len=32, calib_samples=3, eval_samples=2, batch_size=1,
        bos="never", both_readings=True, tasks=("perplexity", "icl"), items=5, bits=(16, 4),
        granularity=("head",), range=("dynamic", "static"), recipe="w8", attention_bits=8,
        opset=22, seed=9,
    ),
    "train": TrainJob(pair=PairSpec.read("pair")),
    "train, seeds": TrainJob(pair=PairSpec.read("seeds")),
}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_the_config_of_a_run_is_the_job_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    command = name.split(",")[0]
    job = dataclasses.replace(JOBS[name], out="here/and there")
    folder = open_run(command, job).folder
    # looked up only now: what stands in for the pipelines also hides the run folders
    pipelines, invoke = (request.getfixturevalue(what) for what in ("pipelines", "invoke"))
    pipelines.error = KeyboardInterrupt()
    config = str(folder / "config.toml")
    words = ("train", config, "--out", job.out) if command == "train" else (
        command, "--config", config)  # fmt: skip

    code, _, err = invoke(*words)

    assert code == 130, err
    assert pipelines.last() == job


FIXED = {"export": ("device", "dtype"), "compare": ("device", "dtype")}
"""Fields that can have but one value now."""


@pytest.mark.parametrize("kind", sorted({type(job) for job in JOBS.values()}, key=str))
def test_no_field_is_forgotten(kind: type) -> None:
    """Every field has an option, and takes another value than its default in one job above."""
    command = kind.__name__.removesuffix("Job").lower()
    jobs = [job for job in JOBS.values() if type(job) is kind]
    names = {
        name.strip().removeprefix("--")
        for _, rows in PAGES[f"quantkit {command}"].panels
        for row in rows
        for name in row.name.split(",")
    }
    arguments = {"model", "pair", "float-graph", "quantized-graph"}
    for field in dataclasses.fields(kind):
        option = {"arms": "arm"}.get(field.name, option_of(field.name))
        assert option in names | arguments, f"{field.name} has no option"
        if field.name not in ("out", "force", "arms", *FIXED.get(command, ("device",))):
            assert any(getattr(job, field.name) != field.default for job in jobs), field.name


def write(path: Path, text: str, command: str = "stats") -> str:
    path.write_text(f'schema = "quantkit.config/1"\ncommand = "{command}"\n{text}')
    return str(path)


def test_what_is_typed_wins(pipelines: Any, invoke: Invoke, tmp_path: Path) -> None:
    text = 'model = ["a", "b"]\nseq-len = 64\nquantiles = "0.5"\npaper = true\ntext = "t.txt"\n'
    config = write(tmp_path / "c.toml", text)
    assert invoke("stats", "--config", config, "--seq-len", "32", "--data", "u.txt")[0] == 0
    assert pipelines.last() == StatsJob(
        models=("a", "b"), seq_len=32, quantiles=(0.5,), both_readings=True, data="u.txt"
    )
    invoke("stats", "c", "--config", config)
    assert pipelines.last() == StatsJob(
        models=("c",), seq_len=64, quantiles=(0.5,), both_readings=True, data="t.txt"
    )


def test_options_of_the_pair_come_from_a_file(
    pipelines: Any, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands in the file counts as typed: it wins over what the pair comes with."""
    monkeypatch.setattr("quantkit.cli.compare.write_report", lambda *_: ())
    config = write(tmp_path / "c.toml", 'items = 200\nrange = ["dynamic"]\n', "compare")
    assert invoke("compare", "--config", config)[0] == 0
    assert pipelines.last() == CompareJob.of_pair(items=200, range=("dynamic",))


def test_commands_without_a_job_take_a_config_too(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("Once upon a time. " * 400)
    text = 'name = "mine"\nfrom = "t.txt"\nlicence = "MIT"\ncopy = true\n'
    config = write(tmp_path / "c.toml", text, "calib make")
    code, _, err = invoke("calib", "make", "--config", config)
    assert (code, err) == (0, "")
    with (tmp_path / "calib/mine/manifest.toml").open("rb") as file:
        assert tomllib.load(file)["licence"] == "MIT"
    calls: list[Any] = []
    monkeypatch.setattr(
        "quantkit.cli.report.write_report",
        lambda runs, out, against: calls.append((runs, out, against)) or (),
    )
    text = 'run = ["a", "b"]\nagainst = "old"\nout = "here"\n'
    assert invoke("report", "--config", write(tmp_path / "r", text, "report"))[0] == 0
    assert calls == [([Path("a"), Path("b")], Path("here"), Path("old"))]


HEAD = 'schema = "quantkit.config/1"\ncommand = "stats"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(None, "cannot read", id="no file"),
        pytest.param("schema = ", "line 1", id="no TOML"),
        pytest.param(f"{HEAD}model = 'm'\nmodel = 'n'\n", "line 4", id="a key twice"),
        pytest.param(b"\xff", "is not TOML", id="no text"),
        pytest.param("command = 'stats'", "schema", id="no schema"),
        pytest.param(
            "schema = 'quantkit.config/2'\ncommand = 'stats'", "quantkit.config/1", id="newer"
        ),
        pytest.param(
            'schema = "quantkit.config/1"\ncommand = "sweep"', 'command = "stats"', id="other"
        ),
        pytest.param('schema = "quantkit.config/1"\nmodel = "m"', "command", id="no command"),
        pytest.param(f"{HEAD}seqlen = 3", "Did you mean 'seq-len'", id="unknown key"),
        pytest.param(f"{HEAD}config = 'x'", "unknown key 'config'", id="a config in a config"),
        pytest.param(f"{HEAD}[data]\na = 1", "data: expected one string", id="a table"),
        pytest.param(f"{HEAD}data = 'a'\ntext = 'b'", "says again", id="two names of one"),
        pytest.param(f"{HEAD}paper = 'yes'", "expected true or false", id="no flag"),
        pytest.param(f"{HEAD}model = 'm'\nseq-len = true", "one string or number", id="a flag"),
        pytest.param(f"{HEAD}model = 'm'\nseq-len = 'many'", "--seq-len", id="no number"),
        pytest.param(f"{HEAD}model = 'm'\nseq-len = [3, 4]", "one string", id="list of one"),
        pytest.param(f"{HEAD}points = []", "a list of them", id="empty list"),
        pytest.param(f"{HEAD}points = [true]", "a list of them", id="list of flags"),
        pytest.param(f"{HEAD}model = []", "a list of them", id="no models"),
        pytest.param(f"{HEAD}model = 1979-05-27", "expected a string", id="a date"),
        pytest.param(f"{HEAD}model = 'm'\npoints = ['q']", "--points does not take", id="word"),
        pytest.param(HEAD, "Missing argument 'MODEL'", id="no model at all"),
        pytest.param(f"{HEAD}x = {'[' * 3000}", "not TOML", id="too deep"),
    ],
)
def test_a_wrong_file_takes_one_line(
    text: str | bytes | None, said: str, invoke: Invoke, tmp_path: Path
) -> None:
    path = tmp_path / "c.toml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    code, out, err = invoke("stats", "--config", str(path))
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: [^\n]+\n", err), err
    assert said in err


def test_a_run_says_where_it_is_and_not_to_replace(tmp_path: Path) -> None:
    """`force` was said of that day's folder; the file must not say it again."""
    job = StatsJob(models=("./m",), data="../t.txt", out=str(tmp_path / "run"), force=True)
    folder = open_run("stats", job).folder
    with (folder / "config.toml").open("rb") as file:
        saved = tomllib.load(file)
    assert "force" not in saved
    assert (saved["model"], saved["data"], saved["out"]) == (["./m"], "../t.txt", job.out)
    assert list(saved)[:2] == ["schema", "command"]
