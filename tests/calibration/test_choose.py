"""Observations to ranges: methods, widths, granularity, what is left out, and the guards."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from quantkit.calibration import (
    Observation,
    RangePlan,
    choose_ranges,
    failed_guards,
    require_trustworthy,
)
from quantkit.errors import InputError
from quantkit.jobs import CALIBRATION_POINTS
from quantkit.numerics.affine import RangeError, affine_params, fake_quantize
from quantkit.numerics.methods import parse_methods
from quantkit.numerics.observers import Bundle
from quantkit.numerics.observers.moving import MovingAverage
from quantkit.numerics.qtypes import QType
from quantkit.results import Range
from tests.calibration.oracle import Seen, brute_force, text
from tests.calibration.test_observe import run


def plan(method: str = "minmax", **options: Any) -> RangePlan:
    return RangePlan(methods=parse_methods(method, CALIBRATION_POINTS), **options)


def observation(
    values: torch.Tensor, first: torch.Tensor | None = None, point: str = "linear_input"
) -> Observation:
    """Of values `[groups, n]`, one sample; `first`: elements of the first token, if any."""
    groups = len(values)
    empty = Bundle.empty(groups)
    tags = torch.arange(values.shape[1])
    classes = {"others": empty.update(values, tags), "first": empty}
    whole = values
    if first is not None:
        classes["first"] = empty.update(first, torch.arange(first.shape[1]))
        whole = torch.cat([values, first], 1)
    ends = [torch.cat([getattr(x, f)(1) for x in (whole, values)]) for f in ("amin", "amax")]
    return Observation(
        point=point,
        granularity="tensor" if groups == 1 else "head",
        classes=classes,
        moving=MovingAverage.empty(2 * groups).update(0, *ends),
    )


def outliers(groups: int = 1, n: int = 20_000) -> torch.Tensor:
    x = torch.randn(groups, n, generator=torch.Generator().manual_seed(5))
    x[:, :3] = torch.tensor([60.0, -45.0, 30.0])
    return x


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_diffllama"])
def test_min_max_equals_brute_force(request: pytest.FixtureRequest, family: str) -> None:
    model = request.getfixturevalue(family)
    data = text((5, 30, 17, 3))
    expected = brute_force(model, data)
    found = choose_ranges(run(model, data).seen, plan())
    assert found.keys() == expected.keys()
    for name, range_ in found.items():
        seen = expected[name]
        groups = range(seen.samples[0][0].shape[0])
        low, high = ([f(seen.values(g)) for g in groups] for f in (np.min, np.max))
        per_head = name.split("/")[0].startswith("attention_") and "output" not in name
        assert range_.granularity == ("head" if per_head else "tensor")
        assert np.ravel(range_.lo) == pytest.approx(low, rel=1e-4, abs=1e-5), name
        assert np.ravel(range_.hi) == pytest.approx(high, rel=1e-4, abs=1e-5), name
        assert isinstance(range_.lo, list) == per_head
        assert range_.count == sum(len(seen.values(g)) for g in groups)
        assert (range_.method, range_.bits, range_.point) == ("minmax", None, name.split("/")[0])
        assert range_.symmetric == (range_.point == "attention_logit")


def test_a_tensors_range_spans_all_heads(tiny_llama: LlamaForCausalLM) -> None:
    seen = run(tiny_llama, text((20, 9)), points=("attention_logit", "attention_key")).seen
    heads, whole = (choose_ranges(seen, plan(granularity=g)) for g in ("head", "tensor"))
    for name, range_ in whole.items():
        assert range_.granularity == "tensor"
        assert range_.lo == min(np.ravel(heads[name].lo))
        assert range_.hi == max(np.ravel(heads[name].hi))
        assert range_.count == heads[name].count


def test_moving_average_of_a_tensor_is_that_of_its_widest_head(
    tiny_llama: LlamaForCausalLM,
) -> None:
    data = text((20, 9, 14))
    seen = run(tiny_llama, data, points=("attention_key",)).seen
    expected = brute_force(tiny_llama, data)
    for name, range_ in choose_ranges(seen, plan("moving-average", granularity="tensor")).items():
        both = [expected[name].moving(group, 0.01) for group in range(2)]
        assert range_.lo == pytest.approx(min(lo for lo, _ in both), rel=1e-4)
        assert range_.hi == pytest.approx(max(hi for _, hi in both), rel=1e-4)


def test_without_the_first_token(tiny_llama: LlamaForCausalLM) -> None:
    data = text((5, 30, 17))
    expected = brute_force(tiny_llama, data)
    seen = run(tiny_llama, data).seen
    found = choose_ranges(seen, plan(excludes_first=True))
    for name, range_ in found.items():
        rows: Seen = expected[name]
        every = [rows.values(g, without_first=True) for g in range(np.size(range_.lo))]
        assert np.ravel(range_.lo) == pytest.approx([x.min() for x in every], rel=1e-4, abs=1e-5)
        assert np.ravel(range_.hi) == pytest.approx([x.max() for x in every], rel=1e-4, abs=1e-5)
        assert range_.count == sum(map(len, every))


def test_each_point_has_its_method_and_every_width() -> None:
    seen = {
        "linear_input/a": observation(outliers()),
        "attention_logit/0/map 1": observation(outliers(2), point="attention_logit"),
    }
    found = choose_ranges(seen, plan("mse,attention_logit=upper-percentile:99", bits=(8, 4, 6)))
    linear, logit = found.values()
    assert (linear.method, linear.bits, list(linear.other_bits)) == ("mse", 8, ["4", "6"])
    assert (logit.method, logit.bits, logit.other_bits) == ("upper-percentile:99.0", None, {})
    x = outliers()
    for bits in (8, 4, 6):
        interval = linear.at(bits)
        mine, minmax = (
            error(x, lo, hi, bits)
            for lo, hi in ((interval.lo, interval.hi), (x.min().item(), x.max().item()))
        )
        assert mine <= minmax
    assert error(x, linear.at(4).lo, linear.at(4).hi, 4) < 0.5 * error(x, -45.0, 60.0, 4)
    assert linear.at(4) != linear.at(8)
    with pytest.raises(
        InputError, match=r"'x' was chosen by mse for 8,4,6 bits.*--method mse --bits 8,4,6,5"
    ):
        linear.at(5, "x")
    top = np.quantile(np.abs(outliers(2)[0].numpy()), 0.99, method="inverted_cdf")
    assert isinstance(logit.lo, list) and isinstance(logit.hi, list)
    assert logit.hi[0] == pytest.approx(top, rel=2**-7)
    assert logit.lo[0] == -logit.hi[0]  # on the symmetric grid
    assert logit.at(5).hi == logit.hi  # does not look at the width


def test_a_range_chosen_for_one_grid_is_refused_on_the_other() -> None:
    seen = {"attention_logit/0/map 1": observation(outliers(2), point="attention_logit")}
    for method, looks in (("minmax", False), ("moving-average", False), ("mse", True)):
        (chosen,) = choose_ranges(seen, plan(method)).values()
        assert chosen.symmetric and chosen.at(8, symmetric=True) == chosen.at(8)
        if looks:
            said = "for the symmetric grid, and is asked for the asymmetric one.*--symmetric none"
            with pytest.raises(InputError, match=said):
                chosen.at(8, symmetric=False)
        else:
            assert chosen.at(8, symmetric=False) == chosen.at(8)
    (other,) = choose_ranges(seen, plan("mse", symmetric=())).values()
    with pytest.raises(InputError, match="--symmetric attention_logit"):
        other.at(8, symmetric=True)


def error(x: torch.Tensor, lo: Any, hi: Any, bits: int) -> float:
    scale, zero = affine_params(torch.tensor(lo), torch.tensor(hi), QType(bits=bits, signed=True))
    quantized = fake_quantize(x, scale, zero, QType(bits=bits, signed=True))
    return float((quantized - x).double().square().mean())


BAD = {
    "nonfinite": (torch.tensor([[1.0, float("nan"), 2.0, float("inf")]]), "1 NaN and 1 inf"),
    "mask": (torch.tensor([[1.0, -3.4e38]]), "mask's stand-in"),
    "zero": (torch.zeros(1, 5), "nothing but zeros"),
    "constant": (torch.full((1, 5), 0.25), "the value 0.25 alone"),
}


@pytest.mark.kind(2, "calibrate")
@pytest.mark.parametrize("guard", BAD)
def test_each_guard_names_the_tensor_and_can_be_waived(guard: str) -> None:
    values, said = BAD[guard]
    seen = {"linear_input/good": observation(outliers()), "linear_input/bad": observation(values)}
    with pytest.raises(RangeError, match=rf"linear_input/bad holds .*{said}.*--allow {guard}"):
        choose_ranges(seen, plan())
    found = choose_ranges(seen, plan(allowed=(guard,)))
    assert found["linear_input/bad"].waived == [guard]
    assert found["linear_input/good"].waived == []
    other = next(name for name in BAD if name != guard)
    with pytest.raises(RangeError, match="linear_input/bad"):
        choose_ranges(seen, plan(allowed=(other,)))


@pytest.mark.kind(2, "calibrate")
def test_a_tensor_without_elements_is_unseen() -> None:
    seen = {"linear_input/x": observation(outliers(), None)}
    empty = dataclasses.replace(
        seen["linear_input/x"], classes={n: Bundle.empty(1) for n in ("first", "others")}
    )
    with pytest.raises(RangeError, match=r"linear_input/x holds no element.*--allow unseen"):
        choose_ranges({"linear_input/x": empty}, plan())
    failed = failed_guards(empty.seen(without_first=True))
    assert list(failed) == ["unseen"]


def test_what_first_tokens_hold_does_not_stop_a_plan_without_them() -> None:
    seen = {"linear_input/x": observation(outliers(), torch.tensor([[float("nan"), 3e38]]))}
    with pytest.raises(RangeError, match="nonfinite"):
        choose_ranges(seen, plan(allowed=("mask",)))
    found: Range = choose_ranges(seen, plan(excludes_first=True))["linear_input/x"]
    assert (found.lo, found.hi) == (-45.0, 60.0)


def test_the_head_is_named() -> None:
    values = outliers(3)
    values[1] = 0.0
    values[2] = 4.0
    found = failed_guards(observation(values, point="attention_logit").seen())
    assert found == {
        "zero": "nothing but zeros in head 1",
        "constant": "the value 4 alone in head 2",
    }
    with pytest.raises(RangeError, match=r"5 ranges cannot be trusted.*and 2 tensors more"):
        require_trustworthy({f"t{n}": found for n in range(5)}, ())
