"""`RowScan` and its companions against plain numpy, compiled and as torch does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.numerics import kernels, scan
from quantkit.numerics.observers import Bundle, Histogram, MinMax, Moments, TopK, merged
from quantkit.numerics.scan import RowScan, ScanResult
from quantkit.numerics.tokens import abs_median, token_summary

INF, NAN = float("inf"), float("nan")
TINY = float(np.finfo(np.float32).smallest_subnormal)
HUGE = float(np.finfo(np.float32).max)
ENTROPY = 1e-5  # nats, of float64
ENGINES = ("compiled", "torch")
engines = pytest.mark.parametrize("engine", ENGINES)
odd_numbers = st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 2.0, -2.0, TINY, -TINY, 2.0**-126, HUGE, -HUGE, NAN, INF, -INF]
)


@contextmanager
def running(engine: str) -> Iterator[None]:
    """With or without numba."""
    found: Callable[[], ModuleType | None] = scan.compiled if engine == "compiled" else lambda: None
    with mock.patch.object(scan, "compiled", found):
        yield


@dataclass(frozen=True, kw_only=True)
class Block:
    """What one `RowScan.add` gets; `x` is float32 [g, rows, columns]."""

    x: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    tag: int = 0
    row_step: int = 1000
    first: int = 0
    valid: np.ndarray | None = None
    full: np.ndarray | None = None
    skip: int = -1

    def add_to(self, scanner: RowScan) -> None:
        scanner.add(
            torch.from_numpy(self.x),
            torch.from_numpy(self.lo),
            torch.from_numpy(self.hi),
            tag=self.tag,
            row_step=self.row_step,
            first_group=self.first,
            valid=None if self.valid is None else torch.from_numpy(self.valid),
            full=None if self.full is None else torch.from_numpy(self.full),
            skip=self.skip,
        )

    def rows(self, group: int) -> Iterator[tuple[list[float], list[float], list[int], bool]]:
        """Of each row: what entropy sees, what counts, its tags, whether it is a full one."""
        local = group - self.first
        if not 0 <= local < len(self.x):
            return
        for r in range(self.x.shape[1]):
            every, values, tags = [], [], []
            for c in range(int(self.lo[r]), int(self.hi[r])):
                if self.valid is not None and not self.valid[min(local, len(self.valid) - 1), r, c]:
                    continue
                every.append(float(self.x[local, r, c]))
                if c != self.skip:
                    values.append(float(self.x[local, r, c]))
                    tags.append(self.tag + r * self.row_step + c)
            yield every, values, tags, self.full is None or bool(self.full[r])


def block(x: np.ndarray, **changes: object) -> Block:
    """All of `x`."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    rows, columns = x.shape[1:]
    whole = Block(x=x, lo=np.zeros(rows, np.int64), hi=np.full(rows, columns, np.int64))
    return replace(whole, **changes)  # type: ignore[arg-type]


def scanned(blocks: list[Block], groups: int, k: int = 4, entropy: bool = True) -> ScanResult:
    scanner = RowScan(groups, k=k, entropy=entropy)
    for part in blocks:
        part.add_to(scanner)
    return scanner.finish()


def softmax_entropy(row: list[float]) -> float:
    weights = np.exp(np.array(row) - max(row))
    weights /= weights.sum()
    some = weights[weights > 0]
    return float(-(some * np.log(some)).sum())


def check_moments(got: Moments, group: int, values: np.ndarray) -> None:
    assert int(got.count[group]) == len(values)
    if not len(values):
        return
    mean = values.mean()
    spread = np.abs(values).max() or 1.0  # rounding is relative to what was subtracted
    assert float(got.mean[group]) == pytest.approx(mean, rel=1e-12, abs=1e-12 * spread)
    for name, power in (("m2", 2), ("m3", 3), ("m4", 4)):
        want = ((values - mean) ** power).sum()
        bound = 1e-10 * len(values) * np.abs(values - mean).max() ** power + 1e-300
        noise = 1e-13 * spread * len(values) * np.abs(values - mean).max() ** (power - 1)
        assert float(getattr(got, name)[group]) == pytest.approx(want, rel=1e-9, abs=bound + noise)


