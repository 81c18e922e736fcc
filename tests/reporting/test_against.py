"""An earlier run beside this one: every planted change is listed once, and judged by its noise."""

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
from quantkit.reporting.against_looks import change_text, look
from quantkit.reporting.against_tables import RULE, main_tables, other_table, same_table
from quantkit.reporting.blocks import FirstScreen, Section
from quantkit.reporting.collect import Found, Run, collect
from quantkit.reporting.report import Page, render_html, render_markdown, write_report
from quantkit.results import Cell, Export, Stats, Sweep, TaskInfo, read_json, write_json

FIXTURES = Path(__file__).parent.parent / "results" / "fixtures"
V3 = FIXTURES / "v3"
FILES = sorted(str(p.relative_to(FIXTURES)) for p in FIXTURES.glob("v[34]/**/*.json"))
HOSTILE = "</style></svg><script>alert(1)</script>\"'&|`*x*`\x1b[31m\nnext"

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


# marks


def sweep_run(change: Callable[[Cell], Cell] = lambda cell: cell, **changes: Any) -> Run:
    sweep = read_json(V3 / "sweep.json", Sweep)
    sweep = dataclasses.replace(sweep, deltas=[], cells=[change(c) for c in sweep.cells], **changes)
    return planted(sweep)


def planted(sweep: Sweep) -> Run:
    return Run(sweeps=(Found(place="x/sweep.json", result=sweep),))


def moved(low: float, value: float, high: float) -> Callable[[Cell], Cell]:
    def change(cell: Cell) -> Cell:
        is_it = (cell.model, cell.recipe) == ("diff", "logits4:row")
        return dataclasses.replace(cell, value=value, ci_low=low, ci_high=high) if is_it else cell

    return change


NAN = float("nan")


@pytest.mark.parametrize(
    ("interval", "mark"),
    [  # the earlier figure: 22.69 [21.55, 23.82], a perplexity
        pytest.param((23.9, 24.5, 25.1), "worse", id="above and apart"),
        pytest.param((19.0, 20.0, 21.0), "better", id="below and apart"),
        pytest.param((23.0, 24.0, 25.0), "within noise", id="above, intervals overlap"),
        pytest.param((20.0, 21.0, 22.0), "within noise", id="below, intervals overlap"),
        pytest.param((NAN, 12.0, NAN), "changed", id="far below, without an interval"),
    ],
)
def test_a_figure_is_judged_by_its_interval(
    interval: tuple[float, float, float], mark: str
) -> None:
    found = compare(sweep_run(moved(*interval)), sweep_run())
    (entry,) = [entry for entry in found.entries if entry.is_changed]
    assert (entry.subject, entry.look.words, entry.mark) == (
        "diff",
        "perplexity, logits4:row",
        mark,
    )
    (row,) = main_tables(found)[0].rows
    assert row[2] == mark and row[3] == "22.69 [21.55, 23.82]"


def test_an_accuracy_is_better_when_it_is_higher_and_moves_in_points() -> None:
    def accuracy(value: float) -> Run:
        def change(cell: Cell) -> Cell:
            cell = dataclasses.replace(cell, task="needles", metric="acc", value=value)
            return dataclasses.replace(cell, ci_low=value - 0.01, ci_high=value + 0.01)

        sweep = read_json(V3 / "sweep.json", Sweep)
        cells = [change(sweep.cells[0])]
        info = TaskInfo(
            name="needles",
            metrics=["acc"],
            unit="items",
            higher_is_better={"acc": True},
            items=9,
            data=sweep.data,
            sha256="1" * 64,
            shares=["acc"],
        )
        return planted(dataclasses.replace(sweep, deltas=[], cells=cells, tasks=[info]))

    (row,) = main_tables(compare(accuracy(0.62), accuracy(0.5)))[0].rows
    assert row[1:] == (
        "needles acc, float", "better", "0.500 [0.49, 0.51]", "0.620 [0.61, 0.63]", "+12.0 points"
    )  # fmt: skip
    assert main_tables(compare(accuracy(0.4), accuracy(0.5)))[0].rows[0][2] == "worse"


def test_other_data_are_said_first_and_nothing_is_better() -> None:
    data = dataclasses.replace(read_json(V3 / "sweep.json", Sweep).data, sha256="d" * 64)
    now, earlier = sweep_run(moved(1.0, 1.1, 1.2), data=data), sweep_run()
    (entry,) = [e for e in compare(now, earlier).figures if e.is_changed]
    assert entry.mark == "changed"
    section = against_section(now, earlier)
    assert section.notes[0].startswith("The data differ (sweep of all models: data sha256 ")
    assert "not comparable" in section.notes[0] and "not comparable" in section.notes[-1]
    assert ("data sha256", "d" * 16) in {(row[0], row[2]) for row in section.tables[-1].rows}


