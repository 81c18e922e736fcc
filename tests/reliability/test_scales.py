"""Kind 2: scales of 0, inf, NaN and subnormal; constant tensors; what never ran.

A range is finite and a grid usable, or there is one error that names the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from quantkit.calibration import RangePlan, observe, ranges_now
from quantkit.calibration.choose import choose_ranges
from quantkit.calibration.guards import failed_guards
from quantkit.calibration.weights import WeightPlan, choose_weight_ranges
from quantkit.errors import InputError, ProbeError, QuantkitError
from quantkit.numerics.affine import (
    RangeError,
    affine_params,
    check_range,
    fake_quantize,
    reduce_absmax,
    symmetric_scale,
)
from quantkit.numerics.choose import choose_range
from quantkit.numerics.granularity import PerAxis, PerGroup, PerTensor
from quantkit.numerics.methods import METHODS, WEIGHT_METHODS, parse_method, parse_methods
from quantkit.numerics.observers import Bundle, MovingAverage
from quantkit.numerics.qtypes import QType
from quantkit.outliers import record
from quantkit.probes import attach
from quantkit.quantization import fake_quantized
from quantkit.quantization.grids import spanning_grid
from quantkit.results import Interval, Range
from tests.calibration.oracle import loaded_model, text
from tests.conftest import make_tiny

TINY = torch.finfo(torch.float32).tiny
LARGEST = torch.finfo(torch.float32).max
WIDTHS = (2, 3, 4, 8, 16)
TENSORS = {
    "zeros": torch.zeros(50),
    "minus zeros": torch.full((50,), -0.0),
    "one value": torch.full((50,), 2.5),
    "one negative value": torch.full((50,), -2.5),
    "a single element": torch.tensor([3.25]),
    "a single zero": torch.tensor([0.0]),
    "a single subnormal": torch.tensor([1e-40]),
    "the least subnormal": torch.full((50,), 1e-45),
    "zero and the least subnormal": torch.tensor([0.0, 1e-45]),
    "subnormals": torch.linspace(-1e-40, 1e-40, 50),
    "absmax that underflows by 127": torch.linspace(-1.2e-38, 1.2e-38, 50),
    "the ends of float32": torch.tensor([LARGEST, -LARGEST, 1.0, 0.0]),
    "the largest float32": torch.full((5,), LARGEST),
    "a subnormal beside the largest": torch.tensor([1e-45] * 100 + [LARGEST]),
    "subnormal to large": torch.tensor([1e-40, 1e38]),
    "a leaked mask": torch.tensor([0.5, -1.0, -LARGEST]),
    "with inf": torch.tensor([1.0, torch.inf, -2.0]),
    "with NaN": torch.tensor([1.0, torch.nan, -2.0]),
    "neighbours": torch.tensor([5.0, 5.0, float(np.nextafter(np.float32(5), np.float32(6)))]),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def seen(x: Tensor) -> tuple[Bundle, MovingAverage]:
    bundle = Bundle.empty(1).update(x[None], torch.arange(len(x)))
    low, high = bundle.minmax.finish()
    return bundle, MovingAverage.empty(1).update(0, low, high)


@pytest.mark.kind(2, "numerics", "calibrate")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", TENSORS)
def test_every_method_gives_a_usable_grid(name: str, method: str) -> None:
    x = TENSORS[name]
    bundle, moving = seen(x)
    finite = x[x.isfinite()]
    for bits in (2, 3, 8):
        for symmetric in (True, False):
            lo, hi = choose_range(
                parse_method(method), bundle, bits, symmetric=symmetric, moving=moving
            )
            check_range(lo, hi, name)
            grid = spanning_grid(lo, hi, bits, symmetric=symmetric)
            scale = float(grid.scale)
            assert TINY <= scale < np.inf
            y = fake_quantize(finite, grid.scale, grid.zero_point, grid.qtype)
            assert bool(y.isfinite().all())
            if len(finite.unique()) == 1:  # also where the range is clipped: it is the value
                assert abs(float(y[0].double() - finite[0].double())) <= 0.5000001 * scale
            if not finite.any():
                assert not y.any() and not y.signbit().any()


@pytest.mark.kind(2, "numerics", "calibrate")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "x",
    [torch.zeros(0), torch.full((4,), torch.nan), torch.full((4,), -torch.inf)],
    ids=["no element", "NaN alone", "inf alone"],
)
def test_a_range_of_nothing_is_one_error(x: Tensor, method: str) -> None:
    bundle, moving = seen(x)
    lo, hi = choose_range(parse_method(method), bundle, 8, symmetric=False, moving=moving)
    with pytest.raises(RangeError, match="finite range for 'q_proj', got NaN"):
        check_range(lo, hi, "q_proj")
    assert "unseen" in failed_guards(bundle)


@pytest.mark.kind(2, "numerics")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", WIDTHS)
def test_constants_come_back(bits: int, dtype: torch.dtype) -> None:
    """A constant is an end of its own range: exact, but for rounding of scale times steps."""
    end = torch.finfo(dtype).max
    for value in (0.0, -0.0, 3.7, -3.7, 1e-3, 65504.0, -60000.0, end, -end):
        x = torch.full((3, 4), value).to(dtype)
        narrow = QType(bits=bits, narrow=True)
        scale = symmetric_scale(reduce_absmax(x, PerTensor()), narrow)
        grids = [(scale, 0, narrow), (*affine_params(x.amin(), x.amax(), QType(bits=bits)), None)]
        for step, zero_point, qtype in grids:
            y = fake_quantize(x, step, zero_point, qtype or QType(bits=bits))
            assert y.dtype == dtype and bool(y.isfinite().all())
            error = (y.double() - x.double()).abs().max()
            assert float(error) <= 4 * torch.finfo(dtype).eps * abs(float(x[0, 0]))


@pytest.mark.kind(2, "numerics")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", WIDTHS)
def test_a_step_beyond_the_range_is_finite_in_16_bits(bits: int, dtype: torch.dtype) -> None:
    """An asymmetric grid over [-max, max] has its lowest step half a step below -max."""
    end = torch.finfo(dtype).max
    x = torch.tensor([-end, end, 0.0, end / 2]).to(dtype)
    y = fake_quantize(x, *affine_params(x.amin(), x.amax(), QType(bits=bits)), QType(bits=bits))
    assert bool(y.isfinite().all())


@pytest.mark.kind(2, "numerics")
@pytest.mark.parametrize("bits", WIDTHS)
def test_any_finite_range_gives_finite_numbers(bits: int) -> None:
    """Ends drawn over all exponents; each end comes back within half a step, in float64."""
    generator = np.random.default_rng(bits)
    exponents = generator.uniform(-45, 38.53, (2, 4000))
    ends = np.minimum(10.0**exponents, float(LARGEST)) * generator.choice([-1, 0, 1], (2, 4000))
    lo, hi = (torch.from_numpy(end.astype(np.float32)) for end in (ends.min(0), ends.max(0)))
    qtype = QType(bits=bits)
    scale, zero_point = affine_params(lo, hi, qtype)
    assert bool(((scale >= TINY) & scale.isfinite()).all())
    outermost = torch.maximum(qtype.qmax - zero_point, zero_point - qtype.qmin)
    for end in (lo, hi):
        y = fake_quantize(end, scale, zero_point, qtype)
        assert bool(y.isfinite().all())
        is_in_range = scale.double() * outermost < 0.49 * float(LARGEST)
        error = (y.double() - end.double()).abs()[is_in_range] / scale.double()[is_in_range]
        # the zero point is rounded, so an end may lie half a step outside
        assert float(error.max()) <= 1.0 + 1e-6


@pytest.mark.kind(2, "numerics")
@pytest.mark.parametrize("name", TENSORS)
def test_a_bundle_of_a_strange_tensor_is_what_numpy_says(name: str) -> None:
    x = TENSORS[name]
    bundle, _ = seen(x)
    finite = x[x.isfinite()].double().numpy()
    lo, hi = bundle.minmax.finish()
    assert (float(lo), float(hi)) == (finite.min(), finite.max())
    assert int(bundle.histogram.count) == len(finite)
    assert float(bundle.moments.mean) == pytest.approx(finite.mean(), rel=1e-12)
    assert float(bundle.topk.values[0, 0]) == np.abs(finite).max()
    median = np.quantile(np.abs(finite), 0.5, method="inverted_cdf")
    assert abs(float(bundle.histogram.quantile_abs(0.5)) - median) <= max(median, TINY) * 2**-8


@pytest.mark.kind(2, "sweep", "numerics")
@pytest.mark.parametrize("group", [None, 4])
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, 1e-45, 3.0, -3.0, 1e38])
def test_weights_of_one_value_stay_what_they_are(value: float, group: int | None) -> None:
    weight = torch.full((3, 6), value)
    weight[1] = 0.0
    groups = PerAxis(axis=0) if group is None else PerGroup(axis=1, group_size=group)
    model = nn.Sequential(nn.Linear(6, 3, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(weight)
    assert reduce_absmax(weight, groups).amin() == 0.0
    recipe = "w4" if group is None else f"w4:group{group}"
    with fake_quantized(model, recipe):  # type: ignore[arg-type]
        found = model[0].weight.detach().clone()
    # a scale below the smallest normal number is that: what is smaller than half of it is zero
    bound = TINY / 2 if abs(value) < TINY else 1e-6 * abs(value)
    assert float((found.double() - weight.double()).abs().max()) <= bound
    assert torch.equal(model[0].weight, weight)


@pytest.mark.kind(2, "calibrate")
@pytest.mark.parametrize(
    "granularity", [PerAxis(axis=0), PerGroup(axis=1, group_size=5)], ids=["channel", "group"]
)
@pytest.mark.parametrize("method", WEIGHT_METHODS)
def test_weight_ranges_of_dead_channels_are_usable(
    method: str, granularity: PerAxis | PerGroup
) -> None:
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
        model[0].weight[0], model[0].weight[1], model[0].weight[2] = 0.0, 1e-41, 2.0
    plan = WeightPlan(method=parse_method(method), bits=4, granularity=granularity)
    found, _ = choose_weight_ranges(model, plan)
    for name, module in (("0", model[0]), ("1", model[1])):
        weight: Tensor = module.weight.detach()
        scale = found.scale(name, weight.shape, 4)
        assert bool((scale.isfinite() & (scale >= TINY)).all())
        y = fake_quantize(weight, scale, 0, QType(bits=4, narrow=True))
        if name == "0":
            assert not y[0].any() and torch.allclose(y[2], torch.tensor(2.0), rtol=1e-6)
        else:  # one element is its own outermost step
            torch.testing.assert_close(y, weight, rtol=1e-6, atol=0)


@pytest.mark.kind(2, "sweep", "export")
@pytest.mark.parametrize(
    ("lo", "hi", "said"),
    [
        (0.0, float("inf"), "inf in 1 of 1 upper"),
        (float("-inf"), 1.0, "inf in 1 of 1 lower"),
        (float("nan"), 1.0, "NaN in 1 of 1 lower"),
        (2.0, 1.0, "the reverse"),
    ],
    ids=["inf", "minus inf", "NaN", "reversed"],
)
@pytest.mark.parametrize("recipe", ["logits8:static:tensor", "a8"])
def test_a_range_that_carries_no_grid_is_named(
    recipe: str, lo: float, hi: float, said: str, tiny_llama: Any
) -> None:
    point = "linear_input" if recipe == "a8" else "attention_logit"
    names = [
        "linear_input/model.layers.0.self_attn.q_proj",
        "attention_logit/0/map 1",
    ]
    name = next(n for n in names if n.startswith(point))
    bad = Range(
        lo=lo, hi=hi, method="minmax", granularity="tensor", count=1, point=point,
        bits=None, symmetric=point == "attention_logit", other_bits={}, waived=[],
    )  # fmt: skip
    before = {n: p.clone() for n, p in tiny_llama.named_parameters()}
    with (
        pytest.raises(RangeError, match=f"(?s){name}.*{said}|{said}.*{name}"),
        fake_quantized(tiny_llama, recipe, {name: bad}),
    ):
        tiny_llama(torch.arange(5)[None])
    assert all(torch.equal(p, before[n]) for n, p in tiny_llama.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in tiny_llama.modules())


class Branches(nn.Module):
    """A layer that is called, one that never is, and one that a training run would drop."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.dead, self.dropped = (nn.Linear(4, 4) for _ in range(3))
        self.drop = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.used(x)
        return x if self.drop else self.dropped(x)


