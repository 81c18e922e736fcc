"""A calibration for tests of the report: real figures of planted tensors, by numpy alone."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from quantkit.results import (
    Calibration,
    DrawnHistogram,
    Interval,
    MethodRange,
    Range,
    Ranges,
    Smoothing,
    StabilityPoint,
    TensorDiagnosis,
    WeightFigures,
    WeightsInfo,
    read_json,
)

V1 = Path(__file__).parent.parent / "results" / "fixtures" / "v1" / "base" / "ranges.json"
BITS = 8
LAYERS = 7
POINTS = ("linear_input", "attention_logit", "linear_output")
MODULES = ("mlp.down_proj", "self_attn", "mlp.up_proj")


def measured(method: str, x: np.ndarray, lo: float, hi: float) -> MethodRange:
    """The range's costs on an asymmetric 8-bit grid, all elements and inliers."""
    scale = (hi - lo) / (2**BITS - 1)
    error = (np.clip(np.round((x - lo) / scale), 0, 2**BITS - 1) * scale + lo - x) ** 2
    low, high = np.quantile(x, [0.0005, 0.9995])
    inlier = (x >= low) & (x <= high)
    return MethodRange(
        method=method,
        lo=float(lo),
        hi=float(hi),
        clipped_frac=float(np.mean((x < lo) | (x > hi))),
        sqnr_db=float(10 * np.log10((x**2).sum() / error.sum())),
        inlier_sqnr_db=float(10 * np.log10((x[inlier] ** 2).sum() / error[inlier].sum())),
    )


def planted_tensor(rng: np.random.Generator, layer: int, place: int) -> TensorDiagnosis:
    """Gaussian values with a few outliers, which grow with the layer; the last point has none."""
    x = rng.normal(size=20_000)
    if place == 2:
        x = np.round(rng.uniform(-2.0, 2.0, size=20_000) * 128) / 128
    else:
        x[:5] = (8.0 + 5.0 * layer) * (1 + place)
    low, high = (float(end) for end in np.quantile(x, [0.0005, 0.9995]))
    least, most = float(x.min()), float(x.max())
    cut = (least, most) if place == 2 else (low, high)
    counts, edges = np.histogram(x, bins=150)
    return TensorDiagnosis(
        name=f"{POINTS[place]}/model.layers.{layer}.{MODULES[place]}",
        point=POINTS[place],
        count=x.size,
        bits=BITS,
        symmetric=False,
        min=least,
        max=most,
        mean=float(x.mean()),
        std=float(x.std()),
        span_lo=low,
        span_hi=high,
        bits_wasted=math.log2((most - least) / (high - low)),
        chosen="minmax",
        methods=[
            measured("minmax", x, least, most),
            measured("upper-percentile:99.95", x, *cut),
            measured("mse", x, *(end if place == 2 else 1.5 * end for end in cut)),
            measured("entropy", x, *cut),
            measured("two-sided-percentile", x, *cut),
        ],
        histogram=DrawnHistogram(edges=edges.tolist(), counts=counts.tolist()),
        first_max_abs=math.nan if place == 1 else float(np.abs(x[:5]).max()),
        others_max_abs=float(np.abs(x[5:]).max()),
        stability=[[32.0, 0.2 / (1 + layer)], [64.0, 0.05 / (1 + layer)], [128.0, 0.004 * layer]],
    )


def unseen_tensor() -> TensorDiagnosis:
    """A tensor of which nothing was seen: every figure is NaN."""
    nan = math.nan
    return TensorDiagnosis(
        name="linear_input/model.layers.6.experts.7",
        point="linear_input",
        count=0,
        bits=BITS,
        symmetric=False,
        min=nan,
        max=nan,
        mean=nan,
        std=nan,
        span_lo=nan,
        span_hi=nan,
        bits_wasted=nan,
        chosen="minmax",
        methods=[
            MethodRange(
                method=method, lo=nan, hi=nan, clipped_frac=nan, sqnr_db=nan, inlier_sqnr_db=nan
            )
            for method in ("minmax", "mse")
        ],
        histogram=DrawnHistogram(edges=[], counts=[]),
        first_max_abs=nan,
        others_max_abs=nan,
    )


STABILITY = [
    StabilityPoint(
        samples=samples,
        before=samples * 3 // 4,
        moved_max_frac=most,
        moved_median_frac=middle,
        worst="linear_input/model.layers.0.mlp.down_proj",
    )
    for samples, most, middle in ((32, 0.2, 0.02), (64, 0.05, 0.003), (128, 0.024, 0.0))
]


@pytest.fixture(scope="session")
def calibration() -> Calibration:
    """21 seen tensors and an unseen one, the worst first as the file promises."""
    rng = np.random.default_rng(4)
    seen = [planted_tensor(rng, layer, place) for layer in range(LAYERS) for place in range(3)]
    seen.sort(key=lambda tensor: tensor.methods[0].inlier_sqnr_db)
    base = read_json(V1, Ranges)
    return Calibration(
        model=base.model,
        data=base.data,
        environment=base.environment,
        method="minmax",
        excludes_first=False,
        tensors=[*seen, unseen_tensor()],
        stability=STABILITY,
        warnings=["8 samples are fewer than the usual 128 of text."],
    )


@pytest.fixture(scope="session")
def ranges3() -> Ranges:
    """Ranges that use every field of schema 3."""
    base = read_json(V1, Ranges)
    heads = Range(
        lo=[-1.0, -69.0, math.nan],
        hi=[3.0, 19.0, math.nan],
        method="mse",
        granularity="head",
        count=1000,
        point="attention_logit",
        bits=8,
        other_bits={"4": Interval(lo=[-1.0, -9.0, 0.0], hi=[3.0, 9.0, 0.0])},
        waived=["unseen"],
    )
    lost = Range(
        lo=math.nan,
        hi=math.nan,
        method="minmax",
        granularity="tensor",
        count=0,
        point="kv_cache",
        waived=["unseen", "constant"],
    )
    smoothing = {
        f"model.layers.{layer}.mlp.up_proj": Smoothing(
            producer=f"model.layers.{layer}.norm",
            linears=[f"model.layers.{layer}.mlp.up_proj", f"model.layers.{layer}.mlp.gate_proj"],
            alpha=0.25 + 0.25 * layer,
            scales=[1.0, 2.0 + layer, 0.5],
            expected_error=0.001 * (1 + layer),
            expected_error_without=0.01 * (1 + layer) ** 2,
        )
        for layer in range(3)
    }
    return Ranges(
        model=base.model,
        data=base.data,
        method="mse",
        environment=base.environment,
        tensors={"attention_logit/1/map 1": heads, "kv_cache/5": lost, **base.tensors},
        smoothing=smoothing,
        stability=STABILITY,
        allowed=["experts.*", "constant"],
        warnings=["model.layers.3 holds a constant tensor."],
        until_stable_frac=0.01,
        weights=WeightsInfo(
            method="mse",
            bits=4,
            granularity="group",
            group_size=64,
            sha256="9" * 64,
            modules={
                f"model.layers.{layer}.mlp.up_proj": WeightFigures(
                    sqnr_db=20.0 + layer,
                    absmax_sqnr_db=18.5 + layer / 2,
                    worst_channel_sqnr_db=12.5 - 3 * layer,
                    worst_channel_absmax_sqnr_db=9.25 - layer,
                )
                for layer in range(3)
            },
        ),
    )
