"""The published outlier definitions, on tensors small enough to check by hand."""

from __future__ import annotations

import math

import pytest
import torch

from quantkit.errors import InputError
from quantkit.numerics.outliers import (
    first_token_attention,
    massive_mask,
    outlier_feature_counts,
    outlier_features,
    outlier_tokens,
    sink_share,
    token_ratio,
)


def test_massive_needs_both_conditions() -> None:
    x = torch.full((10, 10), 0.1)
    x[0, 3], x[1, 4], x[2, 5] = 101.0, -100.0, -500.0  # 100 is not above 100
    assert massive_mask(x).nonzero().tolist() == [[0, 3], [2, 5]]
    assert massive_mask(x, median=0.2).nonzero().tolist() == [[2, 5]]
    assert not massive_mask(x + 50).any()  # large, but not against its median
    assert massive_mask(torch.zeros(0, 4)).shape == (0, 4)


def test_outlier_feature_needs_layers_and_positions() -> None:
    layers = torch.zeros(4, 100, 3)
    layers[0, :24, 0] = 6.0  # 1 of 4 layers, 24 of 400 positions: exactly 25 % and 6 %
    layers[:, :5, 1] = -7.0  # all layers, 20 of 400 positions: 5 %
    layers[0, :, 2] = 5.9
    counts = torch.stack([outlier_feature_counts(x) for x in layers])
    got = outlier_features(counts, tokens=100)
    assert got.is_outlier.tolist() == [True, False, False]
    assert got.layer_frac.tolist() == [0.25, 1.0, 0.0]
    assert got.position_frac.tolist() == [0.06, 0.05, 0.0]


def test_sink_share_leaves_out_query_0_and_padding() -> None:
    attention = torch.zeros(2, 1, 4, 4)
    attention[:, :, 0, 0] = 1.0
    attention[0, 0, 1:, 0], attention[0, 0, 1:, 1] = 0.4, 0.6
    attention[1, 0, 1, :2] = torch.tensor([0.2, 0.8])
    attention[1, 0, 2:] = math.nan  # padding
    mean = first_token_attention(attention, lengths=torch.tensor([4, 2]))
    torch.testing.assert_close(mean, torch.tensor([[0.4], [0.2]]))
    assert sink_share(mean) == 0.5
    lonely = first_token_attention(attention, lengths=torch.tensor([4, 1]))
    assert lonely[1].isnan() and sink_share(lonely) == 1.0
    assert math.isnan(sink_share(torch.tensor([math.nan])))


def test_sink_of_a_signed_map_is_a_share_of_magnitudes() -> None:
    attention = torch.zeros(1, 1, 2, 2)
    attention[0, 0, 1] = torch.tensor([-0.3, 0.1])
    assert first_token_attention(attention).item() == pytest.approx(0.75)


def test_only_queries_1_to_63_count() -> None:
    attention = torch.zeros(1, 1, 80, 80)
    attention[..., 1] = 1.0
    attention[:, :, 64:, 0] = 1e9
    assert first_token_attention(attention).item() == 0.0


def test_token_ratio_by_hand() -> None:
    x = torch.tensor([[130.0, 0.0], [-1.0, 2.0], [1.0, 0.5], [-2.0, 0.0], [0.0, 2.0]])
    assert token_ratio(x).tolist() == [65.0, 1.0, 0.5, 1.0, 1.0]
    assert outlier_tokens(x).tolist() == [True, False, False, False, False]
    assert token_ratio(torch.zeros(0, 3)).shape == (0,)


def test_shapes_that_do_not_fit_are_input_errors() -> None:
    for call in (massive_mask, outlier_feature_counts, token_ratio, first_token_attention):
        with pytest.raises(InputError, match="Expected"):
            call(torch.zeros(2, 2, 2))
    with pytest.raises(InputError, match="0 tokens"):
        outlier_features(torch.zeros(2, 2), tokens=0)


def test_what_is_exactly_at_a_bound_is_not_above_it() -> None:
    assert outlier_tokens(torch.tensor([[64.0], [1.0], [1.0]])).tolist() == [False] * 3
    assert sink_share(torch.tensor([0.3, 0.31]), above=float(torch.tensor(0.3))) == 0.5
    assert math.isnan(sink_share(torch.empty(0)))


def test_one_element_one_layer_and_one_token_are_enough() -> None:
    assert massive_mask(torch.tensor([[200.0]]), median=0.2).tolist() == [[True]]
    empty = massive_mask(torch.zeros(0, 4))
    assert (empty.shape, empty.dtype) == ((0, 4), torch.bool)
    assert outlier_features(torch.tensor([[1, 0]]), tokens=1).is_outlier.tolist() == [True, False]
    no_channels = outlier_features(torch.zeros(2, 0), tokens=1)
    assert no_channels.is_outlier.shape == (0,)
    for counts, tokens in ((torch.zeros(0, 2), 3), (torch.zeros(4), 3), (torch.zeros(1, 2), 0)):
        with pytest.raises(InputError, match="at least 1 layer"):
            outlier_features(counts, tokens=tokens)


def test_layers_may_have_tokens_of_their_own() -> None:
    got = outlier_features(torch.tensor([[6, 0], [0, 1]]), tokens=[60, 40])
    assert got.position_frac.tolist() == [0.06, 0.01]
    assert got.is_outlier.tolist() == [True, False]


def test_each_row_is_a_share_of_its_own_and_each_sequence_has_its_own_mean() -> None:
    attention = torch.zeros(3, 2, 3, 3)
    attention[..., 0] = 0.1
    attention[..., 1] = 0.3
    attention[1, 0, 1] = torch.tensor([0.5, 0.5, 0.0])
    attention[2, 1, 2, 2] = -0.4
    got = first_token_attention(attention)
    want = [[0.25, 0.25], [0.375, 0.25], [0.25, (0.25 + 0.125) / 2]]
    torch.testing.assert_close(got, torch.tensor(want))
    assert got.dtype == torch.float32
    plain = first_token_attention(attention, signed=False)
    torch.testing.assert_close(plain, torch.tensor([[0.1, 0.1], [0.3, 0.1], [0.1, 0.1]]))
    rest = first_token_attention(attention, queries=(2, 2), lengths=torch.tensor([3, 2, 3]))
    assert rest[1].isnan().all()
    torch.testing.assert_close(rest[2], torch.tensor([0.25, 0.125]))
