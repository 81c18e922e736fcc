"""`load`: any file or folder by what it says of itself, and why a folder is none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import quantkit
from quantkit.api import Calibrated, Comparison
from quantkit.errors import InputError
from quantkit.results import (
    Calibration,
    Curves,
    CurvesHeader,
    CurveStep,
    Export,
    Ranges,
    Stats,
    Sweep,
    append_curves,
    dumps,
    read_json,
)

V1 = Path(__file__).parents[1] / "results" / "fixtures" / "v1"
FILES: dict[str, type[object]] = {
    "base/stats.json": Stats,
    "base/ranges.json": Ranges,
    "sweep.json": Sweep,
    "base/export.json": Export,
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_what_its_schema_says_whatever_its_name(name: str) -> None:
    shutil.copy(V1 / name, "other-name.json")
    found = quantkit.load("other-name.json")
    assert type(found) is FILES[name]
    assert found.folder == Path()
    assert dumps(found) == dumps(read_json(V1 / name, FILES[name]))


def copied(*names: str, command: str | None = None) -> Path:
    """A folder of its own with these files of the fixtures, and a run's `run.json`."""
    folder = Path("run")
    folder.mkdir()
    for name in names:
        shutil.copy(V1 / name, folder)
    if command is not None:
        (folder / "run.json").write_text(json.dumps({"command": command}), encoding="utf-8")
    return folder


def test_a_folder_of_one_file_is_that_file() -> None:
    assert isinstance(quantkit.load(copied("base/stats.json")), Stats)


def test_of_an_export_the_ranges_beside_it_are_not_meant() -> None:
    folder = copied("base/export.json", "base/ranges.json", command="export")
    assert isinstance(quantkit.load(folder), Export)


def test_a_comparison_has_its_models_in_the_order_of_the_sweep() -> None:
    shutil.copytree(V1, "both")
    found = quantkit.load("both")
    assert isinstance(found, Comparison)
    assert list(found.ranges) == list(found.exports) == ["base"]  # the fixture has no others
    assert list(found.stats) == [model.name for model in found.sweep.models]
    assert found.report == ()


def test_curves_are_read(tmp_path: Path) -> None:
    header = CurvesHeader(
        name="m", architecture="A", parameters=1, layers=1, maps=1, every=1, ranks=1, versions={}
    )
    step = CurveStep(
        step=3, loss=2.5, lr=1e-3, forwards=1, sequences=1, tokens=8, logits=[], hidden=[]
    )
    append_curves(tmp_path / "curves.jsonl", header, step)
    found = quantkit.load(tmp_path)
    assert isinstance(found, Curves) and found.steps == (step,)
    assert found.folder == tmp_path and "2.500" in found._repr_html_()


def test_ranges_without_their_calibration_are_ranges() -> None:
    assert isinstance(quantkit.load(copied("base/ranges.json", command="calibrate")), Ranges)


def test_a_folder_of_both_is_a_calibration(tiny_folder: Path, text: Path) -> None:
    made = quantkit.calibrate(tiny_folder, text, seq_len=16, samples=2, out="c")
    found = quantkit.load("c")
    assert isinstance(found, Calibrated) and found == made
    (Path("c") / "run.json").unlink()
    assert isinstance(quantkit.load("c"), Calibrated)
    assert isinstance(quantkit.load("c/calibration.json"), Calibration)


REFUSED: dict[str, tuple[Callable[[], Path], str]] = {
    "nothing": (lambda: Path("none"), r"^no such file: none\.$"),
    "an empty folder": (lambda: copied(), "^run holds no result file: expected one of "),
    "unfinished": (
        lambda: copied(command="sweep"), "^run holds a run that has not finished: expected one of"
    ),
    "an unfinished comparison": (
        lambda: copied(command="compare"), "^run holds a comparison that has not finished"
    ),
    "two files of no run": (
        lambda: copied("base/stats.json", "base/export.json"),
        r"^run holds stats\.json, export\.json: expected one of them, e\.g\. run/stats\.json\.$",
    ),
    "results of several models": (
        lambda: copied("base/stats.json").rename("one") and Path(),
        r"^\. holds no result itself: expected one below it, one/stats\.json\.$",
    ),
    "another JSON": (
        lambda: copied(command="x") / "run.json", r"^run/run\.json is no result file: expected"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_result_is_said(case: tuple[Callable[[], Path], str]) -> None:
    make, said = case
    path = make()
    with pytest.raises(InputError, match=said):
        quantkit.load(path)