@pytest.mark.kind(2, "probes", "sweep")
def test_what_never_ran_is_named_and_can_be_waived() -> None:
    model, x = Branches(), torch.randn(2, 3, 4)
    with (
        pytest.raises(ProbeError, match="never fired: linear_input dead, linear_input dropped"),
        attach(model, {"linear_input": lambda visit: None}),
    ):
        model(x)
    with attach(model, {"linear_input": lambda v: None}, allow_unseen=["dead", "dro*"]) as found:
        model(x)
    assert found.waived == ["linear_input dead", "linear_input dropped"]
    model.drop = False  # LayerDrop: that it ran once is enough
    with attach(model, {"linear_input": lambda v: None}, allow_unseen="dead") as found:
        model(x)
        model.drop = True
        model(x)
    assert found.hits["linear_input"]["dropped"].calls == 1


@pytest.mark.kind(2, "sweep")
def test_a_quantizer_that_did_not_run_is_named() -> None:
    model, x = Branches(), torch.randn(2, 3, 4)
    with pytest.raises(ProbeError, match="dead"), fake_quantized(model, "a8:token"):  # type: ignore[arg-type]
        model(x)
    keep = ["linear_input/dead", "linear_input/dropped"]
    with fake_quantized(model, "a8:token", keep=keep) as quantizers:  # type: ignore[arg-type]
        model(x)
    assert set(quantizers.fired) == {"linear_input/used"}


