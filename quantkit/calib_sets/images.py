"""Image files, and the computed `shapes`, as samples of a vision model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from quantkit.calib_sets.arrays import ArraySlice, slice_of
from quantkit.calib_sets.check import image_set
from quantkit.calib_sets.dataset_yaml import dataset_images, is_dataset_yaml
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
UNREADABLE_SHARE: Final = 0.05
"""Of the images that were asked for, that may be unreadable: left out and named. One may be, where
that is so little of the source."""
_NAMED: Final = 3


def image_slice(source: str, loaded: LoadedModel, *, samples: int, skip: int = 0) -> ArraySlice:
    """Returns up to `samples` images after the first `skip`, as the model's input.

    Args:
        source: A named set, an image file, a folder whose images (also in its folders) are
            taken in the order of their paths, or an Ultralytics `data.yaml[#SPLIT]`.

    Images that cannot be read are left out and named in the slice's warnings, up to
    `UNREADABLE_SHARE` of those that were asked for. Each image is read twice here, once to see
    whether it can be, once for its hash.

    Raises:
        InputError: no image after `skip`, more that cannot be read (the first by name), one of a
            named set, pillow is missing, or a model that does not read such images.
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
        is_yaml = is_dataset_yaml(source)
        files = dataset_images(source) if is_yaml else image_files(Path(source).expanduser())
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
    asked = len(chosen)
    warnings = () if named is not None else _leave_out_unreadable(chosen, source, len(files))
    rows = FileRows(files=chosen, process=process)
    found_slice = slice_of(rows, loaded, source=source, skip=skip, preprocessing=words, named=named)
    return replace(found_slice, warnings=warnings, left_out=asked - len(chosen))


def _leave_out_unreadable(files: list[Path], source: str, there: int) -> tuple[str, ...]:
    """Takes the files that cannot be read out of the list; returns a sentence that names them.

    Args:
        there: Images of the source.

    Raises:
        InputError: they are more than `UNREADABLE_SHARE`.
    """
    errors: dict[Path, InputError] = {}
    for path in files:
        try:
            open_image(path)
        except InputError as error:
            errors[path] = error
    if not errors:
        return ()
    first, count = next(iter(errors.values())), len(errors)
    if count > max(UNREADABLE_SHARE * len(files), float(UNREADABLE_SHARE * there >= 1)):
        if count == 1:
            raise first
        raise InputError(
            f"{count} of {len(files)} images of {source} cannot be read, more than "
            f"{100 * UNREADABLE_SHARE:g} %; the first: {first}"
        ) from first
    names = ", ".join(str(path) for path in list(errors)[:_NAMED])
    more = f" and {count - _NAMED} more" if count > _NAMED else ""
    said = f"{source}: {count} of {len(files)} images cannot be read; left out: {names}{more}"
    files[:] = [path for path in files if path not in errors]
    return (said,)


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
