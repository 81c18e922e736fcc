"""Image classification: classes by name, top-1 by hand, and a real backbone with a made head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    Dinov2ForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

from quantkit.calib_sets.shapes import KINDS, shape_image
from quantkit.errors import InputError
from quantkit.jobs.tasks import ImageClassificationSpec
from quantkit.models import LoadedModel, load
from quantkit.models.dinov2_onnx import PREPROCESSING
from quantkit.tasks.image_classification import ImageClassification, class_index
from quantkit.tasks.task import Rows

NAMES = ["tench, Tinca tinca", "great white shark", "crane", "Crane", "cock", "hen", "robin",
         "jay", "magpie", "kite", "bald eagle, eagle"]  # fmt: skip
SIZE = 16


def _vit(classes: list[str]) -> LoadedModel:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        image_size=SIZE, patch_size=8, id2label=dict(enumerate(classes)),
        label2id={name: index for index, name in enumerate(classes)},
    )  # fmt: skip
    model = ViTForImageClassification(config).eval()
    with torch.no_grad():
        model.classifier.weight.mul_(50)
    return LoadedModel(name="vit", source="vit", model=model, tokenizer=None, sha256="")


def _forward(loaded: LoadedModel) -> Any:
    def forward(images: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = loaded.model(pixel_values=images).logits
        return found

    return forward


def _write(root: Path, folder: str, count: int, *, seed: int = 0, size: int = SIZE) -> None:
    random = np.random.default_rng([seed, *folder.encode()])
    (root / folder).mkdir(parents=True, exist_ok=True)
    for index in range(count):
        pixels = random.integers(0, 256, (size, size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / folder / f"{index}.png")


def _task(root: Path, loaded: LoadedModel, **options: Any) -> ImageClassification:
    spec = ImageClassificationSpec(source=str(root))
    return ImageClassification.of(spec, loaded, **{"images": 1000} | options)


def _rows(task: ImageClassification, forward: Any) -> Rows:
    rows = np.full((len(task.labels), 1 + (task.classes > 10)), np.nan)
    for items in task.batches:
        rows[list(items)] = task.run(forward, items)
    return rows


def test_top1_and_top5_are_those_counted_by_hand(tmp_path: Path) -> None:
    loaded = _vit(NAMES)
    for folder in ("tench", "great_white-shark", "HEN", "10"):
        _write(tmp_path, folder, 6)
    task = _task(tmp_path, loaded, batch_size=5)
    one, five = [], []
    for folder, label in (("10", 10), ("HEN", 5), ("great_white-shark", 1), ("tench", 0)):
        for index in range(6):
            pixels = np.asarray(Image.open(tmp_path / folder / f"{index}.png")) / 255
            wanted = (pixels - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
            image = torch.tensor(wanted.transpose(2, 0, 1)[None]).float()
            order = _forward(loaded)(image)[0].argsort(descending=True).tolist()
            one.append(order[0] == label)
            five.append(label in order[:5])
    rows = _rows(task, _forward(loaded))
    np.testing.assert_array_equal(rows, np.stack([one, five], 1))
    assert 0 < sum(five) < 24
    first, second = task.scores(rows).metrics
    assert (first.name, first.value, first.chance) == ("top1", np.mean(one), 1 / 11)
    assert (second.name, second.value, second.chance) == ("top5", np.mean(five), 5 / 11)
    assert first.trials and second.trials and first.is_share and second.is_share
    assert [len(batch) for batch in task.batches] == [5, 5, 5, 5, 4] == list(task.tokens)


def test_few_classes_have_no_top5(tmp_path: Path) -> None:
    _write(tmp_path, "b", 2)
    task = _task(tmp_path, _vit(["a", "b"]))
    metrics = task.scores(_rows(task, _forward(_vit(["a", "b"])))).metrics
    assert [metric.name for metric in metrics] == ["top1"]


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ("1 1", 0),
        ("0 1", 0),
        ("1 0.5", 1),
        ("1 -inf", 1),
        ("-inf 1", 0),
        ("nan nan", np.nan),
        ("1 nan", np.nan),
        ("nan 1", np.nan),
    ],
)
def test_a_tie_is_no_hit_and_nan_is_neither(logits: str, expected: float, tmp_path: Path) -> None:
    _write(tmp_path, "a", 2)
    task = _task(tmp_path, _vit(["a", "b"]))
    row = [float(word) for word in logits.split()]
    rows = _rows(task, lambda x: torch.tensor([row] * len(x)))
    np.testing.assert_array_equal(rows, [[expected]] * 2)


def test_one_image_with_nan_spoils_no_other(tmp_path: Path) -> None:
    _write(tmp_path, "tench", 2)
    task = _task(tmp_path, _vit(NAMES))
    logits = torch.arange(len(NAMES)).flip(0).repeat(2, 1).float()
    logits[1, 9] = float("nan")
    np.testing.assert_array_equal(_rows(task, lambda x: logits), [[1, 1], [np.nan, np.nan]])


@pytest.mark.parametrize(
    ("folder", "index"),
    [
        ("tench", 0),
        ("TINCA_tinca", 0),
        ("tench, tinca tinca", 0),
        ("great-white  shark", 1),
        ("eagle", 10),
        ("4", 4),
        ("07", 7),
    ],
)
def test_a_folder_means_a_name_a_synonym_or_an_index(folder: str, index: int) -> None:
    assert class_index(folder, NAMES, "vit") == index


def test_a_name_that_is_a_number_comes_before_an_index() -> None:
    assert class_index("1", ["1", "0"], "digits") == 0


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("tensh", r"'tensh' is no class of vit, and no index below 11\. Did you mean 'tench'\?"),
        ("11", "'11' is no class of vit"),
        ("crane", "vit has 2 classes of that name: name the folder by an index, 2 or 3"),
    ],
    ids=["misspelt", "index too large", "two of a name"],
)
def test_a_folder_that_means_no_class_is_refused(folder: str, said: str, tmp_path: Path) -> None:
    _write(tmp_path, folder, 1)
    with pytest.raises(InputError, match=said):
        _task(tmp_path, _vit(NAMES))


def test_a_corrupt_image_is_named(tmp_path: Path) -> None:
    _write(tmp_path, "hen", 2)
    (tmp_path / "hen" / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    with pytest.raises(InputError, match=r"hen/1\.png cannot be read"):
        _task(tmp_path, _vit(NAMES))


def test_a_folder_without_images_or_without_classes_is_refused(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none"):
        with pytest.raises(InputError, match="holds no image: expected a folder with a folder for"):
            _task(place, _vit(NAMES))
    _write(tmp_path, ".", 1)
    with pytest.raises(InputError, match=r"lies in no class's folder: expected .*/CLASS/0\.png"):
        _task(tmp_path, _vit(NAMES))


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, "hen", 1)
    model = ViTModel(_vit(NAMES).model.config).eval()
    loaded = LoadedModel(name="body", source="", model=model, tokenizer=None, sha256="")
    with pytest.raises(InputError, match="body is a ViTModel: expected an image classifier"):
        _task(tmp_path, loaded)


def test_images_are_drawn_from_all_classes_and_hashed(tmp_path: Path) -> None:
    for folder in ("cock", "hen", "jay"):
        _write(tmp_path, folder, 10)
    one, same, other = (_task(tmp_path, _vit(NAMES), images=12, seed=seed) for seed in (0, 0, 1))
    assert one.item_hashes == same.item_hashes and len(set(one.item_hashes)) == 12
    assert set(one.labels) == {4, 5, 7} and list(one.labels) == sorted(one.labels)
    assert set(one.item_hashes) != set(other.item_hashes)
    every = _task(tmp_path, _vit(NAMES))
    assert set(one.item_hashes) < set(every.item_hashes)
    assert (one.data.sequences, one.data.modality) == (12, "image")
    (tmp_path / "hen").rename(tmp_path / "robin")
    moved = _task(tmp_path, _vit(NAMES))
    assert len(set(moved.item_hashes) & set(every.item_hashes)) == 20  # another answer


@pytest.fixture(scope="module")
def kinds_classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DINOv2-small, its head the class means of the features of three drawings of each kind."""
    body: Any = load("dinov2-small")
    config = body.model.config
    config.id2label = dict(enumerate(KINDS))
    config.label2id = {name: index for index, name in enumerate(KINDS)}
    model = Dinov2ForImageClassification(config).eval()
    model.dinov2.load_state_dict(body.model.state_dict())
    images = torch.stack([_prepared(index) for index in range(3 * len(KINDS))])
    with torch.no_grad():
        tokens = model.dinov2(images).last_hidden_state
        features = torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], 1)
        means = features.view(3, len(KINDS), -1).mean(0)
        # nearest mean: |x - m|^2 is smallest where x m - |m|^2 / 2 is largest
        model.classifier.weight.copy_(means)
        model.classifier.bias.copy_(-means.square().sum(1) / 2)
    folder = tmp_path_factory.mktemp("kinds")
    model.save_pretrained(folder)

    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSING), encoding="utf-8")
    return folder


def _prepared(index: int) -> Tensor:
    pixels = shape_image(index, 224, 224) / 255
    wanted = (pixels - PREPROCESSING["image_mean"]) / PREPROCESSING["image_std"]
    return torch.tensor(wanted.transpose(2, 0, 1)).float()


def test_a_real_backbone_tells_drawings_apart(kinds_classifier: Path, tmp_path: Path) -> None:
    for index in range(40, 60):  # others than the head was made of
        place = tmp_path / KINDS[index % len(KINDS)]
        place.mkdir(exist_ok=True)
        Image.fromarray(shape_image(index, 256, 256)).save(place / f"{index}.png")
    loaded = load(str(kinds_classifier))
    task = _task(tmp_path, loaded)
    metric = task.scores(_rows(task, _forward(loaded))).metrics[0]
    assert metric.chance == 1 / 4
    assert metric.value >= 0.75
    assert "preprocessor_config.json" in task.data.preprocessing
