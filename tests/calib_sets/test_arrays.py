"""Arrays and images as samples: what is taken, what is refused, and what the numbers are."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    BertConfig,
    BertModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from quantkit.calib_sets import data_slice, default_source, require_disjoint
from quantkit.calib_sets.shapes import shape_image
from quantkit.errors import InputError
from quantkit.models import LoadedModel

SIZE = 16
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TEXT = {
    "vocab_size": 300,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}


def loaded(model: Any, tokenizer: Any = None, folder: Path | None = None) -> LoadedModel:
    return LoadedModel(
        name="tiny", source="tiny", model=model, tokenizer=tokenizer, sha256="0", folder=folder
    )


@pytest.fixture
def vit() -> LoadedModel:
    """Reads 3 x 16 x 16 images; its folder has no preprocessor_config.json."""
    return loaded(ViTModel(ViTConfig(**TEXT, image_size=SIZE, patch_size=8)).eval())


@pytest.fixture
def bert(tokenizer: Any) -> LoadedModel:
    return loaded(BertModel(BertConfig(**TEXT)).eval(), tokenizer)


@pytest.fixture
def whisper() -> LoadedModel:
    config = WhisperConfig(
        vocab_size=60, num_mel_bins=4, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
        decoder_ffn_dim=24, max_source_positions=8, max_target_positions=8, pad_token_id=50,
        bos_token_id=51, eos_token_id=51, decoder_start_token_id=52,
    )  # fmt: skip
    return loaded(WhisperForConditionalGeneration(config).eval())


def save(path: Path, **arrays: Any) -> str:
    np.savez(path, **arrays)
    return str(path)


def pixels(count: int = 3) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).normal(size=(count, 3, SIZE, SIZE)).astype(np.float32)


def normalised(image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What ImageNet's preprocessing makes of uint8 `[height, width, 3]`, in float64."""
    return ((image / 255.0 - np.array(MEAN)) / np.array(STD)).transpose(2, 0, 1)


