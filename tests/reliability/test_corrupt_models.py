"""Kind 8: a damaged or hostile checkpoint is refused in one line, and nothing in it is run."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quantkit.models import load
from tests.conftest import byte_tokenizer, make_tiny
from tests.reliability.one_line import contents, ran, refused, without_network

WEIGHTS, SHARD = "model.safetensors", "model-00001-of-00002.safetensors"
INDEX = f"{WEIGHTS}.index.json"
NORM = "model.norm.weight"
DEEP = b'{"a":' * 10_000 + b"1" + b"}" * 10_000
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "tiny"
    make_tiny(LlamaForCausalLM, LlamaConfig, num_hidden_layers=1).save_pretrained(folder)
    byte_tokenizer(add_bos=False).save_pretrained(folder)
    return folder


@pytest.fixture
def model(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    without_network(monkeypatch)
    return Path(shutil.copytree(sound, tmp_path / "tiny"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("A loop repeats a statement. " * 20, encoding="utf-8")
    return path


def file(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def config(**fields: object) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return damage


def header(folder: Path) -> tuple[dict[str, Any], bytes]:
    whole = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack_from("<Q", whole)
    return json.loads(whole[8 : 8 + length]), whole[8 + length :]


def tensors(*, length: int | None = None, raw: bytes | None = None, **norm: object) -> Damage:
    """Changes what the header says of the last norm, or the header, or its length."""

    def damage(folder: Path) -> None:
        found, data = header(folder)
        found[NORM] |= norm
        said = json.dumps(found).encode() if raw is None else raw
        size = len(said) if length is None else length
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", size) + said + data)

    return damage


def cut(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size // 2)


def a_byte_more(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes() + b"x")


def a_folder(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


def a_dangling_link(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(folder / "none")


def sharded(place: object) -> Damage:
    """The norm lies in `place`, all else in the one shard that is there."""

    def damage(folder: Path) -> None:
        found, _ = header(folder)
        (folder / WEIGHTS).rename(folder / SHARD)
        shutil.copy(folder / SHARD, folder.parent / "other.safetensors")
        places = {name: SHARD for name in found if name != "__metadata__"} | {NORM: place}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))

    return damage


def index(content: bytes) -> Damage:
    def damage(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / SHARD)
        (folder / INDEX).write_bytes(content)

    return damage


class Touches:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def pickled(name: str, *, alone: bool = True) -> Damage:
    def damage(folder: Path) -> None:
        if alone:
            (folder / WEIGHTS).unlink()
        evil = Touches(folder.parent / "ran")
        if name.endswith(".bin"):
            torch.save({"weight": evil}, folder / name)
        else:
            (folder / name).write_bytes(pickle.dumps(evil))

    return damage


AN_OBJECT = "expected a JSON object"
NO_PLACE = "which is no file of this folder"
BAD: dict[str, tuple[Damage, str]] = {
    "no weights at all": (file(WEIGHTS, b""), "broken weights file"),
    "half of the weights": (cut, "broken weights file"),
    "a byte behind the weights": (a_byte_more, "broken weights file"),
    "a header of 2^60 bytes": (tensors(length=2**60), "header too large"),
    "a header of 2^64 - 1 bytes": (tensors(length=2**64 - 1), "header too large"),
    "a header that is not JSON": (tensors(raw=b"not json"), "invalid JSON in header"),
    "a header that is a list": (tensors(raw=b"[1]"), "invalid JSON in header"),
    "a header that is deep": (tensors(raw=DEEP), "recursion limit exceeded"),
    "a header without tensors": (file(WEIGHTS, struct.pack("<Q", 2) + b"{}"), "would be random"),
    "offsets that overlap": (tensors(data_offsets=[0, 128]), "invalid offset for tensor"),
    "offsets behind the end": (tensors(data_offsets=[0, 10**12]), "invalid offset for tensor"),
    "offsets below 0": (tensors(data_offsets=[-5, 3]), "invalid value: integer `-5`"),
    "offsets turned round": (tensors(data_offsets=[100, 20]), "invalid offset for tensor"),
    "an unknown type": (tensors(dtype="Q7"), "unknown variant `Q7`"),
    "a type of another size": (tensors(dtype="BOOL"), "invalid shape, data type, or offset"),
    "integers for reals": (tensors(dtype="I32"), "is I32 in model.safetensors, expected real num"),
    "a shape of other size": (tensors(shape=[33]), "invalid shape, data type, or offset"),
    "a shape of 2^124": (tensors(shape=[2**62, 2**62]), "overflow computing buffer size"),
    "another shape": (tensors(shape=[2, 16]), f"'{NORM}' is [2, 16] in model.safetensors"),
    "a folder for weights": (a_folder, "is a folder or a link to nothing, expected a file"),
    "a link to no weights": (a_dangling_link, "is a folder or a link to nothing"),
    "an index to a lost shard": (sharded("model-00002-of-00002.safetensors"), NO_PLACE),
    "an index upwards": (sharded("../other.safetensors"), NO_PLACE),
    "an index to the system": (sharded("/etc/passwd"), NO_PLACE),
    "an index to a number": (sharded(3), NO_PLACE),
    "an index that is not JSON": (index(b"{nope"), f"{INDEX} is not JSON"),
    "an index that is a list": (index(b"[]"), AN_OBJECT),
    "an index without places": (index(b"{}"), "has no 'weight_map' from weights to files"),
    "a deep index": (index(DEEP), "is nested too deeply"),
    "a pickle of weights": (pickled("pytorch_model.bin"), "is a pickle, which quantkit does not"),
    "a pickle called .pt": (pickled("model.pt"), "is a pickle, which quantkit does not open"),
    "an empty config": (file("config.json", b""), "config.json is not JSON (Expecting value, line"),
    "a config that is null": (file("config.json", b"null"), AN_OBJECT),
    "a config that is a list": (file("config.json", b"[]"), AN_OBJECT),
    "a config of bytes": (file("config.json", b"\xff\xfe\0"), "is not UTF-8 text"),
    "a deep config": (file("config.json", DEEP), "config.json is nested too deeply"),
    "a width in words": (config(hidden_size="big"), "'hidden_size' expected int, got str"),
    "a width of 10^12": (config(hidden_size=10**12), "in model.safetensors, and [257, 10"),
    "a negative width": (config(hidden_size=-4), "negative dimension -4"),
    "no heads": (config(num_attention_heads=0), "ZeroDivisionError"),
    "heads that do not divide": (config(num_attention_heads=3), "is not a multiple of the number"),
    "10^9 layers": (config(num_hidden_layers=10**9), "asks for 1000000000 layers, and the checkp"),
    "a layer too many": (config(num_hidden_layers=2), "which would be random"),
    "a vocabulary of null": (config(vocab_size=None), "'vocab_size' expected int, got NoneType"),
    "an epsilon in words": (config(rms_norm_eps="x"), "'rms_norm_eps' expected float, got str"),
    "an unknown dtype": (config(dtype="floatx"), "has no attribute 'floatx'"),
    "an unknown activation": (config(hidden_act="evil"), "KeyError: 'evil'"),
    "a padding id outside": (config(pad_token_id=10**9), "Padding_idx must be within"),
    "a model type that is a list": (config(model_type=["a"]), "json is ['a'], expected a name"),
    "architectures in words": (config(architectures="X"), "expected a list of class names"),
    "architectures of null": (config(architectures=[None]), "expected a list of class names"),
    "quantization in words": (config(quantization_config="x"), "has no attribute 'to_dict'"),
    "settings that are a list": (file("generation_config.json", b"[]"), "'list' object is not a"),
    "a broken tokenizer": (file("tokenizer.json", b"{nope"), "tokenizer.json is not JSON"),
    "a tokenizer that is a list": (file("tokenizer.json", b"[]"), AN_OBJECT),
    "a tokenizer of nothing": (file("tokenizer.json", b"{}"), "tokenizer.json holds no tokenizer"),
    "a deep tokenizer config": (file("tokenizer_config.json", DEEP), "is nested too deeply"),
    "a tokenizer config in a list": (file("tokenizer_config.json", b"[]"), AN_OBJECT),
}  # fmt: skip


@pytest.mark.kind(8, "models", "stats", "cli")
@pytest.mark.parametrize("name", BAD)
def test_a_damaged_checkpoint_is_one_line(
    name: str, model: Path, text: Path, tmp_path: Path
) -> None:
    damage, said = BAD[name]
    damage(model)
    line = refused("stats", model, "--text", text, "-q", "--out", tmp_path / "out")
    assert said in line
    assert str(model) in line
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "ran").exists()


STAGES = {
    "calibrate": ("--calib",),
    "sensitivity": ("--ranges", "ranges", "--eval"),
    "sweep": ("--eval",),
    "export": ("--calib",),
    "auto": ("--quantize", "auto", "--max-drop", "2%", "--calib"),
    "compare": ("--text",),
}


@pytest.mark.parametrize("damage", ["half of the weights", "a pickle of weights", "a deep config"])
@pytest.mark.parametrize(
    "stage", [pytest.param(name, marks=pytest.mark.kind(8, name)) for name in STAGES]
)
def test_every_stage_says_the_same(
    stage: str,
    damage: str,
    model: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harm, said = BAD[damage]
    if stage == "sensitivity":
        few = ("--seq-len", 8, "--samples", 1, "-q")
        ran("calibrate", model, "--calib", text, *few, "--out", tmp_path / "ranges")
        monkeypatch.chdir(tmp_path)
    harm(model)
    command = "export" if stage == "auto" else stage
    out = tmp_path / "out"
    assert said in refused(command, model, *STAGES[stage], text, "-q", "--out", out)
    assert not out.exists()
    assert not (tmp_path / "ran").exists()


@pytest.mark.kind(8, "models", "api")
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "optimizer.pkl"])
def test_a_pickle_beside_sound_weights_is_left_alone(name: str, model: Path) -> None:
    before = load(str(model)).sha256
    pickled(name, alone=False)(model)
    assert load(str(model)).sha256 == before
    assert not (model.parent / "ran").exists()


@pytest.mark.kind(8, "models", "stats")
@pytest.mark.parametrize("known", [True, False], ids=["a known type", "a type of its own"])
def test_code_beside_the_weights_is_never_run(
    known: bool, model: Path, text: Path, tmp_path: Path
) -> None:
    """A known type is what transformers holds under it; the code is not even read."""
    places = {name: "evil.Evil" for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM")}
    code = f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\nclass Evil: pass\n"
    (model / "evil.py").write_text(code)
    config(auto_map=places, **({} if known else {"model_type": "evil"}))(model)
    words = ("stats", model, "--text", text, "--seq-len", 8, "--samples", 1, "-q")
    if known:
        ran(*words, "--out", tmp_path / "out")
    else:
        assert "cannot be loaded" in refused(*words, "--out", tmp_path / "out")
    assert not (tmp_path / "ran").exists()


@pytest.mark.kind(8, "models")
def test_code_beside_the_tokenizer_is_never_run(model: Path, tmp_path: Path) -> None:
    code = f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\nclass Evil: pass\n"
    (model / "evil.py").write_text(code)
    said = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (model / "tokenizer_config.json").write_text(json.dumps(said))
    load(str(model))
    assert not (tmp_path / "ran").exists()


@pytest.mark.kind(8, "models")
def test_a_tokenizer_of_an_unknown_class_is_a_warning(model: Path) -> None:
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": 3}')
    loaded = load(str(model))
    assert loaded.tokenizer is None
    assert any("its tokenizer cannot be loaded" in words for words in loaded.warnings)


@pytest.mark.kind(8, "models")
def test_an_index_of_its_own_files_is_followed(model: Path) -> None:
    before = load(str(model)).sha256
    sharded(SHARD)(model)
    unchanged = contents(model)
    assert load(str(model)).sha256 == before
    assert contents(model) == unchanged