def check_histogram(got: Histogram, group: int, values: np.ndarray) -> None:
    """Every cell: the upper half of a float32's bits."""
    finite = values[np.isfinite(values)]
    assert int(got.zeros[group]) == int((finite == 0).sum())
    assert int(got.nonfinite[group]) == len(values) - len(finite)
    bits = finite[finite != 0].view(np.uint32) >> 16
    want = np.bincount(bits, minlength=1 << 16)
    cells = np.zeros((2, 256, 128), np.int64)
    stop = got.first_octave + got.octaves
    cells[:, got.first_octave : stop] = got.counts[group].numpy()
    assert np.array_equal(cells.reshape(-1), want)


def check(result: ScanResult, blocks: list[Block], groups: int, k: int = 4) -> None:
    """Compares each group of a scan with a loop over every element."""
    bundle = result.bundle
    for group in range(groups):
        rows = [row for part in blocks for row in part.rows(group)]
        values = np.array([v for _, row, _, _ in rows for v in row], np.float32)
        tags = [t for _, _, row, _ in rows for t in row]
        finite = values[np.isfinite(values)]
        assert int(bundle.minmax.count[group]) == len(values)
        assert int(bundle.minmax.nan_count[group]) == int(np.isnan(values).sum())
        assert int(bundle.minmax.inf_count[group]) == int(np.isinf(values).sum())
        low, high = (float(part[group]) for part in bundle.minmax.finish())
        if len(finite):
            assert (low, high) == (finite.min(), finite.max())
        else:
            assert np.isnan(low) and np.isnan(high)

        pairs = [(v, t) for v, t in zip(values.tolist(), tags, strict=True) if np.isfinite(v)]
        pairs = sorted(pairs, key=lambda p: (-abs(p[0]), p[1]))[:k]
        top = bundle.topk
        missing = k - len(pairs)
        assert top.values[group].tolist() == [abs(v) for v, _ in pairs] + [-1.0] * missing
        assert top.signed[group].tolist() == [v for v, _ in pairs] + [0.0] * missing
        assert top.tags[group].tolist() == [t for _, t in pairs] + [-1] * missing

        sampled = np.array([v for _, row, _, full in rows if full for v in row], np.float32)
        check_moments(bundle.moments, group, sampled[np.isfinite(sampled)].astype(np.float64))
        check_histogram(bundle.histogram, group, sampled)

        whole = [every for every, _, _, full in rows if full and every and np.isfinite(every).all()]
        assert int(result.entropy_rows[group]) == len(whole)
        want = sum(map(softmax_entropy, whole))
        assert float(result.entropy_sum[group]) == pytest.approx(
            want, rel=ENTROPY, abs=ENTROPY * max(1, len(whole))
        )


def random_blocks(seed: int, *, holes: str = "none") -> list[Block]:
    """Blocks of ragged rows of 2 of 3 groups each; values of many sizes, ties, zeros."""
    rng = np.random.default_rng(seed)
    blocks = []
    for number in range(3):
        rows, columns = int(rng.integers(1, 9)), int(rng.integers(1, 40))
        x = rng.standard_normal((2, rows, columns)) * 10.0 ** rng.integers(-3, 2, (2, rows, 1))
        x = np.where(rng.random(x.shape) < 0.3, np.round(x), x)
        lo = rng.integers(0, columns + 1, rows)
        hi = rng.integers(0, columns + 1, rows)
        lo, hi = np.minimum(lo, hi), np.maximum(lo, hi)
        heads = {"none": 0, "shared": 1, "per head": 2}[holes]
        blocks.append(
            block(
                x,
                lo=lo,
                hi=hi,
                tag=number << 20,
                first=number % 2,
                valid=rng.random((heads, rows, columns)) < 0.7 if heads else None,
                full=rng.random(rows) < 0.6,
                skip=int(rng.integers(-1, columns)),
            )
        )
    return blocks


