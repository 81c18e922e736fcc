"""Models whose statistics are worth comparing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from tests.outliers.oracle import Stored, store


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from more, and lose much where processors are shared.

    `tests/numerics/test_scan.py` runs the compiled pass on all of them.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def brute_force() -> Any:
    """`brute_force(model, rows)` -> `Stored`."""
    return store


@pytest.fixture(scope="session")
def stored_family(make_family: Any) -> Any:
    """`stored_family(name, rows)` -> (model, `Stored`), computed once."""
    known: dict[Any, tuple[Any, Stored]] = {}

    def get(family: str, rows: list[torch.Tensor]) -> tuple[Any, Stored]:
        slot = (family, tuple(len(row) for row in rows))
        if slot not in known:
            model = make_family(family)
            known[slot] = model, store(model, rows)
        return known[slot]

    return get


@pytest.fixture
def planted(make_family: Any) -> Any:
    """A Llama with massive activations, outlier tokens and an outlier feature, by its embedding.

    Token 3 has 4,000 in channel 5, and token 4 has -500 in channel 6; channel 9 is 8 in all. What
    an embedding holds stays in every layer's hidden state.
    """
    model = make_family("llama")
    with torch.no_grad():
        weight = model.model.embed_tokens.weight
        weight[3, 5], weight[4, 6], weight[:, 9] = 4000.0, -500.0, 8.0
    return model


@pytest.fixture
def tiny_gemma2() -> Any:
    """A Gemma 2: softcap 5 on logits well beyond it, a scale of its own, 2 key heads for 4."""
    torch.manual_seed(3)
    model = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=97,
            hidden_size=64,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            query_pre_attn_scalar=10,
            attn_logit_softcapping=5.0,
            max_position_embeddings=256,
            sliding_window=256,
        )
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(12)
            layer.self_attn.k_proj.weight.mul_(12)
    return model.eval()
