"""The layers against their equations in numpy, and what a probe in their place sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from quantkit.errors import InputError, ProbeError
from quantkit.models.differential import DiffAttention, DiffAttentionV2, lambda_init
from quantkit.models.families import differential_lambda
from quantkit.probes.split import split_maps

Array = NDArray[np.float64]

HEADS, WIDTH, TOKENS = 4, 4, 7

# The oracle: loops and explicit maps in float64, from the paper's equations.


def of(parameter: Tensor) -> Array:
    array: Array = parameter.detach().double().numpy()
    return array


def turn(x: Array, theta: float = 10_000.0) -> Array:
    """RoPE as a complex rotation of neighbours: `[token, d]`."""
    d = x.shape[1]
    z = x[:, 0::2] + 1j * x[:, 1::2]
    z = z * np.exp(1j * np.arange(len(x))[:, None] * theta ** (-np.arange(0, d, 2) / d))
    return np.stack((z.real, z.imag), axis=-1).reshape(x.shape)


def softmax_map(q: Array, k: Array, seen: NDArray[np.bool_]) -> Array:
    logits = np.where(seen, q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    result: Array = weights / weights.sum(axis=1, keepdims=True)
    return result


def seen_by(causal: bool, tokens: int = TOKENS) -> NDArray[np.bool_]:
    full = np.ones((tokens, tokens), dtype=bool)
    return np.tril(full) if causal else full


def rows(weight: Array, head: int, width: int) -> Array:
    """The rows of one head."""
    return weight[head * width : (head + 1) * width]


def v1_oracle(layer: DiffAttention, x: Array, depth: int, causal: bool) -> Array:
    """Equations 1 to 3 for one sequence, `[token, hidden]`."""
    d, h, g = layer.head_dim, layer.num_heads, layer.num_kv_heads
    start = 0.8 - 0.6 * np.exp(-0.3 * depth)
    first = np.exp(of(layer.lambda_q1) @ of(layer.lambda_k1))
    second = np.exp(of(layer.lambda_q2) @ of(layer.lambda_k2))
    lam = first - second + start
    wq, wk, wv = (of(p.weight) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    heads = []
    for pair in range(h):
        kv = pair // (h // g)
        maps = [
            softmax_map(
                turn(x @ rows(wq, 2 * pair + m, d).T),
                turn(x @ rows(wk, 2 * kv + m, d).T),
                seen_by(causal),
            )
            for m in (0, 1)
        ]
        head = (maps[0] - lam * maps[1]) @ (x @ rows(wv, kv, 2 * d).T)
        normed = head / np.sqrt((head**2).mean(axis=1, keepdims=True) + 1e-5)
        heads.append((1 - start) * normed * of(layer.subln.weight))
    result: Array = np.concatenate(heads, axis=1) @ of(layer.out_proj.weight).T
    return result


def v2_oracle(layer: DiffAttentionV2, x: Array, causal: bool) -> Array:
    d, h, g = layer.head_dim, layer.num_heads, layer.num_kv_heads
    lam = 1 / (1 + np.exp(-x @ of(layer.lambda_proj.weight).T))  # [token, head]
    wq, wk, wv = (of(p.weight) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    heads = []
    for head in range(h):
        kv = head // (h // g)
        key, value = turn(x @ rows(wk, kv, d).T), x @ rows(wv, kv, d).T
        first, second = (
            softmax_map(turn(x @ rows(wq, 2 * head + m, d).T), key, seen_by(causal)) for m in (0, 1)
        )
        heads.append((first - lam[:, head : head + 1] * second) @ value)
    result: Array = np.concatenate(heads, axis=1) @ of(layer.o_proj.weight).T
    return result


@pytest.mark.parametrize("depth", (0, 5))
def test_v1_is_the_papers_equations(
    kv_heads: int, causal: bool, depth: int, v1: Callable[..., DiffAttention], x: Tensor
) -> None:
    layer = v1(num_kv_heads=kv_heads, causal=causal, depth=depth).double()
    with torch.no_grad():
        layer.subln.weight.uniform_(-2, 3)  # a gain that is neither 1 nor one number
    x = x.double()

    got = of(layer(x))

    for sequence in range(2):
        expected = v1_oracle(layer, of(x[sequence]), depth, causal)
        np.testing.assert_allclose(got[sequence], expected, rtol=0, atol=1e-12)


def test_v2_is_its_equation(
    kv_heads: int, causal: bool, v2: Callable[..., DiffAttentionV2], x: Tensor
) -> None:
    layer = v2(num_kv_heads=kv_heads, causal=causal).double()
    x = x.double()

    got = of(layer(x))

    for sequence in range(2):
        expected = v2_oracle(layer, of(x[sequence]), causal)
        np.testing.assert_allclose(got[sequence], expected, rtol=0, atol=1e-12)


def test_lambda_starts_as_in_the_paper(v1: Callable[..., DiffAttention]) -> None:
    assert lambda_init(0) == pytest.approx(0.2)
    assert lambda_init(1) == pytest.approx(0.3555091, abs=1e-7)  # 0.8 - 0.6 x 0.7408182
    assert lambda_init(60) == pytest.approx(0.8, abs=1e-6)
    layer = v1(depth=1)
    assert {p.dtype for n, p in layer.named_parameters() if n.startswith("lambda")} == {
        torch.float32
    }
    assert layer.differential_lambda() == pytest.approx(differential_lambda(layer), abs=1e-6)


# What a probe that stands in for the attention function sees


class Watch:
    """Counts calls of SDPA and keeps the last one's q, k, and V2's lambda at that moment."""

    def __init__(self, layer: DiffAttention | DiffAttentionV2) -> None:
        self.layer, self.calls = layer, 0
        self.original = F.scaled_dot_product_attention

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        self.calls += 1
        self.query, self.key, self.value = query.detach(), key.detach(), value.detach()
        self.lam = self.layer.differential_lambda()
        return self.original(query, key, value, **kwargs)


def test_one_call_holds_both_maps_where_the_layout_says(
    make: Callable[..., Any], kv_heads: int, monkeypatch: pytest.MonkeyPatch, x: Tensor
) -> None:
    layer = make(num_kv_heads=kv_heads).double()
    watch = Watch(layer)
    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    x = x.double()

    layer(x)

    assert watch.calls == layer.attention_layout.calls_per_layer == 1
    assert watch.query.shape == (2, 2 * HEADS, TOKENS, WIDTH)
    scale = WIDTH**-0.5
    common = {"layer": 0, "name": "a", "scale": scale, "mask": None, "causal": True}
    maps = split_maps(
        watch.query,
        watch.key,
        layout=layer.attention_layout,
        mixes=(1.0, -watch.lam),
        real_queries=None,
        **common,
    )
    wq, wk = of(layer.q_proj.weight), of(layer.k_proj.weight)
    for call in maps:
        (tile,) = call.tiles()
        for head in range(HEADS):
            kv = head // (HEADS // kv_heads)
            m = call.map - 1
            key = kv if isinstance(layer, DiffAttentionV2) else 2 * kv + m
            q = turn(of(x[1]) @ rows(wq, 2 * head + m, WIDTH).T)
            k = turn(of(x[1]) @ rows(wk, key, WIDTH).T)
            np.testing.assert_allclose(of(tile.logits[1, head]), scale * q @ k.T, atol=1e-5)


def test_lambda_of_v2_is_there_during_its_forward_only(
    monkeypatch: pytest.MonkeyPatch, v2: Callable[..., DiffAttentionV2], x: Tensor
) -> None:
    layer = v2()
    watch = Watch(layer)
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", watch)
        layer(x)

    assert watch.lam.shape == (2, HEADS, TOKENS)
    assert not watch.lam.requires_grad
    torch.testing.assert_close(watch.lam, layer.lambda_of(x).detach())
    with pytest.raises(ProbeError, match=r"none is under way.*lambda_of"):
        layer.differential_lambda()
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", None)
        with pytest.raises(TypeError):
            layer(x)
    with pytest.raises(ProbeError, match="none is under way"):
        layer.differential_lambda()


def test_layers_refuse_bad_sizes_too(
    v1: Callable[..., DiffAttention], v2: Callable[..., DiffAttentionV2]
) -> None:
    with pytest.raises(InputError, match="multiple of num_kv_heads"):
        v1(num_kv_heads=3)
    with pytest.raises(InputError, match="depth is the layer's index from 0, got -1"):
        v1(depth=-1)
    with pytest.raises(InputError, match="multiple of 4"):
        v2(hidden_size=30, head_dim=None)
