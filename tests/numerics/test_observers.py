"""Observers: a numpy oracle for each, and that they are monoids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantkit.errors import InputError
from quantkit.numerics.observers import Histogram, MinMax, Moments, TopK

INF, NAN = float("inf"), float("nan")
K = 5
CANCELS = {"mean": 0.5, "m3": 1.5}
"""Sums that may be zero of large numbers: rounding is relative to this power of the spread."""
MAKERS: dict[str, Callable[[int], Any]] = {
    "minmax": MinMax.empty,
    "topk": lambda groups: TopK.empty(groups, k=K),
    "moments": Moments.empty,
    "histogram": Histogram.empty,
    "histogram with sums": lambda groups: Histogram.empty(groups, with_sums=True),
}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
numbers = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 2.0**-126, 3.4e38, NAN, INF, -INF]),
)


def same(a: Any, b: Any) -> None:
    """Asserts equal states: to the bit, except float64 sums."""
    left, right = a.state(), b.state()
    assert left.keys() == right.keys()
    for key, value in left.items():
        if value.dtype == torch.float64:
            size = max(1.0, float(value.abs().max())) if value.numel() else 1.0
            if key in CANCELS and value.numel():
                size = max(size, float(left["m2"].max()) ** CANCELS[key])
            torch.testing.assert_close(
                value, right[key], rtol=1e-9, atol=1e-9 * size, equal_nan=True
            )
        else:
            assert torch.equal(value, right[key]), key


def rows(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[None]


def tags_of(x: Tensor, start: int = 0) -> Tensor:
    return torch.arange(start, start + x.shape[1])[None]


@pytest.mark.kind(4, "numerics")
@makers
@settings(deadline=None, max_examples=60)
@given(st.lists(numbers, max_size=30), st.integers(0, 30), st.integers(0, 30))
def test_merge_is_one_pass_and_associative(
    make: Callable[[int], Any], values: list[float], i: int, j: int
) -> None:
    i, j = sorted((min(i, len(values)), min(j, len(values))))
    x = rows(values)
    parts = [make(1).update(x[:, a:b]) for a, b in ((0, i), (i, j), (j, len(values)))]
    whole = make(1).update(x)
    a, b, c = parts
    same(a.merge(b).merge(c), whole)
    same(a.merge(b.merge(c)), whole)
    same(c.merge(b).merge(a), whole)
    same(make(1).update(x[:, :i]).update(x[:, i:]), whole)
    same(make(1).merge(whole), whole)
    same(whole.merge(make(1)), whole)


@makers
def test_groups_are_independent_and_pool_to_one(make: Callable[[int], Any]) -> None:
    x = torch.randn(7, 300) * torch.logspace(-3, 3, 7)[:, None]
    seen = make(7).update(x)
    for g in range(7):
        one = make(1).update(x[g : g + 1])
        for key, value in one.state().items():
            whole = seen.state()[key]
            if key in ("counts", "sums", "squares", "first_octave", "lossless"):
                continue  # another window: compared through quantiles below
            torch.testing.assert_close(whole[g : g + 1], value, rtol=1e-12, atol=1e-12)
        if isinstance(seen, Histogram):
            for q in (0.1, 0.5, 1.0):
                assert seen.quantile(q)[g] == one.quantile(q)[0]
    same(seen.pool(), make(1).update(x.reshape(1, -1)))
    same(make(0).pool(), make(1))


@pytest.mark.kind(1, "numerics")
@makers
def test_what_is_not_valid_does_not_exist(make: Callable[[int], Any]) -> None:
    x = torch.randn(3, 40)
    valid = torch.rand(1, 40) < 0.6
    poisoned = x.masked_fill(~valid, NAN)
    poisoned[:, (~valid[0]).nonzero()[0]] = INF
    want = make(3).update(x[:, valid[0]])
    same(make(3).update(x, valid=valid), want)
    same(make(3).update(poisoned, valid=valid), want)
    same(make(3).update(x, valid=valid.expand(3, 40)), want)
    nothing = make(3).update(x, valid=torch.zeros(1, 40, dtype=torch.bool))
    same(nothing, make(3))


@makers
def test_update_changes_nothing_in_place(make: Callable[[int], Any]) -> None:
    x = torch.randn(2, 30)
    kept = x.clone()
    seen = make(2).update(x)
    state = {k: v.clone() for k, v in seen.state().items()}
    seen.update(x * 100).merge(seen).pool()
    assert torch.equal(x, kept)
    assert all(torch.equal(v, state[k]) for k, v in seen.state().items())


@makers
def test_a_state_makes_the_observer_again(make: Callable[[int], Any]) -> None:
    seen = make(2).update(torch.randn(2, 30))
    again = type(seen).from_state(seen.state())
    same(again, seen)
    same(again.update(torch.ones(2, 3)), seen.update(torch.ones(2, 3)))


@makers
def test_what_does_not_fit_is_an_input_error(make: Callable[[int], Any]) -> None:
    seen = make(2)
    for x in (torch.zeros(3, 4), torch.zeros(2), torch.zeros(2, 4, dtype=torch.int64)):
        with pytest.raises(InputError, match="groups=2"):
            seen.update(x)
    with pytest.raises(InputError, match="valid"):
        seen.update(torch.zeros(2, 4), valid=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(InputError, match="groups"):
        seen.merge(make(3))


@pytest.mark.kind(2, "numerics")
def test_minmax_counts_what_is_not_finite_and_leaves_it_out() -> None:
    seen = MinMax.empty(2).update(torch.tensor([[1.0, NAN, INF, -INF], [NAN, NAN, NAN, NAN]]))
    assert seen.count.tolist() == [4, 4]
    assert seen.nan_count.tolist() == [1, 4]
    assert seen.inf_count.tolist() == [2, 0]
    lo, hi = seen.finish()
    assert (lo[0], hi[0]) == (1.0, 1.0)
    assert lo[1].isnan() and hi[1].isnan()


@pytest.mark.kind(4, "numerics")
@settings(deadline=None)
@given(st.lists(st.integers(-4, 4), max_size=60), st.lists(st.integers(1, 20), max_size=8))
def test_topk_is_a_sort_even_with_ties_and_any_batches(values: list[int], cuts: list[int]) -> None:
    x = torch.tensor(values, dtype=torch.float32)[None]
    tags = torch.arange(len(values)).flip(0)[None]
    want = sorted(zip(values, tags[0].tolist(), strict=True), key=lambda p: (-abs(p[0]), p[1]))
    want = want[:K]
    seen, start = TopK.empty(1, k=K), 0
    for step in [*cuts, len(values)]:
        seen = seen.update(x[:, start : start + step], tags[:, start : start + step])
        start += step
    n = len(want)
    assert seen.signed[0, :n].tolist() == [float(v) for v, _ in want]
    assert seen.tags[0, :n].tolist() == [t for _, t in want]
    assert seen.values[0, :n].tolist() == [float(abs(v)) for v, _ in want]
    assert seen.values[0, n:].tolist() == [-1.0] * (K - n)
    assert seen.finish()[0, n:].isnan().all()


def test_topk_finds_them_in_many_batches_of_several_groups() -> None:
    x = torch.randn(4, 20_000)
    x[2] = x[2].round()  # ties everywhere
    tags = torch.arange(x.shape[1])[None]
    seen = TopK.empty(4, k=100)
    for part, tag in zip(x.split(3000, 1), tags.split(3000, 1), strict=True):
        seen = seen.update(part, tag)
    same(seen, TopK.empty(4, k=100).update(x, tags))
    assert np.array_equal(seen.values.numpy(), -np.sort(-np.abs(x.numpy()), axis=1)[:, :100])
    assert torch.equal(x.gather(1, seen.tags), seen.signed)


def test_topk_of_bfloat16_is_exact_and_nan_takes_no_part() -> None:
    x = torch.tensor([[1.0, NAN, -3.0, INF]], dtype=torch.bfloat16)
    assert TopK.empty(1, k=3).update(x).signed.tolist() == [[-3.0, 1.0, 0.0]]
    with pytest.raises(InputError, match="tags"):
        TopK.empty(1).update(x, torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(InputError, match="k=0"):
        TopK.empty(1, k=0)
    with pytest.raises(InputError, match="equal k"):
        TopK.empty(1, k=2).merge(TopK.empty(1, k=3))


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_moments_are_numpys_in_float64(offset: float) -> None:
    x = (torch.randn(3, 100_000) ** 3 + offset).contiguous()
    seen = Moments.empty(3)
    for part in x.split(777, 1):
        seen = seen.update(part)
    got = seen.finish()
    y = x.numpy().astype(np.float64)
    off = y - y.mean(1, keepdims=True)
    m2, m3, m4 = ((off**p).mean(1) for p in (2, 3, 4))
    np.testing.assert_allclose(got.mean, y.mean(1), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(got.variance, m2, rtol=1e-9)
    np.testing.assert_allclose(got.skewness, m3 / m2**1.5, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(got.kurtosis, m4 / m2**2, rtol=1e-9)


def test_kurtosis_is_pearsons_and_undefined_without_spread() -> None:
    torch.manual_seed(0)
    gauss = Moments.empty(1).update(torch.randn(1, 1_000_000)).finish().kurtosis
    assert abs(float(gauss) - 3.0) < 0.05
    assert Moments.empty(1).update(rows([-1.0, 1.0])).finish().kurtosis.tolist() == [1.0]
    for values in ([], [2.0], [2.0, 2.0, 2.0]):
        assert Moments.empty(1).update(rows(values)).finish().kurtosis.isnan().all()


def inverted_cdf(x: np.ndarray, q: float) -> float:
    return float(np.sort(x)[max(1, int(np.ceil(round(q * x.size, 9)))) - 1])


QS = [0.0, 0.001, 0.1, 0.25, 0.5, 0.9, 0.999, 1.0]


@pytest.mark.parametrize("mantissa_bits", [0, 3, 7, 10])
@pytest.mark.parametrize("q", QS)
def test_a_quantile_is_within_its_stated_error(q: float, mantissa_bits: int) -> None:
    rng = np.random.default_rng(3)
    x = (rng.standard_normal(1000) * np.exp(rng.standard_normal(1000) * 5)).astype(np.float32)
    seen = Histogram.empty(1, mantissa_bits=mantissa_bits).update(torch.from_numpy(x)[None])
    bound = seen.relative_error
    assert bound == 2.0 ** -(mantissa_bits + 1)
    for got, want in (
        (float(seen.quantile(q)), inverted_cdf(x, q)),
        (float(seen.quantile_abs(q)), inverted_cdf(np.abs(x), q)),
    ):
        assert abs(got - want) <= bound * abs(want)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 7), (torch.float16, 10)])
@pytest.mark.parametrize("q", QS)
def test_a_quantile_of_a_narrow_dtype_is_exact(q: float, dtype: torch.dtype, bits: int) -> None:
    x = (torch.randn(1, 1000) * torch.randn(1, 1000).exp()).to(dtype)
    x[0, :20] = torch.finfo(dtype).smallest_normal / 2  # subnormals too
    seen = Histogram.empty(1, mantissa_bits=bits).update(x)
    assert seen.lossless and seen.relative_error == 0.0
    y = x.float().numpy()[0]
    assert float(seen.quantile(q)) == inverted_cdf(y, q)
    assert float(seen.quantile_abs(q)) == inverted_cdf(np.abs(y), q)
    assert not seen.update(torch.randn(1, 3)).lossless
    assert not Histogram.empty(1, mantissa_bits=3).update(x).lossless


def test_every_finite_value_is_in_one_bin_by_hand() -> None:
    values = [0.0, -0.0, 1.0, 1.5, -1.0, 2.0, NAN, INF, 1e-45, -1e-45]
    seen = Histogram.empty(1, mantissa_bits=1).update(rows(values))
    assert (seen.zeros.item(), seen.nonfinite.item(), seen.count.item()) == (2, 2, 8)
    assert seen.first_octave == 0 and seen.counts.shape == (1, 2, 129, 2)
    assert seen.counts[0, :, 0, 0].tolist() == [1, 1]
    assert seen.counts[0, 0, 127].tolist() == [1, 1]
    assert seen.counts[0, 1, 127].tolist() == [1, 0]
    assert seen.counts[0, 0, 128].tolist() == [1, 0]
    without = Histogram.empty(1, mantissa_bits=1).update(rows([0.0, 1.0, 1.5, -1.0, 2.0]))
    assert (without.first_octave, without.octaves) == (127, 2)
    assert without.edges().tolist() == [1.0, 1.5, 2.0, 3.0]
    assert without.centers().tolist() == [1.25, 1.75, 2.5, 3.5]


@settings(deadline=None, max_examples=200)
@given(st.lists(numbers, min_size=1, max_size=40))
def test_counts_are_those_of_numpy_for_any_float32(values: list[float]) -> None:
    x = rows(values)
    seen = Histogram.empty(1).update(x)
    bits = x.numpy().view(np.uint32)[0]
    finite = np.isfinite(x.numpy()[0])
    codes = (bits & 0x7FFFFFFF) >> 16
    for sign in (0, 1):
        mine = seen.counts[0, sign].flatten().numpy()
        for at in range(mine.size):
            if mine[at]:
                want = (bits >> 31 == sign) & (codes == at + (seen.first_octave << 7)) & finite
                assert mine[at] == (want & (x.numpy()[0] != 0)).sum()
    assert int(seen.count) == finite.sum()
    assert int(seen.nonfinite) == (~finite).sum()
    assert int(seen.zeros) == (x.numpy()[0] == 0).sum()


def test_sums_of_bins_add_up() -> None:
    x = torch.randn(2, 5000)
    seen = Histogram.empty(2, with_sums=True)
    for part in x.split(999, 1):
        seen = seen.update(part)
    assert seen.sums is not None and seen.squares is not None
    torch.testing.assert_close(seen.sums.sum((1, 2, 3)), x.double().sum(1))
    torch.testing.assert_close(seen.squares.sum((1, 2, 3)), x.double().square().sum(1))
    with pytest.raises(InputError, match="with_sums"):
        seen.merge(Histogram.empty(2))


def test_a_histogram_says_what_it_cannot_do() -> None:
    assert Histogram.empty(2).quantile(0.5).isnan().all()
    assert Histogram.empty(1).update(torch.zeros(1, 3)).quantile_abs(1.0).tolist() == [0.0]
    with pytest.raises(InputError, match="float64"):
        Histogram.empty(1).update(torch.zeros(1, 3, dtype=torch.float64))
    with pytest.raises(InputError, match="fraction"):
        Histogram.empty(1).quantile(50.0)
    with pytest.raises(InputError, match="mantissa"):
        Histogram.empty(1, mantissa_bits=20)


SPREAD = torch.tensor(
    [
        [0.0, -0.0, 1e-45, -1e-45, 0.0, NAN],
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        [2.0**-126, -1.5, 3.0, INF, -0.0, 0.0],
        [1e30, -1e30, 2.0, 2.5, -INF, 0.0],
    ]
)
"""Groups that use other octaves, one of them none; zeros of both signs beside subnormals."""


@pytest.mark.parametrize("with_sums", [False, True], ids=["counts", "sums"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_some_groups_are_as_if_they_alone_had_been_seen(
    with_sums: bool, dtype: torch.dtype
) -> None:
    x = SPREAD.to(dtype)
    finite = x.masked_fill(~x.isfinite(), 0.0) if with_sums else x
    whole = Histogram.empty(4, with_sums=with_sums).update(finite)
    for start in range(5):
        for stop in range(start, 5):
            part = whole.select(start, stop)
            alone = Histogram.empty(stop - start, with_sums=with_sums)
            if stop > start:
                alone = alone.update(finite[start:stop])
            same(part, alone)
            assert (part.sums is not None) == (part.squares is not None) == with_sums
            same(Histogram.from_state(part.state()), part)
            assert part.counts.data_ptr() != whole.counts.data_ptr() or not part.octaves


def test_selected_sums_stay_with_their_bins() -> None:
    x = torch.tensor([[0.5, 0.5, -8.0], [1e6, -3.0, 0.25]])
    part = Histogram.empty(2, with_sums=True).update(x).select(1, 2)
    assert part.sums is not None and part.squares is not None
    assert part.sums.flatten().nonzero().numel() == 3
    seen = part.counts.flatten() > 0
    assert sorted(part.sums.flatten()[seen].tolist()) == [-3.0, 0.25, 1e6]
    assert sorted(part.squares.flatten()[seen].tolist()) == [0.0625, 9.0, 1e12]


@pytest.mark.parametrize("columns", [slice(0, 6), slice(4, 6)], ids=["subnormals", "no octave"])
@pytest.mark.parametrize("group", range(4))
def test_a_histogram_from_dense_cells_is_that_of_the_elements(group: int, columns: slice) -> None:
    x = SPREAD[group : group + 1, columns]
    want = Histogram.empty(1).update(x)
    positive = ((x == 0) & ~x.signbit()).sum(1)
    negative = ((x == 0) & x.signbit()).sum(1)
    cells = want.counts.clone()
    if want.first_octave == 0 and want.octaves:
        cells[:, 0, 0, 0] += positive
        cells[:, 1, 0, 0] += negative
    before = cells.clone()
    got = Histogram.from_dense(
        cells,
        first_octave=want.first_octave if want.octaves else 7,
        positive_zeros=positive,
        negative_zeros=negative,
        nonfinite=(~x.isfinite()).sum(1),
    )
    same(got, want)
    assert (got.sums, got.squares) == (None, None)
    assert torch.equal(cells, before), "the argument changed"


def test_mantissa_bits_have_two_ends() -> None:
    for good in (0, 16):
        assert Histogram.empty(1, mantissa_bits=good).mantissa_bits == good
    for bad in (-1, 17):
        with pytest.raises(InputError, match="0 to 16"):
            Histogram.empty(1, mantissa_bits=bad)


def test_the_answer_of_a_histogram_is_the_median_of_magnitudes() -> None:
    seen = Histogram.empty(2).update(torch.tensor([[1.0, -2.0, 4.0], [0.0, 0.0, -8.0]]))
    halves = seen.finish()
    torch.testing.assert_close(halves, torch.tensor([2.0, 0.0]), rtol=2.0**-8, atol=0.0)
    assert halves.tolist() == seen.quantile_abs(0.5).tolist()


def test_subnormals_do_not_mix_the_zeros_of_groups() -> None:
    whole = Histogram.empty(4).update(SPREAD)
    assert whole.zeros.tolist() == [3, 6, 2, 1]
    assert whole.nonfinite.tolist() == [1, 0, 1, 1]
    for group in range(4):
        same(whole.select(group, group + 1), Histogram.empty(1).update(SPREAD[group : group + 1]))


def test_topk_keeps_a_hundred_and_is_made_again_from_its_parts() -> None:
    x = torch.linspace(-3.0, 2.9, 240)[None].repeat(3, 1) * torch.tensor([[1.0], [2.0], [0.5]])
    seen = TopK.empty(3).update(x, tags_of(x))
    assert seen.k == 100
    same(TopK.from_state(seen.state()), seen)
    order = x.abs().sort(dim=1, descending=True, stable=True)
    assert torch.equal(seen.values, order.values[:, :100])
    assert torch.equal(seen.signed, x.gather(1, order.indices)[:, :100])


def test_equal_magnitudes_keep_their_order_and_sign() -> None:
    x = torch.tensor([[0.5, -0.5, 0.5, -0.5, 0.25]])
    whole = TopK.empty(1, k=3).update(x, torch.tensor([[4, 2, 1, 3, 0]]))
    assert whole.tags.tolist() == [[1, 2, 3]]
    assert whole.signed.tolist() == [[0.5, -0.5, -0.5]]
    one_token = TopK.empty(1, k=2).update(x, torch.zeros(1, 5, dtype=torch.int64))
    again = TopK.empty(1, k=2).update(x.flip(1), torch.zeros(1, 5, dtype=torch.int64))
    same(one_token, again)
    assert one_token.signed.tolist() == [[0.5, 0.5]]


def test_the_largest_of_candidates_in_any_order() -> None:
    x = torch.tensor([[3.0, -7.0, 5.0, 0.5], [0.0, 2.0, -2.0, 9.0]])
    tags = torch.tensor([[5, 6, 7, 8], [1, 3, 2, 0]])
    got = TopK.of({"values": x.abs(), "signed": x, "tags": tags}, k=2)
    assert got.values.tolist() == [[7.0, 5.0], [9.0, 2.0]]
    assert got.signed.tolist() == [[-7.0, 5.0], [9.0, -2.0]]
    assert got.tags.tolist() == [[6, 7], [0, 2]]