def idle_mixture() -> Any:
    """Of a, -a, 2a and 0 the last is never the largest: layer 0 does not use that expert."""
    model = make_tiny(MixtralForCausalLM, MixtralConfig, num_local_experts=4, num_experts_per_tok=1)
    with torch.no_grad():
        router = model.model.layers[0].mlp.gate
        router.weight.copy_(router.weight[:1] * torch.tensor([[1.0], [-1.0], [2.0], [0.0]]))
    return model


@pytest.mark.kind(2, "stats")
def test_an_unused_expert_is_named_by_statistics() -> None:
    model, ids = idle_mixture(), torch.arange(1, 13)[None]
    place = "model.layers.0.mlp.experts.3.down_proj"
    with torch.no_grad():
        with pytest.raises(ProbeError, match=place), record(model, points=["mlp_down_input"]):
            model(ids)
        with record(model, points=["mlp_down_input"], allow_unseen="*.experts.*") as recording:
            model(ids)
        with attach(
            model, {"mlp_down_input": lambda visit: None}, allow_unseen="*.experts.*"
        ) as found:
            model(ids)
    assert f"mlp_down_input {place}" in found.waived
    assert all(group.count > 0 for group in recording.stats().points["mlp_down_input"])


@pytest.mark.kind(2, "calibrate")
@pytest.mark.parametrize("value", ["zeros", "constant"])
def test_dead_inputs_fail_their_guard_or_give_a_scale(value: str, tiny_llama: Any) -> None:
    """A layer whose input is always the same: a range of it says nothing, or is waived."""
    with torch.no_grad():
        norm = tiny_llama.model.layers[1].input_layernorm
        norm.weight.zero_()
    plan = RangePlan(methods=parse_methods("minmax", ["linear_input"]), granularity="tensor")
    found = observe(
        loaded_model(tiny_llama),
        text((6, 9)),
        points=("linear_input",),
        choose=lambda seen: ranges_now(seen, plan),
        batch_size=2,
    )
    assert found is not None
    names = [f"linear_input/model.layers.1.self_attn.{n}_proj" for n in "qkv"]
    seen = found.seen
    if value == "constant":
        one = Bundle.empty(1).update(torch.full((1, 9), -4.0), torch.arange(9))
        assert failed_guards(one) == {"constant": "the value -4 alone"}
        return
    with pytest.raises(RangeError, match=r"nothing but zeros.*--allow zero"):
        choose_ranges(seen, plan)
    waived = choose_ranges(
        seen, RangePlan(methods=plan.methods, granularity="tensor", allowed=["zero"])
    )
    for name in names:
        assert (waived[name].lo, waived[name].hi, waived[name].waived) == (0.0, 0.0, ["zero"])
    with torch.no_grad(), fake_quantized(tiny_llama, "a8", waived):
        quantized = tiny_llama(torch.arange(7)[None]).logits
    assert bool(quantized.isfinite().all())


@pytest.mark.kind(2, "sweep")
def test_errors_are_ours() -> None:
    """What callers catch: bad ranges and bad input are `InputError`, all are `QuantkitError`."""
    assert issubclass(RangeError, InputError) and issubclass(InputError, QuantkitError)
    assert issubclass(ProbeError, QuantkitError)
    assert Interval(lo=0.0, hi=1.0).hi == 1.0
