"""`calibration.json`: the kept file of version 1, and what a strict reader refuses.

The file is of three tensors: the worst, one whose methods coincide, and one that was never seen.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from quantkit.errors import InputError
from quantkit.results import Calibration, read_json, write_json

KEPT = Path(__file__).parent / "fixtures" / "v3" / "base" / "calibration.json"


def test_reads_and_writes_byte_for_byte(tmp_path: Path) -> None:
    value = read_json(KEPT, Calibration)
    assert value.schema == "quantkit.calibration/1"
    write_json(tmp_path / "again.json", value)
    assert (tmp_path / "again.json").read_bytes() == KEPT.read_bytes()


def test_what_is_unknown_is_nan() -> None:
    worst, same, unseen = read_json(KEPT, Calibration).tensors
    assert unseen.count == 0
    assert all(math.isnan(value) for value in (unseen.min, unseen.bits_wasted, unseen.span_hi))
    assert len({(found.lo, found.hi) for found in same.methods[:2]}) == 1
    for tensor in (worst, same):
        assert sum(tensor.histogram.counts) == tensor.count
        assert tensor.chosen in [found.method for found in tensor.methods]
        chosen = tensor.methods[0]
        spans = (chosen.hi - chosen.lo) / (tensor.span_hi - tensor.span_lo)
        assert tensor.bits_wasted == pytest.approx(math.log2(spans), abs=1e-4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "quantkit.calibration/9"}, "this is version '9'"),
        ({"tensors": [{"name": "x"}]}, "tensors"),
        ({"excludes_first": "no"}, "excludes_first"),
    ],
    ids=["another version", "a field is missing", "another kind"],
)
def test_what_is_not_a_calibration_is_refused(
    change: dict[str, object], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(json.loads(KEPT.read_text()) | change))
    with pytest.raises(InputError, match=said):
        read_json(path, Calibration)
