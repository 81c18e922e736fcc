"""`sensitivity.json`: the kept file of version 1, and what a strict reader refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from quantkit.errors import InputError
from quantkit.results import Sensitivity, read_json, write_json

KEPT = Path(__file__).parent / "fixtures" / "v3" / "base" / "sensitivity.json"


def test_reads_and_writes_byte_for_byte(tmp_path: Path) -> None:
    value = read_json(KEPT, Sensitivity)
    assert value.schema == "quantkit.sensitivity/1"
    write_json(tmp_path / "again.json", value)
    assert (tmp_path / "again.json").read_bytes() == KEPT.read_bytes()


def test_its_figures_agree_with_each_other() -> None:
    found = read_json(KEPT, Sensitivity)
    assert [row.rank for row in found.rows] == [1, 2, 3]
    for row in found.rows:
        assert row.removed_frac == 1 - row.disable_one_kl / found.total_kl
    for point in found.kept:
        assert point.remaining_frac == point.kl / found.total_kl
    few = next(p.units for p in found.kept if p.remaining_frac < found.target_frac)
    assert found.keep == [name for row in found.rows[:few] for name in row.quantizers]
    assert not set(found.data.block_hashes) & set(found.calibration.block_hashes)


def test_what_was_not_measured_is_nan(tmp_path: Path) -> None:
    plain = json.loads(KEPT.read_text())
    plain["rows"][1] |= {"disable_one_kl": None, "removed_frac": None}
    path = tmp_path / "sensitivity.json"
    path.write_text(json.dumps(plain))
    row = read_json(path, Sensitivity).rows[1]
    assert math.isnan(row.disable_one_kl) and math.isnan(row.removed_frac)
    assert row.enable_one_kl == 0.125


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "quantkit.sensitivity/9"}, "this is version '9'"),
        ({"rows": [{"name": "x"}]}, r"missing field `rows\[0\]\.point`"),
        ({"keep": ["x", 3]}, r"field `keep\[1\]`: expected a string, got 3"),
        ({"reached": "yes"}, "field `reached`: expected true or false"),
    ],
    ids=["another version", "a field is missing", "a name is a number", "another kind"],
)
def test_what_is_not_a_sensitivity_is_refused(
    change: dict[str, object], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "sensitivity.json"
    path.write_text(json.dumps(json.loads(KEPT.read_text()) | change))
    with pytest.raises(InputError, match=said):
        read_json(path, Sensitivity)
