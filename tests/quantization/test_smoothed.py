"""Smoothed models: the same function, other weights, and everything as it was afterwards."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from quantkit.errors import InputError
from quantkit.models import LoadedModel
from quantkit.models.smoothing_groups import smoothing_groups
from quantkit.probes import Activation, attach
from quantkit.quantization import fake_quantized, smoothed, smoothing_digest
from quantkit.recipe import Recipe
from quantkit.results import Range, Smoothing

IDS = torch.arange(24).reshape(2, 12) * 31 % 257


def group(producer: str, linears: list[str], scales: list[float]) -> Smoothing:
    return Smoothing(
        producer=producer,
        linears=linears,
        alpha=0.5,
        scales=scales,
        expected_error=0.0,
        expected_error_without=0.0,
    )


def forward(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def look(model: Any, ids: Tensor) -> tuple[dict[str, Range], dict[str, Tensor], Tensor]:
    """Returns each linear input's range and per-channel absmax, and the output."""
    ranges: dict[str, Range] = {}
    absmax: dict[str, Tensor] = {}

    def see(visit: Activation) -> None:
        x = visit.tensor
        absmax[visit.name] = x.abs().amax((0, 1))
        ranges[f"linear_input/{visit.name}"] = Range(
            lo=float(x.min()),
            hi=float(x.max()),
            method="minmax",
            granularity="tensor",
            count=x.numel(),
            point="linear_input",
        )

    with torch.inference_mode(), attach(model, {"linear_input": see}):
        output = forward(model, ids)
    return ranges, absmax, output


def half_way(model: Any, absmax: dict[str, Tensor]) -> dict[str, Smoothing]:
    """SmoothQuant's equation 4 at alpha 0.5, in numpy."""
    found = {}
    for each in smoothing_groups(model):
        weights = [model.get_submodule(name).weight.detach().numpy() for name in each.linears]
        columns = np.abs(np.concatenate(weights)).max(0)
        scales = np.sqrt(absmax[each.linears[0]].numpy() / columns).clip(1e-5)
        found[each.linears[0]] = group(each.producer, list(each.linears), scales.tolist())
    return found


