"""An earlier run beside this one: every planted change is listed once, and nothing else is."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import InputError
from quantkit.reporting.against import against_section, against_sentence
from quantkit.reporting.against_changes import Entry, compare
from quantkit.reporting.against_tables import RULE, main_tables, other_table, same_table
from quantkit.reporting.collect import Run, collect
from quantkit.reporting.report import write_report
from quantkit.results import Cell, Stats, Sweep, read_json, write_json
from tests.reporting.planted_against import FIXTURES, V3, sweep_run

FILES = sorted(str(p.relative_to(FIXTURES)) for p in FIXTURES.glob("v[34]/**/*.json"))

# what tells items apart, or says what other fields say: a change there is another item
NAMES = {
    "batch", "block_hashes", "cached", "depth_frac", "head", "headline", "layer", "map", "method",
    "metric", "model", "name", "recipe", "reference", "samples", "schema", "seq_len", "step",
    "task", "token_class", "units", "unit", "point", "against", "group",
}  # fmt: skip
ENDS = {
    "ci_low": "value",
    "ci_high": "value",
    "change_low": "change",
    "change_high": "change",
    "total_stderr": "total_kl",
}
UNNAMED = {"top", "entries"}


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all numbers of a JSON file, and of the texts of its environment."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        if isinstance(value, dict | list):
            yield from leaves(value, (*path, key))
        elif isinstance(value, bool) or key in NAMES:
            continue
        elif isinstance(value, int | float) or "environment" in path:
            yield (*path, key)


def listed(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The path of what is to be listed as one: a figure with its interval, a list as a whole."""
    for i, key in enumerate(path):
        if key in UNNAMED:
            return path[: i + 1]
    if isinstance(path[-1], int):
        while isinstance(path[-1], int):
            path = path[:-1]
        return path
    return (*path[:-1], ENDS.get(path[-1], path[-1]))


def plant(node: Any, path: tuple[Any, ...], mark: int) -> Any:
    """Puts a value that stands nowhere else at the path; returns it."""
    for key in path[:-1]:
        node = node[key]
    old = node[path[-1]]
    value = f"planted-{mark}" if isinstance(old, str) else type(old)(7_000_001 + 1_000 * mark)
    node[path[-1]] = value
    return value


def numbers_in(node: Any) -> set[Any]:
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return set(dataclasses.asdict(node).values())
    if isinstance(node, dict | list):
        parts = node.values() if isinstance(node, dict) else node
        return {value for part in parts for value in numbers_in(part)}
    return {node}


def copy_of(folder: Path, tmp_path: Path, name: str = "now") -> Path:
    return Path(shutil.copytree(folder, tmp_path / name))


def changed(now: Path, earlier: Path) -> list[Entry]:
    entries = compare(collect([now]), collect([earlier])).entries
    return [entry for entry in entries if entry.is_changed]


