"""The matched pair that ships in the package: by name, whole or one clear line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.errors import InputError
from quantkit.jobs import SHIPPED_PAIR
from quantkit.models import load, pair_results, sha256_of, shipped
from quantkit.models.shipped import pair_folder


@pytest.fixture
def pair(
    tmp_path: Path, tiny_llama: Any, tiny_diffllama: Any, tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:  # fmt: skip
    """A folder in the package's place: tiny models in 16 bits, one result file."""
    root = tmp_path / "package" / "pair"
    for name, model in (("baseline", tiny_llama), ("diff", tiny_diffllama)):
        model.to(torch.bfloat16).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    (root / "training.json").write_text("{}")
    monkeypatch.setattr(shipped, "pair_folder", lambda: root)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return root


@pytest.mark.parametrize(
    ("name", "architecture", "maps"),
    [("baseline", "LlamaForCausalLM", 1), ("diff", "DiffLlamaForCausalLM", 2)],
)
def test_a_model_of_the_pair_is_loaded_by_its_name(
    name: str, architecture: str, maps: int, pair: Path, tiny_llama: Any, tiny_diffllama: Any
) -> None:
    loaded = load(name)
    info = loaded.info()

    assert (info.name, info.source, info.architecture, info.maps) == (
        name, name, architecture, maps,
    )  # fmt: skip
    assert info.sha256 == sha256_of(pair / name / "model.safetensors")
    assert info.dtype == "float32" and loaded.warnings == ()
    assert loaded.tokenizer is not None and loaded.folder == pair / name
    stored = (tiny_llama if name == "baseline" else tiny_diffllama).state_dict()
    for key, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, stored[key].float()), key


def test_a_folder_of_that_name_is_taken_first(pair: Path) -> None:
    (pair / "baseline").rename("diff")

    assert load("diff").info().architecture == "LlamaForCausalLM"


def test_a_broken_installation_is_one_line(pair: Path) -> None:
    (pair / "diff" / "model.safetensors").unlink()

    with pytest.raises(
        InputError, match=r"'diff' ships in quantkit.*Install quantkit again"
    ) as got:
        load("diff")
    assert "\n" not in str(got.value)


def test_an_unknown_name_suggests_the_pair_too(pair: Path) -> None:
    with pytest.raises(InputError, match=r"Did you mean 'baseline'.*diff.*smollm2"):
        load("baselin")


def test_results_are_of_the_pair_alone(pair: Path) -> None:
    folders = [pair / name for name in SHIPPED_PAIR]

    assert pair_results(folders) == (pair / "training.json",)
    assert pair_results(folders[:1]) == ()
    assert pair_results([pair / "diff", None]) == ()
    (pair / "sweep-seeds.json").write_text("{}")
    assert [path.name for path in pair_results(folders)] == ["training.json", "sweep-seeds.json"]


def test_the_pair_lies_in_the_package() -> None:
    assert (pair_folder() / "pair.toml").is_file()
