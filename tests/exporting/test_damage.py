"""What an output loses, by hand: KL of logits or relative energy, without what is padding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.exporting.diagnosis.error_sums import GridSums
from quantkit.exporting.diagnosis.padding import real_elements, real_positions
from quantkit.exporting.diagnosis.switched import damage

Array = NDArray[Any]
HIDDEN = np.array([[True, True, True], [True, False, False]])
"""Which of `[2, 3]` positions are no padding."""


def logits(seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=(2, 3, 7)).astype(np.float32)


def divergence(p: Array, q: Array) -> float:
    """The mean KL of rows `[rows, vocabulary]`, in float64."""
    p, q = (np.exp(x.astype(np.float64)) for x in (p, q))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    return float((p * np.log(p / q)).sum(-1).mean())


def test_logits_lose_kl() -> None:
    p, q = logits(0), logits(1)
    expected = divergence(p.reshape(-1, 7), q.reshape(-1, 7))
    assert damage(["logits"], [p], [q]) == pytest.approx(expected, rel=1e-5)
    assert damage(["logits"], [p], [p]) == 0.0


@pytest.mark.parametrize("outputs", [["logits"], ["hidden"]], ids=["logits", "another output"])
def test_padded_positions_count_in_nothing(outputs: list[str]) -> None:
    p, q = logits(0), logits(1)
    p[1, 1:], q[1, 1:] = np.nan, 1e9
    a, b = p[HIDDEN], q[HIDDEN]
    energy = ((a.astype(np.float64) - b) ** 2).sum() / (a.astype(np.float64) ** 2).sum()
    expected = divergence(a, b) if outputs == ["logits"] else energy
    assert damage(outputs, [p], [q], HIDDEN) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(InputError, match=rf"output '{outputs[0]}' holds 14 NaN"):
        damage(outputs, [p], [q])


def test_what_the_vocabulary_leaves_out_is_left_out() -> None:
    p, q = logits(0), logits(1)
    expected = divergence(p[..., :5].reshape(-1, 5), q[..., :5].reshape(-1, 5))
    p[..., 5:] = q[..., 5:] = -np.inf
    assert damage(["logits"], [p], [q]) == pytest.approx(expected, rel=1e-5)


def test_what_only_the_quantized_graph_chooses_costs() -> None:
    p, q = logits(0), logits(1)
    weights = np.exp(q.astype(np.float64))
    share = weights[..., :5].sum(-1) / weights.sum(-1)
    expected = divergence(p[..., :5].reshape(-1, 5), q[..., :5].reshape(-1, 5))
    p[..., 5:] = -np.inf
    found = damage(["logits"], [p], [q])
    assert found == pytest.approx(expected - np.log(share).mean(), rel=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_one_entry_that_is_not_finite(value: float) -> None:
    p, q = logits(0), logits(1)
    broken = q.copy()
    broken[0, 0, 0] = value
    assert damage(["logits"], [p], [broken]) == math.inf
    assert damage(["hidden"], [p], [broken]) == math.inf
    with pytest.raises(InputError, match="holds 1 NaN or infinite values") as error:
        damage(["logits"], [broken], [q])
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="output 'hidden' holds 1"):
        damage(["hidden"], [broken], [q])


def test_outputs_of_two_shapes_are_of_two_models() -> None:
    with pytest.raises(InputError, match=r"\[2, 3, 7\] in the float graph and \[2, 3, 6\]"):
        damage(["logits"], [logits(0)], [logits(1)[..., :6]])


def test_a_mask_says_which_positions_are_real() -> None:
    ids = np.zeros((2, 3), np.int64)
    mask = HIDDEN.astype(np.int64)
    cached = np.concatenate([np.ones((2, 2), np.int64), mask], 1)
    for given in (mask, cached):
        found = real_positions({"input_ids": ids, "attention_mask": given})
        assert found is not None and found.tolist() == HIDDEN.tolist()
    assert real_positions({"input_ids": ids, "attention_mask": np.ones_like(ids)}) is None
    assert real_positions({"input_ids": ids}) is None
    with pytest.raises(InputError, match="0 throughout"):
        real_positions({"attention_mask": np.zeros((1, 3))})


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((2, 3, 5), "bt."),
        ((2, 4, 3, 5), "b.t."),
        ((2, 4, 5, 3), "b..t"),
        ((2, 4, 3, 3), "b.t."),
        ((2, 3), "bt"),
        ((6, 5), "r."),
        ((8, 3, 5), "htw"),
        ((2, 5), ""),
        ((7, 4), ""),
        ((), ""),
    ],
    ids=str,
)
def test_elements_of_padding_are_found_by_their_shape(shape: tuple[int, ...], axes: str) -> None:
    """An element is called by its place, and its batch and token are worked out one by one."""
    found = real_elements(shape, HIDDEN)
    assert (found is None) == (not axes)
    if found is None:
        return
    assert found.shape == shape
    for place in np.ndindex(*shape):
        if axes == "r.":
            item, token = divmod(place[0], 3)
        elif axes == "htw":
            item, token = place[0] // 4, place[1]
        else:
            item, token = place[axes.index("b")], place[axes.index("t")]
        assert found[place] == HIDDEN[item, token]


def test_a_grid_does_not_count_padding() -> None:
    x = logits(2) * 10
    real = real_elements(x.shape, HIDDEN)
    wide = np.where(np.broadcast_to(HIDDEN[..., None], x.shape), x, np.float32(1e4))
    grids = [
        GridSums(scale=np.array([0.1]), zero_point=np.array([0]), qmin=-128, qmax=127, axis=None)
        for _ in range(2)
    ]
    grids[0].add(x[HIDDEN])
    grids[1].add(wide, None, real)
    for name in ("lo", "hi", "below", "above", "hidden"):
        assert getattr(grids[0], name) == getattr(grids[1], name), name
    assert grids[0].errors.count == grids[1].errors.count == 4 * 7
    assert grids[0].errors.sqnr_db == pytest.approx(grids[1].errors.sqnr_db)
    assert (grids[0].used == grids[1].used).all()
