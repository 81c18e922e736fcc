"""Kind 6: any name of a file, and places that cannot be written to or are full.

Every stage that writes says it in one line, exit code 2; what stood there before stands there still
and is whole; nothing half-written has a name that is read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from quantkit.errors import InputError
from quantkit.exporting.companions import save_companions
from quantkit.exporting.graphs import load_graph, save_graph
from quantkit.jobs import StatsJob
from quantkit.models import load
from quantkit.pipelines import run_stats
from quantkit.results import Stats, read_json
from tests.conftest import byte_tokenizer, make_tiny
from tests.reliability.graph_makers import ROWS, saved, two_layers
from tests.reliability.one_line import contents, no_file_above, ran, refused, without_network

kind = pytest.mark.kind
FEW = ("--seq-len", 8, "--samples", 2, "-q")
NAMES = {
    "spaces": "a  b ",
    "letters outside of ASCII": "ünï 日本",
    "a hash": "a#b?c",
    "per cent": "100%d%s%20",
    "a new line": "a\nb",
    "a leading dash": "-x",
    "quotes": "a'b\"c`",
    "brackets": "{x}[0]*",
    "255 bytes": "n" * 255,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a text, two graphs and samples, and what two stages make of them."""
    folder = tmp_path_factory.mktemp("made")
    make_tiny(LlamaForCausalLM, LlamaConfig, num_hidden_layers=1).save_pretrained(folder / "tiny")
    byte_tokenizer(add_bos=False).save_pretrained(folder / "tiny")
    (folder / "text.txt").write_text("A loop repeats a statement. " * 99, encoding="utf-8")
    saved(two_layers(), folder / "float.onnx")
    np.savez(folder / "x.npz", x=ROWS)
    with pytest.MonkeyPatch.context() as patch:
        without_network(patch)
        ran(*line("export", folder), "--out", folder / "graph")
        shutil.copytree(folder / "graph", folder / "int8")
        ran(*line("calibrate", folder), "--out", folder / "ranges")
        ran(*line("stats", folder), "--out", folder / "stats")
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    without_network(monkeypatch)


def line(stage: str, folder: Path) -> tuple[object, ...]:
    """Returns the command line of a stage on what lies in a folder, without its --out."""
    model, text, graph = folder / "tiny", folder / "text.txt", folder / "float.onnx"
    samples = ("--calib", folder / "x.npz")
    lines: dict[str, tuple[object, ...]] = {
        "stats": ("stats", model, "--text", text, *FEW),
        "calibrate": ("calibrate", model, "--calib", text, *FEW),
        "sensitivity": ("sensitivity", model, "--ranges", folder / "ranges", "--eval", text, *FEW),
        "sweep": ("sweep", model, "--eval", text, "--bits", "16,4", "--granularity", "row", *FEW),
        "export": ("export", graph, *samples, "--samples", 8, "--eval-samples", 2, "-q"),
        "auto": ("export", model, "--quantize", "auto", "--max-drop", "2%", "--calib", text, "-q"),
        "diagnose": ("diagnose", graph, folder / "int8" / "model.onnx", *samples, "-q"),
        "compare": ("compare", model, "--text", text, "--seq-len", 8, "-q"),
        "report": ("report", folder / "stats", "-q"),
    }
    return lines[stage]


def stages(*names: str) -> list[Any]:
    return [pytest.param(name, marks=kind(6, name), id=name) for name in names]


ALL = ("stats", "calibrate", "sensitivity", "sweep", "export", "auto", "diagnose", "compare")


@kind(6, "export", "diagnose", "cli")
@pytest.mark.parametrize("name", NAMES)
def test_any_name_does_for_graphs_read_and_written(name: str, made: Path, tmp_path: Path) -> None:
    folder = tmp_path / NAMES[name]
    shutil.copytree(made / "int8", folder / "int8")
    for each in ("float.onnx", "x.npz"):
        shutil.copy(made / each, folder)
    for stage in ("export", "diagnose"):
        ran(*line(stage, folder), "--out", folder / NAMES[name] / stage)
    written = folder / NAMES[name] / "export" / "model.onnx"
    assert written.read_bytes() == (made / "graph" / "model.onnx").read_bytes()


