"""Quantizers by name: which there are, which stay in float, which run alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DiffLlamaForCausalLM, LlamaForCausalLM

from quantkit.errors import InputError, ProbeError
from quantkit.probes import Activation, AttentionLogits, AttentionValue, attach
from quantkit.quantization import every_quantizer, fake_quantized, quantizer_names
from quantkit.recipe import Recipe
from quantkit.results import Range

IDS = torch.arange(24).reshape(2, 12) * 31 % 257
LOGIT, INPUT = "attention_logit/1/map 1", "linear_input/model.layers.0.mlp.down_proj"
WEIGHT = "weight/model.layers.1.self_attn.v_proj"


def forward(model: Any) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=IDS, use_cache=False).logits
    return logits


@pytest.fixture
def ranges(tiny_llama: LlamaForCausalLM) -> dict[str, Range]:
    """Narrow ones: what is quantized by them is felt."""
    return {
        name: Range(lo=-0.1, hi=0.1, method="x", granularity="tensor", count=1, point="x")
        for name in every_quantizer(tiny_llama)
        if not name.startswith("weight/")
    }


def test_names_are_those_that_fire(tiny_diffllama: DiffLlamaForCausalLM) -> None:
    """The names come from the modules; the oracle is what a forward visits."""
    visited = [f"weight/{n}" for n, m in tiny_diffllama.named_modules() if n.endswith("_proj")]

    def see_input(visit: Activation) -> None:
        visited.append(f"linear_input/{visit.name}")

    def see_map(call: AttentionLogits) -> None:
        points = ("logit", "query", "key", "probability")
        visited.extend(f"attention_{point}/{call.layer}/map {call.map}" for point in points)
        visited.append(f"cache_key/{call.layer}/map {call.map}")

    def see_value(visit: AttentionValue) -> None:
        part = {1: "", 2: "/part 2"}[visit.part]
        visited.append(f"cache_value/{visit.layer}{part}")

    points = {"linear_input": see_input, "attention_logit": see_map, "attention_value": see_value}
    with attach(tiny_diffllama, points):
        forward(tiny_diffllama)
    assert sorted(every_quantizer(tiny_diffllama)) == sorted(visited)
    assert len(set(visited)) == len(visited) == 2 * (7 + 7 + 5 * 2 + 2)
    assert quantizer_names(tiny_diffllama, Recipe()) == []
    only_logits = quantizer_names(tiny_diffllama, Recipe.parse("logits8"))
    assert only_logits == [f"attention_logit/{layer}/map {n}" for layer in (0, 1) for n in (1, 2)]


@pytest.mark.parametrize("name", [LOGIT, INPUT, WEIGHT])
def test_keeping_all_but_one_is_that_one_alone(
    tiny_llama: LlamaForCausalLM, ranges: dict[str, Range], name: str
) -> None:
    recipe = Recipe.parse("w4a8+logits4:head:static")
    names = quantizer_names(tiny_llama, recipe)
    with torch.no_grad():
        for layer in tiny_llama.model.layers:  # else attention is all but uniform
            layer.self_attn.q_proj.weight.mul_(30)
            layer.self_attn.k_proj.weight.mul_(30)
    plain = forward(tiny_llama)
    with fake_quantized(tiny_llama, recipe, ranges, only=[name]) as quantizers:
        alone = forward(tiny_llama)
    assert quantizers.names == [name]
    assert quantizers.hits == 1
    assert not torch.equal(alone, plain)
    with fake_quantized(tiny_llama, recipe, ranges, keep=set(names) - {name}) as quantizers:
        rest_kept = forward(tiny_llama)
    assert quantizers.names == [name] and quantizers.hits == 1
    assert torch.equal(rest_kept, alone)
    with fake_quantized(tiny_llama, recipe, ranges, keep=[name]) as quantizers:
        without = forward(tiny_llama)
    assert quantizers.hits == len(names) - 1
    with fake_quantized(tiny_llama, recipe, ranges, only=set(names) - {name}):
        assert torch.equal(forward(tiny_llama), without)
    with fake_quantized(tiny_llama, recipe, ranges):
        assert not torch.equal(forward(tiny_llama), without)


def test_keeping_everything_is_the_float_model(tiny_llama: LlamaForCausalLM) -> None:
    plain = forward(tiny_llama)
    keep = every_quantizer(tiny_llama)
    with fake_quantized(tiny_llama, Recipe.parse("w4a8+logits4:static"), keep=keep) as quantizers:
        assert torch.equal(forward(tiny_llama), plain)
    assert quantizers.names == [] and quantizers.hits == 0


def test_one_map_of_a_differential_layer(tiny_diffllama: DiffLlamaForCausalLM) -> None:
    changed: dict[str, Tensor] = {}
    with torch.no_grad():
        for layer in tiny_diffllama.model.layers:
            layer.self_attn.q_proj.weight.mul_(30)
            layer.self_attn.k_proj.weight.mul_(30)
    recipe = Recipe.parse("logits2")
    for name in quantizer_names(tiny_diffllama, recipe):
        with fake_quantized(tiny_diffllama, recipe, only=[name]) as quantizers:
            changed[name] = forward(tiny_diffllama)
        assert quantizers.hits == 1
    assert len({float(value.double().sum()) for value in changed.values()}) == 4


def test_what_is_kept_needs_no_range(
    tiny_llama: LlamaForCausalLM, ranges: dict[str, Range]
) -> None:
    recipe = Recipe.parse("w8a8+logits8:head:static")
    keep = [INPUT, LOGIT]
    fewer = {name: found for name, found in ranges.items() if name not in keep}
    with pytest.raises(InputError, match="no range for"), fake_quantized(tiny_llama, recipe, fewer):
        forward(tiny_llama)
    with fake_quantized(tiny_llama, recipe, fewer, keep=keep):
        forward(tiny_llama)


def test_what_is_kept_need_not_run_and_all_else_must(tiny_llama: LlamaForCausalLM) -> None:
    model: Any = tiny_llama
    model.model.layers[1].self_attn.never = torch.nn.Linear(32, 32)
    never = "linear_input/model.layers.1.self_attn.never"
    recipe = Recipe.parse("a8")
    ranges = {
        name: Range(lo=-1.0, hi=1.0, method="x", granularity="tensor", count=1, point="x")
        for name in quantizer_names(model, recipe)
    }
    with fake_quantized(model, recipe, ranges, keep=[never]):
        forward(model)
    with (
        pytest.raises(ProbeError, match=r"layers\.1\.self_attn\.never"),
        fake_quantized(model, recipe, ranges),
    ):
        forward(model)


@pytest.mark.parametrize("argument", ["keep", "only"])
def test_an_unknown_name_suggests(tiny_llama: LlamaForCausalLM, argument: str) -> None:
    wrong: Any = {argument: ["linear_input/model.layers.0.mlp.down_porj"]}
    near = r"Did you mean 'linear_input/model\.layers\.0\.mlp\.down_proj'"
    with (
        pytest.raises(InputError, match=near) as caught,
        fake_quantized(tiny_llama, Recipe.parse("a8"), **wrong),
    ):
        raise AssertionError("not reached")
    assert len(str(caught.value)) < 500


def test_what_the_recipe_does_not_quantize_can_be_kept_but_not_run_alone(
    tiny_llama: LlamaForCausalLM,
) -> None:
    recipe = Recipe.parse("w8")
    with fake_quantized(tiny_llama, recipe, keep=[LOGIT]) as quantizers:
        forward(tiny_llama)
    assert quantizers.hits == 14
    with (
        pytest.raises(InputError, match="to quantize alone in w8"),
        fake_quantized(tiny_llama, recipe, only=[LOGIT]),
    ):
        raise AssertionError("not reached")


def test_kept_weights_are_untouched_inside(tiny_llama: LlamaForCausalLM) -> None:
    module: Any = tiny_llama.get_submodule(WEIGHT.removeprefix("weight/"))
    before = module.weight.data_ptr()
    with fake_quantized(tiny_llama, Recipe.parse("w4"), keep=[WEIGHT]) as quantizers:
        assert module.weight.data_ptr() == before
    assert len(quantizers.fired) == 13 and WEIGHT not in quantizers.fired