def picture(height: int = SIZE, width: int = SIZE, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


# Arrays


def test_arrays_are_given_as_they_are(tmp_path: Path, vit: LoadedModel) -> None:
    values = pixels(5)

    chosen = data_slice(save(tmp_path / "a.npz", pixel_values=values), vit, samples=3, skip=1)

    batches = list(chosen.batches(2))
    assert [batch.first_sequence for batch in batches] == [0, 2]
    joined = torch.cat([batch.inputs["pixel_values"] for batch in batches])
    assert torch.equal(joined, torch.from_numpy(values[1:4]))
    assert all(batch.real is None for batch in batches)
    vit.model(**batches[0].inputs)
    info = chosen.info(2)
    assert (info.sequences, info.tokens, info.seq_len, info.skipped_blocks) == (3, 3, 0, 1)
    assert (info.modality, info.preprocessing) == ("image", "none: arrays as given")


def test_a_npy_file_is_the_main_input(tmp_path: Path, vit: LoadedModel) -> None:
    np.save(tmp_path / "a.npy", pixels())

    (batch,) = data_slice(str(tmp_path / "a.npy"), vit).batches(8)

    assert torch.equal(batch.inputs["pixel_values"], torch.from_numpy(pixels()))


def test_arrays_come_in_the_models_type(tmp_path: Path, vit: LoadedModel) -> None:
    source = save(tmp_path / "a.npz", pixel_values=pixels().astype(np.float64))
    wide = data_slice(source, vit)
    vit.model.to(torch.bfloat16)
    narrow = data_slice(source, vit)

    (batch,) = narrow.batches(8)
    assert batch.inputs["pixel_values"].dtype == torch.bfloat16
    assert narrow.sha256 == wide.sha256


def test_token_arrays_say_what_is_padding(tmp_path: Path, bert: LoadedModel) -> None:
    ids = np.array([[1, 2, 3, 0], [4, 5, 0, 0]])
    mask = (ids > 0).astype(np.int32)

    chosen = data_slice(save(tmp_path / "a.npz", input_ids=ids, attention_mask=mask), bert)

    (batch,) = chosen.batches(2)
    assert batch.real is not None
    assert batch.real.tolist() == (ids > 0).tolist()
    assert (chosen.tokens, chosen.info(2).seq_len) == (5, 4)
    bert.model(**batch.inputs)


def test_hashes_prove_samples_disjoint(tmp_path: Path, vit: LoadedModel) -> None:
    source = save(tmp_path / "a.npz", pixel_values=pixels(4))
    first, second = data_slice(source, vit, samples=2), data_slice(source, vit, samples=2, skip=2)
    across = data_slice(source, vit, samples=2, skip=1)

    require_disjoint(first, second, "calibration and evaluation")
    with pytest.raises(InputError, match="share 1 blocks"):
        require_disjoint(first, across, "calibration and evaluation")
    assert first.sha256 != across.sha256


def test_a_decoder_is_given_its_start_token(tmp_path: Path, whisper: LoadedModel) -> None:
    features = np.zeros((2, 4, 16), np.float32)

    chosen = data_slice(save(tmp_path / "a.npz", input_features=features), whisper)

    (batch,) = chosen.batches(2)
    assert batch.inputs["decoder_input_ids"].tolist() == [[52], [52]]
    assert "start token, 52" in chosen.info(2).preprocessing
    whisper.model.base_model(**batch.inputs)


def bad_arrays() -> dict[str, tuple[dict[str, Any], str]]:
    nan, inf = pixels(), pixels()
    nan[2, 0, 3, 4] = np.nan
    inf[0, 0, 0, 0] = np.inf
    return {
        "wrong name": ({"pixel_value": pixels()}, "'pixel_value' .*Did you mean 'pixel_values'"),
        "no main input": ({"bool_masked_pos": np.ones((3, 4), bool)}, "main input .*'pixel_values"),
        "nan": ({"pixel_values": nan}, "pixel_values of sample 2 holds 1 NaN"),
        "inf": ({"pixel_values": inf}, "pixel_values of sample 0 holds 1 NaN or inf"),
        "overflow": ({"pixel_values": np.full((1, 3, SIZE, SIZE), 1e300)}, "NaN or inf"),
        "first axes": (
            {"pixel_values": pixels(3), "bool_masked_pos": np.ones((2, 4), bool)},
            "pixel_values has 3, bool_masked_pos has 2",
        ),
        "whole numbers": ({"pixel_values": np.zeros((2, 3, SIZE, SIZE), np.uint8)}, "normalised"),
        "channels last": ({"pixel_values": np.zeros((2, SIZE, SIZE, 3))}, "they stand last here"),
        "words": ({"pixel_values": np.array(["a", "b"])}, "expected numbers"),
        "objects": ({"pixel_values": np.array([{}, 1], dtype=object)}, "cannot be read"),
        "no samples": ({"pixel_values": pixels(0)}, "holds 0 samples"),
        "a scalar": ({"pixel_values": np.float32(3)}, "holds 0 samples"),
    }  # fmt: skip


@pytest.mark.parametrize("case", bad_arrays().values(), ids=bad_arrays().keys())
def test_bad_arrays(tmp_path: Path, vit: LoadedModel, case: tuple[dict[str, Any], str]) -> None:
    arrays, said = case

    with pytest.raises(InputError, match=said) as caught:
        data_slice(save(tmp_path / "a.npz", **arrays), vit)

    assert "\n" not in str(caught.value)


@pytest.mark.kind(8, "calib_sets")
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 broken", b"hello", b"\x93NUMPY\x01\x00"])
@pytest.mark.parametrize("suffix", [".npz", ".npy"])
def test_a_broken_array_file(tmp_path: Path, vit: LoadedModel, content: bytes, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)

    with pytest.raises(InputError, match=r"a\.np. cannot be read"):
        data_slice(str(path), vit)


def test_tokens_outside_the_vocabulary(tmp_path: Path, bert: LoadedModel) -> None:
    with pytest.raises(InputError, match=r"tokens from 0 to 300; expected 0 to 299"):
        data_slice(save(tmp_path / "a.npz", input_ids=np.array([[0, 300]])), bert)


def test_audio_with_padding_is_refused(tmp_path: Path, whisper: LoadedModel) -> None:
    source = save(
        tmp_path / "a.npz",
        input_features=np.zeros((2, 4, 16), np.float32),
        attention_mask=np.array([[1] * 16, [1] * 8 + [0] * 8]),
    )

    with pytest.raises(InputError, match="one length"):
        data_slice(source, whisper)


# Images


def test_an_image_against_numpy(tmp_path: Path, vit: LoadedModel) -> None:
    Image.fromarray(picture()).save(tmp_path / "a.png")

    chosen = data_slice(str(tmp_path), vit)

    (batch,) = chosen.batches(4)
    found = batch.inputs["pixel_values"][0].numpy()
    assert np.abs(found - normalised(picture())).max() < 1e-6
    assert "0.485" in chosen.info(4).preprocessing
    assert f"{SIZE} x {SIZE}" in chosen.info(4).preprocessing


def test_the_centre_is_cropped(tmp_path: Path, vit: LoadedModel) -> None:
    wide = picture(SIZE, SIZE + 10)
    Image.fromarray(wide).save(tmp_path / "a.bmp")

    (batch,) = data_slice(str(tmp_path / "a.bmp"), vit).batches(1)

    expected = normalised(wide[:, 5 : 5 + SIZE])
    assert np.abs(batch.inputs["pixel_values"][0].numpy() - expected).max() < 1e-6


def bicubic(length: int, size: int) -> np.ndarray[Any, Any]:
    """The `[size, length]` matrix of an antialiased bicubic resize along one axis (a = -0.5)."""
    scale = length / size
    centres = (np.arange(size)[:, None] + 0.5) * scale
    x = np.abs((np.arange(length) + 0.5 - centres) / max(scale, 1))
    near, far = 1.5 * x**3 - 2.5 * x**2 + 1, -0.5 * (x**3 - 5 * x**2 + 8 * x - 4)
    weights = np.where(x < 1, near, np.where(x < 2, far, 0))
    weights /= weights.sum(1, keepdims=True)
    return weights


@pytest.mark.parametrize("side", [64, 40, 10])
def test_an_image_is_resized(tmp_path: Path, vit: LoadedModel, side: int) -> None:
    image = picture(side, side)
    Image.fromarray(image).save(tmp_path / "a.png")

    (batch,) = data_slice(str(tmp_path), vit).batches(1)

    matrix = bicubic(side, SIZE)
    across = np.rint(np.einsum("wx,yxc->ywc", matrix, image)).clip(0, 255)
    expected = np.rint(np.einsum("hy,ywc->hwc", matrix, across)).clip(0, 255)
    difference = np.abs(batch.inputs["pixel_values"][0].numpy() - normalised(expected)).max()
    assert difference <= 1.01 / 255 / min(STD), difference  # one step of rounding


def test_the_models_own_preprocessing(tmp_path: Path, vit: LoadedModel) -> None:
    settings = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": SIZE, "width": SIZE},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.2, 0.25, 0.5],
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    (tmp_path / "images").mkdir()
    Image.fromarray(picture()).save(tmp_path / "images" / "a.png")
    own = loaded(vit.model, folder=tmp_path)

    files, computed = data_slice(str(tmp_path / "images"), own), data_slice("shapes", own)

    expected = (picture() / 255.0 - [0.5, 0.4, 0.3]) / [0.2, 0.25, 0.5]
    (batch,) = files.batches(1)
    found = batch.inputs["pixel_values"][0].numpy()
    assert np.abs(found - expected.transpose(2, 0, 1)).max() < 1e-6
    assert "ViTImageProcessor" in files.info(1).preprocessing
    assert "mean 0.5, 0.4, 0.3" in computed.info(1).preprocessing


@pytest.mark.parametrize(
    ("mode", "value", "expected"),
    [
        ("L", 200, (200, 200, 200)),
        ("LA", (200, 0), (255, 255, 255)),
        ("RGBA", (10, 20, 30, 255), (10, 20, 30)),
        ("RGBA", (10, 20, 30, 0), (255, 255, 255)),
        ("I;16", 200 * 256, (200, 200, 200)),
        ("1", 1, (255, 255, 255)),
    ],
)
def test_modes_of_images(
    tmp_path: Path, vit: LoadedModel, mode: str, value: Any, expected: tuple[int, int, int]
) -> None:
    Image.new(mode, (SIZE, SIZE), value).save(tmp_path / "a.png")

    (batch,) = data_slice(str(tmp_path), vit).batches(1)

    flat = np.broadcast_to(np.array(expected, np.uint8), (SIZE, SIZE, 3))
    assert np.abs(batch.inputs["pixel_values"][0].numpy() - normalised(flat)).max() < 1e-6


def test_an_image_is_turned_upright(tmp_path: Path, vit: LoadedModel) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    Image.fromarray(picture()).save(tmp_path / "a.png", exif=exif)

    (batch,) = data_slice(str(tmp_path), vit).batches(1)

    upright = np.rot90(picture(), -1)
    assert np.abs(batch.inputs["pixel_values"][0].numpy() - normalised(upright)).max() < 1e-6


def test_images_are_taken_in_the_order_of_their_paths(tmp_path: Path, vit: LoadedModel) -> None:
    for seed, name in enumerate(("b/1.PNG", "a/2.webp", "a/1.png", "c.png")):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(picture(seed=seed)).save(path, lossless=True)
    (tmp_path / ".hidden.png").write_bytes(b"not an image")
    (tmp_path / "notes.md").write_text("not an image")

    (batch,) = data_slice(str(tmp_path), vit, samples=2, skip=1).batches(4)

    expected = np.stack([normalised(picture(seed=seed)) for seed in (1, 0)])
    assert np.abs(batch.inputs["pixel_values"].numpy() - expected).max() < 1e-6


def truncated() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture(64, 64)).save(buffer, "JPEG")
    return buffer.getvalue()[:-400]


