"""Kind 8, of files that quantkit itself reads: another version, and data that changed on disk."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.fuzz_targets import RESULTS, example
from quantkit.calib_sets import changed_since, text_slice
from quantkit.calib_sets import text as text_module
from quantkit.calib_sets.content import file_sha256
from quantkit.calib_sets.find import named_set
from quantkit.calib_sets.image_files import open_image
from quantkit.calib_sets.images import FileRows
from quantkit.calib_sets.make import SetRequest, make_set
from quantkit.errors import InputError
from quantkit.results import Curves, DataInfo, read_curves, read_json
from quantkit.results.curves import CurvesHeader
from quantkit.results.io import schema_of

STAGES = {"ranges": "calibrate", "calibration": "calibrate", "training": "train",
          "diagnosis": "diagnose", "plan": "compare"}  # fmt: skip
RESULT = [
    pytest.param(name, marks=pytest.mark.kind(8, STAGES.get(name, name)), id=name)
    for name in RESULTS
]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def stored(name: str, schema: str) -> Path:
    """A result of a kind that says it has another schema."""
    path = Path(f"{name}.json")
    path.write_text(json.dumps(example(RESULTS[name][0]) | {"schema": schema}), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", RESULT)
def test_an_unknown_version_is_refused_and_what_is_read_is_said(name: str) -> None:
    cls = RESULTS[name][0]
    kind, _, newest = schema_of(cls).partition("/")
    versions = [*getattr(cls, "OLDER", ()), schema_of(cls)]

    for unknown in ("0", str(int(newest) + 1), "2.5", "", "x\ny"):
        with pytest.raises(InputError) as raised:
            read_json(stored(name, f"{kind}/{unknown}"), cls)
        said = str(raised.value)
        assert repr(unknown) in said
        read = re.search(r"reads versions? (.*?)\. ", said)
        assert read is not None
        assert read[1].split(", ") == [repr(v.partition("/")[2]) for v in versions]
        assert len(said.splitlines()) == 1


@pytest.mark.parametrize("name", RESULT)
def test_every_version_that_is_said_is_read(name: str) -> None:
    cls: Any = RESULTS[name][0]
    for version in (*getattr(cls, "OLDER", ()), schema_of(cls)):
        assert read_json(stored(name, version), cls).schema == schema_of(cls)


@pytest.mark.parametrize("name", RESULT)
def test_a_file_of_another_kind_is_refused(name: str) -> None:
    cls = RESULTS[name][0]
    for schema in ("quantkit.other/1", 7, None, ["quantkit.stats/1"], {"a": 1}):
        with pytest.raises(InputError, match="expected 'quantkit"):
            read_json(stored(name, schema), cls)  # type: ignore[arg-type]


@pytest.mark.kind(8, "train")
def test_curves_of_another_version_are_refused() -> None:
    header = example(CurvesHeader)
    Path("curves.jsonl").write_text(json.dumps(header) + "\n", encoding="utf-8")
    assert isinstance(read_curves(Path("curves.jsonl")), Curves)
    Path("curves.jsonl").write_text(json.dumps(header | {"schema": "quantkit.curves/2"}) + "\n")
    with pytest.raises(InputError, match=r"version '2'.*reads version '1'"):
        read_curves(Path("curves.jsonl"))


def made(kind: str, source: str) -> None:
    make_set(SetRequest(name="mine", source=source, kind=kind, force=True))


def data(**changes: Any) -> DataInfo:
    return DataInfo(**(example(DataInfo) | {"named_set": "", "set_sha256": ""} | changes))


@pytest.mark.kind(8, "calibrate", "calib_sets")
def test_a_named_set_that_changed_since_is_told() -> None:
    Path("a.txt").write_text("one two three")
    made("text", "a.txt")
    seen = data(source="mine", named_set="mine", set_sha256=named_set("mine").manifest.sha256)
    assert changed_since(seen, 0.0) == ""

    Path("a.txt").write_text("one two four")
    assert "a.txt changed since its manifest was written" in changed_since(seen, 0.0)

    made("text", "a.txt")
    now = named_set("mine").manifest.sha256
    said = changed_since(seen, 0.0)
    assert f"other content than was observed (sha256 {now[:10]}" in said
    assert seen.set_sha256[:10] in said


@pytest.mark.kind(8, "calibrate", "calib_sets")
@pytest.mark.parametrize("source", ["a.txt", "texts"])
def test_a_source_that_was_written_to_since_is_told(source: str) -> None:
    Path("texts").mkdir()
    for path in (Path("a.txt"), Path("texts/b.txt")):
        path.write_text("words")
    written = Path("texts/b.txt" if source == "texts" else "a.txt")
    seen = data(source=source)
    os.utime(written, (1000.0, 1000.0))
    os.utime("texts", (900.0, 900.0))
    assert changed_since(seen, 1000.0) == ""

    os.utime(written, (1001.0, 1001.0))
    assert changed_since(seen, 1000.0).startswith(f"{source} was written to")


@pytest.mark.kind(8, "calibrate", "calib_sets")
@pytest.mark.parametrize("source", ["nothing.txt", "a\0b", "x" * 5000])
def test_of_a_source_that_is_not_here_nothing_is_said(source: str) -> None:
    assert changed_since(data(source=source), 0.0) == ""
    assert changed_since(data(source=source, named_set="gone", set_sha256="1" * 64), 0.0) == ""


def shrunk(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def replaced(path: Path) -> None:
    np.savez(path, input_ids=np.full((2, 3), 9))


@pytest.mark.kind(8, "calib_sets")
@pytest.mark.parametrize("change", [shrunk, replaced, Path.unlink])
def test_a_set_of_tokens_that_changes_while_it_is_read_is_refused(
    change: Callable[[Path], None], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez("t.npz", input_ids=np.arange(6).reshape(2, 3))
    made("tokens", "t.npz")
    read = text_module.read_tokens

    def changed_behind(path: Path, source: str) -> list[list[int]]:
        found = read(path, source)
        change(path)
        return found

    assert text_slice("mine", tokenizer, seq_len=3).sequences == 2
    monkeypatch.setattr(text_module, "read_tokens", changed_behind)
    with pytest.raises(InputError, match=r"set mine: .*t\.npz changed while it was read"):
        text_slice("mine", tokenizer, seq_len=3)


@pytest.mark.kind(8, "calib_sets")
def test_an_image_that_changes_while_it_is_in_use_is_refused() -> None:
    image = pytest.importorskip("PIL.Image")
    path = Path("a.png")
    image.new("RGB", (4, 4), "white").save(path)
    rows = FileRows(files=[path], process=lambda picture: {"size": picture.size})
    assert rows[0] == rows[0]

    image.new("RGB", (5, 4), "black").save(path)
    with pytest.raises(InputError, match=r"a\.png changed while it was in use"):
        rows[0]


@pytest.mark.kind(8, "calib_sets")
@pytest.mark.parametrize(
    "use",
    [
        file_sha256,
        open_image,
        lambda path: text_slice(str(path), None),
        lambda path: FileRows(files=[path], process=lambda _: {})[0],
    ],
    ids=["hash", "image", "text", "row of images"],
)
def test_a_file_that_is_gone_is_one_line(use: Callable[[Path], Any]) -> None:
    with pytest.raises(InputError):
        use(Path("gone.png"))
