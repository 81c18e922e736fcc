"""Named sets: where they are found, what is made of them, and what a result says about them."""

from __future__ import annotations

import dataclasses
import hashlib
import platform
import shutil
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ViTConfig, ViTModel

from quantkit.calib_sets import data_slice, text_slice, verify_sets
from quantkit.calib_sets.check import verified
from quantkit.calib_sets.find import all_sets, find_set, named_set, set_names, shipped_folder
from quantkit.calib_sets.make import SetRequest, make_set
from quantkit.calib_sets.manifest import manifest_text, read_manifest
from quantkit.calib_sets.retrieval import retrieval_sample
from quantkit.errors import InputError
from quantkit.models import LoadedModel

PYDOC = "\n\n".join(topics.topics[key] for key in sorted(topics.topics))
SHIPPED = ["docstrings", "pydoc", "retrieval", "shapes", "stdlib-source"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def vit() -> LoadedModel:
    """Reads 3 x 16 x 16 images."""
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        image_size=16, patch_size=8,
    )  # fmt: skip
    return LoadedModel(
        name="tiny", source="tiny", model=ViTModel(config).eval(), tokenizer=None, sha256="0"
    )


def changed(name: str, **changes: Any) -> None:
    """Puts a shipped set with a changed manifest into the working directory."""
    shutil.copytree(shipped_folder() / name, Path("calib") / name)
    path = Path("calib") / name / "manifest.toml"
    path.write_text(manifest_text(dataclasses.replace(read_manifest(path), **changes)))


def test_the_shipped_sets_are_found_from_anywhere() -> None:
    assert [found.name for found in all_sets()] == SHIPPED
    assert {found.where for found in all_sets()} == {"shipped"}
    assert set_names("images") == ["shapes"]
    assert set_names() == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_set_is_what_its_manifest_says(name: str) -> None:
    found = named_set(name)

    content, info = verified(found)

    assert found.manifest.description and found.manifest.licence
    assert info.sha256 == content.sha256
    if platform.python_version() in found.manifest.python or not found.manifest.python:
        assert info.warnings == ()


def test_pydoc_is_known_by_the_hash_of_its_text() -> None:
    content, info = verified(named_set("pydoc"))

    assert content.documents == (PYDOC,)
    assert info.sha256 == hashlib.sha256(PYDOC.encode()).hexdigest()
    assert read_manifest(shipped_folder() / "pydoc/manifest.toml").python["3.11.7"] == (
        "71f2ff5d99bdc1f9c48c5c2353ad138201c5ca1c377e0226857ef8fa89b8bcee"
    )


def test_a_result_says_which_set_it_was(tokenizer: Any) -> None:
    info = text_slice("pydoc", tokenizer, seq_len=64, samples=2).info(2)

    assert (info.source, info.named_set, info.licence) == ("pydoc", "pydoc", "PSF-2.0")
    assert info.set_sha256 == hashlib.sha256(PYDOC.encode()).hexdigest()
    Path("a.txt").write_text("some text of a file")
    plain = text_slice("a.txt", tokenizer, seq_len=4).info(2)
    assert (plain.named_set, plain.set_sha256, plain.licence, plain.warnings) == ("", "", "", [])


def test_another_version_of_python_is_said_and_no_error(tokenizer: Any) -> None:
    changed("pydoc", python={"3.99.0": "0" * 64}, sha256="0" * 64)

    info = text_slice("pydoc", tokenizer, seq_len=64, samples=2).info(2)

    (warning,) = info.warnings
    assert "content of another version of Python" in warning
    assert "known: 3.99.0" in warning
    assert info.set_sha256 == hashlib.sha256(PYDOC.encode()).hexdigest()


