"""How the sequences are dealt out changes nothing: batches, padding, processes, sampled rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch

from quantkit.calib_sets import TokenSlice
from quantkit.outliers.assemble import Assembly
from quantkit.outliers.collect import ALONE, collect, run
from quantkit.outliers.features import surfaces_of
from quantkit.outliers.maps import RowSampling
from quantkit.outliers.statistics import ModelStatistics
from quantkit.processes import Processes
from quantkit.progress import silent
from quantkit.results import to_plain
from tests.outliers.oracle import (
    LENGTHS,
    Decoder,
    LeftPadded,
    check,
    loaded,
    measure,
    rows_of,
    sliced,
    store,
)

T = TypeVar("T")
INEXACT = {
    "kurtosis",
    "kurtosis_oft",
    "entropy",
    "attention_entropy",
    "row_sum",
    "inf_norm_mean",
    "first_token_attention",
    "lambda_mean",
}
"""Sums of float64; everything else is a count, an extreme, or read off counts."""
BATCH = {"batch_size", "hits", "excluded", "processes"}
"""What is said of the batches themselves."""


def differences(one: Any, two: Any, rel: float, exact: bool, where: str = "") -> Iterator[str]:
    """Yields the places where two plain results differ by more than they may."""
    if isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for key, value in one.items():
            if key not in BATCH:
                yield from differences(value, two[key], rel, exact, f"{where}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(two), where
        for index, (left, right) in enumerate(zip(one, two, strict=True)):
            yield from differences(left, right, rel, exact, f"{where}[{index}]")
    elif isinstance(one, float) and (not exact or where.split(".")[-1] in INEXACT):
        if not (isinstance(two, float) and math.isclose(one, two, rel_tol=rel, abs_tol=rel)):
            yield f"{where}: {one} and {two}"
    elif one != two:
        yield f"{where}: {one} and {two}"


def recorded(
    model: Any, rows: list[torch.Tensor], batch_size: int, processes: Processes, points: Any = ()
) -> ModelStatistics:
    recording = ModelStatistics.of(points, RowSampling())
    run(
        recording,
        loaded(model),
        sliced(rows),
        batch_size=batch_size,
        processes=processes,
        progress=silent,
    )
    return recording


def assembled(recording: ModelStatistics) -> Any:
    assembly = Assembly(statistics=recording, token=lambda _side, _s, _p: None, quantiles=(0.99,))
    return to_plain(
        {
            "summary": assembly.summary(),
            "points": assembly.points(),
            "differential": assembly.differential(),
            "warnings": recording.nonfinite(),
            "surfaces": surfaces_of(recording.activations, lambda _name, _s, _p: None),
        }
    )


@pytest.mark.kind(4, "stats")
@pytest.mark.parametrize("family", ["gqa", "diffllama", "mistral_window"])
def test_batch_size_and_side_of_padding_change_nothing_to_1e_5(
    family: str, stored_family: Any
) -> None:
    rows = rows_of((40, 3, 9, 21))
    model, _ = stored_family(family, rows)
    points = ["mlp_down_input", "attention_output"]
    one = to_plain(measure(model, rows, batch_size=1, points=points))
    for batch_size in (3, 4):
        two = to_plain(measure(model, rows, batch_size=batch_size, points=points))
        # a histogram's bin may change for a value on its edge
        assert [d for d in differences(one, two, 1e-5, False) if not _is_binned(d)] == []
    left = to_plain(measure(model, rows, LeftPadded, batch_size=4, points=points))
    # another rounding of RoPE's angles, and other positions of the largest
    found = [d for d in differences(one, left, 1e-4, False) if not _is_binned(d)]
    places = (".top", ".entries", "position")
    assert [d for d in found if not any(name in d for name in places)] == []


def _is_binned(difference: str) -> bool:
    names = ("abs_median", "abs_quantiles", "span_999_frac", "count_pooled")
    return any(name in difference for name in names)


@pytest.mark.kind(4, "stats")
@pytest.mark.parametrize("count", [2, 5], ids=["two parts", "five parts, one of them empty"])
@pytest.mark.parametrize("family", ["llama", "diffllama", "v2"])
def test_recordings_of_parts_merge_to_one_pass(family: str, count: int, make_family: Any) -> None:
    model = Decoder().eval() if family == "v2" else make_family(family)
    rows = rows_of((40, 3, 9, 21, 2, 17, 30))
    points = ["mlp_input"] if family != "v2" else []
    whole = recorded(model, rows, 2, ALONE, points)
    parts = [
        recorded(model, rows, 2, Processes(rank=rank, count=count), points) for rank in range(count)
    ]
    for order in (parts, parts[::-1]):
        merged = ModelStatistics.of(points, RowSampling())
        for part in order:
            merged.absorb(part)
        assert list(differences(assembled(whole), assembled(merged), 1e-9, True)) == []
        assert merged.hits == whole.hits


@pytest.mark.kind(4, "stats")
def test_parts_that_hold_nan_merge_too(make_family: Any) -> None:
    """Token 96 is NaN, and in one part alone."""
    model, rows = make_family("llama"), rows_of((9, 8, 7, 6), vocab=96)
    with torch.no_grad():
        model.model.embed_tokens.weight[96] = float("nan")
    rows[3][2] = 96
    whole = recorded(model, rows, 1, ALONE)
    merged = recorded(model, rows, 1, Processes(rank=0, count=2))
    assert not merged.nonfinite()
    merged.absorb(recorded(model, rows, 1, Processes(rank=1, count=2)))
    assert len(merged.nonfinite()) == 6
    assert list(differences(assembled(whole), assembled(merged), 1e-9, True)) == []
    group = assembled(merged)["points"]["hidden_state"][0]
    assert (group["count"], group["nan_count"]) == (
        30 * 64,
        6 * 64,
    )  # 0 x NaN is NaN: also in earlier queries


@dataclass(frozen=True, kw_only=True)
class Rank(Processes):
    """A process whose fellows have left what they recorded."""

    left: list[Any] = field(default_factory=list)

    def everywhere(self, work: Callable[[], T]) -> T:
        return work()

    def at_first(self, work: Callable[[], T]) -> T | None:  # type: ignore[override]
        return work() if self.is_first else None

    def gather(self, value: T) -> Iterator[T]:
        self.left.insert(0, value)
        yield from self.left if self.is_first else []


@pytest.mark.kind(4, "stats")
@pytest.mark.parametrize("count", [2, 4], ids=["two processes", "more processes than batches"])
def test_processes_share_the_batches_and_the_first_has_all(count: int, make_family: Any) -> None:
    model, rows = loaded(make_family("diffllama")), rows_of((40, 3, 9, 21, 7))
    data, options = sliced(rows), {"batch_size": 2, "points": ["mlp_input"]}
    alone = collect(model, data, **options)
    left: list[Any] = []
    for rank in reversed(range(1, count)):
        other = Rank(rank=rank, count=count, left=left)
        assert collect(model, data, processes=other, **options) is None
    shared = collect(model, data, processes=Rank(rank=0, count=count, left=left), **options)
    assert alone is not None and shared is not None
    assert (alone.processes, shared.processes) == (1, count)
    assert alone.hits == shared.hits
    assert list(differences(to_plain(alone), to_plain(shared), 1e-9, True)) == []


# Sampled rows


def parts(rows: int, length: int) -> Sequence[tuple[float, float]]:
    """`length` positions in as many equal parts as there are rows."""
    return [(n * length / rows, (n + 1) * length / rows) for n in range(rows)]


@pytest.mark.parametrize(("rows", "queries"), [(4, 40), (7, 150), (64, 65), (1, 3)])
def test_one_row_is_chosen_of_each_equal_part(rows: int, queries: int) -> None:
    sampling = RowSampling(rows=rows, seed=3)
    found = sampling.chosen(queries, 5).nonzero()[:, 0].tolist()
    assert len(found) <= rows  # parts are no whole numbers: two may share a row
    for low, high in parts(rows, queries):
        assert any(math.floor(low) <= row < math.ceil(high) for row in found)
    assert torch.equal(
        sampling.chosen(queries, 5), RowSampling(rows=rows, seed=3).chosen(queries, 5)
    )


def test_the_choice_differs_by_sequence_and_seed_and_takes_all_of_short_ones() -> None:
    chosen = RowSampling(rows=8, seed=0).chosen(200, 0)
    assert not torch.equal(chosen, RowSampling(rows=8, seed=0).chosen(200, 1))
    assert not torch.equal(chosen, RowSampling(rows=8, seed=1).chosen(200, 0))
    assert RowSampling(rows=8).chosen(8, 0).all() and RowSampling(rows=9).chosen(8, 0).all()
    assert RowSampling().chosen(200, 0).all()
    spread = sum(RowSampling(rows=8, seed=n).chosen(200, 0).int() for n in range(300))
    # each of 200 rows 12 times on average; 0 or 40 are 3.5 and 8 deviations away
    assert int(spread.min()) > 0 and int(spread.max()) < 40


@pytest.mark.kind(4, "stats")
@pytest.mark.parametrize(("batch_size", "side"), [(1, "right"), (4, "right"), (4, "left")], ids=str)
@pytest.mark.parametrize("family", ["gqa", "diffllama", "mistral_window"])
def test_sampled_rows_are_those_of_the_sequence_whatever_its_batch(
    family: str, batch_size: int, side: str, make_family: Any
) -> None:
    """Extremes and top-k are of all rows, moments, histogram and entropy of the sampled ones."""
    rows, model = rows_of(), make_family(family)
    sampling = RowSampling(rows=11, seed=2)
    chosen = [
        sampling.chosen(length, n).nonzero()[:, 0].numpy() for n, length in enumerate(LENGTHS)
    ]
    kind = TokenSlice if side == "right" else LeftPadded
    stats = measure(model, rows, kind, batch_size=batch_size, rows=11, seed=2)
    assert (stats.sampled_rows, stats.seed) == (11, 2)
    check(stats, store(model, rows, chosen), rel=1e-5 if side == "right" else 1e-4)


def test_sampling_leaves_extremes_bitwise_alone(make_family: Any) -> None:
    rows, model = rows_of((70, 20)), make_family("diffllama")
    every, some = (measure(model, rows, batch_size=2, rows=n) for n in (None, 5))
    for point in ("attention_logit", "effective_map"):
        for one, two in zip(every.points[point], some.points[point], strict=True):
            for name in ("abs_top", "max", "min", "abs_max", "count", "inf_norm_mean", "top"):
                assert repr(getattr(one, name)) == repr(getattr(two, name))
    assert repr(every.points["hidden_state"]) == repr(some.points["hidden_state"])
    assert every.summary.sink_rate == some.summary.sink_rate
    assert every.summary.attention_logit.kurtosis != some.summary.attention_logit.kurtosis
