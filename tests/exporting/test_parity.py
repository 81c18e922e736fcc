"""What agreement means, on numbers that can be checked by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantkit.errors import InputError
from quantkit.exporting import FLOAT_GATE, QUANTIZED_GATE, Gate, compare_logits

VALID = torch.ones(1, 2, dtype=torch.bool)


def test_equal_logits_agree() -> None:
    logits = torch.tensor([[[1.0, 2.0, 4.0], [3.0, 0.0, 1.0]]])
    found = compare_logits(logits, logits.numpy(), VALID)
    assert found.max_abs == 0 and found.top1_agreement == 1 and found.positions == 2
    assert found.cosine == pytest.approx(1)
    assert FLOAT_GATE.passes(found)


def test_a_common_shift_is_no_difference_but_is_told() -> None:
    logits = torch.tensor([[[1.0, 2.0, 4.0], [3.0, 0.0, 1.0]]])
    found = compare_logits(logits, logits + 8, VALID)
    assert found.max_abs == 8
    assert found.cosine == pytest.approx(1)


def test_by_hand() -> None:
    reference = torch.tensor([[[1.0, -1.0, 0.0], [1.0, -1.0, 0.0]]])
    candidate = torch.tensor([[[1.0, -1.0, 0.0], [0.0, 1.0, -1.0]]])  # the second at cosine -1/2
    found = compare_logits(reference, candidate, VALID)
    assert (found.max_abs, found.top1_agreement) == (2.0, 0.5)
    assert found.cosine == pytest.approx(0.25)
    assert not QUANTIZED_GATE.passes(found)


def test_what_is_padding_does_not_count() -> None:
    reference = torch.tensor([[[1.0, -1.0], [1.0, -1.0]]])
    candidate = np.array([[[1.0, -1.0], [np.nan, 9.0]]], np.float32)
    found = compare_logits(reference, candidate, np.array([[True, False]]))
    assert (found.max_abs, found.positions) == (0.0, 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_fail_every_gate(bad: float) -> None:
    reference = torch.tensor([[[1.0, -1.0], [1.0, -1.0]]])
    candidate = np.array([[[bad, -1.0], [1.0, -1.0]]], np.float32)
    found = compare_logits(reference, candidate, VALID)
    assert not Gate(cosine=-1, top1_agreement=0).passes(found)


def test_shapes_that_do_not_match_are_an_error() -> None:
    with pytest.raises(InputError, match="one shape"):
        compare_logits(torch.zeros(1, 2, 3), torch.zeros(1, 2, 4), VALID)
    with pytest.raises(InputError, match="no valid position"):
        compare_logits(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), ~VALID)