@pytest.mark.kind(8, "calib_sets")
@pytest.mark.parametrize("others", [{}, {"3.99.0": hashlib.sha256(PYDOC.encode()).hexdigest()}])
def test_other_text_than_this_versions_own_is_said(others: dict[str, str]) -> None:
    """Also where it is another version's: the library that runs was changed."""
    version = platform.python_version()
    changed("pydoc", python={version: "0" * 64, **others})

    _, info = verified(named_set("pydoc"))

    (warning,) = info.warnings
    assert f"pydoc_data.topics: other text than {version} is known to carry (sha256 " in warning
    assert "expected 0000000000): the standard library was changed" in warning


def test_many_modules_are_named_by_the_first() -> None:
    changed("stdlib-source", python={platform.python_version(): "0" * 64})

    _, info = verified(named_set("stdlib-source"))

    assert "bisect, calendar, configparser and 16 more: other text" in info.warnings[0]


def test_a_hand_written_set_without_files_is_named(tokenizer: Any) -> None:
    Path("a.txt").write_text("abcdefgh")
    folder = make_set(SetRequest(name="mine", source="a.txt"))
    path = folder / "manifest.toml"
    path.write_text(path.read_text().partition("[files]")[0])

    with pytest.raises(InputError, match=r"mine/manifest\.toml: \[files\] is missing"):
        text_slice("mine", tokenizer, seq_len=4)
    with pytest.raises(InputError, match=r"\[files\] is missing"):
        named_set("mine")


def test_sets_are_verified_one_by_one_and_what_is_wrong_comes_last() -> None:
    for name in ("bad", "good", "worse"):
        Path(f"{name}.txt").write_text(name)
        make_set(SetRequest(name=name, source=f"{name}.txt"))
    Path("bad.txt").write_text("other")
    Path("calib/worse/manifest.toml").write_text("schema = ")

    several = verify_sets(["bad", "good"])
    found, info = next(several)

    assert (found.name, info.sha256) == ("good", hashlib.sha256(b"good").hexdigest())
    with pytest.raises(InputError, match=r"bad: \S*bad\.txt changed"):
        next(several)
    seen = []
    with pytest.raises(InputError, match=r"worse\S* is not TOML.*bad\.txt changed"):
        for found, _ in verify_sets():
            seen.append(found.name)
    assert seen == ["good", *SHIPPED]


@pytest.mark.kind(8, "calib_sets")
def test_a_generator_that_changed_is_an_error() -> None:
    changed("retrieval", sha256="1" * 64)

    with pytest.raises(InputError, match=r"retrieval.*other content.*expected 1111111111"):
        verified(named_set("retrieval"))


def test_computed_images_of_another_machine_are_said(vit: LoadedModel) -> None:
    changed("shapes", sha256="1" * 64)

    (warning,) = data_slice("shapes", vit, samples=2).info(2).warnings

    assert "computed otherwise here" in warning


def test_retrieval_is_one_sample_a_document(tokenizer: Any) -> None:
    chosen = text_slice("retrieval", tokenizer, seq_len=4096, samples=2, skip=3)

    expected = [
        retrieval_sample(index, needles=4, queries=2, sentences=19).text for index in (3, 4)
    ]
    assert [tokenizer.decode(row) for row in chosen.ids] == expected


def test_source_code_is_one_text(tokenizer: Any) -> None:
    import bisect

    chosen = text_slice("stdlib-source", tokenizer, seq_len=256, samples=4)

    text = "".join(tokenizer.decode(row) for row in chosen.ids)
    assert Path(bisect.__file__).read_text().startswith(text)


def test_a_set_of_the_working_directory_comes_first(tokenizer: Any) -> None:
    Path("a.txt").write_text("abcdefgh" * 8)
    make_set(SetRequest(name="pydoc", source="a.txt", force=True))

    assert ("pydoc", "calib/pydoc") in [(found.name, found.where) for found in all_sets()]
    assert len(all_sets()) == len(SHIPPED)
    assert tokenizer.decode(text_slice("pydoc", tokenizer, seq_len=8).ids[0]) == "abcdefgh"


def test_a_file_or_folder_of_that_name_comes_before_a_set(tokenizer: Any) -> None:
    Path("retrieval").write_text("abcdefgh")

    assert find_set("retrieval") is None
    assert text_slice("retrieval", tokenizer, seq_len=8).sequences == 1


