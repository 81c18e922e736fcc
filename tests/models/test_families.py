"""Which modules are layers, which attend, and what a differential head is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import DiffLlamaForCausalLM, LlamaForCausalLM

from quantkit.errors import QuantkitError
from quantkit.models import (
    AttentionLayout,
    attention_layout,
    attention_modules,
    backbone,
    block_modules,
    differential_lambda,
    layer_modules,
    layout_of,
    mixes_of,
    mlp_of,
    projection_modules,
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


def tiny(model: str, config: str, **sizes: Any) -> Any:
    return getattr(transformers, model)(getattr(transformers, config)(**sizes))


T5 = {"vocab_size": 9, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2}


def test_t5_has_blocks_not_their_mixed_lists() -> None:
    model = tiny("T5Model", "T5Config", **T5)
    names = [name for name, _ in layer_modules(model)]
    assert names == [f"{side}.block.{n}" for side in ("encoder", "decoder") for n in range(2)]
    assert [name for name, _ in block_modules(model)] == names
    attention = [name for name, _ in attention_modules(model)]
    assert attention == [f"encoder.block.{n}.layer.0.SelfAttention" for n in range(2)] + [
        f"decoder.block.{n}.layer.{place}"
        for n in range(2)
        for place in ("0.SelfAttention", "1.EncDecAttention")
    ]


def test_swin_has_stages_of_blocks() -> None:
    sizes = {"image_size": 8, "patch_size": 2, "embed_dim": 4, "window_size": 2}
    model = tiny("SwinModel", "SwinConfig", **sizes, depths=[2, 1], num_heads=[1, 1])
    assert [name for name, _ in layer_modules(model)] == ["encoder.layers.0", "encoder.layers.1"]
    assert [name for name, _ in block_modules(model)] == [
        "encoder.layers.0.blocks.0",
        "encoder.layers.0.blocks.1",
        "encoder.layers.1.blocks.0",
    ]


class MyAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)


class Block(nn.Module):
    """As timm names its parts, with experts for an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = MyAttention()
        self.gate = nn.Linear(4, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(2)
        )


def test_layers_of_any_module_are_what_lists_hold_and_attends() -> None:
    stages = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))
    model = nn.ModuleDict({"stages": stages, "head": nn.Sequential(nn.Linear(4, 4))})
    names = [f"stages.{stage}.{block}" for stage in range(2) for block in range(2)]
    assert [name for name, _ in layer_modules(model)] == names
    assert [name for name, _ in attention_modules(model)] == [f"{name}.attn" for name in names]
    assert backbone(model) is model


def test_a_layer_that_is_given_its_layout_attends_whatever_its_name() -> None:
    class Mixer(nn.Module):
        attention_layout = AttentionLayout(maps=2, order="interleaved")

        def differential_lambda(self) -> float:
            return 0.5

    mixer = Mixer()
    assert attention_modules(nn.Sequential(mixer)) == [("0", mixer)]
    assert layout_of(mixer).order == "interleaved"
    assert mixes_of(mixer, layout_of(mixer)) == (1.0, -0.5)
    assert differential_lambda(mixer) == 0.5
    assert mixes_of(mixer, AttentionLayout()) == (1.0,)


def test_the_mlp_of_unknown_names_narrows_last() -> None:
    layer = nn.ModuleDict(
        {
            "attn": MyAttention(),
            "grow": nn.Linear(4, 16),
            "shrink": nn.Linear(16, 4),
            "adapter": nn.Linear(4, 4),
        }
    )
    mlp = mlp_of("x", layer)
    assert mlp is not None
    assert (mlp.input[0], [name for name, _ in mlp.downs]) == ("x.grow", ["x.shrink"])
    assert mlp_of("x", nn.ModuleDict({"attn": MyAttention()})) is None


def test_gpt2s_linears_are_conv1d() -> None:
    model = tiny("GPT2LMHeadModel", "GPT2Config", vocab_size=9, n_embd=8, n_layer=1, n_head=2)
    names = [name for name, _ in projection_modules(model)]
    assert names == [f"transformer.h.0.{n}" for n in ("attn.c_attn", "attn.c_proj")] + [
        f"transformer.h.0.{n}" for n in ("mlp.c_fc", "mlp.c_proj")
    ]