@engines
@pytest.mark.parametrize("holes", ["none", "shared", "per head"])
@pytest.mark.parametrize("seed", range(6))
def test_ragged_rows_of_many_blocks_are_counted_as_a_loop_does(
    engine: str, holes: str, seed: int
) -> None:
    blocks = random_blocks(seed, holes=holes)
    with running(engine):
        check(scanned(blocks, 3), blocks, 3)


@engines
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_floats_anywhere(engine: str, data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    size = 2 * rows * columns
    numbers = st.one_of(odd_numbers, st.floats(width=32, allow_nan=False))
    values = data.draw(st.lists(numbers, min_size=size, max_size=size))
    spans = data.draw(
        st.lists(st.tuples(st.integers(0, columns), st.integers(0, columns)), min_size=rows)
    )[:rows]
    mask = data.draw(st.none() | st.lists(st.booleans(), min_size=size // 2, max_size=size // 2))
    whole = block(
        np.array(values, np.float32).reshape(2, rows, columns),
        lo=np.array([min(span) for span in spans]),
        hi=np.array([max(span) for span in spans]),
        valid=None if mask is None else np.array(mask).reshape(1, rows, columns),
        full=np.array(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))),
        skip=data.draw(st.integers(-1, columns - 1)),
    )
    with running(engine):
        check(scanned([whole], 2, k=3), [whole], 2, k=3)


@pytest.mark.kind(2, "numerics")
@engines
@pytest.mark.parametrize(
    "row",
    [
        pytest.param([NAN, 1.0, 2.0], id="a NaN in the column aside"),
        pytest.param([INF, 1.0, 2.0], id="an inf in the column aside"),
        pytest.param([-INF, NAN, 2.0], id="not finite in both"),
        pytest.param([1.0, NAN, INF], id="nothing finite but the column aside"),
        pytest.param([5.0, 1.0, NAN], id="a NaN at the end"),
        pytest.param([NAN, NAN, NAN], id="nothing but NaN"),
    ],
)
def test_what_is_not_finite_is_counted_and_enters_nothing(engine: str, row: list[float]) -> None:
    one = block(np.array([[row, [3.0, -4.0, 0.5]]]), skip=0)
    with running(engine):
        result = scanned([one], 1)
        check(result, [one], 1)
        assert int(result.entropy_rows[0]) == 1  # of the second row alone


@engines
def test_the_column_aside_counts_in_the_entropy_alone(engine: str) -> None:
    one = block(np.array([[[100.0, 0.0, 0.0], [7.0, 7.0, 7.0]]]), skip=0)
    with running(engine):
        result = scanned([one], 1)
    assert result.bundle.minmax.max.tolist() == [7.0]
    assert result.bundle.minmax.count.tolist() == [4]
    assert result.bundle.histogram.count.tolist() == [4]
    # exp(-100) of two keys is nothing, and of three equal keys it is ln 3
    assert float(result.entropy_sum) == pytest.approx(np.log(3), abs=ENTROPY)
    alone = block(np.array([[[9.0]]]), skip=0)
    with running(engine):
        result = scanned([alone], 1)
    assert (int(result.entropy_rows), float(result.entropy_sum)) == (1, 0.0)
    assert int(result.bundle.minmax.count) == 0


@engines
@pytest.mark.parametrize(
    "row",
    [
        pytest.param([HUGE, -HUGE, 0.0, 1.0], id="the largest of both signs"),
        pytest.param([1e36, 0.0, 0.0, 0.0], id="a distance that 2^-126 of is not small"),
        pytest.param([-HUGE, -HUGE, -HUGE, -HUGE], id="equal and far from zero"),
        pytest.param([0.0, -200.0, -90.0, -87.0], id="weights that underflow"),
        pytest.param([TINY, -TINY, 0.0, -0.0], id="subnormals and zeros"),
        pytest.param([20.0, 19.0, 18.0, 5.0], id="ordinary"),
    ],
)
def test_entropy_of_any_logits_is_float64s(engine: str, row: list[float]) -> None:
    one = block(np.array([[row]]))
    with running(engine):
        result = scanned([one], 1)
        check(result, [one], 1)
    want = softmax_entropy([float(np.float32(value)) for value in row])
    assert float(result.entropy_sum) == pytest.approx(want, rel=ENTROPY, abs=1e-6)


@engines
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0, 40.0])
def test_entropy_of_long_rows_is_float64s(engine: str, spread: float) -> None:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((1, 3, 3001)) * spread).astype(np.float32)
    with running(engine):
        result = scanned([block(x)], 1)
    want = sum(softmax_entropy(row.astype(np.float64).tolist()) for row in x[0])
    assert float(result.entropy_sum) == pytest.approx(want, rel=ENTROPY)


