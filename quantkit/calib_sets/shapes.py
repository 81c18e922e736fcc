"""`shapes`: images that are computed, so that a vision model can be measured with no file at hand.

They are not natural images: coloured discs and boxes on gradients, gratings, gradients and noise.
What a model does to photographs may differ, and a number measured on them says so in its `source`.
They are a function of index and size alone, carry no licence, and need only numpy.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

KINDS: Final = ("shapes", "grating", "gradient", "noise")
_SEED: Final = 20
Image = np.ndarray[Any, np.dtype[np.uint8]]
Field = np.ndarray[Any, np.dtype[np.float64]]


def shape_image(index: int, height: int, width: int) -> Image:
    """Returns image `index` of the endless row, uint8 `[height, width, 3]`; kinds take turns."""
    random = np.random.default_rng([_SEED, index])
    rows, columns = np.mgrid[0:height, 0:width]
    x, y = columns / width, rows / height
    kind = KINDS[index % len(KINDS)]
    if kind == "noise":
        return random.integers(0, 256, (height, width, 3), dtype=np.uint8)
    if kind == "grating":
        return _pixels(_grating(random, x, y))
    image = _gradient(random, x, y)
    if kind == "shapes":
        for _ in range(int(random.integers(2, 7))):
            image[_inside(random, x, y)] = random.uniform(0, 1, 3)
    return _pixels(image)


def _gradient(random: np.random.Generator, x: Field, y: Field) -> Field:
    angle = random.uniform(0, 2 * np.pi)
    along = (np.cos(angle) * (x - 0.5) + np.sin(angle) * (y - 0.5) + 0.75) / 1.5
    one, other = random.uniform(0, 1, (2, 3))
    blended: Field = one + along[..., None] * (other - one)
    return blended


def _grating(random: np.random.Generator, x: Field, y: Field) -> Field:
    angle, waves = random.uniform(0, 2 * np.pi), random.uniform(3, 24)
    phase = 2 * np.pi * waves * (np.cos(angle) * x + np.sin(angle) * y)
    one, other = random.uniform(0, 1, (2, 3))
    blended: Field = one + (0.5 + 0.5 * np.sin(phase))[..., None] * (other - one)
    return blended


def _inside(random: np.random.Generator, x: Field, y: Field) -> np.ndarray[Any, np.dtype[np.bool_]]:
    centre_x, centre_y = random.uniform(0.1, 0.9, 2)
    half_x, half_y = random.uniform(0.05, 0.3, 2)
    across, down = (x - centre_x) / half_x, (y - centre_y) / half_y
    is_disc = random.integers(0, 2) == 0
    inside: np.ndarray[Any, np.dtype[np.bool_]]
    inside = across**2 + down**2 <= 1 if is_disc else np.maximum(abs(across), abs(down)) <= 1
    return inside


def _pixels(image: Field) -> Image:
    rounded: Image = np.rint(np.clip(image, 0, 1) * 255).astype(np.uint8)
    return rounded
