"""Fake-quantized logits against an oracle of their own: eager attention, quantized in numpy.

The oracle knows nothing of quantkit: it takes the place of transformers' eager attention function,
and its likelihoods are summed in float64 by numpy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DiffLlamaForCausalLM, LlamaForCausalLM
from transformers.models.diffllama import modeling_diffllama
from transformers.models.llama import modeling_llama

import quantkit.probes.attach  # noqa: F401 - the package has a function of that name
from quantkit.calib_sets import TokenBatch, TokenSlice, text_slice
from quantkit.errors import InputError
from quantkit.models import LoadedModel
from quantkit.quantization import fake_quantized
from quantkit.recipe import LogitQuant, Recipe, WeightQuant
from quantkit.results import Fired, Range
from quantkit.tasks import score_blocks

attach_module = sys.modules["quantkit.probes.attach"]
SHARED_AXES = {"tensor": (1, 2, 3), "head": (2, 3), "row": (3,)}
GRID = [(bits, name) for bits in (8, 6, 4) for name in SHARED_AXES]


def quantized(logits: NDArray[Any], valid: NDArray[Any], bits: int, name: str) -> NDArray[Any]:
    """One map's logits `[batch, heads, query, key]` on the narrow symmetric grid."""
    steps = np.float32(2 ** (bits - 1) - 1)
    absmax = np.where(valid, np.abs(logits), 0).max(axis=SHARED_AXES[name], keepdims=True)
    scale = np.where(absmax == 0, 1, absmax / steps).astype(np.float32)
    return (np.clip(np.rint(logits / scale), -steps, steps) * scale).astype(np.float32)


def oracle_attention(bits: int, name: str, maps: int, calls: list[int]) -> Callable[..., Any]:
    """Eager attention with each map's logits quantized."""

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        scaling: float,
        **_: Any,
    ) -> tuple[Tensor, None]:
        calls.append(1)
        repeats = query.shape[1] // key.shape[1]
        keys = key.repeat_interleave(repeats, dim=1)
        values = value.repeat_interleave(repeats, dim=1).numpy()
        logits = (torch.matmul(query, keys.transpose(2, 3)) * scaling).numpy()
        batch, _heads, queries, length = logits.shape
        valid = np.broadcast_to(attention_mask.numpy() == 0, (batch, 1, queries, length))
        halves = np.split(logits, maps, axis=1)
        logits = np.concatenate([quantized(half, valid, bits, name) for half in halves], axis=1)
        logits = np.where(valid, logits.astype(np.float64), -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = (weights @ values).transpose(0, 2, 1, 3).astype(np.float32)
        return torch.from_numpy(np.ascontiguousarray(out)), None

    return attention


@contextmanager
def eager(model: Any) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def oracle_perplexity(model: Any, ids: tuple[Tensor, ...]) -> float:
    """Exp of the mean negative log-likelihood, in numpy and float64, one block at a time."""
    nll, tokens = 0.0, 0
    for block in ids:
        with torch.inference_mode():
            scores = model(input_ids=block[None], use_cache=False).logits[0, :-1].double().numpy()
        top = scores.max(-1, keepdims=True)
        log_sum = np.log(np.exp(scores - top).sum(-1)) + top[:, 0]
        nll += float((log_sum - scores[np.arange(len(scores)), block[1:].numpy()]).sum())
        tokens += len(block) - 1
    return float(np.exp(nll / tokens))


def scorer(model: Any) -> Callable[[TokenBatch], Tensor]:
    def score(batch: TokenBatch) -> Tensor:
        output = model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False
        )
        logits: Tensor = output.logits
        return logits

    return score


def perplexity(model: Any, text: TokenSlice, recipe: Recipe, batch_size: int) -> tuple[float, int]:
    with fake_quantized(model, recipe) as quantizers:
        scores = score_blocks(scorer(model), text, batch_size=batch_size)
    return scores.perplexity, quantizers.hits


def logits(bits: int, name: str) -> Recipe:
    return Recipe(logits=LogitQuant(bits=bits, granularity=name))  # type: ignore[arg-type]


def random_text(lengths: tuple[int, ...], vocabulary: int) -> TokenSlice:
    generator = torch.Generator().manual_seed(1)
    ids = tuple(torch.randint(0, vocabulary, (n,), generator=generator) for n in lengths)
    return TokenSlice(
        source="random", source_sha256="0", ids=ids, seq_len=max(lengths), skip=0, bos="never"
    )