@pytest.mark.kind(4, "numerics")
@engines
def test_ties_in_the_topk_fall_to_the_lowest_tags_whatever_the_order(engine: str) -> None:
    x = np.tile(np.array([3.0, -3.0, 1.0, 3.0], np.float32), (1, 30, 1))
    late, early = block(x, tag=1 << 30), block(x, tag=5)
    with running(engine):
        for order in ([late, early], [early, late]):
            top = scanned(order, 1, k=7).bundle.topk
            assert top.tags[0].tolist() == [5, 6, 8, 1005, 1006, 1008, 2005]
            assert top.signed[0].tolist() == [3.0, -3.0, 3.0, 3.0, -3.0, 3.0, 3.0]


@engines
def test_a_floor_changes_nothing_where_k_larger_ones_are_known(engine: str) -> None:
    rng = np.random.default_rng(2)
    before, after = (block(rng.standard_normal((2, 5, 50)), tag=tag) for tag in (0, 1 << 20))
    with running(engine):
        known = scanned([before], 2).bundle
        scanner = RowScan(2, k=4, floor=known.topk.values[:, -1])
        after.add_to(scanner)
        got, want = known.merge(scanner.finish().bundle), scanned([before, after], 2).bundle
    for name in ("values", "signed", "tags"):
        assert torch.equal(getattr(got.topk, name), getattr(want.topk, name))
    assert torch.equal(got.minmax.min, want.minmax.min)  # the floor is of the top-k alone


@engines
def test_a_floor_keeps_what_equals_it(engine: str) -> None:
    with running(engine):
        scanner = RowScan(1, k=2, floor=torch.tensor([2.0]))
        block(np.array([[[2.0, 1.0, -2.0]]])).add_to(scanner)
        assert scanner.finish().bundle.topk.signed[0].tolist() == [2.0, -2.0]


@engines
def test_a_cut_is_of_its_part_and_the_whole_of_all(engine: str) -> None:
    rng = np.random.default_rng(3)
    parts = [block(rng.standard_normal((2, 4, 9)) * (1 + n) + n, tag=n << 20) for n in range(3)]
    parts[1] = replace(parts[1], full=np.array([True, False, True, False]))
    with running(engine):
        scanner = RowScan(2, k=4)
        assert scanner.cut().abs_max.tolist() == [0.0, 0.0]
        for part in parts:
            part.add_to(scanner)
            cut = scanner.cut()
            for group in range(2):
                assert float(cut.abs_max[group]) == np.abs(part.x[group]).max()
                assert float(cut.lo[group]) == part.x[group].min()
                assert float(cut.hi[group]) == part.x[group].max()
                full = slice(None) if part.full is None else part.full
                values = part.x[group, full].astype(np.float64).ravel()
                check_moments(cut.moments, group, values)
        assert scanner.cut().moments.count.tolist() == [0.0, 0.0]
        whole = scanned(parts, 2)
        check(replace(whole, bundle=scanner.finish().bundle), parts, 2)


@pytest.mark.kind(4, "numerics")
@engines
def test_two_scans_merge_to_one(engine: str) -> None:
    blocks = [replace(part, first=0) for part in random_blocks(11, holes="shared")]
    blocks[0].x[0, 0, 0] = NAN
    with running(engine):
        one, *others = [scanned([part], 2) for part in blocks]
        both = one.bundle
        for other in others:
            both = both.merge(other.bundle)
        check(replace(scanned(blocks, 2), bundle=both), blocks, 2)


