"""What a user can name, and the one line they get where it cannot be loaded."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModel, LlamaForCausalLM

from quantkit.errors import InputError
from quantkit.models import LoadedModel, load
from quantkit.models.shipped import shipped_file

WB = ("weight", "bias")
FAKE_TIMM = r"""
import torch

class TinyVit(torch.nn.Module):
    pretrained_cfg = {"classifier": "head", "input_size": (3, 8, 8)}
    embed_dim = 4

    def __init__(self, classes):
        super().__init__()
        self.body = torch.nn.Linear(3, 4, bias=False)
        self.head = torch.nn.Linear(4, classes, bias=False) if classes else torch.nn.Identity()

    def forward(self, x):
        return self.head(self.body(x.mean((2, 3))))

def is_model(name):
    return name == "tiny_vit"

def list_models():
    return ["tiny_vit"]

def create_model(name, pretrained, num_classes=1000):
    if pretrained:
        raise RuntimeError("no network\nsecond line")
    return TinyVit(num_classes)
"""


def edit_weights(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: v for name, v in config.items() if v is not None}))


def assert_same_weights(one: Any, other: Any) -> None:
    expected = other.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in one.state_dict().items())


def tiny(name: str) -> Any:
    """Returns a model of this class: two layers a part, two heads, 16 wide, random weights."""
    kind = getattr(transformers, name)
    text = {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 32,
    }
    image = {"image_size": 8, "patch_size": 4, "num_channels": 3}
    sizes: dict[str, Any] = {
        "bert": text,
        "llama": text,
        "gpt2": {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
        "t5": {
            "vocab_size": 40,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
        "vit": text | image,
        "dinov2": text | image | {"mlp_ratio": 2},
        "whisper": {
            "vocab_size": 60,
            "num_mel_bins": 4,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "max_source_positions": 8,
            "max_target_positions": 8,
            "pad_token_id": 50,
            "bos_token_id": 51,
            "eos_token_id": 51,
            "decoder_start_token_id": 52,
        },
        "wav2vec2": text
        | {
            "conv_dim": (8, 8),
            "conv_kernel": (4, 4),
            "conv_stride": (4, 4),
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
        },
        "clip": {"text_config": text, "vision_config": text | image, "projection_dim": 8},
    }[kind.config_class.model_type]
    torch.manual_seed(3)
    return kind(kind.config_class(**sizes)).eval()


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


@pytest.mark.kind(8, "models")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_named(tiny_folder: Path, value: float) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit_weights(tiny_folder, lambda tensors: tensors[name].view(-1)[3:4].fill_(value))

    with pytest.raises(InputError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' .* 1 "):
        load(str(tiny_folder))


@pytest.mark.kind(8, "models")
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


@pytest.mark.kind(8, "models")
def test_a_damaged_weights_file(tiny_folder: Path) -> None:
    (tiny_folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json")

    with pytest.raises(InputError) as caught:
        load(str(tiny_folder))

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "modality", "is_encoder_decoder"),
    [
        ("BertModel", "text", False),
        ("BertForMaskedLM", "text", False),
        ("BertForSequenceClassification", "text", False),
        ("T5ForConditionalGeneration", "text", True),
        ("T5EncoderModel", "text", False),
        ("GPT2LMHeadModel", "text", False),
        ("ViTModel", "image", False),
        ("ViTForImageClassification", "image", False),
        ("Dinov2Model", "image", False),
        ("WhisperForConditionalGeneration", "audio", True),
        ("Wav2Vec2Model", "audio", False),
        ("CLIPModel", "text", False),
    ],
)
def test_the_class_is_the_one_that_the_config_names(
    tmp_path: Path, name: str, modality: str, is_encoder_decoder: bool
) -> None:
    made = tiny(name)
    made.save_pretrained(tmp_path)

    loaded = load(str(tmp_path))

    assert type(loaded.model).__name__ == name
    assert_same_weights(loaded.model, made)
    info = loaded.info()
    assert (info.modality, loaded.modality) == (modality, modality)
    assert info.is_encoder_decoder == is_encoder_decoder
    assert (info.heads, info.head_dim, info.hidden_size) == (2, 8, 16)
    assert info.layers >= 2
    assert info.warnings == []


@pytest.mark.parametrize(
    ("saved", "expected"), [("BertModel", "BertModel"), ("LlamaForCausalLM", "LlamaForCausalLM")]
)
def test_without_architectures_a_decoder_keeps_its_head(
    tmp_path: Path, saved: str, expected: str
) -> None:
    tiny(saved).save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=None)

    assert type(load(str(tmp_path)).model).__name__ == expected


def test_an_architecture_that_transformers_does_not_have(tiny_folder: Path) -> None:
    edit_config(tiny_folder, architectures=["LlamaForCausalLN"])

    with pytest.raises(InputError, match=r"'LlamaForCausalLN'.*Did you mean 'LlamaForCausalLM'"):
        load(str(tiny_folder))


def test_an_architecture_of_another_model_type(tiny_folder: Path) -> None:
    edit_config(tiny_folder, architectures=["BertModel"])

    with pytest.raises(InputError, match=r"BertConfig.*model_type is 'llama'"):
        load(str(tiny_folder))


@pytest.mark.kind(8, "models")
def test_code_beside_the_weights_is_not_run(tiny_folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    code = f"open({str(marker)!r}, 'w').close()\nclass Evil: pass\n"
    (tiny_folder / "evil.py").write_text(code)
    edit_config(
        tiny_folder,
        model_type="evil",
        architectures=["Evil"],
        auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"},
    )

    with pytest.raises(InputError) as caught:
        load(str(tiny_folder))

    assert "\n" not in str(caught.value)
    assert not marker.exists()


def test_a_pooler_that_is_missing_is_a_warning(tmp_path: Path) -> None:
    tiny("BertModel").save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda tensors: [tensors.pop(f"pooler.dense.{n}") for n in WB])

    (warning,) = load(str(tmp_path)).warnings

    assert "pooler.dense.weight" in warning
    assert "random" in warning


def test_a_head_that_is_missing_is_a_warning(tmp_path: Path) -> None:
    tiny("ViTForImageClassification").save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda tensors: [tensors.pop(f"classifier.{n}") for n in WB])

    (warning,) = load(str(tmp_path)).warnings

    assert "classifier.weight" in warning


@pytest.mark.kind(8, "models")
@pytest.mark.parametrize(
    ("kind", "weight"),
    [
        ("BertModel", "encoder.layer.1.attention.self.query.weight"),
        ("BertForMaskedLM", "cls.predictions.transform.dense.weight"),
        ("T5ForConditionalGeneration", "encoder.block.1.layer.0.SelfAttention.q.weight"),
        ("ViTModel", "embeddings.position_embeddings"),
    ],
)
def test_a_weight_that_would_be_measured_is_not_made_up(
    tmp_path: Path, kind: str, weight: str
) -> None:
    tiny(kind).save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda tensors: tensors.pop(weight))

    with pytest.raises(InputError, match=r"would be random: .*") as caught:
        load(str(tmp_path))

    assert weight.rsplit(".", 1)[-1] in str(caught.value)


def test_weights_of_other_names_are_named(tmp_path: Path) -> None:
    tiny("BertModel").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    renamed = {f"student.{name}": tensor for name, tensor in load_file(path).items()}
    save_file(renamed, path, metadata={"format": "pt"})

    with pytest.raises(InputError, match=r"It has \d+ others, e\.g\. 'student\."):
        load(str(tmp_path))


def test_weights_that_are_not_used_are_a_warning(tmp_path: Path) -> None:
    tiny("BertForMaskedLM").save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["BertModel"])

    warnings = load(str(tmp_path)).warnings

    assert any("does not use" in warning and "cls.predictions" in warning for warning in warnings)


def test_minilm_is_the_packages_model() -> None:
    loaded = load("minilm")
    folder = shipped_file("minilm").parent
    same = AutoModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    inputs = loaded.tokenizer(["A short text.", "another"], padding=True, return_tensors="pt")

    with torch.no_grad():
        ours, theirs = loaded.model(**inputs), same(**inputs)

    assert torch.equal(ours.last_hidden_state, theirs.last_hidden_state)
    info = loaded.info()
    assert (info.architecture, info.layers, info.heads, info.hidden_size) == (
        "BertModel", 6, 12, 384,
    )  # fmt: skip
    assert (info.parameters, info.warnings) == (22_713_216, [])


def test_timm_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)

    with pytest.raises(InputError, match="pip install timm"):
        load("timm:vit_tiny_patch16_224")


@pytest.fixture
def timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with timm's three functions and one model; returns a folder with its weights."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "timm.py").write_text(FAKE_TIMM)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    tensors = {"body.weight": torch.ones(4, 3), "head.weight": torch.ones(7, 4)}
    save_file(tensors, tmp_path / "full.safetensors")
    save_file({"body.weight": torch.ones(4, 3)}, tmp_path / "headless.safetensors")
    save_file({"head.weight": torch.ones(7, 4)}, tmp_path / "bodyless.safetensors")
    return tmp_path


@pytest.mark.parametrize(("file", "parameters"), [("full", 12 + 28), ("headless", 12)])
def test_timm_with_a_file(timm: Path, file: str, parameters: int) -> None:
    loaded = load(f"timm:tiny_vit@{timm / file}.safetensors")

    info = loaded.info()
    assert (info.name, info.parameters, info.hidden_size) == (file, parameters, 4)
    assert (loaded.modality, loaded.input_name, loaded.tokenizer) == ("image", "x", None)
    assert all(bool((p == 1).all()) for p in loaded.model.parameters())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("timm:tiny_vit", "Random weights are not measured"),
        ("timm:tiny_vitt", "Did you mean 'tiny_vit'"),
        ("timm:tiny_vit@nowhere.safetensors", "existing .safetensors"),
        ("timm:tiny_vit@{}/bodyless.safetensors", "lacks 1 weights .* 'body.weight'"),
    ],
)
def test_timm_refuses(timm: Path, given: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        load(given.format(timm))

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


@pytest.mark.kind(8, "models")
def test_a_graph_where_a_torch_model_is_meant(tmp_path: Path) -> None:
    path = tmp_path / "graph.onnx"
    path.write_bytes(b"")
    with pytest.raises(InputError, match="taken by `export` and `diagnose`"):
        load(str(path))


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
