"""What an export left in float or smoothed, and data that is not held out, are said."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.reporting import export_text, sweep_text, write_report
from quantkit.reporting.collect import Run, collect
from quantkit.reporting.export_tables import kept_table, notes, smoothed_table
from quantkit.reporting.verdict import verdict
from quantkit.results import Export, Stats, Sweep, read_json, write_json
from tests.reporting.drawn import without_names

V3 = Path(__file__).parent.parent / "results" / "fixtures" / "v3"
KEPT = [f"linear_input/model.layers.{i}.mlp.down_proj" for i in (28, 11, 2, 29)]
SMOOTHED = {"model.layers.0.norm": 0.5, "model.layers.1.norm": 0.75, "model.layers.2.norm": 0.25}


def export(**changes: object) -> Export:
    return dataclasses.replace(read_json(V3 / "base/export.json", Export), **changes)  # type: ignore[arg-type]


def test_a_line_each_in_the_terminal(tmp_path: Path) -> None:
    plain = export()
    write_json(tmp_path / "export.json", plain)
    before = export_text(tmp_path)
    write_json(tmp_path / "export.json", export(kept=KEPT, smoothed=SMOOTHED))
    added = [line for line in export_text(tmp_path).splitlines() if line not in before]
    assert added == [
        f"kept in float: 4 quantizers ({KEPT[0]}, {KEPT[1]}, {KEPT[2]} and 1 more)",
        "smoothed: 3 groups, alpha 0.25 .. 0.75",
    ]
    assert "kept in float" not in before and "smoothed" not in before


def test_one_of_each_is_singular(tmp_path: Path) -> None:
    write_json(tmp_path / "export.json", export(kept=KEPT[:1], smoothed={"a": 0.5}))
    assert notes(collect([tmp_path])) == (
        f"kept in float: 1 quantizer ({KEPT[0]})",
        "smoothed: 1 group, alpha 0.50",
    )


def test_the_page_lists_them_all(tmp_path: Path) -> None:
    write_json(tmp_path / "a" / "export.json", export(kept=KEPT, smoothed=SMOOTHED))
    write_json(tmp_path / "b" / "export.json", export(recipe="w4a8"))
    run = collect([tmp_path])
    assert [row[2] for row in kept_table(run).rows] == KEPT
    assert {row[2]: float(row[3]) for row in smoothed_table(run).rows} == SMOOTHED
    for path in write_report([tmp_path], tmp_path / "out")[:2]:
        text = without_names(path.read_text("utf-8"))
        assert "base, w8a8: smoothed: 3 groups, alpha 0.25 .. 0.75" in text
        assert "base, w4a8: " not in text
        assert "Quantizers left in float (4 rows)" in text
        assert "Smoothed groups of the export (3 rows)" in text
    sentence = verdict(run)[-1]
    assert "w8a8 export of base (4 quantizers left in float) passed its gates" in sentence
    assert "w4a8 export of base passed its gates" in sentence


def test_an_export_without_either_has_no_such_table() -> None:
    run = collect([V3 / "base" / "export.json"])
    assert notes(run) == kept_table(run).rows == smoothed_table(run).rows == ()
    assert notes(Run()) == ()


# data that is not held out


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("export.json", Export),
        ("sweep.json", Sweep),
        ("stats.json", Stats),
    ],
)
def test_shared_blocks_are_a_warning_of_the_page(
    name: str, cls: type[Export], tmp_path: Path
) -> None:
    kept = V3 / name if name == "sweep.json" else V3 / "base" / name
    result = read_json(kept, cls)
    for count in (0, 7):
        data = dataclasses.replace(result.data, shared_blocks=count)
        write_json(tmp_path / "run" / name, dataclasses.replace(result, data=data))
        for path in write_report([tmp_path / "run"], tmp_path / "out")[:2]:
            text = path.read_text("utf-8")
            assert text.count("(--allow-overlap): its figures look better") == (count > 0)
            assert (f"7 blocks that run/{name}" in text) == (count > 0)


@pytest.mark.parametrize(
    ("path", "cls", "view", "models"),
    [
        ("base/export.json", Export, export_text, "base"),
        ("sweep.json", Sweep, sweep_text, "diff, base"),
    ],
)
def test_shared_blocks_are_a_warning_of_the_terminal(
    path: str, cls: type[Export], view: Callable[[Path], str], models: str, tmp_path: Path
) -> None:
    result, place = read_json(V3 / path, cls), tmp_path / "run" / Path(path).name
    write_json(place, result)
    before = view(place.parent)
    data = dataclasses.replace(result.data, shared_blocks=7)
    write_json(place, dataclasses.replace(result, data=data))
    assert view(place.parent) == before + (
        f"WARNING {models}: 7 blocks that run/{place.name} was measured on are calibration's too "
        "(--allow-overlap): its figures look better than they are.\n"
    )
