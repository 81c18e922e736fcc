"""Weights on calibrated ranges: the simulation against numpy, and every weight as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quantkit.calibration import WeightPlan, WeightRanges, choose_weight_ranges
from quantkit.errors import InputError
from quantkit.numerics.granularity import weight_granularity
from quantkit.numerics.methods import parse_method
from quantkit.probes import linear_modules
from quantkit.quantization import fake_quantized
from quantkit.recipe import Recipe, WeightQuant


def ranges_of(model: Any, words: str, bits: int, method: str = "mse") -> WeightRanges:
    plan = WeightPlan(method=parse_method(method), bits=bits, granularity=weight_granularity(words))
    return choose_weight_ranges(model, plan)[0]


def oracle(
    weight: NDArray[Any], absmax: NDArray[Any], bits: int, group: int | None
) -> NDArray[Any]:
    """Symmetric and narrow, a column at a time."""
    steps = np.float32(2 ** (bits - 1) - 1)
    found = np.empty_like(weight)
    for column in range(weight.shape[1]):
        top = absmax[:, 0 if group is None else column // group]
        scale = np.where(top == 0, np.float32(1), top / steps)
        found[:, column] = np.clip(np.rint(weight[:, column] / scale), -steps, steps) * scale
    return found


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("words", "group"), [("channel", None), ("group:16", 16), ("group:7", 7)])
def test_weights_lie_on_their_ranges(
    words: str, group: int | None, bits: int, tiny_llama: Any
) -> None:
    ranges = ranges_of(tiny_llama, words, bits)
    before = {name: m.weight.detach().clone() for name, m in linear_modules(tiny_llama)}
    places = {name: m.weight.data_ptr() for name, m in linear_modules(tiny_llama)}
    with fake_quantized(
        tiny_llama, Recipe(weights=WeightQuant(bits=bits)), weight_ranges=ranges
    ) as quantizers:
        assert quantizers.hits == 2 * 7
        for name, module in linear_modules(tiny_llama):
            expected = oracle(before[name].numpy(), ranges.absmax[name].numpy(), bits, group)
            assert np.array_equal(module.weight.detach().numpy(), expected), name
    for name, module in linear_modules(tiny_llama):
        assert module.weight.data_ptr() == places[name]
        assert torch.equal(module.weight, before[name])


def test_minmax_by_channel_is_what_recipes_do_anyway(tiny_llama: Any) -> None:
    ranges = ranges_of(tiny_llama, "channel", 8, "minmax")
    for bits in (8, 4):  # min-max looks at no width
        with fake_quantized(tiny_llama, Recipe(weights=WeightQuant(bits=bits))):
            plain = {name: m.weight.detach().clone() for name, m in linear_modules(tiny_llama)}
        with fake_quantized(
            tiny_llama, Recipe(weights=WeightQuant(bits=bits)), weight_ranges=ranges
        ):
            for name, module in linear_modules(tiny_llama):
                assert torch.equal(module.weight, plain[name]), name


def test_smaller_groups_lose_less(tiny_llama: Any) -> None:
    errors = []
    with torch.no_grad():
        tiny_llama.model.layers[0].mlp.up_proj.weight.pow_(3)  # heavy tails
    exact = tiny_llama.model.layers[0].mlp.up_proj.weight.detach().clone()
    for words in ("channel", "group:16", "group:8", "group:4"):
        ranges = ranges_of(tiny_llama, words, 4)
        with fake_quantized(tiny_llama, Recipe(weights=WeightQuant(bits=4)), weight_ranges=ranges):
            now = tiny_llama.model.layers[0].mlp.up_proj.weight.detach()
            errors.append(float((now - exact).double().square().sum()))
    assert errors == sorted(errors, reverse=True)


@pytest.mark.kind(5, "sweep")
def test_a_weight_that_two_layers_share_is_quantized_once(tiny_llama: Any) -> None:
    mlp = tiny_llama.model.layers[0].mlp
    mlp.gate_proj.weight = mlp.up_proj.weight
    before = mlp.up_proj.weight.detach().clone()
    name = "model.layers.0.mlp.up_proj"
    for words, group in (("channel", None), ("group:8", 8)):
        ranges = ranges_of(tiny_llama, words, 3)
        with fake_quantized(tiny_llama, Recipe(weights=WeightQuant(bits=3)), weight_ranges=ranges):
            assert mlp.gate_proj.weight is mlp.up_proj.weight
            expected = oracle(before.numpy(), ranges.absmax[name].numpy(), 3, group)
            assert np.array_equal(mlp.up_proj.weight.detach().numpy(), expected)
        assert torch.equal(mlp.up_proj.weight, before)


def test_what_is_wrong_leaves_the_weights_alone(tiny_llama: Any) -> None:
    ranges = ranges_of(tiny_llama, "channel", 4)
    before = {name: m.weight.detach().clone() for name, m in linear_modules(tiny_llama)}
    last = list(ranges.absmax)[-1]
    lacking = WeightRanges(
        plan=ranges.plan, absmax={n: x for n, x in ranges.absmax.items() if n != last}
    )
    for found, bits, said in (
        (ranges, 8, "by mse for 4 bits, and are asked for 8"),
        (lacking, 4, f"no range for the weight of '{last}'"),
    ):
        recipe = Recipe(weights=WeightQuant(bits=bits))
        with (
            pytest.raises(InputError, match=said),
            fake_quantized(tiny_llama, recipe, weight_ranges=found),
        ):
            raise AssertionError("not reached")
        assert all(torch.equal(m.weight, before[name]) for name, m in linear_modules(tiny_llama))
    with fake_quantized(
        tiny_llama,
        Recipe(weights=WeightQuant(bits=4)),
        keep=[f"weight/{last}"],
        weight_ranges=lacking,
    ):
        pass  # nothing is asked of what stays in float