@pytest.mark.parametrize("content", [b"", b"not an image", truncated()], ids=["0", "text", "cut"])
def test_an_image_that_cannot_be_read_is_named(
    tmp_path: Path, vit: LoadedModel, content: bytes
) -> None:
    Image.fromarray(picture()).save(tmp_path / "a.png")
    (tmp_path / "broken.jpg").write_bytes(content)

    with pytest.raises(InputError, match=r"broken\.jpg") as caught:
        data_slice(str(tmp_path), vit)

    assert "\n" not in str(caught.value)


def test_an_empty_folder(tmp_path: Path, vit: LoadedModel) -> None:
    with pytest.raises(InputError, match=r"holds no image.*\.png"):
        data_slice(str(tmp_path), vit)


def test_images_without_pillow(
    tmp_path: Path, vit: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.fromarray(picture()).save(tmp_path / "a.png")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)

    with pytest.raises(InputError, match="pip install pillow"):
        data_slice(str(tmp_path), vit)


# Computed images


def test_shapes_are_a_function_of_index_and_size(vit: LoadedModel) -> None:
    first, second = data_slice("shapes", vit, samples=4), data_slice("shapes", vit, samples=6)

    assert first.block_hashes == second.block_hashes[:4]
    assert len(set(second.block_hashes)) == 6
    assert data_slice("shapes", vit, samples=2, skip=3).block_hashes == second.block_hashes[3:5]
    (batch,) = first.batches(8)
    expected = np.stack([normalised(shape_image(i, SIZE, SIZE)) for i in range(4)])
    assert np.abs(batch.inputs["pixel_values"].numpy() - expected).max() < 1e-6
    vit.model(**batch.inputs)


