"""Kind 4: how elements are dealt out - batches, order, processes - is in no figure.

Counts, extremes, top-k and histograms are equal; what is a sum of float64 agrees to 1e-9.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit.calib_sets import TokenSlice
from quantkit.calibration import RangePlan, observe, ranges_now
from quantkit.calibration.watch import Watch
from quantkit.numerics.choose import choose_range
from quantkit.numerics.methods import METHODS, parse_method, parse_methods
from quantkit.numerics.observers import Bundle, MovingAverage
from quantkit.outliers import collect
from quantkit.probes import attach
from quantkit.quantization import fake_quantized
from quantkit.results import to_plain
from quantkit.tasks.perplexity import score_blocks
from tests.calibration.oracle import loaded_model, text
from tests.outliers.oracle import loaded, rows_of, sliced

LENGTHS = (9, 3, 14, 1, 7, 14, 5)
SIZES = (1, 2, 3, 7)
POINTS = ("linear_input", "attention_logit", "attention_probability")
SUMS = ("moments", "mean", "m2", "m3", "m4", "lo_sum", "hi_sum", "weight")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


Part = tuple[Bundle, MovingAverage]


def merged(a: Part, b: Part) -> Part:
    return a[0].merge(b[0]), a[1].merge(b[1])


def from_left(parts: Sequence[Part]) -> Part:
    found = parts[0]
    for part in parts[1:]:
        found = merged(found, part)
    return found


def from_right(parts: Sequence[Part]) -> Part:
    found = parts[-1]
    for part in reversed(parts[:-1]):
        found = merged(part, found)
    return found


def as_tree(parts: Sequence[Part]) -> Part:
    level = list(parts)
    while len(level) > 1:
        pairs = [merged(*level[n : n + 2]) for n in range(0, len(level) - 1, 2)]
        level = pairs + ([level[-1]] if len(level) % 2 else [])
    return level[0]


def shuffled(parts: Sequence[Part]) -> Part:
    """Any two, again and again."""
    rest, draw = list(parts), random.Random(7)
    while len(rest) > 1:
        draw.shuffle(rest)
        rest.append(merged(rest.pop(), rest.pop()))
    return rest[0]


def reversed_(parts: Sequence[Part]) -> Part:
    return from_left(parts[::-1])


TREES: dict[str, Callable[[Sequence[Part]], Part]] = {
    "from the left": from_left,
    "from the right": from_right,
    "in pairs": as_tree,
    "at random": shuffled,
    "in reverse": reversed_,
}


def samples() -> list[Tensor]:
    """Ragged samples of two groups: ties, zeros of either sign, subnormals, inf, NaN, nothing."""
    generator = torch.Generator().manual_seed(4)
    parts = [torch.randn(2, n, generator=generator) * 10.0**e for n, e in zip(
        (5, 40, 1, 17, 300, 2, 90, 3), (0, 1, -3, 0, 2, -42, 0, 20), strict=True
    )]  # fmt: skip
    parts[0][:, :3] = torch.tensor([[7.0, -7.0, 7.0], [0.0, -0.0, 1.0]])
    parts[4][0, :7] = torch.tensor([7.0, 7.0, -7.0, torch.nan, torch.inf, -torch.inf, 0.0])
    return [*parts, torch.empty(2, 0)]


def states(part: Part) -> dict[str, Tensor]:
    found = {f"{a}.{b}": x for a, its in part[0].state().items() for b, x in its.items()}
    return found | part[1].state()


def one_part(index: int, x: Tensor, first: int) -> Part:
    bundle = Bundle.empty(2).update(x, torch.arange(first, first + x.shape[1]))
    moving = MovingAverage.empty(2)
    if x.shape[1]:
        moving = moving.update(
            index, *Bundle.empty(2).update(x, torch.arange(x.shape[1])).minmax.finish()
        )
    return bundle, moving


def assert_equal(found: Part, wanted: Part) -> None:
    """Octaves that hold nothing may or may not be stored: counts are compared by value."""
    ours, theirs = states(found), states(wanted)
    for name, x in ours.items():
        y = theirs[name]
        if name.startswith("histogram.") and name not in ("histogram.zeros", "histogram.nonfinite"):
            continue
        if any(word in name for word in SUMS):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-30, equal_nan=True, msg=name)
        else:
            assert torch.equal(x, y), name
    for q in (0.01, 0.5, 0.99, 1.0):
        for how in ("quantile", "quantile_abs"):
            a, b = (getattr(part[0].histogram, how)(q) for part in (found, wanted))
            assert torch.equal(a, b), (how, q)
    assert torch.equal(found[0].histogram.count, wanted[0].histogram.count)


@pytest.mark.kind(4, "numerics", "stats", "calibrate")
@pytest.mark.parametrize("tree", TREES)
def test_any_tree_of_merges_is_one_pass(tree: str) -> None:
    parts, whole = samples(), (Bundle.empty(2), MovingAverage.empty(2))
    starts = np.cumsum([0, *(x.shape[1] for x in parts)])
    single = [one_part(n, x, int(starts[n])) for n, x in enumerate(parts)]
    for part in single:
        whole = merged(whole, part)
    once = Bundle.empty(2).update(torch.cat(parts, 1), torch.arange(int(starts[-1])))
    assert_equal((once, whole[1]), whole)
    assert_equal(TREES[tree](single), whole)
    nothing = (Bundle.empty(2), MovingAverage.empty(2))
    assert_equal(merged(nothing, TREES[tree]([*single, nothing])), whole)


@pytest.mark.kind(4, "numerics", "calibrate")
@pytest.mark.parametrize("method", METHODS)
def test_a_range_does_not_know_how_its_samples_came(method: str) -> None:
    parts = [x for x in samples() if x.shape[1]]
    starts = np.cumsum([0, *(x.shape[1] for x in parts)])
    single = [one_part(n, x, int(starts[n])) for n, x in enumerate(parts)]
    found = []
    for tree in TREES.values():
        bundle, moving = tree(single)
        for symmetric in (True, False):
            ends = choose_range(parse_method(method), bundle, 6, symmetric=symmetric, moving=moving)
            found.append(torch.stack(ends))
    for symmetric in (0, 1):
        for other in found[symmetric::2]:
            torch.testing.assert_close(other, found[symmetric], rtol=1e-6, atol=0)


def assert_near(one: Any, two: Any, where: str = "") -> None:
    """Numbers to 1e-4 (a forward over more rows rounds otherwise), all else equal."""
    if isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for key in one:
            assert_near(one[key], two[key], f"{where}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(two), where
        for index, pair in enumerate(zip(one, two, strict=True)):
            assert_near(*pair, f"{where}[{index}]")
    elif isinstance(one, float):
        assert two == pytest.approx(one, rel=1e-4, abs=1e-6, nan_ok=True), where
    else:
        assert one == two, where


@pytest.mark.kind(4, "stats")
def test_statistics_of_any_batch_size_and_order(make_family: Any) -> None:
    """Every permutation would be too many: the reverse, and a rotation."""
    model, rows = make_family("diffllama"), rows_of(LENGTHS)

    def summary(rows: list[Tensor], batch_size: int) -> dict[str, Any]:
        found = collect(loaded(model), sliced(rows), batch_size=batch_size, points=())
        assert found is not None
        plain: dict[str, Any] = to_plain(found.summary)
        for name in ("attention_logit", "hidden_state"):
            # masked entries of the batches themselves; and a bin changes for a value on its edge
            for key in ("excluded", "abs_median", "abs_quantiles"):
                plain[name].pop(key, None)
        return {
            name: plain[name]
            for name in ("attention_logit", "hidden_state", "sink_rate", "attention_entropy")
        }

    wanted = summary(rows, 1)
    assert_near(summary(rows, 7), wanted, "one batch")
    assert_near(summary(rows[::-1], 3), wanted, "in reverse")
    assert_near(summary(rows[4:] + rows[:4], 2), wanted, "rotated")


@pytest.mark.kind(4, "calibrate")
def test_ranges_of_any_batch_size(tiny_diffllama: Any) -> None:
    """One observation gives the ranges of every method."""
    plans = {word: RangePlan(methods=parse_methods(word, POINTS)) for word in METHODS}
    found = []
    for size in SIZES:
        recording = observe(
            loaded_model(tiny_diffllama),
            text(LENGTHS),
            points=POINTS,
            choose=lambda seen: ranges_now(seen, plans["minmax"]),
            batch_size=size,
        )
        assert recording is not None
        some = {name: recording.seen[name] for name in list(recording.seen)[::5]}
        ranges = {word: ranges_now(some, plan) for word, plan in plans.items()}
        found.append((recording, ranges))
    first, ranges = found[0]
    for recording, its in found[1:]:
        for name, observation in first.seen.items():
            ours, theirs = observation.seen(), recording.seen[name].seen()
            assert torch.equal(ours.minmax.count, theirs.minmax.count), name
            assert torch.equal(ours.histogram.count, theirs.histogram.count), name
        for word in METHODS:
            # a value on the edge of a bin may change it
            tolerance = 1e-4 if word in ("minmax", "moving-average") else 2**-7
            for name, ends in ranges[word].items():
                for a, b in zip(ends, its[word][name], strict=True):
                    torch.testing.assert_close(a, b, rtol=tolerance, atol=1e-5, msg=name)


@pytest.mark.kind(4, "calibrate", "stats")
@pytest.mark.parametrize("count", [2, 3])
def test_any_split_among_processes_is_one_pass(count: int, tiny_llama: Any) -> None:
    """Each shares the batches of one sequence; their observations are merged in every order."""
    data = text(LENGTHS)

    def share(ranks: set[int]) -> Watch:
        watch = Watch(points=POINTS)
        with torch.no_grad(), attach(tiny_llama, watch.callbacks(), allow_unseen="*"):
            for index, batch in enumerate(data.batches(1)):
                if index % count in ranks:
                    watch.begin(batch.first_sequence)
                    tiny_llama(**batch.inputs, use_cache=False)
                    watch.end()
        return watch

    whole = share(set(range(count))).seen
    parts = [share({rank}).seen for rank in range(count)]
    for order in itertools.permutations(parts):
        for name, wanted in whole.items():
            found = order[0][name]
            for part in order[1:]:
                found = found.merge(part[name])
            for without_first in (False, True):
                a, b = (
                    (o.seen(without_first=without_first), o.averages(without_first=without_first))
                    for o in (found, wanted)
                )
                exact = a[0].minmax, b[0].minmax
                assert all(
                    torch.equal(x, y)
                    for x, y in zip(
                        exact[0].state().values(), exact[1].state().values(), strict=True
                    )
                )
                assert torch.equal(a[0].topk.values, b[0].topk.values)
                assert torch.equal(a[0].histogram.count, b[0].histogram.count)
                torch.testing.assert_close(
                    a[0].moments.mean, b[0].moments.mean, rtol=1e-9, atol=1e-12
                )
                torch.testing.assert_close(a[1].finish(), b[1].finish(), rtol=1e-6, atol=1e-12)


@pytest.mark.kind(4, "sweep", "sensitivity")
@pytest.mark.parametrize("recipe", ["logits4:tensor", "logits4:row", "w4+a8:token+qk8+probs8:row"])
def test_scores_of_any_batch_size_and_order(recipe: str, tiny_llama: Any) -> None:
    """A grid belongs to a sequence or less: one over a batch would show here.

    With weights that are as sharp as a trained model's a rounding can pass a step: 1e-3.
    """
    data = text(LENGTHS[:3] + LENGTHS[4:])
    ids = data.ids

    def score(ids: tuple[Tensor, ...], size: int) -> np.ndarray[Any, Any]:
        part = TokenSlice(
            source="random", source_sha256="0", ids=ids, seq_len=14, skip=0, bos="never"
        )
        with torch.inference_mode(), fake_quantized(tiny_llama, recipe):
            return score_blocks(
                lambda batch: tiny_llama(**batch.inputs, use_cache=False).logits,
                part,
                batch_size=size,
            ).nll

    wanted = score(ids, 1)
    for size in SIZES[1:]:
        np.testing.assert_allclose(score(ids, size), wanted, rtol=1e-3)
    np.testing.assert_allclose(score(ids[::-1], 2)[::-1], wanted, rtol=1e-3)


SCAN = """
import hashlib, torch
from quantkit.numerics.scan import RowScan
x = torch.randn(2, 64, 37, generator=torch.Generator().manual_seed(0))
scan = RowScan(2, entropy=True)
rows = torch.arange(64)
scan.add(x, torch.zeros(64, dtype=torch.int64), (rows + 1).clamp(max=37), tag=0, row_step=37,
         full=torch.ones(64, dtype=torch.bool))
print(hashlib.sha256(scan._moments.numpy().tobytes() + scan._entropy.numpy().tobytes()).hexdigest())
"""


@pytest.mark.kind(4, "numerics", "stats", "calibrate")
def test_a_scan_that_is_compiled_and_one_that_is_loaded_have_the_same_bits(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    surroundings = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    run = [sys.executable, "-c", SCAN]
    compiled, loaded_again = (
        subprocess.run(run, env=surroundings, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    assert list(tmp_path.rglob("*.nbc"))
    assert len(compiled) == 65 and compiled == loaded_again
