"""Image files, and the computed `shapes`, as samples of a vision model."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch import Tensor

from quantkit.calib_sets.arrays import ArraySlice, slice_of
from quantkit.calib_sets.preprocessing import Target, preprocessing_of, target_of
from quantkit.calib_sets.shapes import shape_image
from quantkit.errors import InputError
from quantkit.models import LoadedModel

SHAPES: Final = "shapes"
IMAGE_SUFFIXES: Final = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_PILLOW: Final = "images are read with the package pillow, which is missing: pip install pillow"


def image_slice(source: str, loaded: LoadedModel, *, samples: int, skip: int = 0) -> ArraySlice:
    """Returns up to `samples` images after the first `skip`, as the model's input.

    Args:
        source: `shapes`, an image file, or a folder whose images (also in its folders) are taken
            in the order of their paths.

    Raises:
        InputError: no image after `skip`, one that cannot be read (by name), pillow is missing, or
            a model that does not read such images.
    """
    path = Path(source).expanduser()
    if source == SHAPES and not path.exists():
        target = target_of(loaded)
        computed = _ShapeRows(target=target, name=loaded.input_name, skip=skip, count=samples)
        words = f"computed at {target}"
        return slice_of(computed, loaded, source=source, skip=skip, preprocessing=words)
    files = image_files(path)
    if not files:
        raise InputError(
            f"{source} holds no image: expected {', '.join(IMAGE_SUFFIXES)}, in it or its folders."
        )
    chosen = files[skip : skip + samples]
    if not chosen:
        raise InputError(
            f"{source} holds {len(files)} images: expected at least one after {skip} that are used "
            "elsewhere."
        )
    if importlib.util.find_spec("PIL") is None:
        raise InputError(f"{_PILLOW}.")
    process, words = preprocessing_of(loaded)
    rows = _FileRows(files=chosen, process=process)
    return slice_of(rows, loaded, source=source, skip=skip, preprocessing=words)


def image_files(path: Path) -> list[Path]:
    """Returns the image files at a path, in the order of their paths; hidden ones are left out."""
    if path.is_file():
        return [path] if path.suffix.lower() in IMAGE_SUFFIXES else []
    found = [
        (file.relative_to(path).as_posix(), file)
        for file in path.rglob("*")
        if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file()
    ]
    return [file for name, file in sorted(found) if not name.split("/")[-1].startswith(".")]


def open_image(path: Path) -> Any:
    """Returns a PIL image in RGB, upright.

    Turned as its EXIF orientation says; grey values are repeated; 16 bits a channel become 8; what
    is transparent lies on white.

    Raises:
        InputError: not an image that pillow can read to its end.
    """
    from PIL import Image, ImageOps

    if path.stat().st_size == 0:
        raise InputError(f"image {path} is empty (0 bytes); expected an image file.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about metadata; what cannot be read raises
            with Image.open(path) as file:
                file.load()
                image = ImageOps.exif_transpose(file)
            if image.mode.startswith("I"):  # 16 bits; convert() would clip them at 255
                wide = np.asarray(image).astype(np.int64)
                image = Image.fromarray((wide >> 8).clip(0, 255).astype(np.uint8))
            if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
                image = image.convert("RGBA")
                white = Image.new("RGBA", image.size, "white")
                image = Image.alpha_composite(white, image)
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"image {path} cannot be read: {first}") from error


@dataclass(frozen=True, kw_only=True, eq=False)
class _FileRows:
    files: list[Path]
    process: Callable[[Any], dict[str, Tensor]]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.process(open_image(self.files[index]))


@dataclass(frozen=True, kw_only=True, eq=False)
class _ShapeRows:
    target: Target
    name: str
    skip: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        pixels = shape_image(self.skip + index, self.target.height, self.target.width)
        return {self.name: self.target.normalised(pixels)}
