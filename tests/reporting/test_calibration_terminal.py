"""What `quantkit calibrate` prints."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from quantkit.reporting import calibration_text, ranges_text
from quantkit.results import Calibration, Ranges, write_json

RESULTS = Path(__file__).parent.parent / "results" / "fixtures"


def printed(folder: Path, *results: Calibration | Ranges) -> str:
    for result in results:
        name = "calibration.json" if isinstance(result, Calibration) else "ranges.json"
        write_json(folder / name, result)
    return calibration_text(folder)


def rows_of(text: str) -> list[list[str]]:
    """The rows of the table of worst tensors, as cells."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("---"))
    stop = next(i for i, line in enumerate(lines) if i > start and line.startswith("wasted:"))
    return [line.split() for line in lines[start + 1 : stop]]


def test_ten_worst_tensors_in_100_columns(calibration: Calibration, tmp_path: Path) -> None:
    text = printed(tmp_path, calibration)
    assert max(map(len, text.splitlines())) <= 100
    rows = rows_of(text)
    assert [row[0] for row in rows] == [t.name for t in calibration.tensors[:10]]
    for row, tensor in zip(rows, calibration.tensors, strict=False):
        ours = tensor.methods[0]
        assert float(row[1]) == pytest.approx(ours.lo, rel=1e-3)
        assert float(row[3]) == pytest.approx(ours.hi, rel=1e-3)
        assert float(row[-1]) == pytest.approx(ours.inlier_sqnr_db, abs=0.06)
        assert float(row[-2]) == pytest.approx(ours.sqnr_db, abs=0.06)


def test_header_stability_and_warnings(calibration: Calibration, tmp_path: Path) -> None:
    text = " ".join(printed(tmp_path, calibration).split())
    assert text.startswith("base: 8 blocks of 512 tokens of pydoc; 22 tensors at 3 points; ")
    assert (
        "compared at 8 bits: minmax, upper-percentile:99.95, mse, entropy, two-sided-percentile."
        in text
    )
    assert "Ranges moved at most 2.40 % (median 0 %) over the last quarter" in text
    assert "WARNING base: 8 samples are fewer than the usual 128 of text." in text
    assert "another method has" not in text.lower()


def test_methods_are_compared_by_the_error_of_all_elements(
    calibration: Calibration, tmp_path: Path
) -> None:
    """Not by that of the inliers, where whoever clips most would win."""
    better = {"mse": 3, "entropy": 1}
    names = [method for method, count in better.items() for _ in range(count)]
    tensors = list(calibration.tensors)
    for index, name in enumerate(names):
        methods = [
            dataclasses.replace(m, sqnr_db=90.0 if m.method == name else m.sqnr_db)
            for m in tensors[index].methods
        ]
        tensors[index] = dataclasses.replace(tensors[index], methods=methods)
    text = printed(tmp_path, dataclasses.replace(calibration, tensors=tensors))
    words = " ".join(text.split())
    assert "Another method has a higher SQNR in 4 of 22 tensors: mse 3, entropy 1." in words
    assert "no reason to clip" in words


def test_ranges_beside_it_add_smoothing_guards_and_the_target(
    calibration: Calibration, ranges3: Ranges, tmp_path: Path
) -> None:
    text = printed(tmp_path, calibration, ranges3)
    assert max(map(len, text.splitlines())) <= 100
    for words in (
        "3 smoothing groups, alpha 0.25 .. 0.75; expected error 0.002000 instead of 0.04000",
        "Weights: mse at 4 bits by group:64; SQNR median 19.0 -> 21.0 dB (absmax -> chosen), worst",
        "NOT reached at 128 samples", "unseen 2, constant 1", "WARNING base: model.layers.3",
    ):  # fmt: skip
        assert words in text


def test_long_and_hostile_names_keep_their_ends(calibration: Calibration, tmp_path: Path) -> None:
    deep = "linear_input/" + "model.vision\x1b[31m_tower." * 8 + "encoder.layers.17.mlp.down_proj"
    tensors = [
        dataclasses.replace(t, name=deep, chosen=t.methods[i % 2].method)
        for i, t in enumerate(calibration.tensors)
    ]
    warnings = [f"warning {i} " + "of many words " * 20 for i in range(14)]
    text = printed(tmp_path, dataclasses.replace(calibration, tensors=tensors, warnings=warnings))
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text
    rows = [line for line in text.splitlines() if line.startswith("linear_input/...")]
    assert len(rows) == 10
    levels = sorted((t.methods[i % 2].inlier_sqnr_db, t.chosen) for i, t in enumerate(tensors[:-1]))
    for line, (level, method) in zip(rows, levels, strict=False):
        assert ".17.mlp.down_proj " in line
        assert f" {method.partition(':')[0]} " in line
        assert line.endswith(f" {level:.1f}")
    assert "and 4 more warnings" in text


def test_runs_without_a_calibration_show_their_ranges(ranges3: Ranges, tmp_path: Path) -> None:
    for version in ("v1", "v2"):
        folder = tmp_path / version
        folder.mkdir()
        shutil.copy(RESULTS / version / "base" / "ranges.json", folder)
        text = calibration_text(folder)
        assert text == ranges_text(folder)
        assert "12.25" in text
    text = printed(tmp_path / "new", ranges3)
    assert "Calibrated ranges" in text
    assert max(map(len, text.splitlines())) <= 100


def test_nothing_is_printed_where_there_is_neither(tmp_path: Path) -> None:
    shutil.copy(RESULTS / "v1" / "base" / "stats.json", tmp_path)
    assert calibration_text(tmp_path) == ""


def test_a_calibration_without_tensors_or_stability(
    calibration: Calibration, tmp_path: Path
) -> None:
    empty = dataclasses.replace(calibration, tensors=[], stability=[])
    text = printed(tmp_path, empty)
    assert "0 tensors at 0 points" in text
    assert "was not measured" in text
    assert "worst tensors" not in text
