"""Calibrated ranges against brute force: hooks of the test's own, one unpadded row at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from quantkit.calib_sets import TokenSlice
from quantkit.calibration import MASK_VALUE, observation_tensors, observe, ranges_of
from quantkit.errors import InputError
from quantkit.models import LoadedModel
from quantkit.numerics.observers.minmax import MinMax
from quantkit.results import Ranges


def loaded_model(model: Any) -> LoadedModel:
    return LoadedModel(name="tiny", source="tiny", model=model, tokenizer=None, sha256="0" * 64)


def text(lengths: tuple[int, ...]) -> TokenSlice:
    generator = torch.Generator().manual_seed(2)
    # token 0 is what padding is filled with: it is left to the padding
    ids = tuple(torch.randint(1, 257, (n,), generator=generator) for n in lengths)
    return TokenSlice(
        source="random", source_sha256="0", ids=ids, seq_len=max(lengths), skip=0, bos="never"
    )


def calibrate(model: Any, data: TokenSlice, batch_size: int) -> Ranges:
    loaded = loaded_model(model)
    observed = observe(loaded, data, batch_size=batch_size)
    return ranges_of(observed, loaded, data, batch_size=batch_size)


def brute_force(model: Any, data: TokenSlice) -> dict[str, list[Tensor]]:
    """Every valid entry of each tensor: linear inputs flat, logits `[heads, entries]`."""
    seen: dict[str, list[Tensor]] = {}
    handles = []
    for name, module in model.model.named_modules():
        if isinstance(module, nn.Linear):

            def look(_module: Any, args: Any, name: str = f"linear_input/model.{name}") -> None:
                seen.setdefault(name, []).append(args[0].flatten())

            handles.append(module.register_forward_pre_hook(look))
    source = __import__(type(model).__module__, fromlist=["x"])
    maps = 2 if model.config.model_type == "diffllama" else 1
    eager, layers = source.eager_attention_forward, {}
    for index, layer in enumerate(model.model.layers):
        layers[id(layer.self_attn)] = index

    def attention(module: Any, query: Tensor, key: Tensor, *rest: Any, **kwargs: Any) -> Any:
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        logits = (query @ keys.transpose(2, 3))[0] * kwargs["scaling"]
        valid = torch.ones(logits.shape[1:], dtype=torch.bool).tril()
        for number, half in enumerate(logits.chunk(maps), 1):
            name = f"attention_logit/{layers[id(module)]}/map {number}"
            seen.setdefault(name, []).append(half[:, valid])
        return eager(module, query, key, *rest, **kwargs)

    before = model.config._attn_implementation
    source.eager_attention_forward = attention
    model.set_attn_implementation("eager")
    try:
        for block in data.ids:
            with torch.inference_mode():
                model(input_ids=block[None], use_cache=False)
    finally:
        source.eager_attention_forward = eager
        model.set_attn_implementation(before)
        for handle in handles:
            handle.remove()
    return seen


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_diffllama"])
@pytest.mark.parametrize(
    ("lengths", "batch_size"),
    [((32, 32, 32), 1), ((32, 32, 32), 2), ((5, 48, 17, 2), 1), ((5, 48, 17, 2), 3)],
)
def test_ranges_equal_brute_force(
    request: pytest.FixtureRequest, family: str, lengths: tuple[int, ...], batch_size: int
) -> None:
    """With rows of different lengths too: what is padded or masked is in no range and no count."""
    model = request.getfixturevalue(family)
    data = text(lengths)
    expected = brute_force(model, data)
    found = calibrate(model, data, batch_size).tensors
    assert found.keys() == expected.keys()
    entries = sum(n * (n + 1) // 2 for n in lengths)
    for name, parts in expected.items():
        range_ = found[name]
        if name.startswith("attention_logit/"):
            every = torch.cat(parts, dim=1)
            per_layer = every.shape[1] // entries  # DiffLlama attends twice a layer
            assert range_.count == every.numel() // per_layer
            assert range_.granularity == "head"
            assert range_.lo == pytest.approx(every.amin(1).tolist(), rel=1e-4, abs=1e-5)
            assert range_.hi == pytest.approx(every.amax(1).tolist(), rel=1e-4, abs=1e-5)
        else:
            every = torch.cat(parts)
            assert range_.count == every.numel()
            assert range_.granularity == "tensor"
            assert range_.lo == pytest.approx(float(every.min()), rel=1e-4, abs=1e-5)
            assert range_.hi == pytest.approx(float(every.max()), rel=1e-4, abs=1e-5)
        assert range_.method == "minmax"
        assert range_.point == name.split("/")[0]


def test_a_huge_padding_token_is_left_out(tiny_llama: LlamaForCausalLM) -> None:
    """Token 0 fills padding; here its embedding would blow every range up."""
    data = text((6, 40, 12))
    with torch.no_grad():
        tiny_llama.model.embed_tokens.weight[0] = 1e4
    alone = calibrate(tiny_llama, data, 1).tensors
    padded = calibrate(tiny_llama, data, 3).tensors
    for name, range_ in alone.items():
        assert padded[name].count == range_.count, name
        assert padded[name].lo == pytest.approx(range_.lo, rel=1e-4, abs=1e-5), name
        assert padded[name].hi == pytest.approx(range_.hi, rel=1e-4, abs=1e-5), name


def test_masked_logits_are_left_out(tiny_llama: LlamaForCausalLM) -> None:
    """One row of two tokens has three valid logits a head, and none of the fourth's size."""
    model: Any = tiny_llama
    found = calibrate(model, text((2,)), 1).tensors["attention_logit/0/map 1"]
    assert found.count == 3 * 4


