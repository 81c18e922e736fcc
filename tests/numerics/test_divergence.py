"""Kullback-Leibler divergence over bins: by hand, on a planted tail, and beside onnxruntime."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from onnxruntime.quantization.calibrate import HistogramCollector
from torch import Tensor

from quantkit.numerics.cells import Cells, Floats, cells_of
from quantkit.numerics.choose import choose_range
from quantkit.numerics.distortion import Grids, grids_of
from quantkit.numerics.divergence import divergence
from quantkit.numerics.methods import EntropyRange
from quantkit.numerics.observers import Bundle


def planted(n: int = 60_000) -> Tensor:
    """Returns [1, n]: a Gaussian body, one value in a thousand of a tail twenty times as wide."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, n, generator=generator)
    x[:, ::1000] *= 20.0
    return x


def seen(x: Tensor) -> Bundle:
    return Bundle.empty(1).update(x, torch.arange(x.shape[1]))


def bins(edges: list[float], counts: list[float]) -> Cells:
    nothing = np.zeros(0)
    return Cells(
        points=nothing,
        point_counts=nothing,
        lower=np.array(edges[:-1]),
        upper=np.array(edges[1:]),
        counts=np.array(counts),
        min=edges[0],
        max=edges[-1],
        ties=False,
    )


def grid(scale: float, kmin: float, kmax: float) -> Grids:
    return Grids(scale=np.array([scale]), kmin=np.array([kmin]), kmax=np.array([kmax]))


def test_by_hand() -> None:
    # Level 0 is [-1, 1], level 1 is [1, 3]. Counts 4 and 2 of widths 1/2 and 1/2 share level 0
    # evenly (3 each); level 1 has one bin of 2, to which the clipped 2 beyond 3 are added.
    cells = bins([0.0, 0.5, 1.0, 3.0, 5.0], [4.0, 2.0, 2.0, 2.0])
    p, q = np.array([4.0, 2.0, 4.0]) / 10, np.array([3.0, 3.0, 2.0]) / 8

    found = divergence(cells, grid(2.0, -1, 1))

    assert found[0] == pytest.approx(float(p @ np.log(p / q)))


def test_counts_are_spread_by_width() -> None:
    # Two bins of one density in one level: nothing is lost, though their counts differ.
    assert divergence(bins([0.0, 0.2, 1.0], [2.0, 8.0]), grid(2.0, -1, 1))[0] == 0.0


def test_bins_wider_than_levels_lose_nothing() -> None:
    even = bins([0.0, 8.0, 100.0], [5.0, 3.0])
    assert divergence(even, grid(0.5, -1000, 1000))[0] == pytest.approx(0.0, abs=1e-2)
    assert divergence(even, grid(20.0, -100, 100))[0] > 0.01


def test_data_outside_the_range_and_zeros() -> None:
    assert divergence(bins([5.0, 6.0], [3.0]), grid(1.0, -2, 2))[0] == math.inf
    (zeros,) = cells_of(seen(torch.zeros(1, 9)))
    assert divergence(zeros, grid(1.0, -2, 2)).tolist() == [0.0]


def raw_divergence(x: Floats, lo: float, hi: float, bits: int) -> float:
    """Returns KL on elements: 16,384 equal bins over all of them; levels as `grids_of` has them."""
    counts, edges = np.histogram(x, bins=1 << 14)
    middle = (edges[1:] + edges[:-1]) / 2
    grids = grids_of(np.array([lo]), np.array([hi]), bits, symmetric=False)
    scale, kmin, kmax = (float(v[0]) for v in (grids.scale, grids.kmin, grids.kmax))
    inside = (middle > (kmin - 0.5) * scale) & (middle < (kmax + 0.5) * scale) & (counts > 0)
    level = np.rint(middle[inside] / scale).astype(int)
    level -= level.min()
    kept = counts[inside].astype(np.float64)
    q = (np.bincount(level, kept) / np.maximum(np.bincount(level), 1))[level]
    p = kept.copy()
    below = counts[middle < middle[inside][0]].sum()
    p[0] += below
    p[-1] += counts.sum() - kept.sum() - below
    p, q = p / p.sum(), q / q.sum()
    return float(p @ np.log(p / q))


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_on_a_planted_tail_it_is_lower_than_that_of_minmax(bits: int) -> None:
    x = planted()
    bundle = seen(x)

    lo, hi = choose_range(EntropyRange(), bundle, bits, symmetric=False)

    data = x[0].double().numpy()
    ours = raw_divergence(data, float(lo[0]), float(hi[0]), bits)
    assert ours < 0.8 * raw_divergence(data, data.min(), data.max(), bits)
    (cells,) = cells_of(bundle)
    lows, highs = np.array([float(lo[0]), data.min()]), np.array([float(hi[0]), data.max()])
    of_bins = divergence(cells, grids_of(lows, highs, bits, symmetric=False))
    assert of_bins[0] < 0.8 * of_bins[1]
    assert float(hi[0]) < 0.8 * data.max()


def test_onnxruntimes_default_returns_minmax_on_the_same_data(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Its 128 bins are as many as its 128 quantized ones: the only candidate is the whole range.
    data = planted()[0].numpy()
    collector = HistogramCollector(
        method="entropy",
        symmetric=False,
        num_bins=128,
        num_quantized_bins=128,
        percentile=99.999,
        scenario="same",
    )
    collector.collect({"x": data})

    low, high = collector.compute_collection_result()["x"][:2]

    assert (float(low), float(high)) == (data.min(), data.max())
    assert "histogram bins : 128" in capsys.readouterr().out
