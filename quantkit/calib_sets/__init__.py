"""Named sets of text, images and arrays, cut into hashed samples."""

from quantkit.calib_sets.array_files import array_slice
from quantkit.calib_sets.arrays import ArrayBatch, ArraySlice
from quantkit.calib_sets.batches import Batch, DataSlice, require_disjoint
from quantkit.calib_sets.choose import data_slice, default_source
from quantkit.calib_sets.images import SHAPES, image_slice
from quantkit.calib_sets.text import NAMED, TokenBatch, TokenSlice, text_slice

__all__ = [
    "NAMED",
    "SHAPES",
    "ArrayBatch",
    "ArraySlice",
    "Batch",
    "DataSlice",
    "TokenBatch",
    "TokenSlice",
    "array_slice",
    "data_slice",
    "default_source",
    "image_slice",
    "require_disjoint",
    "text_slice",
]