def test_shapes_are_pictures_of_several_kinds() -> None:
    images = [shape_image(index, 48, 64) for index in range(12)]

    assert all(image.shape == (48, 64, 3) and image.dtype == np.uint8 for image in images)
    assert all(image.std() > 2 for image in images)
    steps = [np.abs(np.diff(image.astype(int), axis=1)).mean() for image in images]
    assert max(steps[2::4]) < 5 < min(steps[3::4])  # gradients are smooth, noise is not


# Which kind of data


@pytest.mark.parametrize(
    ("reads", "source", "said"),
    [
        ("vit", "pydoc", "holds text, and tiny .ViTModel. reads images"),
        ("bert", "shapes", "holds images, and tiny .BertModel. reads text"),
        ("whisper", "pydoc", "reads audio: expected the model's input as .npz"),
        ("vit", "shape", "Did you mean 'shapes'"),
        ("bert", "pydocs", "Did you mean 'pydoc'"),
        ("whisper", None, "no data ships"),
    ],
)
def test_the_wrong_kind_of_data(
    request: pytest.FixtureRequest, reads: str, source: str | None, said: str
) -> None:
    with pytest.raises(InputError, match=said) as caught:
        data_slice(source, request.getfixturevalue(reads))

    assert "\n" not in str(caught.value)


def test_a_folder_with_both_is_what_the_model_reads(
    tmp_path: Path, vit: LoadedModel, bert: LoadedModel
) -> None:
    Image.fromarray(picture()).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("some text")

    assert data_slice(str(tmp_path), vit).info(1).modality == "image"
    assert data_slice(str(tmp_path), bert, seq_len=8).info(1).modality == "text"


def test_default_sources(vit: LoadedModel, bert: LoadedModel) -> None:
    assert (default_source(vit), default_source(bert)) == ("shapes", "pydoc")


# Text of encoders


def test_blocks_longer_than_the_models_positions(bert: LoadedModel) -> None:
    with pytest.raises(InputError, match="has 32 positions, blocks have 33 tokens"):
        data_slice("pydoc", bert, seq_len=33, samples=1)


def test_a_decoder_reads_the_block_shifted(tmp_path: Path, tokenizer: Any) -> None:
    config = T5Config(
        vocab_size=300, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2,
        decoder_start_token_id=7,
    )  # fmt: skip
    model = loaded(T5ForConditionalGeneration(config).eval(), tokenizer)
    rows = [{"text": "abc"}, {"text": "abcde"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))

    (batch,) = data_slice(str(tmp_path / "a.jsonl"), model, seq_len=8).batches(2)

    ids, shifted = batch.inputs["input_ids"], batch.inputs["decoder_input_ids"]
    assert shifted[:, 0].tolist() == [7, 7]
    assert torch.equal(shifted[:, 1:], ids[:, :-1])
    assert batch.real is not None
    assert batch.real.sum(1).tolist() == [3, 5]
    assert torch.equal(batch.inputs["decoder_attention_mask"].bool(), batch.real)
    model.model(**batch.inputs)


def test_an_encoder_decoder_without_a_start_token(tokenizer: Any) -> None:
    config = T5Config(vocab_size=300, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)

    with pytest.raises(InputError, match="decoder_start_token_id"):
        data_slice("pydoc", loaded(T5ForConditionalGeneration(config), tokenizer), seq_len=8)