def test_both_engines_say_the_same() -> None:
    blocks = random_blocks(21, holes="per head")
    blocks[1].x[0, 0, :] = INF
    results = []
    for engine in ENGINES:
        with running(engine):
            results.append(scanned(blocks, 3))
    left, right = (result.bundle.state() for result in results)
    for part in ("minmax", "topk", "histogram"):
        for name, value in left[part].items():
            assert torch.equal(value, right[part][name]), (part, name)
    torch.testing.assert_close(left["moments"], right["moments"], rtol=1e-9, atol=1e-9)


@pytest.mark.kind(2, "numerics")
@engines
def test_no_rows_and_empty_rows_are_nothing(engine: str) -> None:
    none = block(np.ones((2, 3, 4)), hi=np.zeros(3, np.int64))
    with running(engine):
        for blocks in ([], [none], [block(np.ones((2, 0, 4)))]):
            result = scanned(blocks, 2)
            check(result, blocks, 2)
            assert bool(result.bundle.topk.finish().isnan().all())


@engines
def test_more_groups_than_dense_bins_have_room_for_are_still_told_apart(engine: str) -> None:
    x = np.arange(1, 151, dtype=np.float32)[:, None, None] * np.ones((1, 3, 2), np.float32)
    with running(engine):
        bundle = scanned([block(x)], 150, entropy=False).bundle
    assert bundle.minmax.max.tolist() == list(range(1, 151))
    assert bundle.histogram.count.tolist() == [6] * 150


@engines
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_kurtosis_of_a_gaussian_is_3_wherever_it_stands(engine: str, offset: float) -> None:
    """Float64 central sums: float32 ones would lose 4 of 7 digits at a mean of 100 deviations."""
    x = (np.random.default_rng(4).standard_normal((1, 400, 500)) + offset).astype(np.float32)
    with running(engine):
        found = float(scanned([block(x)], 1, entropy=False).bundle.moments.finish().kurtosis)
    y = x.astype(np.float64).ravel()
    off = y - y.mean()
    assert found == pytest.approx((off**4).mean() / (off**2).mean() ** 2, rel=1e-9)
    assert found == pytest.approx(3.0, abs=0.05)  # sqrt(24 / 200,000) is 0.011


# abs_median, abs_select, token_summary


