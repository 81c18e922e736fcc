"""Which modules are layers, which attend, and what a differential head is."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import DiffLlamaForCausalLM, LlamaForCausalLM

from quantkit.errors import QuantkitError
from quantkit.models import (
    attention_layout,
    attention_modules,
    backbone,
    differential_lambda,
    layer_modules,
)


def test_llama(tiny_llama: LlamaForCausalLM) -> None:
    layout = attention_layout(tiny_llama.config)

    assert (layout.maps, layout.calls_per_layer) == (1, 1)
    assert [name for name, _ in layer_modules(tiny_llama)] == ["model.layers.0", "model.layers.1"]
    assert [name for name, _ in attention_modules(tiny_llama)] == [
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    ]
    assert backbone(tiny_llama) is tiny_llama.model


def test_diffllama_has_two_maps_and_two_calls(tiny_diffllama: DiffLlamaForCausalLM) -> None:
    layout = attention_layout(tiny_diffllama.config)

    assert (layout.maps, layout.calls_per_layer) == (2, 2)
    assert len(layer_modules(tiny_diffllama)) == len(attention_modules(tiny_diffllama)) == 2


def test_lambda_is_the_papers(tiny_diffllama: DiffLlamaForCausalLM) -> None:
    _, attention = attention_modules(tiny_diffllama)[1]
    with torch.no_grad():
        for name, value in {"q1": 0.5, "k1": 0.25, "q2": 0.5, "k2": -0.25}.items():
            getattr(attention, f"lambda_{name}").fill_(value)

    # 8 numbers a head: q1.k1 = 1, q2.k2 = -1; depth 1: 0.8 - 0.6 exp(-0.3)
    expected = math.e - 1 / math.e + 0.8 - 0.6 * math.exp(-0.3)
    assert differential_lambda(attention) == pytest.approx(expected, rel=1e-6)


def test_lambda_of_an_ordinary_head_is_an_error(tiny_llama: LlamaForCausalLM) -> None:
    with pytest.raises(QuantkitError, match="LlamaAttention"):
        differential_lambda(attention_modules(tiny_llama)[0][1])
