"""Kind 3: logits beyond float16, counts beyond 2^24 and 2^31, sums of many.

States of many elements are made by merging, and so are those of the oracle: Python's integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from quantkit.calibration.watch import Watch
from quantkit.errors import ProbeError
from quantkit.numerics.choose import choose_range
from quantkit.numerics.methods import METHODS, parse_method
from quantkit.numerics.observers import Bundle, Histogram, MinMax, Moments, MovingAverage
from quantkit.numerics.scan import RowScan
from quantkit.outliers import record
from quantkit.probes import AttentionLogits, attach
from quantkit.quantization import fake_quantized
from tests.conftest import make_tiny

DOUBLINGS = 34


@pytest.fixture(autouse=True)
def one_thread_without_gradients() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


def overflowing(dtype: torch.dtype) -> Any:
    """A Llama with q and k of some hundreds, so that q k^T reaches 1e5 and more."""
    model = make_tiny(LlamaForCausalLM, LlamaConfig)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.mul_(4000)
        layer.self_attn.k_proj.weight.mul_(4000)
    return model.to(dtype)


IDS = torch.arange(1, 9)[None]
VALID = torch.ones(8, 8, dtype=torch.bool).tril()


def true_logits(model: Any) -> list[np.ndarray[Any, Any]]:
    """Of each layer, valid ones of all heads in float64, of the q and k that the model has."""
    found: list[np.ndarray[Any, Any]] = []

    def see(call: AttentionLogits) -> None:
        key = call.key.double().repeat_interleave(call.heads // call.key.shape[1], 1)
        logits = call.query.double() @ key.transpose(2, 3) * call.scale
        found.append(logits[0][:, VALID].numpy())

    with attach(model, {"attention_logit": see}):
        model(IDS)
    return found


@pytest.mark.kind(3, "probes", "stats", "calibrate")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_logit_beyond_the_models_dtype_is_recorded(dtype: torch.dtype) -> None:
    model = overflowing(dtype)
    wanted = true_logits(model)
    largest = max(float(np.abs(layer).max()) for layer in wanted)
    assert largest > 1e5
    watch = Watch(points=("attention_logit",))
    with record(model, points=()) as recording:
        model(IDS)
    with attach(model, watch.callbacks()):
        watch.begin(0)
        model(IDS)
        watch.end()
    summary = recording.stats().summary.attention_logit
    assert summary.abs_top["1"] == pytest.approx(largest, rel=1e-6)
    assert summary.count == sum(layer.size for layer in wanted)
    every = np.concatenate([layer.ravel() for layer in wanted])
    off = every - every.mean()
    assert summary.kurtosis == pytest.approx((off**4).mean() / (off**2).mean() ** 2, rel=1e-5)
    for index, layer in enumerate(wanted):
        seen = watch.seen[f"attention_logit/{index}/map 1"].seen().minmax
        np.testing.assert_allclose(seen.max.numpy(), layer.max(1), rtol=1e-5)
        assert int(seen.inf_count.sum()) == 0


@pytest.mark.kind(3, "sweep", "sensitivity")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", ["logits15:tensor", "logits15:row", "logits15:head:asymmetric"])
def test_a_grid_over_such_logits_is_felt_by_none_where_it_is_fine(
    recipe: str, dtype: torch.dtype
) -> None:
    """15 bits over a few 1e5 have steps of a few tens: the softmax there is one-hot."""
    model = overflowing(dtype)
    plain = model(IDS).logits.float()
    with fake_quantized(model, recipe):
        quantized = model(IDS).logits.float()
    assert bool(quantized.isfinite().all())
    assert float((quantized - plain).abs().max()) < 0.05 * float(plain.abs().max())


class HalfAttention(nn.Module):
    """Multiplies q and k itself, in the dtype that they have."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.transpose(1, 2), -1) @ x


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([HalfAttention()])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers[0](x)
        return out


