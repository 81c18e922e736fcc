"""Top-1 accuracy of an image classifier on a folder that holds one folder of images a class.

The images are prepared as for `stats`: by the model folder's own settings, else as ImageNet's.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.calib_sets import ArraySlice
from quantkit.calib_sets.arrays import slice_of
from quantkit.calib_sets.content import drawn
from quantkit.calib_sets.image_files import IMAGE_SUFFIXES, image_files, require_pillow
from quantkit.calib_sets.images import FileRows
from quantkit.calib_sets.preprocessing import preprocessing_of
from quantkit.errors import InputError, suggest
from quantkit.jobs.tasks import ImageClassificationSpec
from quantkit.models import LoadedModel
from quantkit.results import DataInfo
from quantkit.tasks.task import ImageForward, Metric, Rows, Scores

TOP5_ABOVE: Final = 10
"""Classes from which on a top-5 accuracy says something."""
_HEAD: Final = "ForImageClassification"


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageClassification:
    """The task: `top1`, and `top5` where the model has more than ten classes.

    Its rows have a column a metric: 1 for a hit, NaN where the model says none of a class. An image
    counts as a hit where fewer than k other classes are at least as likely as its own: a tie with
    a wrong one is none. Time: a forward pass a batch; images are read again for each.

    Attributes:
        labels: The class of each image, an index into the model's classes.
        hashes: One an image, over its file and its folder's name.
    """

    spec: ImageClassificationSpec
    images: ArraySlice
    input_name: str
    labels: NDArray[np.int64]
    classes: int
    hashes: tuple[str, ...]
    batch_size: int
    unit: str = "images"

    @classmethod
    def of(
        cls,
        spec: ImageClassificationSpec,
        loaded: LoadedModel,
        *,
        images: int,
        seed: int = 0,
        batch_size: int = 4,
    ) -> Self:
        """Returns the task for one model; every image is read once.

        Args:
            images: How many are measured. Of a folder with more they are drawn by the seed, since
                the first ones are all of a class; in the order of their paths.

        Raises:
            InputError: no classifier, no folder of folders, a folder that is none of the model's
                classes, an image that cannot be read (by name), pillow is missing.
        """
        named = class_names(loaded)
        root = Path(spec.source).expanduser()
        files = image_files(root) if root.is_dir() else []
        if not files:
            raise InputError(
                f"{spec.source} holds no image: expected a folder with a folder for each class, "
                f"and in it {', '.join(IMAGE_SUFFIXES)}."
            )
        if len(files) > images:
            files = sorted(drawn(files, images, seed, spec.source))
        folders = [_folder_of(file, root, spec.source) for file in files]
        index_of = {folder: class_index(folder, named, loaded.name) for folder in set(folders)}
        require_pillow()
        process, words = preprocessing_of(loaded)
        rows = FileRows(files=files, process=process)
        return cls(
            spec=spec,
            images=slice_of(rows, loaded, source=spec.source, skip=0, preprocessing=words),
            input_name=loaded.input_name,
            labels=np.array([index_of[folder] for folder in folders]),
            classes=len(named),
            hashes=tuple(map(_hash, files, folders)),
            batch_size=batch_size,
        )

    @property
    def name(self) -> str:
        """The specification."""
        return str(self.spec)

    @property
    def item_hashes(self) -> tuple[str, ...]:
        """One an image, over its file and class."""
        return self.hashes

    @property
    def batches(self) -> tuple[tuple[int, ...], ...]:
        """Images in order."""
        every, size = range(len(self.labels)), self.batch_size
        return tuple(tuple(every[start : start + size]) for start in range(0, len(every), size))

    @property
    def tokens(self) -> tuple[int, ...]:
        """Images of each batch, which all are of one size."""
        return tuple(len(batch) for batch in self.batches)

    @property
    def data(self) -> DataInfo:
        """What a result says about the images."""
        return self.images.info(self.batch_size)

    def run(self, forward: ImageForward, items: Sequence[int]) -> Rows:
        """Returns the hits, `[items, 1 or 2]`."""
        inputs = [self.images.rows[item][self.input_name] for item in items]
        with torch.inference_mode():
            logits = forward(torch.stack(inputs)).double().cpu().numpy()
        own = np.take_along_axis(logits, self.labels[list(items), None], 1)
        before = (logits >= own).sum(1) - 1  # of the others
        hits = np.stack([before < k for k in self._ks], 1)
        rows: Rows = np.where(np.isnan(logits).any(1, keepdims=True), np.nan, hits)
        return rows

    def scores(self, rows: Rows) -> Scores:
        """Returns the accuracies; chance is a class of the model's at random."""
        return Scores(
            metrics=tuple(
                Metric(
                    name=f"top{k}",
                    total=rows[:, column],
                    weight=np.ones(len(rows)),
                    chance=k / self.classes,
                    trials=True,
                    is_share=True,
                )
                for column, k in enumerate(self._ks)
            )
        )

    @property
    def _ks(self) -> tuple[int, ...]:
        return (1, 5) if self.classes > TOP5_ABOVE else (1,)


def class_names(loaded: LoadedModel) -> list[str]:
    """Returns what the model calls its classes, by index; of a timm model the indices themselves.

    Raises:
        InputError: it is no image classifier.
    """
    model = loaded.model
    known: Mapping[int, str] | None = getattr(getattr(model, "config", None), "id2label", None)
    count = getattr(model, "num_classes", 0)
    if known and _HEAD in type(model).__name__:
        return [str(known[index]) for index in range(len(known))]
    if (
        isinstance(getattr(model, "pretrained_cfg", None), dict)
        and isinstance(count, int)
        and count
    ):
        return [str(index) for index in range(count)]
    raise InputError(
        f"{loaded.name} is a {type(model).__name__}: expected an image classifier, whose class "
        f"ends in {_HEAD}, or one of timm."
    )


def class_index(folder: str, names: Sequence[str], model: str) -> int:
    """Returns the class that a folder's name means: a name, one of its synonyms, or an index.

    In any case, with spaces, hyphens or underscores; synonyms are separated by commas.

    Raises:
        InputError: none of them, or a name of several classes.
    """
    wanted = _plain(folder)
    whole = [index for index, name in enumerate(names) if _plain(name) == wanted]
    parts = [index for index, name in enumerate(names) if wanted in map(_plain, name.split(","))]
    found = whole or parts
    if len(found) == 1:
        return found[0]
    if found:
        raise InputError(
            f"class folder {folder!r}: {model} has {len(found)} classes of that name: name the "
            f"folder by an index, {' or '.join(map(str, found))}."
        )
    if re.fullmatch(r"[0-9]+", folder) and int(folder) < len(names):
        return int(folder)
    raise InputError(
        f"class folder {folder!r} is no class of {model}, and no index below {len(names)}."
        f"{suggest(folder, {part.strip() for name in names for part in name.split(',')})}"
    )


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name).strip().casefold()


def _folder_of(file: Path, root: Path, source: str) -> str:
    parts = file.relative_to(root).parts
    if len(parts) < 2:
        raise InputError(
            f"image {file} lies in no class's folder: expected {source}/CLASS/{file.name}."
        )
    return parts[0]


def _hash(file: Path, folder: str) -> str:
    digest = hashlib.sha256(file.read_bytes())
    digest.update(_plain(folder).encode())
    return digest.hexdigest()[:16]
