"""Config and tokenizer beside a graph: what is loaded again, and what must not be in them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    GenerationConfig,
    LlamaConfig,
)

from quantkit.errors import InputError
from quantkit.exporting.companions import save_companions
from quantkit.models import LoadedModel, load
from tests.conftest import byte_tokenizer, make_tiny

TEXT = "Größe: 25 %, said the fox."


@pytest.fixture
def loaded(tiny_folder: Path) -> LoadedModel:
    return load(str(tiny_folder))


def plain(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    return found


def test_transformers_loads_the_folder(loaded: LoadedModel, tmp_path: Path) -> None:
    out = tmp_path / "out"
    names = save_companions(loaded, out)
    assert names == tuple(sorted(path.name for path in out.iterdir()))
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= set(names)
    config = AutoConfig.from_pretrained(out)
    assert isinstance(config, LlamaConfig)
    assert config.architectures == ["LlamaForCausalLM"]
    for name in ("hidden_size", "num_key_value_heads", "vocab_size", "eos_token_id"):
        assert getattr(config, name) == getattr(loaded.model.config, name)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer(TEXT).input_ids == loaded.tokenizer(TEXT).input_ids
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
    assert tokenizer.bos_token == "<s>"
    assert GenerationConfig.from_pretrained(out).eos_token_id == config.eos_token_id


def test_where_a_model_lay_leaves_no_trace(
    loaded: LoadedModel, tiny_folder: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "somewhere" / "else"
    shutil.copytree(tiny_folder, moved)
    names = save_companions(loaded, tmp_path / "a")
    assert save_companions(load(str(moved)), tmp_path / "b") == names
    for name in names:
        content = (tmp_path / "a" / name).read_bytes()
        assert content == (tmp_path / "b" / name).read_bytes(), name
        assert str(tmp_path).encode() not in content
    # transformers itself writes these two
    assert not {"is_local", "local_files_only"} & set(
        plain(tmp_path / "a", "tokenizer_config.json")
    )


def test_names_are_those_that_transformers_4_knows(tmp_path: Path, loaded: LoadedModel) -> None:
    tokenizer = byte_tokenizer(add_bos=False)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<end>"]})
    save_companions(dataclasses.replace(loaded, tokenizer=tokenizer), tmp_path / "out")
    found = plain(tmp_path / "out", "tokenizer_config.json")
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert found["additional_special_tokens"] == ["<end>"]
    assert "extra_special_tokens" not in found
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again("a<end>").input_ids == tokenizer("a<end>").input_ids
    assert "<end>" in again.all_special_tokens


def test_a_dequantized_model_is_not_called_quantized(loaded: LoadedModel, tmp_path: Path) -> None:
    loaded.model.config.quantization_config = {"quant_method": "gguf", "bits": 4}
    loaded.model.config._name_or_path = str(tmp_path)
    save_companions(loaded, tmp_path / "out")
    assert not {"quantization_config", "_name_or_path"} & set(
        plain(tmp_path / "out", "config.json")
    )
    assert loaded.model.config.quantization_config["bits"] == 4
    assert AutoConfig.from_pretrained(tmp_path / "out").hidden_size == 32


def test_contradictory_generation_settings_are_written_as_they_are(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    """Published checkpoints hold a temperature without sampling, which transformers refuses."""
    loaded.model.generation_config = GenerationConfig(do_sample=False, eos_token_id=7)
    loaded.model.generation_config.temperature = 0.3
    with pytest.raises(ValueError, match="temperature"):
        loaded.model.generation_config.save_pretrained(tmp_path / "theirs")
    save_companions(loaded, tmp_path / "out")
    found = plain(tmp_path / "out", "generation_config.json")
    assert (found["temperature"], found["eos_token_id"]) == (0.3, 7)


def test_a_preprocessor_comes_along(loaded: LoadedModel, tiny_folder: Path, tmp_path: Path) -> None:
    written = {"image_mean": [0.5], "size": {"height": 8}, "_commit_hash": "abc"}
    (tiny_folder / "preprocessor_config.json").write_text(json.dumps(written), encoding="utf-8")
    assert "preprocessor_config.json" in save_companions(loaded, tmp_path / "out")
    found = plain(tmp_path / "out", "preprocessor_config.json")
    assert found == {"image_mean": [0.5], "size": {"height": 8}}


def test_a_diffllama_is_one_again(loaded: LoadedModel, tmp_path: Path) -> None:
    model = make_tiny(DiffLlamaForCausalLM, DiffLlamaConfig)
    save_companions(dataclasses.replace(loaded, model=model), tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), DiffLlamaConfig)


def test_what_a_model_lacks_is_left_out(tmp_path: Path) -> None:
    bare = LoadedModel(name="n", source="s", model=nn.Linear(2, 2), tokenizer=None, sha256="")
    assert save_companions(bare, tmp_path / "out") == ()
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.kind(6, "export")
def test_a_folder_that_cannot_be_written_is_one_line(loaded: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"^cannot write config and tokenizer to .*file: .*\.$"):
        save_companions(loaded, tmp_path / "file")


def test_the_models_weights_are_not_among_them(loaded: LoadedModel, tmp_path: Path) -> None:
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    names = save_companions(loaded, tmp_path / "out")
    assert not [name for name in names if "safetensors" in name or name.endswith(".bin")]
    after = loaded.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
