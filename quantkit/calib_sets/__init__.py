"""Named sets of text, images and arrays, cut into hashed samples.

What needs torch is imported when it is looked up: listing sets loads none of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from quantkit.calib_sets.array_files import array_slice
    from quantkit.calib_sets.arrays import ArrayBatch, ArraySlice
    from quantkit.calib_sets.batches import Batch, DataSlice
    from quantkit.calib_sets.check import changed_since, verify_sets
    from quantkit.calib_sets.choose import data_slice, default_source
    from quantkit.calib_sets.counts import sample_count_warning
    from quantkit.calib_sets.find import all_sets, find_set, named_set
    from quantkit.calib_sets.images import SHAPES, image_slice
    from quantkit.calib_sets.overlap import repeated_blocks, require_disjoint
    from quantkit.calib_sets.text import TokenBatch, TokenSlice, text_slice

_PLACES: Final = {
    "array_files": ("array_slice",),
    "arrays": ("ArrayBatch", "ArraySlice"),
    "batches": ("Batch", "DataSlice"),
    "check": ("changed_since", "verify_sets"),
    "choose": ("data_slice", "default_source"),
    "counts": ("sample_count_warning",),
    "find": ("all_sets", "find_set", "named_set"),
    "images": ("SHAPES", "image_slice"),
    "overlap": ("repeated_blocks", "require_disjoint"),
    "text": ("TokenBatch", "TokenSlice", "text_slice"),
}
"""Module -> its public names."""

__all__ = [
    "SHAPES",
    "ArrayBatch",
    "ArraySlice",
    "Batch",
    "DataSlice",
    "TokenBatch",
    "TokenSlice",
    "all_sets",
    "array_slice",
    "changed_since",
    "data_slice",
    "default_source",
    "find_set",
    "image_slice",
    "named_set",
    "repeated_blocks",
    "require_disjoint",
    "sample_count_warning",
    "text_slice",
    "verify_sets",
]


def __getattr__(name: str) -> Any:
    """Returns a public name, importing its module now."""
    for module, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
