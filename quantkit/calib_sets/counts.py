"""How many samples a calibration usually has."""

from __future__ import annotations

from typing import Final

from quantkit.calib_sets.array_files import AS_GIVEN
from quantkit.calib_sets.arrays import ArraySlice
from quantkit.calib_sets.batches import DataSlice
from quantkit.calib_sets.token_slice import TokenSlice

USUAL_TOKENS: Final = 128 * 512
"""128 blocks of 512: the default of `--samples` and `--seq-len`."""
USUAL_IMAGES: Final = 300
"""Ultralytics' advice for int8 calibration: at least 300 images."""


def sample_count_warning(data: DataSlice) -> str | None:
    """Returns a sentence where a slice is smaller than is usual for calibration, else None.

    Arrays have no usual number: what a row is, only the user knows.
    """
    if isinstance(data, TokenSlice) and data.tokens < USUAL_TOKENS:
        return (
            f"{data.source}: {data.tokens:,} tokens are fewer than the {USUAL_TOKENS:,} "
            "(128 x 512) that are usual for calibration; ranges may move with more"
        )
    is_image = isinstance(data, ArraySlice) and data.modality == "image"
    is_array = isinstance(data, ArraySlice) and data.preprocessing.startswith(AS_GIVEN)
    if is_image and not is_array and data.sequences < USUAL_IMAGES:
        return (
            f"{data.source}: {data.sequences} images are fewer than the {USUAL_IMAGES} that are "
            "usual for calibration; ranges may move with more"
        )
    return None