@engines
@settings(deadline=None, max_examples=50)
@given(values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40))
def test_the_median_is_a_sort(engine: str, values: list[float]) -> None:
    with running(engine):
        got = abs_median(torch.tensor(values, dtype=torch.float32))
    size = np.sort(np.abs(np.array(values, np.float32)))
    if not len(size):
        assert np.isnan(got)
    else:
        assert got == size[(len(size) - 1) // 2]


@pytest.mark.parametrize("ties", [False, True], ids=["all different", "many ties"])
def test_any_rank_is_a_sort(ties: bool) -> None:
    rng = np.random.default_rng(5)
    x = (rng.standard_normal(1001) * np.exp(rng.standard_normal(1001) * 5)).astype(np.float32)
    if ties:
        x = np.round(x)
    size = np.sort(np.abs(x))
    for rank in (0, 1, 499, 500, 999, 1000):
        assert kernels.abs_select(x, rank) == size[rank]


@engines
def test_the_median_of_nothing_and_of_what_is_not_contiguous(engine: str) -> None:
    with running(engine):
        assert np.isnan(abs_median(torch.empty(0)))
        assert abs_median(torch.tensor([[1.0, 2.0], [-3.0, 4.0]]).T) == 2.0  # not contiguous


@engines
@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(
        st.one_of(odd_numbers, st.sampled_from([5.9, 6.0, -6.0, 6.1])), min_size=12, max_size=12
    ),
    use=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_tokens_and_channels_have_the_maxima_of_numpy(
    engine: str, values: list[float], use: list[bool]
) -> None:
    x, chosen = np.array(values, np.float32).reshape(4, 3), np.array(use)
    with running(engine):
        got = token_summary(torch.from_numpy(x), torch.from_numpy(chosen), above=6.0)
    size = np.where(np.isfinite(x) & chosen[:, None], np.abs(x), 0.0)
    assert got.token_top.tolist() == size.max(1).tolist()
    assert got.channel_top.tolist() == size.max(0).tolist()
    assert got.channel_reached.tolist() == (size >= 6).sum(0).tolist()
    assert got.channel_reached.dtype == torch.int64
    assert got.is_finite == bool(np.isfinite(x[chosen]).all())


# Histogram.from_dense and Bundle


@settings(deadline=None, max_examples=40)
@given(values=st.lists(st.one_of(odd_numbers, st.floats(width=32)), min_size=1, max_size=40))
def test_dense_cells_make_the_histogram_that_update_makes(values: list[float]) -> None:
    x = np.array([values, values[::-1]], np.float32)
    x[1] *= 0.5  # another group, other octaves
    bits = x.view(np.uint32)
    cells = np.stack([np.bincount(row >> 16, minlength=1 << 16) for row in bits])
    octaves = (bits[np.isfinite(x) & (x != 0)] >> 23) & 0xFF
    first, stop = (int(octaves.min()), int(octaves.max()) + 1) if octaves.size else (0, 0)
    dense = Histogram.from_dense(
        torch.from_numpy(cells).view(2, 2, 256, 128)[:, :, first:stop],
        first_octave=first,
        positive_zeros=torch.from_numpy((bits == 0).sum(1)),
        negative_zeros=torch.from_numpy((bits == 1 << 31).sum(1)),
        nonfinite=torch.from_numpy((~np.isfinite(x)).sum(1)),
    )
    updated = Histogram.empty(2).update(torch.from_numpy(x))
    for name, value in updated.state().items():
        if name != "lossless":  # of cells nobody knows which dtype they were
            assert torch.equal(dense.state()[name], value), name
    for group in range(2):
        check_histogram(dense, group, x[group])


def test_a_bundle_counts_what_is_valid_and_samples_what_is_sampled() -> None:
    x = torch.randn(3, 50)
    valid, sampled = torch.rand(1, 50) < 0.7, torch.rand(3, 50) < 0.5
    sampled &= valid
    tags = torch.arange(50)
    got = Bundle.empty(3, k=5).update(x, tags, valid=valid, sampled=sampled)
    parts = (
        (got.minmax, MinMax.empty(3).update(x, valid=valid)),
        (got.topk, TopK.empty(3, k=5).update(x, tags[None], valid=valid)),
        (got.moments, Moments.empty(3).update(x, valid=sampled)),
        (got.histogram, Histogram.empty(3).update(x, valid=sampled)),
    )
    for mine, its in parts:
        for name, value in its.state().items():
            assert torch.equal(mine.state()[name], value), name
    assert got.histogram.count.tolist() == sampled.sum(1).tolist()
    every = Bundle.empty(3, k=5).update(x, tags, valid=valid)
    assert torch.equal(every.histogram.count, every.minmax.count)
    assert Bundle.empty(3).update(torch.zeros(3, 0), tags[:0]).minmax.count.tolist() == [0, 0, 0]


def test_a_bundles_state_makes_it_again_and_it_moves() -> None:
    bundle = Bundle.empty(2, k=3).update(torch.randn(2, 20), torch.arange(20))
    for again in (Bundle.from_state(bundle.state()), bundle.to("cpu"), bundle.to("meta")):
        for part, state in bundle.state().items():
            for name, value in state.items():
                found = again.state()[part][name]
                assert (found.shape, found.dtype) == (value.shape, value.dtype)
                assert found.is_meta or torch.equal(found, value)


@pytest.mark.kind(4, "numerics")
def test_bundles_pool_and_merge_to_one_pass() -> None:
    x = torch.randn(4, 60)
    tags = torch.arange(240).view(4, 60)
    parts = [Bundle.empty(1, k=5).update(x[n : n + 1], tags[n : n + 1]) for n in range(4)]
    whole = Bundle.empty(1, k=5).update(x.reshape(1, -1), tags.reshape(1, -1))
    pooled = Bundle.empty(4, k=5).update(x, tags).pool()
    for got in (merged(parts), pooled):
        for part in ("minmax", "topk", "histogram"):
            for name, value in whole.state()[part].items():
                assert torch.equal(got.state()[part][name], value), (part, name)
        torch.testing.assert_close(got.moments.state(), whole.moments.state(), rtol=1e-9, atol=1e-9)
