"""What a command may remove, and what it says where it cannot write: `--force`, a full disk."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import InputError
from quantkit.jobs import CalibrateJob, DiagnoseJob, ExportJob, PairSpec, SensitivityJob, SweepJob
from quantkit.pipelines import run_calibrate
from quantkit.pipelines.runs import open_run
from quantkit.results import Ranges, read_json
from tests.reliability.one_line import contents, no_file_above, ran, refused, without_network
from tests.training.conftest import PAIR

FILES = (
    "ranges.json", "observations.safetensors", "model.onnx", "model.onnx.data", "config.json",
    "float/model.onnx", "sensitivity.json",
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with files of an earlier run, and a folder and a text of the user's."""
    folder = open_run("export", ExportJob(model="m", out=str(tmp_path / "run"))).folder
    for name in (*FILES, "texts/a.txt", "notes.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    return folder


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "a graph": ("export", lambda f: ExportJob(model=str(f / "model.onnx"), calib="x.npz")),
    "a graph below": ("export", lambda f: ExportJob(model=str(f / "float/model.onnx"), calib="x")),
    "the run as a model": ("export", lambda f: ExportJob(model=str(f))),
    "a link to a graph": ("diagnose", lambda f: DiagnoseJob(
        float_graph=str(f.parent / "link.onnx"), quantized_graph="q.onnx")),
    "observations": ("calibrate", lambda f: CalibrateJob(from_run=str(f))),
    "ranges": ("sensitivity", lambda f: SensitivityJob(model="m", ranges=str(f))),
    "a file of ranges": ("sensitivity", lambda f: SensitivityJob(
        model="m", ranges=str(f / "ranges.json"))),
    "a labelled model": ("sweep", lambda f: SweepJob(models=(f"a={f}",))),
    "what to keep": ("export", lambda f: ExportJob(
        model="m", keep=(str(f / "sensitivity.json"),))),
}  # fmt: skip


@pytest.mark.kind(6, "export", "diagnose", "calibrate", "sensitivity", "sweep")
@pytest.mark.parametrize("reader", READERS)
def test_force_removes_nothing_that_the_command_reads(run: Path, reader: str) -> None:
    (run.parent / "link.onnx").symlink_to(run / "model.onnx")
    command, job_of = READERS[reader]
    before = contents(run)
    job = dataclasses.replace(job_of(run), out=str(run), force=True)
    with pytest.raises(InputError, match=r"--force would remove .*, which this command reads"):
        open_run(command, job)
    assert contents(run) == before


@pytest.mark.kind(6, "sweep", "export")
@pytest.mark.parametrize("read", ["texts", "texts/a.txt", "notes.txt", ".."])
def test_what_is_not_removed_may_be_read(run: Path, read: str) -> None:
    job = ExportJob(model="m", eval=str(run / read), out=str(run), force=True)
    assert not open_run("export", job).finished
    assert set(contents(run)) == {"config.toml", "run.json", "notes.txt", "texts/a.txt"}


@pytest.mark.kind(6, "export")
def test_force_takes_a_link_away_and_not_what_it_leads_to(run: Path) -> None:
    elsewhere = run.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.json").write_text("{}")
    (run / "cells").symlink_to(elsewhere)
    open_run("export", ExportJob(model="m", out=str(run), force=True))
    assert not (run / "cells").is_symlink() and (elsewhere / "mine.json").exists()


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pair of one arm whose files have known sizes: a tokenizer, rows, a larger checkpoint."""
    without_network(monkeypatch)
    prose = tmp_path / "prose"
    prose.mkdir()
    words = "the quick brown fox jumps over a lazy dog while many small birds sing above"
    for number in range(24):
        text = " ".join(f"{word}{number}" for word in words.split() * 60)
        (prose / f"{number:02}.txt").write_text(text, encoding="utf-8")
    path = tmp_path / "tiny.toml"
    text = PAIR.format(arms='"baseline", "diff"', seeds="0", training="", text=prose)
    path.write_text(text.replace("steps = 24", "steps = 8"), encoding="utf-8")
    return path


@pytest.mark.kind(6, "train", "cli")
@pytest.mark.parametrize(
    ("limit", "named"),
    [
        pytest.param(2_000, "data/tokenizer", id="tokenizer"),
        pytest.param(40_000, "data/train.npy", id="rows"),
        pytest.param(250_000, "baseline-seed0", id="checkpoint"),
    ],
)
def test_a_full_disk_is_one_line_of_a_training(
    pair: Path, tmp_path: Path, limit: int, named: str
) -> None:
    out = tmp_path / "out"
    with no_file_above(limit):
        said = refused("train", pair, "-q", "--out", out)
    assert "cannot write" in said and named in said
    assert not list(out.rglob(".*"))  # nothing half-written stays


@pytest.mark.kind(10, "train", "cli")
@pytest.mark.parametrize(
    "line",
    [
        pytest.param("steps = " + "1" * 5000, id="5000 digits"),
        pytest.param("learning_rate = 1" + "0" * 400, id="no float"),
        pytest.param("steps = " + "[" * 5000, id="nested without end"),
    ],
)
def test_a_number_that_is_none_is_one_line(pair: Path, tmp_path: Path, line: str) -> None:
    pair.write_text(pair.read_text().replace("steps = 8", line))
    with pytest.raises(InputError) as caught:
        PairSpec.read(pair)
    assert "\n" not in str(caught.value)
    config = tmp_path / "config.toml"
    config.write_text(f'schema = "quantkit.config/1"\ncommand = "stats"\n{line}\n')
    assert "config.toml" in refused("stats", "m", "--config", config) or "no float" in line


@pytest.mark.kind(8, "calibrate")
def test_ranges_chosen_again_say_that_the_text_has_changed(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_network(monkeypatch)
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40, encoding="utf-8")
    first = tmp_path / "first"
    small = ("--samples", "2", "--seq-len", "16", "-q")
    ran("calibrate", tiny_folder, "--calib", text, *small, "--out", first)

    def warnings(name: str) -> list[str]:
        job = CalibrateJob(from_run=str(first), method="mse", out=str(tmp_path / name))
        return read_json(run_calibrate(job) / "ranges.json", Ranges).warnings

    before = warnings("same")
    text.write_text("Something else stands here now. " * 60, encoding="utf-8")
    later = (first / "observations.safetensors").stat().st_mtime + 10
    os.utime(text, (later, later))
    (more,) = set(warnings("changed")) - set(before)
    assert "changed" in more or "written" in more
