"""`data.yaml` as a source of images, letterboxed images, and images that cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, save_model
from PIL import Image

from quantkit.calib_sets import image_slice
from quantkit.calib_sets.dataset_yaml import dataset_images, is_dataset_yaml
from quantkit.calib_sets.images import UNREADABLE_SHARE
from quantkit.calib_sets.preprocessing import target_of
from quantkit.errors import InputError
from quantkit.onnx_runtime import GraphBatch, open_graph
from quantkit.pipelines.graph_inputs import GraphInput, _stand_in, graph_batch, inputs_of

SIDE = 32


def picture(seed: int, height: int = SIDE, width: int = SIDE) -> np.ndarray[Any, Any]:
    drawn = np.random.default_rng(seed).integers(0, 256, (height, width, 3))
    return drawn.astype(np.uint8)


def save(folder: Path, count: int, first: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        Image.fromarray(picture(first + index)).save(folder / f"{first + index:03}.png")


def pixels() -> GraphInput:
    return GraphInput(
        name="images", shape=(1, 3, SIDE, None), type="tensor(float)", letterbox=(640, SIDE)
    )


def fed(source: str, samples: int = 99) -> tuple[Any, list[GraphBatch]]:
    value = pixels()
    chosen = image_slice(source, _stand_in(Path("graph.onnx"), value), samples=samples)
    return chosen, [graph_batch(batch, (value,)) for batch in chosen.batches(1)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data set with three images to train and two to validate."""
    save(tmp_path / "images" / "train", 3)
    save(tmp_path / "images" / "val", 2, first=50)
    path = tmp_path / "data.yaml"
    path.write_text("path: .\ntrain: images/train\nval: images/val\ntest:\nnames: {0: a}\n")
    return path


def names(source: str) -> list[str]:
    return [path.name for path in dataset_images(source)]


def test_val_is_meant_unless_a_split_is_named(data: Path) -> None:
    assert names(str(data)) == names(f"{data}#val") == ["050.png", "051.png"]
    assert names(f"{data}#train") == ["000.png", "001.png", "002.png"]
    assert is_dataset_yaml("a.YML#x") and not is_dataset_yaml("a.txt#x.yaml")


def test_a_list_of_folders_and_lists(data: Path) -> None:
    (data.parent / "some.txt").write_text("./images/train/002.png\n\nimages/train/000.png\n")
    data.write_text("train: [some.txt, images/val, images/train/000.png]\n")
    assert names(f"{data}#train") == ["002.png", "000.png", "050.png", "051.png"]


def test_a_folder_above_that_is_beside(data: Path) -> None:
    """As data sets are written that are trained from a folder of their own."""
    data.write_text("val: ../images/val\n")
    assert names(str(data)) == ["050.png", "051.png"]


