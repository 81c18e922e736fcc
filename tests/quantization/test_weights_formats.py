"""Weights inside `quantized_weights`: integer grids against loops in numpy, and all as it was."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from quantkit.calib_sets import text_slice
from quantkit.calibration import WeightPlan, WeightRanges, choose_weight_ranges
from quantkit.errors import InputError
from quantkit.models import LoadedModel, projection_modules
from quantkit.numerics.affine import RangeError
from quantkit.numerics.granularity import weight_granularity
from quantkit.numerics.methods import parse_method
from quantkit.probes import linear_modules
from quantkit.quantization.fired import Counter
from tests.quantization.weights_inside import forward, inside

F32 = np.float32
UP = "model.layers.0.mlp.up_proj"
RECIPES = ["w4", "w4:group8", "nf4", "fp4", "llm-int8", "llm-int8:0"]


def ranges_of(model: Any, words: str, bits: int, method: str = "mse") -> WeightRanges:
    plan = WeightPlan(method=parse_method(method), bits=bits, granularity=weight_granularity(words))
    return choose_weight_ranges(model, plan)[0]


def tiny_gpt2() -> Any:
    torch.manual_seed(2)
    config = GPT2Config(vocab_size=257, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    return GPT2LMHeadModel(config).eval()


def rounded(weight: NDArray[Any], bits: int, group: int | None) -> NDArray[Any]:
    """Symmetric and narrow, a group of one row at a time."""
    steps = 2 ** (bits - 1) - 1
    out = np.empty_like(weight)
    width = weight.shape[1] if group is None else group
    for row in range(len(weight)):
        for start in range(0, weight.shape[1], width):
            own = weight[row, start : start + width]
            top = np.abs(own).max()
            scale = F32(top / F32(steps)) if top > 0 else F32(1)
            out[row, start : start + width] = np.clip(np.rint(own / scale), -steps, steps) * scale
    return out


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("group", [None, 16, 7, 1000], ids=["channel", "16", "short-last", "wider"])
def test_weights_equal_loops_in_numpy(group: int | None, bits: int, tiny_llama: Any) -> None:
    with torch.no_grad():
        dict(tiny_llama.named_modules())[UP].weight[2] = 0.0
    before = {name: m.weight.detach().clone() for name, m in linear_modules(tiny_llama)}
    fired = Counter()
    name = f"w{bits}" if group is None else f"w{bits}:group{group}"
    with inside(tiny_llama, name, fired=fired):
        for module_name, module in linear_modules(tiny_llama):
            expected = rounded(before[module_name].numpy(), bits, group)
            assert np.array_equal(module.weight.detach().numpy(), expected), module_name
    assert {key: (seen.hits, seen.elements) for key, seen in fired.fired.items()} == {
        f"weight/{name}": (1, weight.numel()) for name, weight in before.items()
    }


def test_ranges_take_the_place_of_absmax(tiny_llama: Any) -> None:
    with inside(tiny_llama, "w3:group16", ranges=ranges_of(tiny_llama, "group:16", 3)):
        chosen = dict(tiny_llama.named_modules())[UP].weight.detach().clone()
    with inside(tiny_llama, "w3", ranges=ranges_of(tiny_llama, "group:16", 3)):
        assert torch.equal(dict(tiny_llama.named_modules())[UP].weight, chosen)
    with inside(tiny_llama, "w3:group16"):
        plain = dict(tiny_llama.named_modules())[UP].weight.detach().clone()
    exact = dict(tiny_llama.named_modules())[UP].weight.detach()
    assert (chosen - exact).square().sum() < (plain - exact).square().sum()


@pytest.mark.parametrize(
    ("recipe", "words", "said"),
    [
        ("w4:group16", "channel", "groups of 16, and their ranges were chosen for each output"),
        ("w4:group16", "group:8", "groups of 16.*each group of 8: leave :group16 out"),
        ("w5:group8", "group:8", "by mse for 4 bits, and are asked for 5"),
    ],
    ids=["channel", "another-group", "another-width"],
)
def test_ranges_that_do_not_fit_the_recipe(
    recipe: str, words: str, said: str, tiny_llama: Any
) -> None:
    ranges = ranges_of(tiny_llama, words, 4)
    before = parameters(tiny_llama)
    with pytest.raises(InputError, match=said), inside(tiny_llama, recipe, ranges=ranges):
        raise AssertionError("not reached")
    assert_untouched(tiny_llama, before)


@pytest.mark.parametrize("recipe", ["nf4", "llm-int8"])
def test_formats_do_not_look_at_ranges(recipe: str, tiny_llama: Any) -> None:
    with inside(tiny_llama, recipe):
        plain = forward(tiny_llama)
    with inside(tiny_llama, recipe, ranges=ranges_of(tiny_llama, "group:8", 4)):
        assert torch.equal(forward(tiny_llama), plain)


def parameters(model: nn.Module) -> dict[str, tuple[nn.Parameter, int, Tensor]]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: (p, p.data_ptr(), p.detach().clone()) for name, p in named}


def assert_untouched(model: nn.Module, before: dict[str, Any]) -> None:
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(before)
    for name, (parameter, place, values) in before.items():
        assert after[name] is parameter, name
        assert parameter.data_ptr() == place, name
        assert torch.equal(parameter, values), name
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.kind(7, "sweep")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_is_as_it_was(recipe: str, tiny_llama: Any) -> None:
    before, exact = parameters(tiny_llama), forward(tiny_llama)
    state = torch.random.get_rng_state()
    with inside(tiny_llama, recipe):
        assert not torch.equal(forward(tiny_llama), exact)
    assert_untouched(tiny_llama, before)
    with pytest.raises(KeyError, match="stop"), inside(tiny_llama, recipe):
        forward(tiny_llama)
        raise KeyError("stop")
    assert_untouched(tiny_llama, before)
    assert torch.equal(forward(tiny_llama), exact)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.kind(2, "sweep")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_a_weight_that_is_not_finite_is_named(bad: float, recipe: str, tiny_llama: Any) -> None:
    last = "model.layers.1.mlp.down_proj"
    with torch.no_grad():
        dict(tiny_llama.named_modules())[last].weight[1, 1] = bad
    before = {n: (p, p.data_ptr()) for n, p in tiny_llama.named_parameters()}
    with pytest.raises(RangeError, match=rf"{last}\.weight"), inside(tiny_llama, recipe):
        raise AssertionError("not reached")
    assert before == {n: (p, p.data_ptr()) for n, p in tiny_llama.named_parameters()}


@pytest.mark.kind(5, "sweep")
@pytest.mark.parametrize("recipe", ["w3", "w3:group8", "nf4"])
def test_what_shares_a_weight(recipe: str, tiny_llama: Any) -> None:
    mlp = tiny_llama.model.layers[0].mlp
    mlp.gate_proj.weight = mlp.up_proj.weight
    with inside(tiny_llama, recipe, on=[f"weight/{UP}"]):
        alone = mlp.up_proj.weight.detach().clone()
    before = parameters(tiny_llama)
    exact = mlp.up_proj.weight.detach().clone()
    assert not torch.equal(alone, exact)
    with inside(tiny_llama, recipe):
        assert mlp.gate_proj.weight is mlp.up_proj.weight
        assert torch.equal(mlp.up_proj.weight, alone)
    assert_untouched(tiny_llama, before)
    with inside(tiny_llama, recipe, on=[f"weight/{UP}"]):
        assert torch.equal(mlp.gate_proj.weight, exact)  # it stays in float
        assert torch.equal(mlp.up_proj.weight, alone)
    assert_untouched(tiny_llama, before)


@pytest.mark.kind(5, "sweep")
def test_an_embedding_tied_to_a_linear_layer_keeps_its_numbers() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.out.weight = self.embed.weight

    model = Tied()
    exact = model.embed.weight.detach().clone()
    with inside(model, "w2"):
        assert torch.equal(model.embed.weight, exact)
        assert not torch.equal(model.out.weight, exact)
    assert model.out.weight is model.embed.weight


def test_heads_and_unnamed_layers_stay_in_float(tiny_llama: Any) -> None:
    head = tiny_llama.lm_head.weight
    for recipe in ("w4", "nf4"):
        fired = Counter()
        on = [f"weight/{UP}", "linear_input/lm_head", "attention_logit/0/map 1"]
        before = parameters(tiny_llama)
        with inside(tiny_llama, recipe, on=on, fired=fired):
            now = dict(tiny_llama.named_parameters())
            changed = {name for name, (p, _, _) in before.items() if now[name] is not p}
            assert changed == {f"{UP}.weight"}
            assert tiny_llama.lm_head.weight is head
        assert list(fired.fired) == [f"weight/{UP}"]
    with (
        pytest.raises(InputError, match="'lm_head'"),
        inside(tiny_llama, "w4", on=["weight/lm_head"]),
    ):
        pass


def test_weights_that_are_no_float_matrix_are_refused(tiny_llama: Any) -> None:
    up = dict(tiny_llama.named_modules())[UP]
    for weight, said in (
        (nn.Parameter(torch.ones(4, 2, dtype=torch.uint8), requires_grad=False), "torch.uint8"),
        (nn.Parameter(torch.ones(48, 32, device="meta")), "offloaded"),
    ):
        up.weight = weight
        for recipe in RECIPES:
            with pytest.raises(InputError, match=said), inside(tiny_llama, recipe):
                pass
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    with pytest.raises(InputError, match=r"got none.*parametrizations"), inside(model, "w4"):
        pass


@pytest.mark.kind(5, "sweep")
@pytest.mark.parametrize("recipe", ["w4", "w4:group6"])
def test_the_transposed_weight_of_conv1d_is_rounded_by_output(recipe: str) -> None:
    model = tiny_gpt2()
    before = parameters(model)
    convs = [(n, m) for n, m in projection_modules(model) if isinstance(m, Conv1D)]
    assert len(convs) == 8
    group = 6 if "group" in recipe else None
    with inside(model, recipe):
        for name, module in convs:
            expected = rounded(before[f"{name}.weight"][2].numpy().T.copy(), 4, group).T
            assert np.array_equal(module.weight.detach().numpy(), expected), name
    assert_untouched(model, before)


@pytest.mark.kind(5, "sweep")
@pytest.mark.parametrize("recipe", ["nf4", "fp4", "llm-int8", "llm-int8:0"])
def test_formats_see_conv1d_as_the_linear_layer_it_is(recipe: str) -> None:
    conv = Conv1D(48, 64)
    with torch.no_grad():
        conv.weight.normal_()
        conv.bias.normal_()
    linear = nn.Linear(64, 48)
    linear.weight, linear.bias = nn.Parameter(conv.weight.t().contiguous()), conv.bias
    x = torch.randn(2, 5, 64) * 3
    found = []
    for layer in (conv, linear):
        model = nn.Sequential(layer)
        with torch.inference_mode(), inside(model, recipe):
            found.append(model(x))
    assert torch.allclose(found[0], found[1], atol=1e-5)
    exact = x @ linear.weight.t() + linear.bias
    assert 1e-3 < (found[0] - exact).norm() / exact.norm() < 0.2


def test_what_each_format_costs_a_real_model(smollm2: LoadedModel) -> None:
    """Smaller groups and NF4's quantiles lose less, in the weights and in perplexity."""
    model: Any = smollm2.model
    text = text_slice("pydoc", smollm2.tokenizer, seq_len=128, samples=2)
    down = dict(linear_modules(model))["model.layers.14.mlp.down_proj"]
    exact = down.weight.detach().clone()
    errors, values = {}, {}
    for recipe in ("w4", "w4:group32", "nf4", "llm-int8", "w8"):
        with inside(model, recipe):
            errors[recipe] = float((down.weight.detach() - exact).norm() / exact.norm())
            values[recipe] = perplexity(model, text.ids)
    values["none"] = perplexity(model, text.ids)
    assert errors["w8"] < errors["nf4"] < errors["w4:group32"] < errors["w4"] < 0.25
    assert max(values["nf4"], values["w4:group32"]) < 0.9 * values["w4"]
    for recipe in ("w8", "llm-int8"):
        assert abs(values[recipe] / values["none"] - 1) < 0.05, recipe
    assert torch.equal(down.weight, exact)


def perplexity(model: Any, ids: tuple[Tensor, ...]) -> float:
    """Exp of the mean negative log-likelihood, in float64, one block at a time."""
    nll, tokens = 0.0, 0
    for block in ids:
        scores = forward(model, block[None])[0, :-1].double()
        nll += float(torch.nn.functional.cross_entropy(scores, block[1:], reduction="sum"))
        tokens += len(block) - 1
    return math.exp(nll / tokens)
