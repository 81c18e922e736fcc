"""`calibration.json` against raw data: what each method costs, recomputed with numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from quantkit.calibration import RangePlan, choose_ranges
from quantkit.calibration.diagnose import diagnose
from quantkit.calibration.recording import Checkpoint
from quantkit.jobs import CALIBRATION_POINTS
from quantkit.numerics.affine import affine_params, fake_quantize, symmetric_scale
from quantkit.numerics.drawing import even_bins
from quantkit.numerics.methods import parse_methods
from quantkit.numerics.observers.histogram import Histogram
from quantkit.numerics.qtypes import QType
from quantkit.results import TensorDiagnosis
from tests.calibration.test_choose import observation


def heavy(seed: int = 5, n: int = 40_000) -> torch.Tensor:
    x = torch.randn(1, n, generator=torch.Generator().manual_seed(seed))
    x[0, :4] = torch.tensor([80.0, -30.0, 40.0, 25.0])
    return x


def plan(method: str = "minmax", **options: Any) -> RangePlan:
    return RangePlan(methods=parse_methods(method, CALIBRATION_POINTS), **options)


def quantized(x: np.ndarray[Any, Any], lo: float, hi: float, bits: int, symmetric: bool) -> Any:
    qtype = QType(bits=bits, signed=True, narrow=symmetric)
    if symmetric:
        scale, zero = symmetric_scale(torch.tensor(max(abs(lo), abs(hi))), qtype), torch.tensor(0)
    else:
        scale, zero = affine_params(torch.tensor(lo), torch.tensor(hi), qtype)
    return fake_quantize(torch.from_numpy(x), scale, zero, qtype).double().numpy()


def sqnr(x: np.ndarray[Any, Any], fq: np.ndarray[Any, Any]) -> float:
    wide = x.astype(np.float64)
    return float(10 * np.log10((wide**2).sum() / ((wide - fq) ** 2).sum()))


@pytest.mark.parametrize("point", ["linear_input", "attention_logit"])
@pytest.mark.parametrize("bits", [8, 4])
def test_costs_are_those_of_the_raw_data(point: str, bits: int) -> None:
    x = heavy()
    (found,) = diagnose({f"{point}/x": observation(x, point=point)}, plan(bits=(bits,)))
    raw = x[0].numpy()
    symmetric = point == "attention_logit"
    assert (found.symmetric, found.bits, found.count) == (symmetric, bits, raw.size)
    assert [m.method.split(":")[0] for m in found.methods] == [
        "minmax",
        "moving-average",
        "upper-percentile",
        "two-sided-percentile",
        "entropy",
        "mse",
    ]
    low, high = np.quantile(raw, [0.0005, 0.9995], method="inverted_cdf")
    assert (found.span_lo, found.span_hi) == pytest.approx((low, high), rel=2**-7)
    inliers = raw[(raw >= low) & (raw <= high)]
    for method in found.methods:
        fq = quantized(raw, method.lo, method.hi, bits, symmetric)
        assert method.sqnr_db == pytest.approx(sqnr(raw, fq), abs=0.15), method
        fq = quantized(inliers, method.lo, method.hi, bits, symmetric)
        assert method.inlier_sqnr_db == pytest.approx(sqnr(inliers, fq), abs=0.15), method
        limit = max(abs(method.lo), abs(method.hi))
        lo, hi = (-limit, limit) if symmetric else (method.lo, method.hi)
        clipped = ((raw < lo) | (raw > hi)).mean()
        assert method.clipped_frac == pytest.approx(clipped, abs=2e-5), method
    by_name = {m.method.split(":")[0]: m for m in found.methods}
    assert by_name["mse"].sqnr_db >= by_name["minmax"].sqnr_db - 1e-6
    assert by_name["two-sided-percentile"].inlier_sqnr_db > by_name["minmax"].inlier_sqnr_db
    width = 160.0 if symmetric else 110.0
    assert found.bits_wasted == pytest.approx(math.log2(width / (high - low)), abs=0.02)
    assert (found.min, found.max) == (-30.0, 80.0)
    assert found.mean == pytest.approx(raw.mean(dtype=np.float64), abs=1e-9)
    assert found.std == pytest.approx(raw.std(dtype=np.float64), rel=1e-6)


@pytest.mark.parametrize("method", ["minmax", "mse"])
def test_heads_are_judged_under_their_own_ranges(method: str) -> None:
    x = heavy(n=20_000).repeat(2, 1)
    x[1] = heavy(seed=6, n=20_000)[0] * 0.01  # a head that the other's range would flatten
    asked = plan(method, bits=(6,))
    (found,) = diagnose({"attention_logit/0/map 1": observation(x, point="attention_logit")}, asked)
    (coarse,) = diagnose(
        {"attention_logit/0/map 1": observation(x, point="attention_logit")},
        plan(method, bits=(6,), granularity="tensor"),
    )
    chosen = choose_ranges(
        {"attention_logit/0/map 1": observation(x, point="attention_logit")}, asked
    )["attention_logit/0/map 1"]
    assert isinstance(chosen.lo, list) and isinstance(chosen.hi, list)
    noise = power = 0.0
    for raw, lo, hi in zip(x.numpy(), chosen.lo, chosen.hi, strict=True):
        wide = raw.astype(np.float64)
        noise += ((wide - quantized(raw, lo, hi, 6, True)) ** 2).sum()
        power += (wide**2).sum()
    mine = next(m for m in found.methods if m.method == method)
    assert mine.sqnr_db == pytest.approx(10 * np.log10(power / noise), abs=0.15)
    assert (mine.lo, mine.hi) == (min(chosen.lo), max(chosen.hi))
    assert found.bits_wasted == pytest.approx(
        np.mean([math.log2(w / s) for w, s in widths(x.numpy(), chosen)]), abs=0.03
    )
    alone = next(m for m in coarse.methods if m.method == method)
    assert mine.inlier_sqnr_db > alone.inlier_sqnr_db - 0.2
    assert coarse.bits_wasted != found.bits_wasted


def widths(x: np.ndarray[Any, Any], chosen: Any) -> list[tuple[float, float]]:
    """Of each head, what its symmetric grid spans, and its 99.9 % span."""
    spans = np.quantile(x, [0.0005, 0.9995], axis=1, method="inverted_cdf")
    ends = zip(chosen.lo, chosen.hi, strict=True)
    return [
        (2 * max(abs(lo), abs(hi)), float(high - low))
        for (lo, hi), low, high in zip(ends, *spans, strict=True)
    ]


def test_the_worst_come_first_and_share_what_they_share() -> None:
    mild = torch.rand(1, 5000, generator=torch.Generator().manual_seed(1)) - 0.5
    shared = observation(heavy())
    seen = {
        "linear_input/mild": observation(mild),
        "linear_input/b": shared,
        "linear_input/a": shared,
    }
    found = diagnose(seen, plan())
    assert [t.name for t in found] == [f"linear_input/{n}" for n in ("a", "b", "mild")]
    keys: list[float] = [t.methods[0].inlier_sqnr_db for t in found]
    assert keys == sorted(keys) and keys[0] == keys[1]


def test_first_tokens_are_told_apart() -> None:
    x = observation(heavy(), torch.tensor([[900.0, -1000.0]]))
    (found,) = diagnose({"linear_input/x": x}, plan())
    assert (found.first_max_abs, found.others_max_abs) == (1000.0, 80.0)
    assert (found.min, found.max) == (-1000.0, 900.0)
    (without,) = diagnose({"linear_input/x": x}, plan(excludes_first=True))
    assert (without.min, without.max, without.count) == (-30.0, 80.0, 40_000)
    assert (without.first_max_abs, without.others_max_abs) == (1000.0, 80.0)


def test_a_method_with_another_parameter_is_compared_too() -> None:
    (found,) = diagnose({"linear_input/x": observation(heavy())}, plan("upper-percentile:99"))
    assert found.chosen == "upper-percentile:99.0"
    assert [m.method for m in found.methods].count(found.chosen) == 1
    assert len(found.methods) == 7


@pytest.mark.kind(2, "calibrate")
@pytest.mark.parametrize("value", [0.0, 0.25, -3.0])
def test_a_constant_tensor_has_a_diagnosis(value: float) -> None:
    x = observation(torch.full((1, 10), value))
    (found,) = diagnose({"linear_input/x": x}, plan())
    assert (found.min, found.max, found.std) == (value, value, 0.0)
    assert found.histogram.counts == [10] and found.histogram.edges == [value, value]
    assert found.bits_wasted == math.inf


def test_stability_is_of_the_tensor() -> None:
    ranges = [(torch.tensor([-1.0]), torch.tensor([x])) for x in (1.0, 3.0)]
    points = [
        Checkpoint(samples=n, ranges={"linear_input/x": r})
        for n, r in zip((12, 16), ranges, strict=True)
    ]
    found: TensorDiagnosis = diagnose({"linear_input/x": observation(heavy())}, plan(), points)[0]
    assert found.stability == [[16.0, 0.5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_even_bins_hold_every_element(dtype: torch.dtype) -> None:
    x = heavy().to(dtype)
    x[0, 10:500] = 0.0
    seen = Histogram.empty(1).update(x)
    edges, counts = even_bins(seen, -30.0, 80.0, 64)
    raw = x[0].float().numpy()
    expected, _ = np.histogram(raw, np.array(edges))
    assert len(edges) == 65 and len(counts) == 64
    assert sum(counts) == raw.size and min(counts) >= 0
    # elements of a bin of the other grid may lie on either side of an edge
    assert np.abs(np.array(counts) - expected).max() < 0.01 * raw.size
    assert counts[-1] == 1 and counts[0] == 1  # the outliers are drawn where they are
