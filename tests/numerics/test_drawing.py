"""Equal bins for a figure: exact where both grids have their edges in the same places."""

from __future__ import annotations

import pytest
import torch

from quantkit.numerics.drawing import even_bins
from quantkit.numerics.observers import Histogram


def test_bins_on_the_same_edges_have_numpys_counts() -> None:
    # each element in the middle of a bin of 1/8 or less; the equal bins are 0.5 wide
    x = torch.tensor([[-1.9, -1.9, -0.6, -0.3, 0.1, 0.3, 0.3, 0.9, 1.2, 1.9, 1.9, 1.9]])
    edges, counts = even_bins(Histogram.empty(1).update(x), -2.0, 2.0, 8)
    assert edges == [-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0]
    assert counts == [2, 0, 1, 1, 3, 1, 1, 3]


def test_zeros_lie_in_the_bin_that_begins_at_zero() -> None:
    x = torch.tensor([[0.0, -0.0, 0.0, -0.75, 0.75]])
    seen = Histogram.empty(1).update(x)
    assert even_bins(seen, -1.0, 1.0, 2)[1] == [1, 4]
    assert even_bins(seen, -1.0, 1.0, 4)[1] == [1, 0, 3, 1]


def test_a_bin_across_an_edge_is_shared_out_evenly() -> None:
    x = torch.full((1, 400), 1.25)  # with no mantissa bits the bin is [1, 2)
    seen = Histogram.empty(1, mantissa_bits=0).update(x)
    assert even_bins(seen, 0.0, 4.0, 16)[1] == [0] * 4 + [100] * 4 + [0] * 8
    negative = Histogram.empty(1, mantissa_bits=0).update(-x)
    assert even_bins(negative, -4.0, 0.0, 16)[1] == [0] * 8 + [100] * 4 + [0] * 4
    # what is left of the bin between the extremes holds all of it
    assert even_bins(seen, 1.0, 1.5, 2)[1] == [200, 200]


@pytest.mark.parametrize("zeros", [0, 3])
def test_groups_are_taken_together_and_all_finite_elements_counted(zeros: int) -> None:
    x = torch.tensor([[1.5, 3.5, float("nan"), float("inf")], [-1.5, 1e-45, -3.5, 2.5]])
    x = torch.cat([x, torch.zeros(2, zeros)], 1)
    _, counts = even_bins(Histogram.empty(2).update(x), -4.0, 4.0, 4)
    assert counts == [1, 1, 2 + 2 * zeros, 2]


def test_one_value_is_one_bin() -> None:
    seen = Histogram.empty(1).update(torch.full((1, 5), 0.7))
    assert even_bins(seen, 0.7, 0.7, 64) == ([0.7, 0.7], [5])