def sharpen(model: Any) -> Any:
    """Scales queries, so that attention is far from uniform and 4 bits are felt."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name or "embed" in name or "lm_head" in name:
                parameter.mul_(20)
    return model


@pytest.fixture
def sharp_llama(tiny_llama: LlamaForCausalLM) -> LlamaForCausalLM:
    return sharpen(tiny_llama)


@pytest.fixture
def sharp_diffllama(tiny_diffllama: DiffLlamaForCausalLM) -> DiffLlamaForCausalLM:
    return sharpen(tiny_diffllama)


@pytest.fixture(scope="module")
def two_blocks(smollm2: LoadedModel) -> TokenSlice:
    return text_slice("pydoc", smollm2.tokenizer, seq_len=64, samples=2)


def oracle(
    monkeypatch: pytest.MonkeyPatch, model: Any, text: TokenSlice, bits: int, name: str
) -> float:
    is_diff = model.config.model_type == "diffllama"
    source, maps = (modeling_diffllama, 2) if is_diff else (modeling_llama, 1)
    calls: list[int] = []
    with monkeypatch.context() as patch, eager(model):
        attention = oracle_attention(bits, name, maps, calls)
        patch.setattr(source, "eager_attention_forward", attention)
        expected = oracle_perplexity(model, text.ids)
    assert len(calls) == len(text.ids) * model.config.num_hidden_layers * maps
    return expected


@pytest.mark.parametrize(("bits", "name"), GRID)
def test_smollm2_equals_the_oracle(
    smollm2: LoadedModel,
    two_blocks: TokenSlice,
    monkeypatch: pytest.MonkeyPatch,
    bits: int,
    name: str,
) -> None:
    """Each layer alone, on the same q, k and v; the perplexity of all layers only loosely.

    A logit next to a tie goes either way by rounding in q.k: relative noise of 1e-7 on the oracle's
    own logits moves its perplexity by 0.6 % at 8 bits, so over 30 layers no tighter bound holds.
    """
    expected = oracle(monkeypatch, smollm2.model, two_blocks, bits, name)
    attention = oracle_attention(bits, name, 1, [])
    future = torch.ones(64, 64).triu(1)[None, None]
    differing: list[float] = []
    original = attach_module.attend

    def compared(maps: Any, value: Tensor) -> Tensor:
        found = original(maps, value)
        call = maps[0][0]
        wanted, _ = attention(None, call.query, call.key, value, future, call.scale)
        wrong = (found - wanted).norm(dim=-1) > 1e-3 * wanted.norm(dim=-1)
        differing.append(float(wrong.double().mean()))
        return found

    monkeypatch.setattr(attach_module, "attend", compared)
    found, hits = perplexity(smollm2.model, two_blocks, logits(bits, name), 2)
    assert len(differing) == hits == 30
    assert max(differing) < 0.01  # rows, of 64 x 9 x 2
    assert found == pytest.approx(expected, rel=3e-2)


def test_quantization_is_felt(smollm2: LoadedModel, two_blocks: TokenSlice) -> None:
    """Else the comparison with the oracle would say nothing."""
    plain, hits = perplexity(smollm2.model, two_blocks, Recipe(), 2)
    assert hits == 0
    assert plain == pytest.approx(oracle_perplexity(smollm2.model, two_blocks.ids), rel=1e-5)
    seen = [perplexity(smollm2.model, two_blocks, logits(4, n), 2)[0] for n in SHARED_AXES]
    assert all(abs(value / plain - 1) > 5e-3 for value in seen)
    assert len({round(value, 2) for value in seen}) == 3


@pytest.mark.parametrize(("bits", "name"), GRID)
def test_diffllama_has_a_scale_a_map(
    sharp_diffllama: DiffLlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, bits: int, name: str
) -> None:
    """Map 1 is given larger logits than map 2: one scale for both would be seen."""
    model: Any = sharp_diffllama
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight[: layer.self_attn.q_proj.weight.shape[0] // 2] *= 6
    text = random_text((64, 64), 257)
    expected = oracle(monkeypatch, model, text, bits, name)
    found, hits = perplexity(model, text, logits(bits, name), 2)
    assert found == pytest.approx(expected, rel=1e-3)
    assert hits == 4  # two layers of two maps; the two calls of a layer count once
    if (bits, name) == (4, "tensor"):
        with monkeypatch.context() as patch, eager(model):
            shared = oracle_attention(bits, name, 1, [])
            patch.setattr(modeling_diffllama, "eager_attention_forward", shared)
            assert oracle_perplexity(model, text.ids) != pytest.approx(found, rel=1e-3)


@pytest.mark.kind(4, "sweep")
@pytest.mark.parametrize("name", SHARED_AXES)
@pytest.mark.parametrize("family", ["sharp_llama", "sharp_diffllama"])
def test_padding_and_batch_size_change_nothing(
    request: pytest.FixtureRequest, family: str, name: str
) -> None:
    model = request.getfixturevalue(family)
    text = random_text((40, 9, 64, 23, 2, 31, 64), 257)
    recipe = logits(4, name)
    maps = (1, 2) if family == "sharp_diffllama" else (1,)
    with fake_quantized(model, recipe):
        expected = oracle_perplexity(model, text.ids)  # row by row: no padding, no mask
    for batch_size in (1, 3, 4):
        found, hits = perplexity(model, text, recipe, batch_size)
        assert found == pytest.approx(expected, rel=1e-5), batch_size
        assert hits == 2 * len(maps) * -(-7 // batch_size)


def test_a_recipe_may_be_given_by_name(tiny_llama: LlamaForCausalLM) -> None:
    model: Any = tiny_llama
    batch = torch.arange(16)[None]
    found = []
    for recipe in ("w4+logits4", Recipe.parse("w4+logits4")):
        with torch.inference_mode(), fake_quantized(model, recipe):
            found.append(model(input_ids=batch).logits)
    assert torch.equal(*found)
    with pytest.raises(InputError, match="is not `none`"), fake_quantized(model, "w4x"):
        raise AssertionError("not reached")


@pytest.mark.kind(7, "sweep")
def test_weights_come_back_bitwise_after_an_exception(tiny_llama: LlamaForCausalLM) -> None:
    model: Any = tiny_llama
    before = {name: (t.data_ptr(), t.clone()) for name, t in model.state_dict().items()}
    implementation = model.config._attn_implementation
    batch = torch.arange(16)[None]
    with torch.inference_mode():
        plain = model(input_ids=batch).logits
    recipe = Recipe.parse("w4+logits4")
    with pytest.raises(RuntimeError, match="on purpose"), fake_quantized(model, recipe) as seen:
        with torch.inference_mode():
            inside = model(input_ids=batch).logits
        assert seen.fired["weight/model.layers.0.self_attn.q_proj"] == Fired(
            hits=1, elements=32 * 32
        )
        assert not torch.equal(inside, plain)
        raise RuntimeError("on purpose")
    for name, tensor in model.state_dict().items():
        pointer, values = before[name]
        assert tensor.data_ptr() == pointer, name
        assert torch.equal(tensor, values), name
    assert model.config._attn_implementation == implementation
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with torch.inference_mode():
        assert torch.equal(model(input_ids=batch).logits, plain)


@pytest.mark.kind(7, "sweep")
def test_weights_are_restored_when_a_later_one_cannot_be_quantized(
    tiny_llama: LlamaForCausalLM,
) -> None:
    model: Any = tiny_llama
    model.model.layers[1].mlp.down_proj.weight.data[3, 5] = float("nan")
    first = model.model.layers[0].self_attn.q_proj.weight.clone()
    with (
        pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.down_proj\.weight"),
        fake_quantized(model, Recipe(weights=WeightQuant(bits=4))),
    ):
        raise AssertionError("not reached")
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, first)


@pytest.mark.kind(2, "sweep")
@pytest.mark.parametrize(
    ("recipe", "tensor"),
    [
        ("a8", "linear_input/model.layers.0.self_attn.q_proj"),
        ("logits8:head:static", "attention_logit/0/map 1"),
        ("logits8:static", "attention_logit/0/map 1"),
    ],
)
def test_missing_range_names_the_tensor(
    tiny_llama: LlamaForCausalLM, recipe: str, tensor: str
) -> None:
    other = Range(
        lo=-1.0, hi=1.0, method="minmax", granularity="tensor", count=1, point="linear_input"
    )
    for ranges in (None, {"linear_input/another": other}):
        with (
            pytest.raises(InputError, match=f"no range for '{tensor}'"),
            fake_quantized(tiny_llama, Recipe.parse(recipe), ranges),
        ):
            tiny_llama(input_ids=torch.arange(8)[None])


@pytest.mark.kind(2, "sweep")
def test_quantizers_that_never_fired_are_an_error(tiny_llama: LlamaForCausalLM) -> None:
    from quantkit.errors import ProbeError

    with (
        pytest.raises(ProbeError, match=r"attention_logit model\.layers\.0\.self_attn"),
        fake_quantized(tiny_llama, logits(8, "tensor")) as quantizers,
    ):
        assert quantizers.hits == 0
