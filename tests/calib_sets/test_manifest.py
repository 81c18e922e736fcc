"""Manifests: what is written is read again, and what is wrong is named by file and field."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.calib_sets.manifest import Manifest, check_name, manifest_text, read_manifest
from quantkit.calib_sets.source import Source
from quantkit.calib_sets.toml_text import toml_text
from quantkit.errors import InputError

HASH = "0123456789abcdef" * 4
FILES = f'[files]\n"../a b.txt" = "{HASH}"\n"sub/é.txt" = "{HASH}"\n'
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
PLAIN = st.booleans() | st.integers(-(2**63), 2**63 - 1) | TEXT | st.lists(TEXT, max_size=4)
TABLES = st.dictionaries(TEXT, st.dictionaries(TEXT, PLAIN, min_size=1, max_size=3), max_size=3)


def manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "name": "mine",
        "kind": "text",
        "description": 'Quotes " and \\ and\nlines, a bell \a and \u2028.',
        "licence": "CC-BY-4.0",
        "cut": "documents",
        "seed": 3,
        "samples": 2,
        "drawn": True,
        "bytes": 10,
        "sha256": HASH,
        "source": Source(type="path", names=("../a b.txt",), parameters={"x": 1}),
        "files": {"../a b.txt": HASH, "sub/é.txt": HASH},
    }
    return Manifest(**fields | changes)


def stored(folder: Path, text: str) -> Path:
    path = folder / "mine" / "manifest.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.kind(10, "calib_sets")
@given(st.dictionaries(TEXT, PLAIN, max_size=4), TABLES)
def test_any_fields_are_what_a_toml_reader_finds(
    plain: dict[str, Any], tables: dict[str, Any]
) -> None:
    fields = plain | tables

    assert tomllib.loads(toml_text(fields)) == fields


def test_nested_tables_and_long_lists() -> None:
    fields = {"a": ["x" * 60, "y" * 60], "t": {"b": 1, "deep er": {"c": "d"}}}

    assert tomllib.loads(toml_text(fields)) == fields


def test_what_a_manifest_cannot_hold() -> None:
    with pytest.raises(InputError, match="no Unicode text"):
        toml_text({"a": "\udc80"})
    with pytest.raises(TypeError, match="complex"):
        toml_text({"a": 0.5j})


@pytest.mark.parametrize("number", [0.1, 1 / 3, -2.5e-300, 1e300, 5e-324, 1.0, float("inf")])
def test_a_float_is_read_back_to_its_last_digit(number: float) -> None:
    assert tomllib.loads(toml_text({"a": number})) == {"a": number}


def test_tables_in_a_list_are_read_back() -> None:
    fields = {"text": [{"source": 'a "b"', "repeat": 2}, {"source": "c", "odd key": [1.5, True]}]}
    assert tomllib.loads(toml_text(fields)) == fields


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kind": "tokens", "vocab_size": 7, "tokenizer_sha256": HASH, "copied_from": "x.npz"},
        {
            "python": {"3.11.7": HASH},
            "files": {},
            "drawn": False,
            "source": Source(type="module", names=("ast",)),
        },
    ],
)
def test_a_manifest_is_read_as_it_was_written(tmp_path: Path, changes: dict[str, Any]) -> None:
    value = manifest(**changes)

    assert read_manifest(stored(tmp_path, manifest_text(value))) == value


@pytest.mark.kind(8, "calib_sets")
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('licence = "CC-BY-4.0"\n', "", "missing field `licence`"),
        ("licence =", "license =", "unknown field `license`.*Did you mean 'licence'"),
        ("samples = 2", 'samples = "2"', "field `samples`: expected a whole number, got '2'"),
        ("samples = 2", "samples = -2", "field `samples`: expected 0 or more, got -2"),
        ("samples = 2", "samples = true", "field `samples`: expected a whole number"),
        ("drawn = true", "drawn = 1", "field `drawn`: expected true or false"),
        ('kind = "text"', 'kind = "txt"', "field `kind`.*Did you mean 'text'"),
        ('cut = "documents"', 'cut = "lines"', "field `cut`: unknown value 'lines'"),
        ('type = "path"', 'type = "paths"', "field `source.type`.*Did you mean 'path'"),
        ('names = ["../a b.txt"]', "names = []", "field `source.names` is empty"),
        ("x = 1", "x = 1.5", "field `source.parameters.x`: expected a whole number"),
        (f'sha256 = "{HASH}"', 'sha256 = "abc"', "field `sha256`: expected a sha256.*'abc'"),
        (f'"../a b.txt" = "{HASH}"', '"../a b.txt" = ""', r"field `files.../a b.txt`: expected a"),
        ("quantkit.calib/1", "quantkit.calib/2", "version '2' of quantkit.calib"),
        ('schema = "quantkit.calib/1"\n', "", "no field `schema`"),
        ('name = "mine"', 'name = "other"', "field `name`: expected that of its folder, 'mine'"),
        ("seed = 3", "seed = ", "is not TOML"),
        ('type = "path"', 'type = "module"\nfield = "t"', "^((?!kind).)*$"),
        (FILES, "", r"\[files\] is missing or empty: a path needs the sha256 of each of its files"),
        (FILES, "[files]\n", r"\[files\] is missing or empty"),
    ],
)
def test_a_wrong_manifest_says_file_and_field(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    text = manifest_text(manifest())
    assert text.count(old) == 1
    path = stored(tmp_path, text.replace(old, new))

    if said.startswith("^"):  # the control: this change is allowed
        read_manifest(path)
        return
    with pytest.raises(InputError, match=said) as error:
        read_manifest(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_module_holds_no_images(tmp_path: Path) -> None:
    source = Source(type="module", names=("ast",))
    path = stored(tmp_path, manifest_text(manifest(kind="images", source=source)))

    with pytest.raises(InputError, match="field `kind`: a module holds text"):
        read_manifest(path)


def test_a_package_needs_its_files_too(tmp_path: Path) -> None:
    source = Source(type="package", names=("p/q",))
    path = stored(tmp_path, manifest_text(manifest(kind="images", source=source, files={})))

    with pytest.raises(InputError, match=r"manifest.toml: \[files\] is missing.*a package needs"):
        read_manifest(path)


def test_no_manifest_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_manifest(tmp_path / "manifest.toml")
    path = stored(tmp_path, "")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="is not TOML"):
        read_manifest(path)


@pytest.mark.parametrize("name", ["", ".", "..", ".a", "a/b", "A", "a b", "a" * 65, "é", "-a"])
def test_names_that_are_no_folder(name: str) -> None:
    with pytest.raises(InputError, match="expected a name"):
        check_name(name)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("a.txt", Source(type="path", names=("a.txt",))),
        ("a#b/c.txt", Source(type="path", names=("a#b/c.txt",))),
        ("s.jsonl#body", Source(type="path", names=("s.jsonl",), field="body")),
        ("C:x", Source(type="path", names=("C:x",))),
        ("module:ast", Source(type="module", names=("ast",))),
        ("module:ast,json.decoder", Source(type="module", names=("ast", "json.decoder"))),
        ("module:a.b#c", Source(type="module", names=("a.b",), field="c")),
        ("stdlib:docstrings", Source(type="stdlib", names=("docstrings",))),
        ("package:p/q/r.txt", Source(type="package", names=("p/q/r.txt",))),
        (
            "datasets:org/set:config/train#body",
            Source(
                type="datasets", names=("org/set",), field="body", config="config", split="train"
            ),
        ),
        (
            "generator:retrieval?needles=8&queries=4",
            Source(type="generator", names=("retrieval",), parameters={"needles": 8, "queries": 4}),
        ),
    ],
)
def test_a_source_is_its_text(text: str, source: Source) -> None:
    assert Source.parse(text) == source
    assert str(source) == text


def test_what_is_meant_where_less_is_said() -> None:
    assert Source.parse("module:pydoc_data.topics").field == "topics"
    plain = Source.parse("datasets:set/train")
    assert (plain.names, plain.config, plain.field) == (("set",), "", "text")
    assert Source.parse(str(plain)) == plain


@pytest.mark.parametrize(
    "text",
    ["", "module:", "module:a,,b", "package:p", "package:/x", "stdlib:source", "datasets:set",
     "datasets:/train", "generator:", "generator:retrieval?needles",
     "generator:retrieval?needles=x", "generator:retrieval?needles=1&needles=2",
     "generator:r?n=-1"],
)  # fmt: skip
def test_a_source_that_says_too_little(text: str) -> None:
    with pytest.raises(InputError, match="expected"):
        Source.parse(text)


def test_defaults_are_not_written() -> None:
    text = manifest_text(dataclasses.replace(manifest(), files={}))

    assert "copied_from" not in text
    assert "[files]" not in text
    assert text.startswith('schema = "quantkit.calib/1"\n')
