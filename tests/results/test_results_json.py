"""Result files: the kept version-1 fixtures, the round trip, and what the strict reader says."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path

import pytest

from quantkit.errors import InputError
from quantkit.results import (
    Accuracy,
    Export,
    FileInfo,
    Range,
    Ranges,
    Stats,
    Sweep,
    dumps,
    read_json,
    to_plain,
    write_json,
)

V1 = Path(__file__).parent / "fixtures" / "v1"
FILES = [
    pytest.param("base/stats.json", Stats, id="stats"),
    pytest.param("base/ranges.json", Ranges, id="ranges"),
    pytest.param("sweep.json", Sweep, id="sweep"),
    pytest.param("base/export.json", Export, id="export"),
]


@pytest.mark.parametrize(("name", "cls"), FILES)
def test_version_1_reads_and_writes_byte_for_byte(
    name: str, cls: type[object], tmp_path: Path
) -> None:
    value = read_json(V1 / name, cls)
    write_json(tmp_path / "again.json", value)
    assert (tmp_path / "again.json").read_bytes() == (V1 / name).read_bytes()


@pytest.mark.parametrize(("name", "cls"), FILES)
def test_schema_is_the_first_field(name: str, cls: type) -> None:
    assert next(iter(json.loads((V1 / name).read_text()))) == "schema"
    assert dataclasses.fields(cls)[0].name == "schema"


def test_values_of_the_fixture() -> None:
    ranges = read_json(V1 / "base/ranges.json", Ranges)
    assert ranges.tensors["attention_logit/0/map 1"].hi == [3.0, 4.0]
    assert ranges.tensors["linear_input/model.layers.0.mlp.down_proj"].lo == -3.5
    export = read_json(V1 / "base/export.json", Export)
    assert export.accuracy == Accuracy(metric="perplexity", float=17.5, quantized=17.61)
    first = next(
        group
        for group in read_json(V1 / "base/stats.json", Stats).points["attention_logit"]
        if group.token_class == "first"
    )
    assert math.isnan(first.kurtosis)
    assert first.inf_norm_mean is None


def changed(tmp_path: Path, name: str, **changes: object) -> Path:
    plain = json.loads((V1 / name).read_text())
    for field, value in changes.items():
        if value is KeyError:
            del plain[field]
        else:
            plain[field] = value
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(plain))
    return path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"schema": "quantkit.export/2"}, ["'2'", "'1'"], id="newer version"),
        pytest.param({"schema": "quantkit.stats/1"}, ["quantkit.stats/1", "export/1"], id="kind"),
        pytest.param({"schema": 7}, ["'7'"], id="schema is a number"),
        pytest.param({"schema": KeyError}, ["no field `schema`"], id="no schema"),
        pytest.param({"opset": KeyError}, ["missing field `opset`"], id="missing"),
        pytest.param({"latency_ms": KeyError}, ["missing field `latency_ms`"], id="with default"),
        pytest.param({"opsets": 21}, ["unknown field `opsets`", "'opset'"], id="unknown"),
        pytest.param({"opset": "21"}, ["field `opset`", "whole number", "'21'"], id="string"),
        pytest.param({"opset": True}, ["field `opset`"], id="bool is no int"),
        pytest.param({"files": [{"name": "x"}]}, ["missing field `files[0].bytes`"], id="nested"),
        pytest.param({"passed": 1}, ["field `passed`", "true or false"], id="int is no bool"),
        pytest.param({"model": []}, ["field `model`", "an object", "a list"], id="list"),
    ],
)
def test_strict_reader_names_file_and_field(
    changes: dict[str, object], said: list[str], tmp_path: Path
) -> None:
    path = changed(tmp_path, "base/export.json", **changes)
    with pytest.raises(InputError) as caught:
        read_json(path, Export)
    for words in (str(path), *said):
        assert words in str(caught.value)


def test_unknown_literal_suggests(tmp_path: Path) -> None:
    plain = json.loads((V1 / "base/stats.json").read_text())
    plain["points"]["hidden_state"][0]["token_class"] = "frist"
    path = tmp_path / "stats.json"
    path.write_text(json.dumps(plain))
    with pytest.raises(InputError, match=r"hidden_state\[0\]\.token_class.*Did you mean 'first'"):
        read_json(path, Stats)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null"])
def test_what_is_no_result_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"x\.json"):
        read_json(path, Stats)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_json(tmp_path / "none.json", Stats)
    with pytest.raises(InputError, match="cannot read"):
        read_json(tmp_path, Stats)


def test_nan_is_null_and_infinity_is_a_string(tmp_path: Path) -> None:
    span = Range(
        lo=-math.inf, hi=[math.nan, math.inf], method="m", granularity="g", count=0, point=""
    )
    assert to_plain(span)["lo"] == "-inf"
    assert to_plain(span)["hi"] == [None, "inf"]
    ranges = read_json(V1 / "base/ranges.json", Ranges)
    write_json(tmp_path / "r.json", dataclasses.replace(ranges, tensors={"x": span}))
    again = read_json(tmp_path / "r.json", Ranges).tensors["x"]
    assert again.lo == -math.inf
    assert isinstance(again.hi, list)
    assert math.isnan(again.hi[0])
    assert again.hi[1] == math.inf


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError, match="a result cannot hold"):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(path.parent) == ["x.json"]


def test_writing_below_a_file_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        write_json(tmp_path / "file" / "x.json", {})


def test_text_is_kept_as_it_is() -> None:
    name = FileInfo(name='é\n"<b>', bytes=1, sha256="")
    assert json.loads(dumps(name))["name"] == 'é\n"<b>'