def test_another_model_of_the_same_name_is_said_and_still_judged() -> None:
    sweep = read_json(V3 / "sweep.json", Sweep)
    models = [dataclasses.replace(model, sha256="e" * 64) for model in sweep.models]
    now = sweep_run(moved(1.0, 1.1, 1.2), models=models)
    assert {e.mark for e in compare(now, sweep_run()).figures if e.is_changed} == {"better"}
    notes = against_section(now, sweep_run()).notes
    assert notes[0].startswith("The model differs (") and "models diff sha256" in notes[0]


@pytest.mark.parametrize(
    ("factor", "processor", "mark"),
    [
        (0.95, "x", "within noise"),
        (1.05, "x", "within noise"),
        (0.5, "x", "better"),
        (2.0, "x", "worse"),
        (0.5, "y", "changed"),
        (0.5, "", "changed"),
    ],
    ids=["5 % less", "5 % more", "half", "double", "other processor", "processor unknown"],
)
def test_latency_is_judged_on_one_processor(
    factor: float, processor: str, mark: str, tmp_path: Path
) -> None:
    export = read_json(V3 / "base" / "export.json", Export)

    def run(name: str, times: float, processor: str) -> Run:
        latency = export.latency_ms | {"quantized": times * export.latency_ms["quantized"]}
        kept = {"processor": processor} if processor else {}
        file = dataclasses.replace(export, latency_ms=latency, environment=kept)
        write_json(tmp_path / name / "export.json", file)
        return collect([tmp_path / name])

    found = compare(run("now", factor, processor), run("then", 1.0, "x"))
    assert [e.mark for e in found.figures if e.is_changed] == [mark]


def test_what_one_run_has_alone_is_one_row_each() -> None:
    sweep = read_json(V3 / "sweep.json", Sweep)
    fewer = dataclasses.replace(sweep, deltas=[], cells=sweep.cells[1:])
    gone = [e for e in compare(planted(fewer), sweep_run()).entries if e.is_changed]
    assert [(e.mark, e.subject, e.look.words) for e in gone] == [
        ("gone", "diff", "perplexity, float")
    ]
    new = [e for e in compare(sweep_run(), planted(fewer)).entries if e.is_changed]
    assert [(e.mark, e.subject) for e in new] == [("new", "diff")]


def test_many_changes_within_noise_are_folded() -> None:
    sweep = read_json(V3 / "sweep.json", Sweep)
    tripled = [
        dataclasses.replace(cell, model=f"{cell.model}{i}")
        for i in range(3)
        for cell in sweep.cells
    ]

    def run(value: Callable[[Cell], float]) -> Run:
        cells = [
            dataclasses.replace(
                cell, value=value(cell), ci_low=value(cell) - 1, ci_high=value(cell) + 1
            )
            for cell in tripled
        ]
        return planted(dataclasses.replace(sweep, deltas=[], cells=cells))

    now = run(lambda cell: cell.value + (9 if cell.recipe == "logits4" else 0.5))
    section = against_section(now, run(lambda cell: cell.value))
    assert [row[2] for row in section.tables[0].rows] == ["worse"] * 6
    assert [row[2] for row in section.folded[0].rows] == ["within noise"] * 54
    assert "54 more are within noise" in section.tables[0].note


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


# the page


def hostile_runs() -> tuple[Run, Run]:
    def renamed(cell: Cell) -> Cell:
        return dataclasses.replace(
            cell, model=f"{HOSTILE}{cell.model}", recipe=HOSTILE + cell.recipe
        )

    models = read_json(V3 / "sweep.json", Sweep).models
    others = [dataclasses.replace(model, name=f"{HOSTILE}{model.name}") for model in models]

    def worse(cell: Cell) -> Cell:
        return renamed(dataclasses.replace(cell, value=9e3, ci_low=8e3, ci_high=1e4))

    return sweep_run(worse, models=others), sweep_run(renamed, models=others)


def page(section: Section) -> Page:
    context: dict[str, object] = {
        "models": [HOSTILE], "warnings": [], "headlines": [], "definitions": []
    }  # fmt: skip
    first = FirstScreen(sentences=section.notes)
    return Page(context=context, first=first, sections=(section,))


def test_hostile_names_are_escaped_and_marks_are_words() -> None:
    section = against_section(*hostile_runs())
    text = render_html(page(section))
    assert "<script>alert" not in text and "\x1b" not in text
    assert text.count(">worse</td>") == len(section.tables[0].rows) == 20
    twin = render_markdown(page(section))
    assert "<script>" not in twin and "\x1b" not in twin
    assert "| worse |" in twin


@pytest.mark.parametrize(
    ("now", "earlier", "said"),
    [
        (3.0, 2.0, "+50.00 %"),
        (2.0, -1.0, "+3"),
        (5, 7, "-2"),
        (1.00002, 1.0, "+0.002 %"),
        ([1.0, 2.0, 9.0], [1.0, 2.5, 4.0], "2 of 3 differ, most at [2]: 4.000 to 9.000"),
        (["a", "c"], ["a", "b"], "+ c; - b"),
        ("text", "other", ""),
        (None, 3.0, ""),
    ],
)
def test_the_words_of_a_change(now: Any, earlier: Any, said: str) -> None:
    assert change_text(now, earlier, look("ranges", ("x",), {})) == said
