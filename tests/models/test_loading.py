"""What a user can name, and the one line they get where it cannot be loaded."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from quantkit.errors import InputError
from quantkit.models import LoadedModel, load


def edit_weights(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_folder_loads_ready_to_be_measured(tiny_folder: Path) -> None:
    loaded = load(str(tiny_folder))

    assert isinstance(loaded.model, LlamaForCausalLM)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.model.dtype == torch.float32
    assert loaded.tokenizer("ab").input_ids == loaded.tokenizer("ab").input_ids
    assert loaded.name == "tiny"
    assert loaded.warnings == ()


def test_info_says_what_was_loaded(tiny_folder: Path, tiny_llama: LlamaForCausalLM) -> None:
    info = load(str(tiny_folder), dtype="bfloat16").info()

    assert (info.architecture, info.layers, info.heads, info.kv_heads) == (
        "LlamaForCausalLM", 2, 4, 2,
    )  # fmt: skip
    assert (info.head_dim, info.hidden_size, info.maps) == (8, 32, 1)
    assert (info.dtype, info.device) == ("bfloat16", "cpu")
    assert info.parameters == sum(parameter.numel() for parameter in tiny_llama.parameters())


def test_the_hash_is_the_weights(tiny_folder: Path) -> None:
    before = load(str(tiny_folder)).sha256
    assert load(str(tiny_folder), dtype="bfloat16").sha256 == before

    edit_weights(tiny_folder, lambda tensors: tensors["model.norm.weight"].mul_(2))

    assert load(str(tiny_folder)).sha256 != before


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_named(tiny_folder: Path, value: float) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit_weights(tiny_folder, lambda tensors: tensors[name].view(-1)[3:4].fill_(value))

    with pytest.raises(InputError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' .* 1 "):
        load(str(tiny_folder))


def test_a_weight_that_is_missing_is_not_made_up(tiny_folder: Path) -> None:
    edit_weights(tiny_folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))

    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(str(tiny_folder))


def test_a_missing_path_is_one_line() -> None:
    with pytest.raises(InputError) as caught:
        load("/no/such/folder")

    assert "/no/such/folder" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_misspelt_shipped_name_is_suggested() -> None:
    with pytest.raises(InputError, match="Did you mean 'smollm2'"):
        load("smolm2")


def test_a_folder_without_weights(tiny_folder: Path) -> None:
    (tiny_folder / "model.safetensors").unlink()

    with pytest.raises(InputError, match=r"no weights .*safetensors"):
        load(str(tiny_folder))


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json"):
        load(str(tmp_path))


def test_a_damaged_weights_file(tiny_folder: Path) -> None:
    (tiny_folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json")

    with pytest.raises(InputError) as caught:
        load(str(tiny_folder))

    assert "\n" not in str(caught.value)


def test_an_unknown_model_type(tiny_folder: Path) -> None:
    config = json.loads((tiny_folder / "config.json").read_text())
    config |= {"model_type": "nonesuch", "architectures": ["NoneSuch"]}
    (tiny_folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(InputError, match="nonesuch"):
        load(str(tiny_folder))


def test_a_folder_without_a_tokenizer_loads(tiny_folder: Path) -> None:
    for path in tiny_folder.glob("tokenizer*"):
        path.unlink()

    assert load(str(tiny_folder)).tokenizer is None


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")

    with pytest.raises(InputError, match=r"\.gguf"):
        load(str(tmp_path / "notes.txt"))


def test_a_gguf_file_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "bad.gguf").write_bytes(b"not a gguf file at all" * 10)

    with pytest.raises(InputError, match="GGUF") as caught:
        load(str(tmp_path / "bad.gguf"))

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("option", "value"), [("dtype", "float33"), ("device", "gpu")])
def test_an_unknown_dtype_or_device(tiny_folder: Path, option: str, value: str) -> None:
    with pytest.raises(InputError, match=value):
        load(str(tiny_folder), **{option: value})


def test_a_hub_id_without_a_network_fails_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    start = time.monotonic()

    with pytest.raises(InputError, match="hub") as caught:
        load("quantkit-tests/no-such-model")

    assert time.monotonic() - start < 10
    assert "\n" not in str(caught.value)


def test_a_hub_id_offline_by_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    with pytest.raises(InputError, match="hub"):
        load("quantkit-tests/no-such-model")


def test_loading_prints_nothing(tiny_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(str(tiny_folder))

    assert capfd.readouterr() == ("", "")


def test_smollm2(smollm2: LoadedModel) -> None:
    info = smollm2.info()

    assert (info.name, info.architecture) == ("smollm2", "LlamaForCausalLM")
    assert (info.layers, info.heads, info.kv_heads, info.head_dim) == (30, 9, 3, 64)
    assert (info.hidden_size, info.parameters) == (576, 134_515_008)
    assert any("dequantized" in warning for warning in info.warnings)
    assert smollm2.tokenizer("Hello world").input_ids == [19556, 905]
    assert getattr(smollm2.model.config, "quantization_config", None) is None
