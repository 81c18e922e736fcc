"""The rules on hidden states, on tensors that no small model makes: NaN, inf, zeros, many."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantkit.outliers.activations import ActivationStatistics
from quantkit.outliers.assemble import Assembly
from quantkit.outliers.features import outlier_tokens_of
from quantkit.outliers.maps import RowSampling
from quantkit.outliers.statistics import ModelStatistics
from quantkit.probes import Activation
from quantkit.results import GroupStats, MassiveActivations, OutlierTokens

INF, NAN = float("inf"), float("nan")


def visit(x: torch.Tensor, *, layer: int = 0, real: torch.Tensor | None = None) -> Activation:
    real = torch.ones(x.shape[:2], dtype=torch.bool) if real is None else real
    return Activation(point="hidden_state", layer=layer, name=f"l{layer}", tensor=x, real=real)


def found(
    *visits: Activation,
) -> tuple[MassiveActivations, OutlierTokens, list[GroupStats], ModelStatistics]:
    """What the rules and the groups say of hidden states."""
    recording = ModelStatistics.of((), RowSampling())
    for one in visits:
        recording.activations["hidden_state"].see(one)
    recording.end()
    assembly = Assembly(statistics=recording, token=lambda _side, _s, _p: None)
    states = recording.activations["hidden_state"]
    groups = list(assembly._activation_groups(states))
    tokens = outlier_tokens_of(states, lambda _name, _s, _p: None)
    return assembly._massive(states), tokens, groups, recording


def states() -> torch.Tensor:
    """Two sequences of 8 tokens and 6 channels with a median |x| of 0.1."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (2, 8, 6), generator=generator) * 2 - 1
    return 0.1 * signs.float()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_is_neither_massive_nor_hides_what_is(bad: float) -> None:
    x = states()
    x[0, 2, 3] = -900.0
    x[0, 2, 4], x[0, 5, :] = bad, bad  # beside it, and a whole token
    massive, tokens, groups, recording = found(visit(x))
    assert massive.count == massive.count_pooled == 1
    entry = massive.entries[0]
    assert (entry.value, entry.sequence, entry.position, entry.channel) == (-900.0, 0, 2, 3)
    assert tokens.count == 1 and tokens.entries[0].position == 2
    # 900 over the median token's largest |x|, 0.1
    assert tokens.entries[0].ratio == pytest.approx(9000, rel=1e-5)
    group = groups[0]
    assert (group.count, group.nan_count + group.inf_count) == (96, 7)
    assert (group.abs_max, group.min) == (900.0, -900.0)
    assert group.channel_absmax == pytest.approx(
        [0.1, 0.1, 0.1, 900.0, 0.1, 0.1][:3] + [900.0] + [0.1] * 2
    )
    assert group.channel_ratio == pytest.approx(9000, rel=1e-5)
    what = "7 NaN and 0 inf" if np.isnan(bad) else "0 NaN and 7 inf"
    assert recording.nonfinite() == [
        f"hidden_state of layer 0 holds {what} values; they are left out of its figures."
    ]


def test_both_thresholds_of_massive_are_met_at_their_edges() -> None:
    x = states()
    x[0, 0, 0], x[1, 1, 1] = 100.0, 100.001  # 1000 x the median is 100; more than 100 is asked
    massive, _, _, _ = found(visit(x))
    assert [entry.sequence for entry in massive.entries] == [1]


def test_the_median_is_of_each_sequence_and_pooled_of_the_layer() -> None:
    for own, other, counts in (
        (0.1, 0.1, (1, 1)),  # 150 is 1,500 medians of both
        (0.1, 0.3, (1, 0)),  # of its own sequence; with the other's 48 elements the median is 0.3
        (0.3, 0.1, (0, 1)),
    ):
        x = states().sign() * torch.tensor([own, other])[:, None, None]
        x[0, 4, 4] = 150.0
        massive, _, _, _ = found(visit(x))
        assert (massive.count, massive.count_pooled) == counts


def test_the_twenty_largest_are_listed_and_all_are_counted() -> None:
    x = torch.full((1, 40, 1000), 0.01)
    x[0, :15, 0], x[0, 15:19, 1] = 200.0 + torch.arange(15), -1000.0
    x[0, 20, 2:12] = 500.0
    massive, tokens, groups, _ = found(visit(x), visit(x * 2, layer=1))
    assert massive.count == 2 * 29
    assert [entry.value for entry in massive.entries[:4]] == [-2000.0] * 4
    assert [entry.layer for entry in massive.entries[:4]] == [1] * 4
    assert len(massive.entries) == len(tokens.entries) == 20
    # half the tokens are outliers, and the median token is one of the others
    assert tokens.by_layer == [20, 20] and tokens.count == 40
    assert len(groups[0].top) == 10


@pytest.mark.kind(1, "stats")
def test_padding_takes_no_part() -> None:
    x = states()
    real = torch.ones(2, 8, dtype=torch.bool)
    real[0, 5:], real[1, :3] = False, False
    clean = found(visit(x, real=real))
    x[0, 5:], x[1, :3] = NAN, 1e6
    dirty = found(visit(x, real=real))
    assert repr(clean[:3]) == repr(dirty[:3])
    assert not dirty[3].nonfinite()
    first = next(group for group in dirty[2] if group.token_class == "first")
    assert first.count == 2 * 6  # positions 0 and 3
    statistics = dirty[3].activations["hidden_state"]
    assert statistics.records[0].excluded == 6 * 6


@pytest.mark.kind(2, "stats")
def test_a_layer_of_zeros_has_no_outliers_and_no_ratio() -> None:
    massive, tokens, groups, _ = found(visit(torch.zeros(1, 5, 4)))
    assert (massive.count, massive.count_pooled, tokens.count) == (0, 0, 0)
    group = groups[0]
    assert (group.abs_max, group.abs_median, group.inf_norm_mean) == (0.0, 0.0, 0.0)
    assert np.isnan([group.kurtosis, group.kurtosis_oft, group.span_999_frac]).all()
    assert group.channel_ratio is not None


@pytest.mark.kind(2, "stats")
def test_a_token_is_infinitely_far_from_a_median_of_zero() -> None:
    x = torch.zeros(1, 5, 4)
    x[0, 3, 1] = 1.0
    _, tokens, groups, _ = found(visit(x))
    assert tokens.count == 1 and tokens.entries[0].ratio == INF
    assert groups[0].channel_ratio == INF


def test_an_offset_keeps_the_kurtosis_of_a_gaussian() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 500, 64, generator=generator)
    for offset in (0.0, 100.0):
        _, _, groups, _ = found(visit(x + offset))
        # sqrt(24 / 64,000) is 0.02; a sequence's has twice the variance, and two are averaged
        assert groups[0].kurtosis == pytest.approx(3.0, abs=0.08)
        assert groups[0].kurtosis_oft == pytest.approx(3.0, abs=0.08)


def test_statistics_start_empty() -> None:
    statistics = ActivationStatistics()
    assert not statistics.records and np.isnan(statistics.inf_norm.mean)
