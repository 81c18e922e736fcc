"""Files of images: which there are at a path, and their pixels."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any, Final

import numpy as np

from quantkit.errors import InputError

IMAGE_SUFFIXES: Final = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


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


def require_pillow() -> None:
    """Raises InputError where images cannot be read."""
    if importlib.util.find_spec("PIL") is None:
        raise InputError(
            "images are read with the package pillow, which is missing: pip install pillow."
        )


def open_image(path: Path) -> Any:
    """Returns a PIL image in RGB, upright.

    Turned as its EXIF orientation says; grey values are repeated; 16 bits a channel become 8; what
    is transparent lies on white.

    Raises:
        InputError: not an image that pillow can read to its end.
    """
    from PIL import Image, ImageOps

    try:
        if path.stat().st_size == 0:
            raise InputError(f"image {path} is empty (0 bytes); expected an image file.")
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
