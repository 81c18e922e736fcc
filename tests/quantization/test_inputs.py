"""Inputs of linear layers on their grids, against loops in numpy and ONNX's reference evaluator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor
from transformers import LlamaForCausalLM

from quantkit.calib_sets import text_slice
from quantkit.errors import InputError, ProbeError
from quantkit.models import LoadedModel
from quantkit.probes import Activation, attach, linear_modules
from quantkit.quantization.fired import Counter
from quantkit.quantization.inputs import input_quantizer, static_input_grid
from quantkit.quantization.weights import quantized_weights
from quantkit.recipe import ActivationQuant, Recipe
from quantkit.results import Interval, Range

F32 = np.float32
DYNAMIC = [
    f"a{bits}:{options}"
    for bits in (2, 4, 8, 16)
    for options in ("token", "dynamic", "token:symmetric", "dynamic:symmetric")
]


def quant_of(name: str) -> ActivationQuant:
    quant = Recipe.parse(name).activations
    assert quant is not None
    return quant


def visit_of(tensor: Tensor, real: Tensor | None = None, name: str = "m") -> Activation:
    if real is None:
        real = torch.ones(tensor.shape[:2], dtype=torch.bool)
    return Activation(point="linear_input", layer=0, name=name, tensor=tensor, real=real)


def on_grid(x: NDArray[Any], lo: Any, hi: Any, bits: int, symmetric: bool) -> NDArray[Any]:
    """An element at a time, in float32; `lo` and `hi` are the extremes that the grid reaches."""
    lo, hi = min(F32(lo), F32(0)), max(F32(hi), F32(0))
    if symmetric:
        top = max(-lo, hi)
        qmin, qmax = 1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1
        scale, zero = F32(top / F32(qmax)), 0
    else:
        qmin, qmax = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        scale = F32(F32(hi - lo) / F32(qmax - qmin))
        zero = 0 if scale == 0 else round(float(min(max(F32(qmin) - F32(lo / scale), qmin), qmax)))
    if scale == 0:
        scale = F32(1)
    out = np.empty(x.shape, F32)
    for place in np.ndindex(x.shape):
        q = min(max(round(float(F32(x[place] / scale))) + zero, qmin), qmax)
        out[place] = F32(q - zero) * scale
    return out


def oracle(x: NDArray[Any], real: NDArray[Any], quant: ActivationQuant) -> NDArray[Any]:
    """Of real tokens; padding is 0."""
    out = np.zeros_like(x)
    for b in range(len(x)):
        for t in np.flatnonzero(real[b]):
            seen = x[b, t] if quant.granularity == "token" else x[b, real[b]]
            out[b, t] = on_grid(x[b, t], seen.min(), seen.max(), quant.bits, quant.symmetric)
    return out


def example(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three sequences of five tokens; padding on either side, huge or not finite."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 5, 7, generator=generator) * torch.tensor([0.3, 20.0, 1.0])[:, None, None]
    x[2] = x[2].abs()  # of one sign
    x[1, 2] = 0.0  # a token of zeros
    x[0, 1, 3] = 40.0
    real = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.bool)
    x[1, 0], x[1, 1], x[2, 4] = 1e6, torch.nan, -torch.inf
    return x, real


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_grids_equal_loops_in_numpy(name: str) -> None:
    x, real = example()
    before, fired = x.clone(), Counter()
    found = input_quantizer(quant_of(name), {}, fired)(visit_of(x, real))
    expected = oracle(x.numpy(), real.numpy(), quant_of(name))
    assert np.array_equal(found[real].numpy(), expected[real.numpy()])
    assert torch.equal(x.nan_to_num(), before.nan_to_num())
    counted = fired.fired["linear_input/m"]
    assert (counted.hits, counted.elements) == (1, (5 + 3 + 3) * 7)


@pytest.mark.kind(4, "sweep")
@pytest.mark.parametrize("name", DYNAMIC)
def test_neither_batch_nor_padding_moves_a_grid(name: str) -> None:
    x, real = example()
    quantizer = input_quantizer(quant_of(name), {}, Counter())
    together = quantizer(visit_of(x, real))
    for row in range(len(x)):
        alone = quantizer(visit_of(x[row, real[row]][None]))
        assert torch.equal(together[row, real[row]], alone[0])


def test_a_token_has_its_own_range_and_a_sequence_one() -> None:
    x = torch.tensor([[[0.3, 0.1], [100.0, -50.0]]])
    by_token, by_sequence = (
        input_quantizer(quant_of(name), {}, Counter())(visit_of(x))
        for name in ("a4:token", "a4:dynamic")
    )
    assert by_sequence[0, 0].tolist() == [0.0, 0.0]  # its step is 10
    assert (by_token[0, 0] - x[0, 0]).abs().max() <= 0.3 / 15 / 2
    assert torch.equal(by_token[0, 1], by_sequence[0, 1])


@pytest.mark.kind(2, "sweep")
def test_zeros_stay_exactly_zero() -> None:
    for name in DYNAMIC:
        found = input_quantizer(quant_of(name), {}, Counter())(visit_of(torch.zeros(2, 3, 4)))
        assert torch.equal(found, torch.zeros(2, 3, 4)), name


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["a8:dynamic", "a8:token"])
def test_the_eight_bit_grid_is_that_of_onnx(name: str, seed: int) -> None:
    """DynamicQuantizeLinear is unsigned; a grid that is shifted by 128 has the same values."""
    graph = helper.make_graph(
        [
            helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
            helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
        ],
        "dynamic",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    session = ReferenceEvaluator(
        helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
    )
    x = torch.randn(2, 4, 33, generator=torch.Generator().manual_seed(seed)) * (1 + 3 * seed)
    found = input_quantizer(quant_of(name), {}, Counter())(visit_of(x))
    sets = x.reshape(8, 33) if "token" in name else x
    for own, quantized in zip(sets, found.reshape(sets.shape), strict=True):
        (expected,) = session.run(None, {"x": own.numpy()})
        assert np.array_equal(quantized.numpy(), expected)


def range_of(lo: Any, hi: Any, **more: Any) -> Range:
    return Range(
        lo=lo, hi=hi, method="minmax", granularity="tensor", count=9, point="linear_input", **more
    )


@pytest.mark.parametrize("name", ["a8", "a4", "a8:symmetric", "a3:symmetric", "a16:symmetric"])
@pytest.mark.parametrize(("lo", "hi"), [(-1.5, 4.0), (-6.0, -2.0), (1.0, 3.0), (0.0, 0.0)], ids=str)
def test_static_grids_equal_loops_in_numpy(lo: float, hi: float, name: str) -> None:
    quant, fired = quant_of(name), Counter()
    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(3)) * 4
    found = input_quantizer(quant, {"linear_input/m": range_of(lo, hi)}, fired)(visit_of(x))
    assert np.array_equal(found.numpy(), on_grid(x.numpy(), lo, hi, quant.bits, quant.symmetric))
    assert fired.fired["linear_input/m"].elements == 30


@pytest.mark.kind(2, "sweep")
@pytest.mark.parametrize("grid", ["", ":symmetric"], ids=["asymmetric", "symmetric"])
def test_a_static_range_that_cannot_be_used_is_named(grid: str) -> None:
    quant, x = quant_of(f"a8{grid}"), visit_of(torch.ones(1, 2, 3))
    for ranges, said in (
        ({}, "no range for 'linear_input/m'.*calibrate"),
        ({"linear_input/m": range_of([0.0, 0.0], [1.0, 1.0])}, "has 2 groups"),
        ({"linear_input/m": range_of(0.0, math.inf)}, "finite range for 'linear_input/m'"),
        ({"linear_input/m": range_of(2.0, 1.0)}, "lo <= hi"),
    ):
        fired = Counter()
        with pytest.raises(InputError, match=said):
            input_quantizer(quant, ranges, fired)(x)
        assert not fired.fired


def test_a_range_for_another_grid_is_refused() -> None:
    found = Range(
        lo=-1.0,
        hi=2.0,
        method="mse",
        granularity="tensor",
        count=9,
        point="linear_input",
        bits=8,
        symmetric=False,
        other_bits={"4": Interval(lo=-0.5, hi=1.0)},
    )
    ranges = {"linear_input/m": found}
    with pytest.raises(InputError, match="for the asymmetric grid"):
        static_input_grid(ranges, "m", quant_of("a8:symmetric"))
    with pytest.raises(InputError, match="for 8,4 bits, and is asked for 6"):
        static_input_grid(ranges, "m", quant_of("a6"))
    # 1.5 over 15 steps: the interval that was chosen for this width
    assert float(static_input_grid(ranges, "m", quant_of("a4")).scale) == F32(0.1)


@pytest.mark.kind(2, "sweep")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("name", ["a8", "a8:symmetric", "a8:dynamic", "a8:token"])
def test_what_is_not_finite_fails_by_name(name: str, bad: float) -> None:
    x = torch.ones(2, 3, 4)
    x[1, 2, 0] = bad
    ranges = {"linear_input/layers.3.up": range_of(-1.0, 1.0)}
    quantizer = input_quantizer(quant_of(name), ranges, Counter())
    with pytest.raises(ProbeError, match=r"input of layers\.3\.up is not finite"):
        quantizer(visit_of(x, name="layers.3.up"))
    real = torch.ones(2, 3, dtype=torch.bool)
    real[1, 2] = False
    found = quantizer(visit_of(x, real, name="layers.3.up"))
    assert torch.allclose(found[real], torch.ones(5, 4), atol=0.01)


@pytest.mark.kind(3, "sweep")
def test_large_finite_inputs_are_not_taken_for_infinite() -> None:
    x = torch.full((1, 2, 3), 3e38)
    for name in ("a8", "a8:dynamic", "a8:token"):
        quantizer = input_quantizer(
            quant_of(name), {"linear_input/m": range_of(0.0, 3e38)}, Counter()
        )
        assert (quantizer(visit_of(x)) / x - 1).abs().max() < 1e-6


@pytest.mark.kind(2, "sweep")
def test_an_expert_without_tokens_has_no_hit() -> None:
    fired = Counter()
    for name in ("a8:token", "a8:dynamic"):
        found = input_quantizer(quant_of(name), {}, fired)(visit_of(torch.empty(1, 0, 8)))
        assert found.shape == (1, 0, 8)
    assert not fired.fired


@pytest.mark.kind(3, "sweep")
@pytest.mark.parametrize("name", ["a8:token", "a8:dynamic"])
def test_half_precision_stays_half_on_a_float32_grid(name: str) -> None:
    x = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(5)).bfloat16()
    found = input_quantizer(quant_of(name), {}, Counter())(visit_of(x))
    expected = oracle(x.float().numpy(), np.ones((1, 4), bool), quant_of(name))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, torch.from_numpy(expected).bfloat16())


@pytest.mark.kind(1, "sweep")
@pytest.mark.parametrize("name", ["a8:token", "a8:dynamic", "a6:token:symmetric"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_of_a_model(side: str, name: str, tiny_llama: LlamaForCausalLM) -> None:
    """One forward of two padded sequences equals one of each, and every layer is counted."""
    model: Any = tiny_llama
    ids = [torch.arange(9) * 29 % 257, torch.arange(5) * 17 % 257]
    batch, mask = torch.zeros(2, 9, dtype=torch.int64), torch.zeros(2, 9, dtype=torch.int64)
    for row, own in enumerate(ids):
        places = slice(9 - len(own), 9) if side == "left" else slice(0, len(own))
        batch[row, places], mask[row, places] = own, 1
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    fired, alone_fired = Counter(), Counter()

    def run(ids: Tensor, fired: Counter, **more: Tensor) -> Tensor:
        callback = input_quantizer(quant_of(name), {}, fired)
        with attach(model, {"linear_input": callback}), torch.inference_mode():
            logits: Tensor = model(input_ids=ids, use_cache=False, **more).logits
        return logits

    together = run(batch, fired, attention_mask=mask, position_ids=positions)
    for row, own in enumerate(ids):
        alone = run(own[None], alone_fired)[0]
        # sums of another shape round differently, which a grid can turn into a step
        assert torch.allclose(together[row, mask[row] == 1], alone, atol=2e-3)
    counted, names = fired.fired, [f"linear_input/{n}" for n, _ in linear_modules(model)]
    assert sorted(counted) == sorted(names)
    assert all(
        counted[key].elements == alone_fired.fired[key].elements == 14 * module.in_features
        for key, (_, module) in zip(names, linear_modules(model), strict=True)
    )


def test_eight_bits_per_token_cost_a_real_model_little(smollm2: LoadedModel) -> None:
    model: Any = smollm2.model
    text = text_slice("pydoc", smollm2.tokenizer, seq_len=128, samples=2)
    names = [f"weight/{name}" for name, _ in linear_modules(model)]

    def perplexity(recipe: str) -> float:
        found, fired = Recipe.parse(recipe), Counter()
        assert found.activations is not None
        assert found.weights is not None
        with (
            quantized_weights(model, found.weights, on=names, ranges=None, fired=fired),
            attach(model, {"linear_input": input_quantizer(found.activations, {}, fired)}),
        ):
            value = plain(model, text.ids)
        assert fired.hits == len(names) * (1 + len(text.ids))
        return value

    exact = plain(model, text.ids)
    token, sequence = perplexity("w8a8:token"), perplexity("w8a8:dynamic")
    assert abs(token / exact - 1) < 0.1
    assert sequence > 1.2 * token  # one range for a sequence is that of its first token's outliers
    assert plain(model, text.ids) == exact


def plain(model: Any, ids: tuple[Tensor, ...]) -> float:
    """Exp of the mean negative log-likelihood, in float64, one block at a time."""
    nll, tokens = 0.0, 0
    for block in ids:
        with torch.inference_mode():
            scores = model(input_ids=block[None], use_cache=False).logits[0, :-1].double()
        nll += float(torch.nn.functional.cross_entropy(scores, block[1:], reduction="sum"))
        tokens += len(block) - 1
    return math.exp(nll / tokens)