FILES = [
    str(p.relative_to(FIXTURES)) for v in ("v3", "v4") for p in FIXTURES.glob(f"{v}/**/*.json")
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("file", FILES)
def test_every_planted_change_is_listed_once(file: str, seed: int, tmp_path: Path) -> None:
    folder = FIXTURES / Path(file).parts[0]
    path = copy_of(folder, tmp_path) / Path(*Path(file).parts[1:])
    plain = json.loads(path.read_text("utf-8"))
    # a list and a figure with its interval are one; of each, one leaf is changed
    groups: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    rng = random.Random(seed)
    every = list(leaves(plain))
    for leaf in rng.sample(every, min(25, len(every))):
        groups.setdefault(listed(leaf), leaf)
    marks = [plant(plain, leaf, i) for i, leaf in enumerate(groups.values())]
    path.write_text(json.dumps(plain), "utf-8")

    found = changed(tmp_path / "now", folder)
    for mark in marks:
        assert sum(mark in numbers_in(entry.now) for entry in found) == 1, mark
    assert len(found) == len(groups)


def test_the_tables_list_what_was_compared(tmp_path: Path) -> None:
    now = copy_of(V3, tmp_path)
    for path in now.rglob("stats.json"):
        plain = json.loads(path.read_text("utf-8"))
        plain["points"]["hidden_state"][0]["kurtosis"] += 1
        plain["summary"]["hidden_state"]["abs_top"]["1"] *= 2
        path.write_text(json.dumps(plain), "utf-8")
    found = compare(collect([now]), collect([V3]))
    (main, _), other = main_tables(found), other_table(found)
    assert [row[:3] for row in main.rows] == [
        (f"statistics of {name}", "hidden states, top-1 |x|", "changed")
        for name in ("base", "diff")
    ]
    assert [row[5] for row in main.rows] == ["+100.00 %"] * 2
    assert [row[0] for row in other.rows] == ["statistics of base", "statistics of diff"]
    assert all("kurtosis" in row[1] for row in other.rows)
    assert main.note == RULE
    shown = {row[:2] for row in same_table(found).rows}
    assert ("sweep of diff", "perplexity, logits4:row") in shown
    assert ("statistics of base", "hidden states, top-1 |x|") not in shown


def test_nothing_changed_in_the_same_folder_under_another_name(tmp_path: Path) -> None:
    run = collect([copy_of(V3, tmp_path, "elsewhere")])
    section = against_section(run, collect([V3]))
    assert section.tables == ()
    assert [table.title for table in section.folded] == ["Unchanged"]
    assert "nothing changed" in against_sentence(run, collect([V3]))
    assert section.notes == (against_sentence(run, collect([V3])),)


@pytest.mark.parametrize("old", ["v1", "v2", "v3"])
def test_old_versions_stand_on_either_side(old: str) -> None:
    before, now = collect([FIXTURES / old]), collect([V3])
    one, other = compare(now, before), compare(before, now)
    # what a version lacks is new in the other, never a change from a default
    turned = {"new": "gone", "gone": "new"}
    marks = {(e.kind, e.subject, e.path): e.mark for e in one.entries}
    back = {(e.kind, e.subject, e.path): e.mark for e in other.entries}
    assert marks.keys() == back.keys()
    plain = ("new", "gone", "changed", "same")
    assert all(turned.get(m, m) == back[key] for key, m in marks.items() if m in plain)
    assert against_sentence(now, before).endswith(".")


# what is laid beside what


def test_cells_are_matched_however_files_hold_them(tmp_path: Path) -> None:
    sweep = read_json(V3 / "sweep.json", Sweep)
    halves = [dataclasses.replace(sweep, cells=sweep.cells[i::2], deltas=[]) for i in (0, 1)]
    for place, half in zip(("b", "a"), halves, strict=True):
        cells = list(reversed(half.cells))
        write_json(tmp_path / place / "sweep.json", dataclasses.replace(half, cells=cells))
    found = compare(collect([tmp_path]), sweep_run())
    assert {e.mark for e in found.entries} == {"same"}


def test_the_one_model_of_each_run_is_compared_whatever_it_is_called(tmp_path: Path) -> None:
    stats = read_json(V3 / "base" / "stats.json", Stats)
    model = dataclasses.replace(stats.model, name="mine-v2")
    write_json(tmp_path / "stats.json", dataclasses.replace(stats, model=model))
    now, earlier = collect([tmp_path]), collect([V3 / "base" / "stats.json"])
    found = compare(now, earlier)
    assert [(e.path, e.earlier, e.now) for e in found.entries if e.is_changed] == [
        (("model", "name"), "base", "mine-v2")
    ]
    assert "mine-v2 now, base then" in against_section(now, earlier).notes[0]


def test_of_two_models_with_one_name_the_hash_decides(tmp_path: Path) -> None:
    stats = read_json(V3 / "base" / "stats.json", Stats)
    other = dataclasses.replace(
        stats, model=dataclasses.replace(stats.model, sha256="f" * 64), sampled_rows=77
    )
    for name, pair in (("now", (stats, other)), ("then", (other, stats))):
        for place, one in zip("ab", pair, strict=True):
            write_json(tmp_path / name / place / "stats.json", one)
    found = compare(collect([tmp_path / "now"]), collect([tmp_path / "then"]))
    assert {entry.mark for entry in found.entries} == {"same"}
    assert {entry.subject for entry in found.entries} == {"base", "base [2]"}


# bad input


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_a_folder_without_results_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=name):
        write_report([V3], tmp_path / "out", against=tmp_path / name)
    assert not (tmp_path / "out").exists()


def test_another_kind_of_run_has_nothing_in_common() -> None:
    with pytest.raises(InputError, match="nothing in common") as caught:
        against_section(collect([V3 / "base" / "stats.json"]), collect([V3 / "sweep.json"]))
    said = str(caught.value)
    assert "statistics of base" in said and "sweep of diff, sweep of base" in said
    assert "\n" not in said


@pytest.mark.parametrize("read", [against_section, against_sentence])
def test_other_models_have_nothing_in_common(read: Callable[[Run, Run], object]) -> None:
    def renamed(cell: Cell) -> Cell:
        return dataclasses.replace(cell, model=f"{cell.model}-x")

    models = read_json(V3 / "sweep.json", Sweep).models
    others = [dataclasses.replace(model, name=f"{model.name}-x") for model in models]
    with pytest.raises(InputError, match="nothing in common"):
        read(sweep_run(renamed, models=others), sweep_run())