@kind(6, "stats", "models")
@pytest.mark.parametrize("name", ["letters outside of ASCII", "per cent", "a new line"])
def test_any_name_does_for_a_model(name: str, made: Path, tmp_path: Path) -> None:
    folder = tmp_path / NAMES[name]
    shutil.copytree(made / "tiny", folder / "tiny")
    shutil.copy(made / "text.txt", folder)
    ran(*line("stats", folder), "--out", folder / NAMES[name])
    ours, theirs = (
        read_json(x / "stats.json", Stats) for x in (folder / NAMES[name], made / "stats")
    )
    assert ours.summary == theirs.summary


@kind(6, "export", "cli")
@pytest.mark.parametrize("name", ["a leading dash", "a new line", "a hash"])
def test_any_name_is_given_by_itself(
    name: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    word = NAMES[name]
    shutil.copy(made / "float.onnx", f"{word}.onnx")
    few = ("--samples", 8, "--eval-samples", 2, "-q")
    ran("export", "--calib", made / "x.npz", *few, f"--out={word}", "--", f"{word}.onnx")
    assert (Path(word) / "model.onnx").is_file()


def under_a_file(folder: Path) -> Path:
    (folder / "file").write_text("mine")
    return folder / "file" / "out"


def a_file(folder: Path) -> Path:
    (folder / "file").write_text("mine")
    return folder / "file"


def a_link_to_a_file(folder: Path) -> Path:
    (folder / "link").symlink_to(a_file(folder))
    return folder / "link"


def a_link_to_nothing(folder: Path) -> Path:
    (folder / "link").symlink_to(folder / "none" / "there")
    return folder / "link"


def a_link_to_itself(folder: Path) -> Path:
    (folder / "link").symlink_to(folder / "link")
    return folder / "link"


def a_name_too_long(folder: Path) -> Path:
    return folder / ("n" * 256)


def read_only(_: Path) -> Path:
    """Nobody, root included, can make a folder in the kernel's own file system."""
    return Path("/sys/quantkit")


def a_folder_of_somebody(folder: Path) -> Path:
    (folder / "theirs").mkdir()
    (folder / "theirs" / "thesis.tex").write_text("mine")
    return folder / "theirs"


PLACES = (under_a_file, a_link_to_nothing, read_only, a_folder_of_somebody)
MORE = (a_file, a_link_to_a_file, a_link_to_itself, a_name_too_long)


@pytest.mark.parametrize(
    ("stage", "place"),
    [
        pytest.param(stage, place, marks=kind(6, stage), id=f"{stage}-{place.__name__}")
        for stage in ALL
        for place in PLACES + (MORE if stage == "stats" else ())
    ],
)
def test_a_place_that_cannot_be_written_to(
    stage: str, place: Callable[[Path], Path], made: Path, tmp_path: Path
) -> None:
    """Before anything is loaded or computed."""
    out = place(tmp_path)
    before = contents(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert str(out.name)[:200] in refused(*line(stage, made), "--out", out)
    assert contents(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@kind(6, "report")
def test_a_report_that_cannot_be_written(made: Path, tmp_path: Path) -> None:
    assert "cannot write" in refused(*line("report", made), "--out", read_only(tmp_path))


@kind(6, "report")
def test_a_full_disk_leaves_the_old_report(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "figures").mkdir(parents=True)
    for name in ("report.html", "report.md", "figures/sink-rate-by-layer-and-head-tiny.svg"):
        (out / name).write_text("of yesterday")
    before = contents(out)
    with no_file_above(3000):
        assert "File too large" in refused(*line("report", made), "--out", out)
    assert contents(out) == before


@pytest.mark.parametrize("stage", stages("stats", "calibrate", "sensitivity", "export", "diagnose"))
def test_a_full_disk_is_one_line_and_the_same_command_goes_on(
    stage: str, made: Path, tmp_path: Path
) -> None:
    """The folder's own small files fit, and the result does not."""
    out = tmp_path / "out"
    with no_file_above(2500):
        said = refused(*line(stage, made), "--out", out)
    assert "cannot write" in said and "File too large" in said
    for path in out.rglob("*"):  # what has a name is whole, and nothing is left that has none
        assert not path.name.startswith("."), path
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
    ran(*line(stage, made), "--out", out)
    assert json.loads((out / "run.json").read_text(encoding="utf-8"))["finished"]


@kind(6, "sweep")
def test_a_full_disk_in_a_sweep_keeps_its_cells(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with no_file_above(2500):
        said = refused(*line("sweep", made), "--out", out)
    assert "cannot write" in said
    kept = {name: data for name, data in contents(out).items() if name.startswith("cells/")}
    ran(*line("sweep", made), "--out", out)
    assert kept.items() <= contents(out).items()


@kind(6, "export")
@pytest.mark.parametrize("limit", [0, 150], ids=["at once", "midway"])
def test_a_full_disk_leaves_the_old_graph(limit: int, made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    save_graph(load_graph(made / "float.onnx"), folder)
    before = contents(tmp_path)
    with no_file_above(limit), pytest.raises(InputError, match=r"cannot write .*File too large"):
        save_graph(load_graph(made / "graph" / "model.onnx"), folder)
    assert contents(tmp_path) == before
    ort.InferenceSession(folder / "model.onnx")


@kind(6, "export")
def test_a_full_disk_leaves_the_old_config_and_tokenizer(made: Path, tmp_path: Path) -> None:
    loaded = load(str(made / "tiny"))
    save_companions(loaded, tmp_path / "out")
    before = contents(tmp_path)
    with no_file_above(500), pytest.raises(InputError, match="cannot write"):
        save_companions(loaded, tmp_path / "out")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("stage", stages("stats", "export", "diagnose"))
def test_a_link_to_a_folder_stays_one(stage: str, made: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    ran(*line(stage, made), "--out", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "run.json").is_file()


@kind(6, "stats")
def test_output_inside_of_the_model_changes_nothing_of_it(made: Path, tmp_path: Path) -> None:
    """Also not its hash: the second time the run is known as done."""
    shutil.copytree(made / "tiny", tmp_path / "tiny")
    shutil.copy(made / "text.txt", tmp_path)
    before = contents(tmp_path / "tiny")
    out = tmp_path / "tiny" / "out"
    ran(*line("stats", tmp_path), "--out", out)
    after = contents(tmp_path / "tiny")
    assert before.items() <= after.items()
    ran(*line("stats", tmp_path), "--out", out)
    assert contents(tmp_path / "tiny") == after


@kind(6, "stats")
def test_output_inside_of_a_folder_of_texts_is_not_read_as_one(made: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(3):
        (texts / f"{number}.txt").write_text("A loop repeats. " * 9)
    words = ("stats", made / "tiny", "--text", texts, "--seq-len", 8, "--samples", 3, "-q")
    ran(*words, "--out", texts / "out")
    ran(*words, "--out", tmp_path / "again")
    first, second = (
        read_json(folder / "stats.json", Stats) for folder in (texts / "out", tmp_path / "again")
    )
    assert first.data == second.data
    assert first.summary == second.summary


@pytest.mark.parametrize("stage", stages("stats", "export"))
def test_output_that_is_the_input_is_refused(stage: str, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "tiny", tmp_path / "tiny")
    shutil.copy(made / "text.txt", tmp_path)
    for name in ("float.onnx", "x.npz"):
        shutil.copy(made / name, tmp_path)
    before = contents(tmp_path)
    out = tmp_path / "tiny" if stage == "stats" else tmp_path
    assert "nothing in it is touched" in refused(*line(stage, tmp_path), "--out", out)
    assert contents(tmp_path) == before


@kind(6, "stats", "api")
@pytest.mark.parametrize("samples", [2, 3], ids=["the same command", "another one"])
def test_a_second_command_in_the_same_folder(samples: int, made: Path, tmp_path: Path) -> None:
    """It begins while the first one computes: it does the same work, or is refused."""
    job = StatsJob(
        models=(str(made / "tiny"),), data=str(made / "text.txt"), seq_len=8, samples=2,
        out=str(tmp_path / "out"),
    )  # fmt: skip
    said: list[str] = []

    def second(message: str, done: int, total: int) -> None:
        if said:
            return
        said.append("done")
        other = StatsJob(**{**vars(job), "samples": samples})
        try:
            run_stats(other)
        except InputError as error:
            said[0] = str(error)

    run_stats(job, progress=second)
    assert ("done" in said[0]) == (samples == 2)
    assert samples == 2 or "holds another run (stats" in said[0]
    found = read_json(tmp_path / "out" / "stats.json", Stats)
    assert found.data.sequences == 2
    assert sorted(os.listdir(tmp_path / "out")) == ["config.toml", "run.json", "stats.json"]
