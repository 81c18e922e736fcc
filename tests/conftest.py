"""Fixtures that more than one part of the tests needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from quantkit.models import LoadedModel, load

BOS_ID = 256


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The shipped model; its first conversion takes half a minute, then it is in the cache."""
    return load("smollm2")


def byte_tokenizer(*, add_bos: bool) -> PreTrainedTokenizerFast:
    """A tokenizer with one token a byte, 0 to 255, and `<s>` (256)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)} | {"<s>": BOS_ID}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS_ID)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte; adds no BOS."""
    return byte_tokenizer(add_bos=False)


@pytest.fixture
def bos_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte; adds BOS by itself."""
    return byte_tokenizer(add_bos=True)


@pytest.fixture
def tiny_llama() -> LlamaForCausalLM:
    """A Llama of two layers, four heads, two key-value heads, with fixed random weights."""
    return make_tiny(LlamaForCausalLM, LlamaConfig)


@pytest.fixture
def tiny_diffllama() -> DiffLlamaForCausalLM:
    """A DiffLlama of the same sizes: two pairs of heads."""
    return make_tiny(DiffLlamaForCausalLM, DiffLlamaConfig)


def make_tiny(model_class: Any, config_class: Any, **changes: Any) -> Any:
    """Returns a model small enough to be made in milliseconds."""
    sizes: dict[str, Any] = {
        "vocab_size": BOS_ID + 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    torch.manual_seed(0)
    return model_class(config_class(**sizes | changes)).eval()


@pytest.fixture
def tiny_folder(
    tmp_path: Path, tiny_llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> Path:
    """The tiny Llama and its tokenizer, saved."""
    folder = tmp_path / "tiny"
    tiny_llama.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_family() -> Any:
    """Builds one of `llama`, `gqa`, `diffllama`, `diffllama_gqa`, `mistral_window`, by name."""
    return family_model


def family_model(family: str) -> Any:
    """A model whose heads, maps, layers and lambdas are so far apart that no swap goes unseen.

    Four heads of width 16, three layers, window 7 for Mistral.
    """
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4 if family in ("llama", "diffllama") else 2,
        "max_position_embeddings": 256,
    }
    torch.manual_seed(11)
    if family.startswith("diffllama"):
        model: Any = DiffLlamaForCausalLM(DiffLlamaConfig(**sizes))
    elif family == "mistral_window":
        model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=7))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            attention.k_proj.weight.mul_(6)
            heads = attention.q_proj.weight.view(4, 16, 64)
            heads.mul_(torch.tensor([1.5, 6.0, 0.4, 25.0])[:, None, None] * (1 + index))
            if family.startswith("diffllama"):
                for name, dot in (("1", (0.5, -2.0, -0.5)[index]), ("2", (-3.0, 0.3, -3.0)[index])):
                    getattr(attention, f"lambda_q{name}").fill_(1.0)
                    getattr(attention, f"lambda_k{name}").fill_(dot / 16)
    return model.eval()
