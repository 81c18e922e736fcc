"""Result files: the kept fixtures of each version, the round trip, and what the strict reader says.

`fixtures/v2/*/stats.json` are of a Llama and a DiffLlama of one layer, two (pairs of one) heads and
eight channels, with a planted massive activation.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from pathlib import Path

import pytest

from quantkit.errors import InputError
from quantkit.results import (
    Accuracy,
    AttentionMass,
    Cell,
    Delta,
    Export,
    FileInfo,
    Fired,
    Range,
    Ranges,
    SeedSpread,
    Stats,
    Sweep,
    TaskInfo,
    dumps,
    read_json,
    to_plain,
    write_json,
)

V1 = Path(__file__).parent / "fixtures" / "v1"
V2 = Path(__file__).parent / "fixtures" / "v2"
V3 = Path(__file__).parent / "fixtures" / "v3"
V4 = Path(__file__).parent / "fixtures" / "v4"
FILES = [
    pytest.param("base/stats.json", Stats, id="stats"),
    pytest.param("diff/stats.json", Stats, id="stats of a differential model"),
    pytest.param("base/ranges.json", Ranges, id="ranges"),
    pytest.param("sweep.json", Sweep, id="sweep"),
    pytest.param("base/export.json", Export, id="export"),
]


VERSION_4 = (Stats, Sweep, Export)
NEWEST = [(V4 if param.values[1] in VERSION_4 else V3, *param.values) for param in FILES]
OLDER = [
    *((folder, *param.values) for folder in (V1, V2) for param in FILES),
    *((V3, *param.values) for param in FILES if param.values[1] in VERSION_4),
]


def case_id(value: object) -> str:
    """Folder, file and class of a case, in words."""
    return value.name if isinstance(value, Path) else getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("folder", "name", "cls"), NEWEST, ids=case_id)
def test_the_newest_version_reads_and_writes_byte_for_byte(
    folder: Path, name: str, cls: type[object], tmp_path: Path
) -> None:
    value = read_json(folder / name, cls)
    assert json.loads((folder / name).read_text())["schema"] == value.schema  # type: ignore[attr-defined]
    write_json(tmp_path / "again.json", value)
    assert (tmp_path / "again.json").read_bytes() == (folder / name).read_bytes()


def check_older(plain: object, value: object, where: str = "") -> None:
    """What the file says is what was read; what it does not say has its default."""
    if dataclasses.is_dataclass(value):
        assert isinstance(plain, dict)
        for field in dataclasses.fields(value):
            found = getattr(value, field.name)
            place = f"{where}.{field.name}"
            if field.name in plain:
                check_older(plain[field.name], found, place)
            elif field.default is not dataclasses.MISSING:
                assert repr(found) == repr(field.default), place
            else:
                assert field.default_factory is not dataclasses.MISSING, place
                assert found == field.default_factory(), place
    elif isinstance(plain, dict):
        assert isinstance(value, dict) and value.keys() == plain.keys(), where
        for key, item in plain.items():
            check_older(item, value[key], f"{where}.{key}")
    elif isinstance(plain, list):
        assert isinstance(value, list | tuple) and len(value) == len(plain), where
        for index, (item, found) in enumerate(zip(plain, value, strict=True)):
            check_older(item, found, f"{where}[{index}]")
    else:
        assert to_plain(value) == plain, where


@pytest.mark.kind(8, "report")
@pytest.mark.parametrize(("folder", "name", "cls"), OLDER, ids=case_id)
def test_older_versions_are_read_and_what_they_lack_has_its_default(
    folder: Path, name: str, cls: type[object]
) -> None:
    plain = json.loads((folder / name).read_text())
    value = read_json(folder / name, cls)
    kind, _, version = plain.pop("schema").partition("/")
    assert version == folder.name[1:]
    newest = 4 if cls in VERSION_4 else 3
    assert value.schema == f"{kind}/{newest}"  # type: ignore[attr-defined]  # as it is written again
    check_older(plain, value)


def test_the_sweep_of_version_4_uses_every_field() -> None:
    sweep = read_json(V4 / "sweep.json", Sweep)
    fired = [hit for cell in sweep.cells for hit in cell.quantizers.values()]
    parts: list[object] = [
        sweep,
        *fired,
        *sweep.cells,
        *sweep.deltas,
        *sweep.spreads,
        *sweep.attention_mass,
    ]
    parts += sweep.tasks
    for cls in (Sweep, Cell, Delta, Fired, SeedSpread, AttentionMass, TaskInfo):
        mine = [part for part in parts if type(part) is cls]
        empty = [
            field.name
            for field in dataclasses.fields(cls)
            if all(getattr(part, field.name) in (None, "", [], {}) for part in mine)
        ]
        assert mine and not empty, cls
    assert {cell.group for cell in sweep.cells} == {"diff", "base"}
    static = next(c for c in sweep.cells if c.recipe == "logits6:head:static:asymmetric")
    assert (static.bits, static.granularity, static.range) == (6, "head", "static")
    assert {hit.elements for hit in static.quantizers.values()} == {400_000}
    assert {delta.is_level for delta in sweep.deltas} == {True, False}
    assert next(d for d in sweep.deltas if d.against_model).against_model == "base-s0"


def test_version_1_of_stats_lacks_what_version_2_brought() -> None:
    stats = read_json(V1 / "diff/stats.json", Stats)
    assert (stats.schema, stats.sampled_rows, stats.processes) == ("quantkit.stats/4", None, 1)
    assert stats.differential == stats.hits == stats.warnings == []
    assert stats.surfaces == {}
    assert stats.summary.outlier_tokens.count == 0
    assert stats.summary.attention_entropy is None
    group = stats.points["attention_logit"][0]
    assert math.isnan(group.abs_max) and math.isnan(group.span_999_frac)
    assert group.kurtosis_oft is group.entropy is group.sink_rate is None
    assert group.abs_quantiles == {} and group.nan_count == 0


@pytest.mark.kind(8, "report")
def test_what_version_1_requires_is_still_required(tmp_path: Path) -> None:
    plain = json.loads((V1 / "base/stats.json").read_text())
    del plain["points"]["hidden_state"][0]["kurtosis"]
    path = tmp_path / "stats.json"
    path.write_text(json.dumps(plain))
    with pytest.raises(InputError, match=r"missing field `points\.hidden_state\[0\]\.kurtosis`"):
        read_json(path, Stats)


@pytest.mark.parametrize("field", ["surfaces", "warnings"])
def test_version_4_must_say_what_older_ones_may_leave_out(field: str, tmp_path: Path) -> None:
    plain = json.loads((V4 / "base/stats.json").read_text())
    del plain[field]
    path = tmp_path / "stats.json"
    path.write_text(json.dumps(plain))
    with pytest.raises(InputError, match=f"missing field `{field}`"):
        read_json(path, Stats)


def test_version_4_of_stats_is_version_3_with_a_surface_and_query_tokens() -> None:
    for name in ("base", "diff"):
        older, stats = (read_json(v / name / "stats.json", Stats) for v in (V3, V4))
        assert older.surfaces == {}
        (surface,) = stats.surfaces.values()
        bare = dumps(dataclasses.replace(stats, surfaces={}))  # text: NaN is equal too
        without, count = re.subn(r'"query_token": ".*"', '"query_token": null', bare)
        assert without == dumps(older) and count
        assert [len(row) for row in surface.abs_max] == [8] * 9 == [surface.channel_count] * 9
        for entry in stats.points["hidden_state"][0].top:
            if entry.sequence == surface.sequence and entry.channel is not None:
                value = surface.abs_max[entry.position][entry.channel]
                assert value == pytest.approx(abs(entry.value), rel=1e-5)
                assert surface.tokens[entry.position] == entry.token


def test_values_of_the_fixtures() -> None:
    base, diff = (read_json(V4 / name / "stats.json", Stats) for name in ("base", "diff"))
    for stats in (base, diff):
        assert (stats.schema, stats.sampled_rows, stats.seed) == ("quantkit.stats/4", 6, 1)
        state = next(g for g in stats.points["hidden_state"] if g.layer == 0)
        assert len(state.channel_absmax) == 8
        assert state.channel_ratio is not None and state.channel_ratio > 1000
        assert stats.summary.massive_activations.count == 1
        assert stats.summary.outlier_tokens.by_layer == [1]
        assert stats.summary.outlier_features.channels == [1, 5]
        assert {hit.point for hit in stats.hits} == {"attention_logit", "hidden_state", "mlp_input"}
    head = next(g for g in base.points["attention_logit"] if g.head == 1)
    assert head.sink_rate is not None and head.row_sum is None and head.map == 1
    assert not base.differential and not base.warnings and diff.warnings
    effective = next(g for g in diff.points["effective_map"] if g.head == 0)
    assert effective.row_sum == diff.differential[0].row_sum
    # a new layer 0: lambda is 0.2 and what its random vectors add
    assert effective.row_sum == pytest.approx(1 - diff.differential[0].lambda_mean, abs=1e-6)
    assert diff.differential[0].lambda_mean == pytest.approx(0.2, abs=0.1)


@pytest.mark.parametrize(("name", "cls"), FILES)
def test_schema_is_the_first_field(name: str, cls: type) -> None:
    for folder in (V1, V2, V3, *([V4] if cls in VERSION_4 else [])):
        assert next(iter(json.loads((folder / name).read_text()))) == "schema"
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
    plain = json.loads((V4 / name).read_text())
    for field, value in changes.items():
        if value is KeyError:
            del plain[field]
        else:
            plain[field] = value
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(plain))
    return path


@pytest.mark.kind(8, "report")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"schema": "quantkit.export/5"}, ["'5'", "'4'"], id="newer version"),
        pytest.param({"schema": "quantkit.stats/1"}, ["quantkit.stats/1", "export/4"], id="kind"),
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


@pytest.mark.kind(8, "report")
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
    ranges = read_json(V3 / "base/ranges.json", Ranges)
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