def test_a_set_by_its_folder(tokenizer: Any) -> None:
    Path("a.txt").write_text("abcdefgh")
    make_set(SetRequest(name="mine", source="a.txt"))

    info = text_slice("./calib/mine", tokenizer, seq_len=8).info(1)

    assert (info.source, info.named_set) == ("./calib/mine", "mine")
    assert named_set("calib/mine").manifest == named_set("mine").manifest


@pytest.mark.parametrize("source", ["retrieva", "x" * 300, "a\0b"])
def test_a_name_that_is_nothing(source: str, tokenizer: Any) -> None:
    assert find_set(source) is None
    with pytest.raises(InputError, match=f"Available: {', '.join(SHIPPED)}"):
        named_set(source)


def test_unknown_names_suggest_sets_of_the_models_kind(vit: LoadedModel, tokenizer: Any) -> None:
    with pytest.raises(InputError, match=r"Did you mean 'shapes'\? Available: shapes\."):
        data_slice("shape", vit)
    with pytest.raises(InputError, match="Did you mean 'retrieval'"):
        text_slice("retrievel", tokenizer)


def test_a_folder_without_a_manifest_is_no_set() -> None:
    Path("calib/mine").mkdir(parents=True)

    with pytest.raises(InputError, match=r"calib/mine holds no manifest\.toml"):
        named_set("mine")


def test_the_wrong_kind_of_set(vit: LoadedModel, tokenizer: Any) -> None:
    with pytest.raises(InputError, match=r"'pydoc' holds text.*reads images"):
        data_slice("pydoc", vit)
    with pytest.raises(InputError, match="shapes holds images: expected text"):
        text_slice("shapes", tokenizer)


def test_a_broken_manifest_stops_the_run_and_is_left_out_of_suggestions(tokenizer: Any) -> None:
    Path("calib/mine").mkdir(parents=True)
    Path("calib/mine/manifest.toml").write_text("schema = ")

    with pytest.raises(InputError, match="is not TOML"):
        text_slice("mine", tokenizer)
    with pytest.raises(InputError, match="Available: docstrings, pydoc, retrieval, stdlib-source"):
        text_slice("min", tokenizer)


def test_a_set_of_images(vit: LoadedModel) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8)
    Path("photos").mkdir()
    for index, values in enumerate(pixels):
        Image.fromarray(values).save(f"photos/{index}.png")
    make_set(SetRequest(name="mine", source="photos", licence="CC0-1.0"))

    chosen = data_slice("mine", vit, samples=2, skip=1)

    plain = data_slice("photos", vit, samples=2, skip=1)
    assert chosen.block_hashes == plain.block_hashes
    info = chosen.info(2)
    assert (info.named_set, info.licence, info.modality) == ("mine", "CC0-1.0", "image")
    assert info.set_sha256 == named_set("mine").manifest.sha256
    # only what is used is hashed in a run
    Image.fromarray(pixels[0]).save("photos/2.png")
    assert data_slice("mine", vit, samples=2).sequences == 2
    with pytest.raises(InputError, match=r"mine: \S*photos/2\.png changed"):
        data_slice("mine", vit, samples=2, skip=1)


def test_a_set_of_arrays(vit: LoadedModel) -> None:
    values = np.random.default_rng(0).normal(size=(4, 3, 16, 16)).astype(np.float32)
    np.savez("a.npz", pixel_values=values)
    make_set(SetRequest(name="mine", source="a.npz", licence="mine alone"))

    chosen = data_slice("mine", vit, samples=2, skip=1)

    (batch,) = chosen.batches(2)
    assert torch.equal(batch.inputs["pixel_values"], torch.from_numpy(values[1:3]))
    assert (chosen.info(2).named_set, chosen.info(2).licence) == ("mine", "mine alone")
    np.savez("a.npz", pixel_values=values + 1)
    with pytest.raises(InputError, match=r"a\.npz changed"):
        data_slice("mine", vit)