@pytest.mark.kind(3, "probes", "stats", "sweep")
def test_what_overflows_in_the_model_itself_is_said_by_name() -> None:
    """A model that has inf where a logit should be: nothing can be read off it but that."""
    x = torch.full((1, 3, 4), 200.0, dtype=torch.float16)
    x[0, 1] = 1.0
    model = Half()
    with record(model, points=(), layers="layers.0") as recording:
        model(x)
    stats = recording.stats()
    said = " ".join(str(warning) for warning in stats.warnings)
    assert "inf" in said
    assert stats.summary.attention_logit.abs_top["1"] == 800.0
    with pytest.raises(ProbeError, match=r"layers\.0"), fake_quantized(model, "logits8"):  # type: ignore[arg-type]
        model(x)


def doubled(part: Any, times: int = DOUBLINGS) -> Any:
    for _ in range(times):
        part = part.merge(part)
    return part


VALUES = torch.tensor([[1.0, 2.0, -3.0, 0.0, 1.0, 700.0, -0.0, 0.5]])


@pytest.mark.kind(3, "numerics", "calibrate")
def test_counts_go_past_2_to_the_31() -> None:
    """Each doubling but the last would be lost in float32 once a count is odd and above 2^24."""
    one = Bundle.empty(1).update(VALUES, torch.arange(8))
    extra = Bundle.empty(1).update(torch.tensor([[1.0]]), torch.tensor([9]))
    many = doubled(one).merge(extra)
    n = 2**DOUBLINGS
    assert int(many.minmax.count) == 8 * n + 1
    assert int(many.histogram.count) == 8 * n + 1
    assert int(many.histogram.zeros) == 2 * n
    assert many.histogram.counts.dtype == torch.int64
    assert int(many.histogram.counts.max()) == 2 * n + 1  # of 1.0, exactly
    assert float(many.moments.count) == 8 * n + 1
    assert many.histogram.counts.min() >= 0


@pytest.mark.kind(3, "numerics", "calibrate")
@pytest.mark.parametrize("q", ["0.25", "0.5", "0.9", "0.999999999"])
def test_ranks_of_many_are_exact(q: str) -> None:
    """The rank is counted in integers: one element more on a side moves the median."""
    n = 2**DOUBLINGS
    low = doubled(Histogram.empty(1).update(torch.tensor([[1.0]])))
    high = doubled(Histogram.empty(1).update(torch.tensor([[4.0]])))
    one = Histogram.empty(1).update(torch.tensor([[4.0]]))
    both = low.merge(high).merge(one)
    rank = math.ceil(Fraction(q) * (2 * n + 1))
    wanted = 1.0 if rank <= n else 4.0
    assert float(both.quantile_abs(float(q))) == pytest.approx(wanted, rel=2**-8)
    assert float(low.merge(high).quantile_abs(0.5)) == pytest.approx(1.0, rel=2**-8)
    assert float(both.quantile_abs(0.5)) == pytest.approx(4.0, rel=2**-8)


@pytest.mark.kind(3, "numerics", "calibrate")
@pytest.mark.parametrize("method", METHODS)
def test_ranges_of_a_billion_are_those_of_the_eight(method: str) -> None:
    """Every element repeated 2^30 times: 8.6e9 in all. A quantile may not overflow on the way."""
    many = doubled(Bundle.empty(1).update(VALUES, torch.arange(8)), 30)
    moving = MovingAverage.empty(1).update(0, *many.minmax.finish())
    few = doubled(Bundle.empty(1).update(VALUES, torch.arange(8)), 20)
    for bits in (4, 8):
        for symmetric in (True, False):
            ranges = [
                choose_range(parse_method(method), seen, bits, symmetric=symmetric, moving=moving)
                for seen in (few, many)
            ]
            for a, b in zip(*ranges, strict=True):
                assert bool(b.isfinite().all())
                if "percentile" not in method:  # that of the top-k is exact, of the rest a bin's
                    torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
                else:
                    torch.testing.assert_close(a, b, rtol=2**-7, atol=0)


