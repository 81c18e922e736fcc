"""DiffLlama's attention and `DiffAttention` are one function, up to where the rows stand."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import DiffLlamaConfig
from transformers.models.diffllama.modeling_diffllama import (
    DiffLlamaAttention,
    DiffLlamaRotaryEmbedding,
)

from quantkit.errors import InputError
from quantkit.models.differential import DiffAttention, from_diffllama, to_diffllama

HIDDEN, HEADS, WIDTH = 32, 4, 4


def diffllama(kv_heads: int, depth: int, implementation: str) -> DiffLlamaAttention:
    config = DiffLlamaConfig(
        hidden_size=HIDDEN,
        num_attention_heads=2 * HEADS,
        num_key_value_heads=2 * kv_heads,
        head_dim=WIDTH,
        rms_norm_eps=1e-5,
        attn_implementation=implementation,
    )
    return DiffLlamaAttention(config, depth).eval()


def diffllama_output(layer: DiffLlamaAttention, x: Tensor) -> Tensor:
    places = torch.arange(x.shape[1])[None]
    rotation = DiffLlamaRotaryEmbedding(layer.config)(x, places)
    mask = torch.full((x.shape[1], x.shape[1]), torch.finfo(x.dtype).min).triu(1)
    output: Tensor = layer(x, position_embeddings=rotation, attention_mask=mask[None, None])[0]
    return output


@pytest.mark.parametrize("implementation", ("eager", "sdpa"))
@pytest.mark.parametrize("depth", (0, 1, 9))
def test_v1_is_diffllama_after_the_permutation(
    implementation: str, depth: int, kv_heads: int, v1: Callable[..., DiffAttention], x: Tensor
) -> None:
    layer = v1(num_kv_heads=kv_heads, depth=depth)
    with torch.no_grad():
        layer.subln.weight.uniform_(0.5, 2)  # goes into o_proj
    theirs = diffllama(kv_heads, depth, implementation)
    theirs.load_state_dict(to_diffllama(layer.state_dict()))

    with torch.no_grad():
        torch.testing.assert_close(layer(x), diffllama_output(theirs, x), rtol=0, atol=1e-5)


def test_diffllama_becomes_v1(v1: Callable[..., DiffAttention], x: Tensor) -> None:
    theirs = diffllama(2, 3, "sdpa")
    layer = v1(num_kv_heads=2, depth=3)
    layer.load_state_dict(from_diffllama(theirs.state_dict()))

    with torch.no_grad():
        torch.testing.assert_close(layer(x), diffllama_output(theirs, x), rtol=0, atol=1e-5)


def test_conversion_round_trips_bit_for_bit(
    kv_heads: int, v1: Callable[..., DiffAttention]
) -> None:
    state = v1(num_kv_heads=kv_heads).state_dict()
    before = copy.deepcopy(state)

    back = from_diffllama(to_diffllama(state))

    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], before[name]) for name in before)
    assert all(torch.equal(state[name], before[name]) for name in before)
    theirs = diffllama(kv_heads, 0, "sdpa").state_dict()
    there = to_diffllama(from_diffllama(theirs))
    assert there.keys() == theirs.keys()
    assert all(torch.equal(there[name], theirs[name]) for name in theirs)


def test_conversion_moves_rows_as_its_table_says(v1: Callable[..., DiffAttention]) -> None:
    h, g, d = 4, 2, 4
    state = v1(num_kv_heads=g).state_dict()

    got = to_diffllama(state)

    for name, pairs in (("q_proj.weight", h), ("k_proj.weight", g)):
        for p in range(pairs):
            for m, c in ((0, 0), (0, 1), (1, 0), (1, 1)):
                for j in range(d // 2):
                    ours = state[name][(2 * p + m) * d + 2 * j + c]
                    theirs = got[name][(m * pairs + p) * d + c * d // 2 + j]
                    assert torch.equal(ours, theirs)
    for p in range(g):
        for s in (0, 1):
            for i in range(d):
                ours = state["v_proj.weight"][(2 * p + s) * d + i]
                assert torch.equal(ours, got["v_proj.weight"][(s * g + p) * d + i])


def test_a_folded_gain_is_gone_but_not_lost(v1: Callable[..., DiffAttention], x: Tensor) -> None:
    layer = v1()
    with torch.no_grad():
        layer.subln.weight.uniform_(-2, 2)
    expected = layer(x)

    layer.load_state_dict(from_diffllama(to_diffllama(layer.state_dict())))

    assert torch.equal(layer.subln.weight, torch.ones(2 * WIDTH))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-5)


def reshaped(name: str, *shape: int) -> Callable[[dict[str, Tensor]], None]:
    def change(state: dict[str, Tensor]) -> None:
        state[name] = torch.zeros(*shape)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    (
        (lambda state: state.pop("subln.weight"), "missing subln.weight, not known nothing"),
        (lambda state: state.update({"q_proj.bias": torch.zeros(1)}), "not known q_proj.bias"),
        (reshaped("lambda_k2", 6), r"lambda_k2 must be \[d\]"),
        (reshaped("subln.weight", 4), r"subln.weight must be \[2d\] = \[8\], got \[4\]"),
        (reshaped("k_proj.weight", 12, 32), "k_proj.weight must be .*multiple of 2d = 8"),
        (reshaped("k_proj.weight", 24, 32), "do not fit each other: 32, 24 and 32 rows"),
        (reshaped("out_proj.weight", 32, 16), "out_proj.weight do not fit"),
    ),
)
def test_conversion_refuses_what_is_not_a_layer(
    change: Callable[[dict[str, Tensor]], None], said: str, v1: Callable[..., DiffAttention]
) -> None:
    state = dict(v1().state_dict())
    change(state)

    with pytest.raises(InputError, match=said):
        to_diffllama(state)


def test_back_conversion_refuses_the_other_layout(v1: Callable[..., DiffAttention]) -> None:
    with pytest.raises(InputError, match=r"missing o_proj.weight, not known out_proj.weight"):
        from_diffllama(v1().state_dict())