def test_by_hand(tiny_llama: LlamaForCausalLM) -> None:
    """The two groups of an MLP meet in up_proj: its columns grow, its rows shrink."""
    model: Any = tiny_llama
    prefix = "model.layers.0"
    mlp, norm = model.model.layers[0].mlp, model.model.layers[0].post_attention_layernorm
    inside = {"norm": norm.weight, "up": mlp.up_proj.weight, "down": mlp.down_proj.weight}
    before = {name: parameter.data.clone() for name, parameter in inside.items()}
    first, second = torch.arange(1.0, 33.0), torch.linspace(0.5, 3, 48)
    smoothing = {
        "a": group(
            f"{prefix}.post_attention_layernorm",
            [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"],
            first.tolist(),
        ),
        "b": group(f"{prefix}.mlp.up_proj", [f"{prefix}.mlp.down_proj"], second.tolist()),
    }
    with smoothed(model, smoothing, check_inputs={"input_ids": IDS}):
        torch.testing.assert_close(norm.weight, before["norm"] / first)
        torch.testing.assert_close(mlp.up_proj.weight, before["up"] * first / second[:, None])
        torch.testing.assert_close(mlp.down_proj.weight, before["down"] * second)
    for name, parameter in inside.items():
        assert torch.equal(parameter, before[name])


@pytest.mark.kind(7, "sweep")
def test_everything_comes_back_after_an_exception(tiny_llama: LlamaForCausalLM) -> None:
    model: Any = tiny_llama
    _, absmax, plain = look(model, IDS)
    smoothing = half_way(model, absmax)
    assert len(smoothing) == 6
    before = {name: (t.data_ptr(), t.clone()) for name, t in model.state_dict().items()}
    with (
        pytest.raises(RuntimeError, match="on purpose"),
        fake_quantized(model, Recipe.parse("w8"), smoothing=smoothing),
    ):
        assert not torch.equal(forward(model), plain)
        raise RuntimeError("on purpose")
    for name, tensor in model.state_dict().items():
        pointer, values = before[name]
        assert tensor.data_ptr() == pointer and torch.equal(tensor, values), name
    assert torch.equal(forward(model), plain)


@pytest.mark.kind(7, "sweep")
@pytest.mark.parametrize("inference", [True, False], ids=["inference mode", "plain"])
def test_in_any_grad_mode(tiny_llama: LlamaForCausalLM, inference: bool) -> None:
    _, absmax, plain = look(tiny_llama, IDS)
    smoothing = half_way(tiny_llama, absmax)
    with torch.inference_mode(inference), smoothed(tiny_llama, smoothing):
        torch.testing.assert_close(forward(tiny_llama), plain, rtol=1e-4, atol=1e-5)
    assert tiny_llama.model.norm.weight.requires_grad


def test_weights_are_quantized_after_smoothing(tiny_llama: LlamaForCausalLM) -> None:
    name = "model.layers.1.mlp.down_proj"
    module: Any = tiny_llama.get_submodule(name)
    scales = torch.linspace(0.5, 3, 48)
    smoothing = {name: group("model.layers.1.mlp.up_proj", [name], scales.tolist())}
    moved = (module.weight.detach() * scales).numpy()
    steps = np.float32(7)
    scale = (np.abs(moved).max(1, keepdims=True) / steps).astype(np.float32)
    expected = np.rint(moved / scale).clip(-7, 7).astype(np.float32) * scale
    with fake_quantized(tiny_llama, Recipe.parse("w4"), smoothing=smoothing):
        np.testing.assert_array_equal(module.weight.detach().numpy(), expected)


def test_the_check_finds_a_group_that_is_none(tiny_llama: LlamaForCausalLM) -> None:
    norm = "model.layers.0.input_layernorm"
    smoothing = {"a": group(norm, ["model.layers.0.self_attn.q_proj"], [3.0] * 32)}
    with smoothed(tiny_llama, smoothing):
        pass  # without inputs nothing can be said
    with (
        pytest.raises(InputError, match=rf"moved the float model's output .*{norm}"),
        smoothed(tiny_llama, smoothing, check_inputs={"input_ids": IDS}),
    ):
        raise AssertionError("not reached")
    assert torch.equal(tiny_llama.get_submodule(norm).weight, torch.ones(32))


def test_no_smoothing_is_nothing(tiny_llama: LlamaForCausalLM) -> None:
    plain = forward(tiny_llama)
    with smoothed(tiny_llama, {}, check_inputs={"input_ids": IDS}):
        assert torch.equal(forward(tiny_llama), plain)
    assert smoothing_digest({}) == ""


def test_the_digest_is_of_what_is_moved() -> None:
    one = {"a": group("p", ["a"], [1.0, 2.0])}
    assert smoothing_digest(one) == smoothing_digest({"a": group("p", ["a"], [1.0, 2.0])})
    assert smoothing_digest(one) != smoothing_digest({"a": group("p", ["a"], [1.0, 2.5])})


def test_smollm2_is_the_same_in_float_and_better_in_w8a8(smollm2: LoadedModel) -> None:
    model = smollm2.model
    text = smollm2.tokenizer(topics["class"], return_tensors="pt")
    ids = text.input_ids[:, :64]
    ranges, absmax, plain = look(model, ids)
    smoothing = half_way(model, absmax)
    assert len(smoothing) == 3 * 30
    with smoothed(model, smoothing):
        moved, _, after = look(model, ids)
    assert float((after - plain).norm() / plain.norm()) < 1e-3
    recipe = Recipe.parse("w8a8")
    with fake_quantized(model, recipe, ranges):
        without = forward(model, ids)
    with fake_quantized(model, recipe, moved, smoothing=smoothing):
        within = forward(model, ids)
    errors = [float((found - plain).norm() / plain.norm()) for found in (without, within)]
    assert errors[1] < 0.6 * errors[0], errors
    assert torch.equal(forward(model, ids), plain)