def test_nan_is_refused_by_name(tiny_llama: LlamaForCausalLM) -> None:
    model: Any = tiny_llama
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(InputError, match=r"linear_input/model\.layers\.1\.mlp\.down_proj'.*NaN"):
        calibrate(model, text((8,)), 1)


def test_nan_logits_are_refused_by_name(tiny_llama: LlamaForCausalLM) -> None:
    model: Any = tiny_llama
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[0, 0] = float("nan")
    with pytest.raises(InputError, match=r"attention_logit/0/map 1'.*NaN"):
        calibrate(model, text((8,)), 1)


def test_a_mask_value_in_a_range_is_refused(tiny_llama: LlamaForCausalLM) -> None:
    state = MinMax.empty(1).update(torch.tensor([[1.0, -2 * MASK_VALUE]]))
    with pytest.raises(InputError, match=r"linear_input/x.*mask"):
        ranges_of({"linear_input/x": state}, loaded_model(tiny_llama), text((4,)), batch_size=1)


def test_observations_merge_to_one_pass(tiny_llama: LlamaForCausalLM) -> None:
    data = text((16, 9, 24, 16))
    loaded = loaded_model(tiny_llama)

    def part(start: int, stop: int) -> TokenSlice:
        return TokenSlice(
            source="r",
            source_sha256="0",
            ids=data.ids[start:stop],
            seq_len=24,
            skip=start,
            bos="never",
        )

    whole = observe(loaded, data, batch_size=1)
    first, second = (observe(loaded, part(*ends), batch_size=1) for ends in ((0, 1), (1, 4)))
    tensors = observation_tensors(first)
    for name, state in whole.items():
        kept = {field: tensors[f"{name}|{field}"] for field in state.state()}
        merged = MinMax.from_state(kept).merge(second[name])
        for field, tensor in state.state().items():
            assert torch.equal(merged.state()[field], tensor), (name, field)


def test_progress_ends_at_the_total(tiny_llama: LlamaForCausalLM) -> None:
    seen: list[tuple[int, int]] = []
    observe(
        loaded_model(tiny_llama),
        text((4, 4, 4)),
        batch_size=2,
        progress=lambda _what, done, total: seen.append((done, total)),
    )
    assert seen == [(0, 2), (1, 2), (2, 2)]
