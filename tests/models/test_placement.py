"""A model whose weights lie partly on disk is measured as if all of them were in memory."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from quantkit.calib_sets import TokenSlice
from quantkit.errors import InputError
from quantkit.jobs import StatsJob
from quantkit.models import LoadedModel, load
from quantkit.models.placement import input_device, stored, weights
from quantkit.outliers import collect

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "diffllama": ("DiffLlama", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "bert": ("Bert", {}),
}


def saved(folder: Path, kind: str) -> Path:
    """A tiny random model of the kind, in several files."""
    name, changes = KINDS[kind]
    model_class = getattr(transformers, f"{name}{'Model' if kind == 'bert' else 'ForCausalLM'}")
    torch.manual_seed(3)
    model = model_class(getattr(transformers, f"{name}Config")(**SIZES | changes))
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder


def limit(folder: Path, share: float) -> dict[int | str, str]:
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return {"cpu": f"{size * share / 1000:.3f}KB"}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of temporary files; whatever the test leaves in it fails the test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    gc.collect()
    assert list(folder.iterdir()) == []


def data() -> TokenSlice:
    generator = torch.Generator().manual_seed(1)
    rows = tuple(torch.randint(0, 61, (length,), generator=generator) for length in (20, 7, 16))
    return TokenSlice(
        source="test", source_sha256="0" * 64, ids=rows, seq_len=20, skip=0, bos="never"
    )


def on_disk(loaded: LoadedModel) -> list[str]:
    return [name for name, tensor in loaded.model.state_dict().items() if tensor.is_meta]


def differences(one: Any, other: Any, rel: float, path: str = "") -> Iterator[str]:
    """Yields where two results differ: floats by more than `rel`, the rest at all."""
    if dataclasses.is_dataclass(one):
        one, other = vars(one), vars(other)
    if isinstance(one, float) and isinstance(other, float):
        if one != pytest.approx(other, rel=rel, abs=rel, nan_ok=True):
            yield f"{path}: {one} {other}"
    elif isinstance(one, dict) and one.keys() == other.keys():
        for key in one:
            yield from differences(one[key], other[key], rel, f"{path}.{key}")
    elif isinstance(one, (list, tuple)) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, rel, f"{path}[{index}]")
    elif one != other:
        yield f"{path}: {one} {other}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.0, 0.6], ids=["all on disk", "some in memory"])
def test_statistics_are_those_of_the_whole_model(
    kind: str, share: float, tmp_path: Path, temporary: Path
) -> None:
    folder = saved(tmp_path / kind, kind)
    whole = load(str(folder))
    spread = load(str(folder), device_map="auto", max_memory=limit(folder, share))

    assert on_disk(spread)
    assert (len(on_disk(spread)) < len(spread.model.state_dict())) == (share > 0)
    assert spread.device == torch.device("cpu")
    assert spread.info() == whole.info()
    points = ("attention_output", "mlp_input", "mlp_down_input", "linear_input")
    unused = "*experts*" if kind == "mixtral" else ()
    both = [
        collect(loaded, data(), batch_size=2, points=points, allow_unseen=unused)
        for loaded in (whole, spread)
    ]
    assert both[0] is not None and both[1] is not None
    assert len(both[0].hits) > 10
    # not bitwise: what is read from a file may lie at another alignment in memory
    assert list(differences(*both, rel=1e-5)) == []
    assert on_disk(spread)  # what was read for a forward pass was let go again

    del spread, both


def test_weights_are_all_read_whatever_lies_on_disk(tmp_path: Path, temporary: Path) -> None:
    folder = saved(tmp_path / "llama", "llama")
    spread = load(str(folder), device_map="auto", max_memory={"cpu": "0KB"})
    expected = load(str(folder)).model.state_dict()
    found = dict(weights(spread.model))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert input_device(spread.model) == torch.device("cpu")
    del spread.model.lm_head._hf_hook
    with pytest.raises(InputError, match=r"'lm_head\.weight' is on no device and in no file"):
        stored(spread.model, "lm_head.weight")


def test_a_model_that_fits_is_loaded_as_without_a_map(tmp_path: Path, temporary: Path) -> None:
    folder = saved(tmp_path / "llama", "llama")
    spread = load(str(folder), device_map="auto", max_memory={"cpu": "1GB"})
    assert on_disk(spread) == []
    assert not hasattr(spread.model, "_hf_hook")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dtype_is_the_one_asked_for(dtype: str, tmp_path: Path, temporary: Path) -> None:
    folder = saved(tmp_path / "llama", "llama")
    spread = load(str(folder), dtype=dtype, device_map="auto", max_memory={"cpu": "0KB"})
    assert spread.info().dtype == dtype
    assert {str(t.dtype) for _, t in weights(spread.model)} == {f"torch.{dtype}"}


@pytest.mark.kind(8, "models")
def test_nan_weights_on_disk_are_refused_by_name(tmp_path: Path, temporary: Path) -> None:
    model = LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model.save_pretrained(tmp_path / "nan")
    path = tmp_path / "nan" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.2.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"'model\.layers\.2\.mlp\.up_proj\.weight' holds 1 NaN"):
        load(str(tmp_path / "nan"), device_map="auto", max_memory={"cpu": "0KB"})


def test_what_was_written_for_offloading_is_gone_at_exit(tmp_path: Path) -> None:
    folder = saved(tmp_path / "mixtral", "mixtral")
    (tmp_path / "temporary").mkdir()
    code = (
        "import sys, tempfile, pathlib; from quantkit.models import load; "
        f"m = load({str(folder)!r}, device_map='auto', max_memory={{'cpu': '0KB'}}); "
        "print(len(list(pathlib.Path(tempfile.gettempdir()).rglob('*.safetensors')))); "
        "raise RuntimeError('planted')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"TMPDIR": str(tmp_path / "temporary"), "PYTHONPATH": ".", "OMP_NUM_THREADS": "1"},
    )
    assert "planted" in done.stderr
    assert int(done.stdout) > 0
    assert "meta device" not in done.stderr
    assert list((tmp_path / "temporary").glob("quantkit*")) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device_map": "balance"}, "unknown device_map 'balance'"),
        ({"max_memory": {"cpu": "1GB"}}, "give device_map='auto' too"),
        ({"device_map": "auto", "max_memory": {"cpu": "lots"}}, "sizes such as 300MB, got lots"),
        ({"device_map": "auto", "max_memory": {"gpu": "1GB"}}, "names the device 'gpu'"),
        ({"device_map": "auto", "max_memory": {99: "1GB"}}, "names the device 99"),
    ],
)
def test_arguments_that_cannot_be_meant(
    arguments: dict[str, Any], message: str, tmp_path: Path, temporary: Path
) -> None:
    folder = saved(tmp_path / "llama", "llama")
    with pytest.raises(InputError, match=message):
        load(str(folder), **arguments)


def test_what_is_loaded_whole_is_not_spread(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    with pytest.raises(InputError, match="is a GGUF file, which is loaded whole"):
        load(str(tmp_path / "a.gguf"), device_map="auto")
    with pytest.raises(InputError, match="is a timm model, which is loaded whole"):
        load("timm:vit", device_map="auto")


@pytest.mark.parametrize("words", [("cpu",), ("cpu=1",), ("cpu=1 GB",), ("disk=1GB",), ("0=1gb",)])
def test_limits_that_cannot_be_read(words: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=r"takes device=size words such as cpu=300MB,0=20GB"):
        StatsJob(models=("a",), device_map="auto", max_memory=words)


def test_limits_of_a_job() -> None:
    job = StatsJob(models=("a",), device_map="auto", max_memory=("cpu=300MB", "0=2.5GiB"))
    assert job.max_memory == ("cpu=300MB", "0=2.5GiB")
    with pytest.raises(InputError, match="names cpu twice"):
        dataclasses.replace(job, max_memory=("cpu=1GB", "cpu=2GB"))
    with pytest.raises(InputError, match="give --device-map auto"):
        dataclasses.replace(job, device_map=None)