@pytest.mark.kind(8, "calib_sets")
@pytest.mark.parametrize(
    ("text", "split", "said"),
    [
        ("val: images/none\n", "", "names 'images/none', and there is no"),
        ("val: [images/val, 3]\n", "", "val: expected a folder"),
        ("train: images/train\n", "", "it names train"),
        ("- a\n", "", "expected the keys path, train and val, got list"),
        ("val: [a\n", "", "is no YAML"),
        ("val: !!python/object/apply:os.getcwd []\n", "", "is no YAML"),
        ("val: images/val\n", "#vall", "Did you mean"),
        ("val: list.txt\n", "", "list.txt, line 2: no image 'gone.png'"),
        ("val: empty\n", "", "holds no image"),
        ("val: empty.txt\n", "", "is empty"),
        ("val: a\0b\n", "", "is no YAML"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nval: [*b, *b]\n", "", "val: expected a folder"),
    ],
)
def test_what_is_no_data_set_is_one_line(data: Path, text: str, split: str, said: str) -> None:
    (data.parent / "list.txt").write_text("images/val/050.png\ngone.png\n")
    (data.parent / "empty.txt").write_text("\n")
    (data.parent / "empty").mkdir()
    data.write_text(text)
    with pytest.raises(InputError) as caught:
        dataset_images(f"{data}{split}")
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.kind(8, "calib_sets")
def test_no_such_file_and_a_large_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        dataset_images(str(tmp_path / "none.yaml"))
    large = tmp_path / "large.yaml"
    large.write_text("val: images\n#" + "x" * (1 << 20))
    with pytest.raises(InputError, match="more than 1 MiB"):
        dataset_images(str(large))


# Letterboxed images


@pytest.mark.parametrize(("height", "width"), [(16, 32), (32, 10), (32, 32), (31, 32)])
def test_what_fits_already_is_put_in_the_middle(tmp_path: Path, height: int, width: int) -> None:
    image = picture(1, height, width)
    Image.fromarray(image).save(tmp_path / "a.png")
    chosen, (batch,) = fed(str(tmp_path))
    top, left = (SIDE - height) // 2, (SIDE - width) // 2
    around = ((top, SIDE - height - top), (left, SIDE - width - left), (0, 0))
    expected = np.pad(image, around, constant_values=114).transpose(2, 0, 1) / 255
    assert np.abs(batch.feeds["images"][0] - expected).max() < 1e-6
    said = chosen.info(1).preprocessing
    assert said == (
        "letterboxed (bilinear, border of 114) to 32 x 32 pixels, mean 0, 0, 0, std 1, 1, 1"
    )


def bilinear(length: int, size: int) -> np.ndarray[Any, Any]:
    """The `[size, length]` matrix of an antialiased bilinear resize along one axis."""
    scale = max(length / size, 1)
    centres = (np.arange(size)[:, None] + 0.5) * length / size
    weights = np.maximum(0, 1 - np.abs((np.arange(length) + 0.5 - centres) / scale))
    return weights / weights.sum(1, keepdims=True)


@pytest.mark.parametrize(("height", "width"), [(48, 64), (100, 20), (8, 16), (31, 65)])
def test_a_letterboxed_image_against_numpy(tmp_path: Path, height: int, width: int) -> None:
    image = picture(2, height, width)
    Image.fromarray(image).save(tmp_path / "a.png")
    (batch,) = fed(str(tmp_path))[1]
    factor = min(SIDE / height, SIDE / width)
    rows, columns = round(height * factor), round(width * factor)
    across = np.floor(np.einsum("wx,yxc->ywc", bilinear(width, columns), image) + 0.5)
    down = np.floor(np.einsum("hy,ywc->hwc", bilinear(height, rows), across) + 0.5)
    canvas = np.full((SIDE, SIDE, 3), 114.0)
    top, left = (SIDE - rows) // 2, (SIDE - columns) // 2
    canvas[top : top + rows, left : left + columns] = down
    # pillow rounds its weights to 22 bits, so a tie may fall to the other side
    off = np.abs(batch.feeds["images"][0].transpose(1, 2, 0) * 255 - canvas)
    assert off.max() <= 1.001 and (off > 0.01).mean() < 0.05


DETECTOR = {"task": "detect", "stride": "32", "imgsz": "[48, 64]"}


@pytest.mark.parametrize(
    ("told", "size"),
    [
        (DETECTOR, (48, 64)),
        (DETECTOR | {"task": "pose", "imgsz": "96"}, (96, 96)),
        (DETECTOR | {"imgsz": "[48, -1]"}, (640, 640)),
        (DETECTOR | {"imgsz": "{"}, (640, 640)),
        (DETECTOR | {"task": "classify"}, None),
        ({"task": "detect"}, None),
        ({}, None),
    ],
)
def test_a_files_metadata_say_that_images_are_letterboxed(
    tmp_path: Path, told: dict[str, str], size: tuple[int, int] | None
) -> None:
    shape = ["batch", 3, "height", "width"]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(model, told)
    save_model(model, tmp_path / "graph.onnx")
    (found,) = inputs_of(open_graph(tmp_path / "graph.onnx"))
    assert found.letterbox == size
    target = target_of(_stand_in(tmp_path / "graph.onnx", found))
    assert (target.height, target.width) == (size or (224, 224))
    assert (target.fit, target.mean[0] > 0) == (("letterbox", False) if size else ("crop", True))


# Images that cannot be read


@pytest.mark.kind(8, "calib_sets")
def test_a_few_unreadable_images_are_named_and_left_out(tmp_path: Path) -> None:
    count = round(1 / UNREADABLE_SHARE)
    save(tmp_path, count)
    (tmp_path / "007.png").write_bytes(b"")
    chosen, batches = fed(str(tmp_path))
    assert chosen.sequences == count - 1 == len(batches)
    (warning,) = chosen.info(1).warnings
    assert f"1 of {count} images cannot be read" in warning and "007.png" in warning
    rest = tmp_path / "rest"
    save(rest, 7)
    save(rest, count - 8, first=8)
    assert fed(str(rest))[0].sha256 == chosen.sha256


@pytest.mark.kind(8, "calib_sets")
def test_more_unreadable_images_than_that_are_an_error(tmp_path: Path) -> None:
    save(tmp_path, 2 * round(1 / UNREADABLE_SHARE))
    for index in range(3):
        (tmp_path / f"{index:03}.png").write_bytes(b"not an image")
    with pytest.raises(InputError, match=r"3 of 40 images of .*, more than 5 %; .*000\.png") as err:
        fed(str(tmp_path))
    assert "\n" not in str(err.value)


def test_one_of_many_may_be_unreadable_wherever_it_is(tmp_path: Path) -> None:
    save(tmp_path, round(1 / UNREADABLE_SHARE))
    (tmp_path / "001.png").write_bytes(b"")
    assert fed(str(tmp_path), samples=2)[0].sequences == 1
    (tmp_path / "019.png").unlink()
    with pytest.raises(InputError, match=r"001\.png is empty"):
        fed(str(tmp_path), samples=2)


def test_those_behind_the_samples_are_not_looked_at(tmp_path: Path) -> None:
    save(tmp_path, 4)
    (tmp_path / "003.png").write_bytes(b"")
    assert fed(str(tmp_path), samples=3)[0].sequences == 3
