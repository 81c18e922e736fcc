"""How an image becomes a model's input: by the model folder's own settings, else as ImageNet's."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoImageProcessor

from quantkit.errors import InputError
from quantkit.models import LoadedModel

IMAGENET_MEAN: Final = (0.485, 0.456, 0.406)
IMAGENET_STD: Final = (0.229, 0.224, 0.225)
PROCESSOR_FILE: Final = "preprocessor_config.json"
_DEFAULT_SIZE: Final = 224


PAD: Final = 114
"""Grey of the border of a letterboxed image, of 255 (Ultralytics)."""
Fit = Literal["crop", "letterbox"]
"""Resized to cover the target and its centre cut out, or to fit into it with a border around."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a finished image is: its size in pixels, and the numbers that normalise it.

    A pixel becomes `(pixel * scale - mean) / std`, channel by channel.
    """

    height: int
    width: int
    scale: float = 1 / 255
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    crop_pct: float = 1.0
    """Share of the resized image that the centre crop keeps (timm)."""
    fit: Fit = "crop"

    def __str__(self) -> str:
        """Returns the numbers in words."""
        mean, std = (", ".join(f"{v:g}" for v in values) for values in (self.mean, self.std))
        return f"{self.height} x {self.width} pixels, mean {mean}, std {std}"

    def normalised(self, pixels: np.ndarray[Any, Any]) -> Tensor:
        """Returns float32 `[channels, height, width]` of uint8 `[height, width, channels]`."""
        scaled = pixels.astype(np.float32) * np.float32(self.scale)
        mean, std = (np.asarray(values, np.float32) for values in (self.mean, self.std))
        return torch.from_numpy(np.ascontiguousarray(((scaled - mean) / std).transpose(2, 0, 1)))


def target_of(loaded: LoadedModel) -> Target:
    """Returns what the model's images are: by its preprocessor_config.json, else by its config.

    Raises:
        InputError: not a model of still images with three channels.
    """
    config: Any = getattr(loaded.model, "config", None)
    vision = getattr(config, "vision_config", None) or config
    if getattr(vision, "num_channels", 3) != 3 or getattr(vision, "num_frames", None) is not None:
        raise InputError(
            f"{loaded.name} does not read still images of three channels: give its input as .npz."
        )
    settings = _settings(loaded)
    if settings:
        crop = bool(settings.get("do_center_crop")) and settings.get("crop_size") is not None
        height, width = _size(settings["crop_size"] if crop else settings.get("size"))
        plain = settings.get("do_normalize", True) is False
        zero, one = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        return Target(
            height=height,
            width=width,
            scale=settings.get("rescale_factor", 1 / 255)
            if settings.get("do_rescale", True)
            else 1.0,
            mean=zero if plain else tuple(settings.get("image_mean") or IMAGENET_MEAN),
            std=one if plain else tuple(settings.get("image_std") or IMAGENET_STD),
        )
    timm = getattr(loaded.model, "pretrained_cfg", None)
    if isinstance(timm, dict):
        height, width = _size(list(timm.get("input_size") or (3, _DEFAULT_SIZE, _DEFAULT_SIZE))[1:])
        return Target(
            height=height,
            width=width,
            mean=tuple(timm.get("mean") or IMAGENET_MEAN),
            std=tuple(timm.get("std") or IMAGENET_STD),
            crop_pct=float(timm.get("crop_pct") or 1.0),
            fit=timm.get("fit", "crop"),
        )
    height, width = _size(getattr(vision, "image_size", None))
    return Target(height=height, width=width)


def preprocessing_of(loaded: LoadedModel) -> tuple[Callable[[Any], dict[str, Tensor]], str]:
    """Returns (what makes a PIL image in RGB the model's input, the same in words).

    Raises:
        InputError: settings that transformers cannot read.
    """
    target = target_of(loaded)
    if _settings(loaded):
        return _with_processor(loaded)

    fitted = _letterboxed if target.fit == "letterbox" else _cropped

    def plain(image: Any) -> dict[str, Tensor]:
        return {loaded.input_name: target.normalised(fitted(image, target))}

    words = f"shortest side resized (bicubic), centre cropped to {target}"
    if target.fit == "letterbox":
        words = f"letterboxed (bilinear, border of {PAD}) to {target}"
    return plain, words


def _settings(loaded: LoadedModel) -> dict[str, Any]:
    path = None if loaded.folder is None else loaded.folder / PROCESSOR_FILE
    if path is None or not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is no JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def _size(given: Any) -> tuple[int, int]:
    """Returns (height, width) of any of the ways that configs write a size."""
    if isinstance(given, dict):
        if "height" in given and "width" in given:
            return int(given["height"]), int(given["width"])
        sides = [given[name] for name in ("shortest_edge", "longest_edge") if given.get(name)]
        return (int(sides[0]), int(sides[0])) if sides else (_DEFAULT_SIZE, _DEFAULT_SIZE)
    if isinstance(given, (list, tuple)) and len(given) == 2:
        return int(given[0]), int(given[1])
    side = int(given) if isinstance(given, (int, float)) and given else _DEFAULT_SIZE
    return side, side


def _with_processor(loaded: LoadedModel) -> tuple[Callable[[Any], dict[str, Tensor]], str]:
    folder = loaded.folder
    assert folder is not None
    try:
        # PIL, not torchvision: the same numbers wherever it runs
        auto: Any = AutoImageProcessor
        processor = auto.from_pretrained(
            folder, backend="pil", local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"{folder / PROCESSOR_FILE} cannot be used: {first}") from error

    def process(image: Any) -> dict[str, Tensor]:
        made = processor(images=[image], return_tensors="pt")
        return {name: value[0] for name, value in made.items() if isinstance(value, Tensor)}

    digest = hashlib.sha256((folder / PROCESSOR_FILE).read_bytes()).hexdigest()[:10]
    kind = type(processor).__name__
    return process, (
        f"{kind} of transformers {transformers.__version__} with the model's {PROCESSOR_FILE} "
        f"(sha256 {digest})"
    )


def _cropped(image: Any, target: Target) -> np.ndarray[Any, Any]:
    """Returns uint8 `[height, width, 3]`: resized to cover the target, its centre cut out."""
    from PIL import Image

    height = math.floor(target.height / target.crop_pct)
    width = math.floor(target.width / target.crop_pct)
    factor = max(height / image.height, width / image.width)
    size = (max(width, round(image.width * factor)), max(height, round(image.height * factor)))
    resized = image.resize(size, Image.Resampling.BICUBIC)
    left, top = (size[0] - target.width) // 2, (size[1] - target.height) // 2
    return np.asarray(resized.crop((left, top, left + target.width, top + target.height)))


def _letterboxed(image: Any, target: Target) -> np.ndarray[Any, Any]:
    """Returns uint8 `[height, width, 3]`: the whole image in the middle, a grey border around.

    Sizes and borders are rounded as Ultralytics does.
    """
    from PIL import Image

    factor = min(target.height / image.height, target.width / image.width)
    width, height = (max(1, round(side * factor)) for side in image.size)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    canvas = np.full((target.height, target.width, 3), PAD, np.uint8)
    left, top = (target.width - width) // 2, (target.height - height) // 2
    canvas[top : top + height, left : left + width] = np.asarray(resized)
    return canvas