@pytest.mark.kind(3, "numerics", "stats")
def test_moments_of_many_are_those_of_the_few() -> None:
    x = VALUES.double().numpy().ravel()
    off = x - x.mean()
    found = doubled(Moments.empty(1).update(VALUES)).finish()
    assert float(found.count) == 8 * 2**DOUBLINGS
    assert float(found.mean) == pytest.approx(x.mean(), rel=1e-12)
    assert float(found.variance) == pytest.approx((off**2).mean(), rel=1e-12)
    assert float(found.kurtosis) == pytest.approx((off**4).mean() / (off**2).mean() ** 2, rel=1e-11)


@pytest.mark.kind(3, "numerics", "stats")
def test_an_offset_far_beyond_the_spread_costs_no_digit() -> None:
    """2^24 elements at 1e4 +- 1, by merging unequal parts: sums of squares would cancel."""
    generator = torch.Generator().manual_seed(0)
    part = torch.randn(1, 4096, generator=generator) + 1e4
    other = torch.randn(1, 17, generator=generator) + 1e4
    whole = doubled(Moments.empty(1).update(part), 12).merge(Moments.empty(1).update(other))
    a, b = part.double().numpy().ravel(), other.double().numpy().ravel()
    weight = 2.0**12
    n = weight * len(a) + len(b)
    mean = (weight * a.sum() + b.sum()) / n
    second = (weight * ((a - mean) ** 2).sum() + ((b - mean) ** 2).sum()) / n
    fourth = (weight * ((a - mean) ** 4).sum() + ((b - mean) ** 4).sum()) / n
    found = whole.finish()
    assert float(found.mean) == pytest.approx(mean, rel=1e-14)
    assert float(found.variance) == pytest.approx(second, rel=1e-9)
    assert float(found.kurtosis) == pytest.approx(fourth / second**2, rel=1e-9)


@pytest.mark.kind(3, "numerics", "stats")
@pytest.mark.parametrize("engine", ["compiled", "plain"])
def test_a_long_sum_of_float32_is_kept_in_float64(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 million elements, 1 beside 2^24 beside small ones: float32 sums would stop at 2^24."""
    if engine == "plain":
        monkeypatch.setattr("quantkit.numerics.scan.compiled", lambda: None)
    x = torch.ones(1, 300, 10_000)
    x[0, 0, 0] = 2.0**24
    scan = RowScan(1, k=4)
    ends = torch.zeros(300, dtype=torch.int64), torch.full((300,), 10_000)
    scan.add(x, *ends, tag=0, row_step=10_000)
    bundle = scan.finish().bundle
    mean = (2**24 + 3_000_000 - 1) / 3_000_000
    assert float(bundle.moments.mean) == pytest.approx(mean, rel=1e-12)
    assert int(bundle.minmax.count) == int(bundle.histogram.count) == 3_000_000
    assert bundle.topk.signed[0].tolist() == [2.0**24, 1.0, 1.0, 1.0]
    assert bundle.topk.tags[0].tolist() == [0, 1, 2, 3]


@pytest.mark.kind(3, "numerics")
def test_counts_of_nan_and_inf_go_as_far() -> None:
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1.0]])
    many = doubled(MinMax.empty(1).update(x))
    n = 2**DOUBLINGS
    assert [int(c) for c in (many.count, many.nan_count, many.inf_count)] == [4 * n, n, 2 * n]
    assert [float(end) for end in many.finish()] == [1.0, 1.0]


@pytest.mark.kind(3, "numerics", "calibrate")
def test_a_state_of_many_survives_its_dictionary() -> None:
    many = doubled(Bundle.empty(1).update(VALUES, torch.arange(8)))
    again = Bundle.from_state(many.state())
    assert torch.equal(again.histogram.counts, many.histogram.counts)
    assert int(again.merge(many).minmax.count) == 16 * 2**DOUBLINGS
