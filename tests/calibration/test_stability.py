"""Where ranges are looked at, and how far they moved: numbers by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from quantkit.calibration import stability
from quantkit.calibration.recording import Checkpoint
from quantkit.calibration.stability import (
    by_tensor,
    checkpoints_before,
    checkpoints_until,
    is_stable,
)
from tests.calibration.oracle import text
from tests.calibration.test_observe import run


def point(samples: int, **ranges: tuple[list[float], list[float]]) -> Checkpoint:
    return Checkpoint(
        samples=samples,
        ranges={name: (torch.tensor(lo), torch.tensor(hi)) for name, (lo, hi) in ranges.items()},
    )


def test_plans_by_hand() -> None:
    assert checkpoints_before(128, 4) == [2, 3, 4, 6, 8, 10, 14, 18, 24, 32]
    assert checkpoints_before(128, 1)[-2:] == [96, 128]
    assert checkpoints_before(5, 2) == [3]
    assert checkpoints_before(1, 8) == [1]
    assert checkpoints_until(64, 4) == [4, 6, 8, 10, 16]  # 13 of 16 would leave 19 % at the end
    assert checkpoints_until(10, 4) == [3]


@pytest.mark.parametrize("samples", [1, 7, 16, 33, 128, 1000])
@pytest.mark.parametrize("batch_size", [1, 3, 8, 64])
def test_plans_end_with_the_data(samples: int, batch_size: int) -> None:
    for plan in (checkpoints_before, checkpoints_until):
        stops = plan(samples, batch_size)
        assert stops[-1] == math.ceil(samples / batch_size)
        assert stops == sorted(set(stops)) and stops[0] >= 1
    stops = checkpoints_until(samples, batch_size)
    assert all(stop <= 0.75 * stops[-1] for stop in stops[:-1])


def test_moved_by_hand() -> None:
    points = [
        point(12, a=([-1.0, 0.0], [1.0, 2.0]), b=([0.0], [4.0])),
        point(16, a=([-1.0, -0.25], [1.5, 2.0]), b=([0.0], [4.0])),
    ]
    (found,) = stability(points)
    assert (found.samples, found.before, found.worst) == (16, 12, "a")
    assert found.moved_max_frac == pytest.approx(0.5 / 2.5)  # the first head's, not 0.25 / 2.25
    assert found.moved_median_frac == pytest.approx(0.1)  # of 0.2 and 0
    assert by_tensor(points) == {"a": [[16.0, pytest.approx(0.2)]], "b": [[16.0, 0.0]]}
    assert is_stable(points, 0.2000001) and not is_stable(points, 0.19)


@pytest.mark.kind(2, "calibrate")
def test_what_is_new_or_constant() -> None:
    before, after = point(3, a=([0.0], [0.0])), point(4, a=([0.0], [0.0]), b=([0.0], [1.0]))
    assert by_tensor([before, after])["a"] == [[4.0, 0.0]]
    assert math.isnan(by_tensor([before, after])["b"][0][1])
    assert not is_stable([before, after], 0.5)  # b has just been seen
    assert is_stable([before, point(4, a=([0.0], [0.0]))], 0.01)
    assert not is_stable([after], 0.9)  # nothing to compare with
    assert stability([after]) == []


def test_a_pass_stops_where_ranges_no_longer_move(tiny_llama: LlamaForCausalLM) -> None:
    """One text again and again: nothing moves after its first time."""
    data = text((12,) * 200, seed=3)
    data = type(data)(**{**vars(data), "ids": data.ids[:4] * 50})
    found = run(tiny_llama, data, 4, until_stable=0.01)
    assert found.samples == 24  # 16, then 21.3 in whole batches
    assert [c.samples for c in found.checkpoints] == [16, 24]
    assert stability(found.checkpoints)[0].moved_max_frac == 0.0
    layer = found.seen["linear_input/model.layers.0.mlp.down_proj"]
    assert int(layer.seen().minmax.count) == 24 * 12 * 48


def test_a_pass_that_is_never_stable_takes_all(tiny_llama: LlamaForCausalLM) -> None:
    found = run(tiny_llama, text((12,) * 40), 4, until_stable=1e-9)
    assert found.samples == 40


def test_checkpoints_are_what_would_be_chosen_then(tiny_llama: LlamaForCausalLM) -> None:
    data = text((12,) * 16)
    whole = run(tiny_llama, data, 1)
    for checkpoint in whole.checkpoints:
        ids = data.ids[: checkpoint.samples]
        part: Any = run(tiny_llama, type(data)(**{**vars(data), "ids": ids}), 1)
        last = part.checkpoints[-1].ranges
        for name, pair in checkpoint.ranges.items():
            assert all(torch.equal(a, b) for a, b in zip(pair, last[name], strict=True)), name
