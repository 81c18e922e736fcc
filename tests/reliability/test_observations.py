"""Kind 8: observations of a calibration that are damaged are refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from quantkit.calibration import RangePlan, load, observe, ranges_now, save
from quantkit.errors import InputError
from quantkit.numerics.methods import parse_methods
from tests.calibration.oracle import loaded_model, text

Plain = dict[str, Any]
DAMAGES: dict[str, Callable[[Plain], object]] = {
    "no names": lambda plain: plain.pop("names"),
    "a name of another number": lambda plain: plain["names"].update(
        dict.fromkeys(plain["names"], 99)
    ),
    "names as a list": lambda plain: plain.update(names=[]),
    "kinds of one word": lambda plain: plain.update(kinds=[["linear_input"]]),
    "no identity": lambda plain: plain.pop("identity"),
    "hits as a number": lambda plain: plain.update(hits=3),
}


@pytest.fixture
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Any) -> Path:
    path = tmp_path_factory.mktemp("observed") / "observations.safetensors"
    plan = RangePlan(methods=parse_methods("minmax", ("linear_input",)))
    recording = observe(
        loaded_model(tiny_llama), text((8, 8)), points=("linear_input",), batch_size=1,
        choose=lambda seen: ranges_now(seen, plan),
    )  # fmt: skip
    assert recording is not None
    save(path, recording, {"model": "m"})
    assert load(path)[1] == {"model": "m"}
    return path


@pytest.mark.kind(8, "calibrate")
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_observations_are_one_line(
    damage: Callable[[Plain], object], whole: Path, tmp_path: Path
) -> None:
    with safe_open(whole, framework="pt") as file:
        (key,) = file.metadata()
        plain = json.loads(file.metadata()[key])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    damage(plain)
    path = tmp_path / whole.name
    save_file(tensors, path, metadata={key: json.dumps(plain)})
    with pytest.raises(InputError, match=r"is damaged .*: calibrate again") as said:
        load(path)
    assert "\n" not in str(said.value)


@pytest.mark.kind(8, "calibrate")
def test_observations_nested_without_end_are_one_line(whole: Path, tmp_path: Path) -> None:
    with safe_open(whole, framework="pt") as file:
        (key,) = file.metadata()
    path = tmp_path / whole.name
    save_file({"x": torch.zeros(1)}, path, metadata={key: "[" * 100_000})
    with pytest.raises(InputError, match="cannot be read"):
        load(path)
