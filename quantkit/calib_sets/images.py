"""Image files, and the computed `shapes`, as samples of a vision model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from quantkit.calib_sets.arrays import ArraySlice, slice_of
from quantkit.calib_sets.check import image_set
from quantkit.calib_sets.find import find_set
from quantkit.calib_sets.image_files import (
    IMAGE_SUFFIXES,
    image_files,
    open_image,
    require_pillow,
)
from quantkit.calib_sets.preprocessing import Target, preprocessing_of, target_of
from quantkit.calib_sets.shapes import shape_image
from quantkit.errors import InputError
from quantkit.models import LoadedModel

SHAPES: Final = "shapes"


def image_slice(source: str, loaded: LoadedModel, *, samples: int, skip: int = 0) -> ArraySlice:
    """Returns up to `samples` images after the first `skip`, as the model's input.

    Args:
        source: A named set, an image file, or a folder whose images (also in its folders) are
            taken in the order of their paths.

    Raises:
        InputError: no image after `skip`, one that cannot be read (by name), pillow is missing, or
            a model that does not read such images.
    """
    found = find_set(source)
    files, named = (None, None) if found is None else image_set(found, skip, samples)
    if found is not None and files is None:
        target = target_of(loaded)
        computed = _ShapeRows(target=target, name=loaded.input_name, skip=skip, count=samples)
        words = f"computed at {target}"
        return slice_of(
            computed, loaded, source=source, skip=skip, preprocessing=words, named=named
        )
    if files is None:
        files = image_files(Path(source).expanduser())
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
    require_pillow()
    process, words = preprocessing_of(loaded)
    rows = FileRows(files=chosen, process=process)
    return slice_of(rows, loaded, source=source, skip=skip, preprocessing=words, named=named)


@dataclass(frozen=True, kw_only=True, eq=False)
class FileRows:
    """Image files as a model's inputs, each read when it is asked for.

    A file that is written to in between is refused: the slice's hash would be of another image.
    """

    files: list[Path]
    process: Callable[[Any], dict[str, Tensor]]
    _stamps: dict[Path, tuple[int, int]] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        path = self.files[index]
        stamp = self._stamps.setdefault(path, _stamp(path))
        image = open_image(path)
        if _stamp(path) != stamp:
            raise InputError(f"image {path} changed while it was in use: run again.")
        return self.process(image)


def _stamp(path: Path) -> tuple[int, int]:
    """Returns size and time of the last write; zeros where there is no file."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


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
