"""Which positions of a batch are padding: what is computed there counts in no figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.exporting.diagnosis.tensor_runs import Arrays

_MASK: Final = "attention_mask"
_IDS: Final = "input_ids"
Mask = NDArray[np.bool_]


def real_positions(batch: Arrays) -> Mask | None:
    """Returns bool `[batch, tokens]`, False where padded; None where nothing is.

    Raises:
        InputError: an `attention_mask` that hides every token.
    """
    mask, ids = batch.get(_MASK), batch.get(_IDS)
    if mask is None or mask.ndim != 2:
        return None
    if ids is not None and ids.ndim == 2 and ids.shape[1] < mask.shape[1]:
        mask = mask[:, -ids.shape[1] :]  # what comes before it is in the cache
    real: Mask = mask.astype(np.bool_)
    if not real.any():
        raise InputError(f"a sample's {_MASK} is 0 throughout: expected one token at least.")
    return None if real.all() else real


def real_elements(shape: Sequence[int], real: Mask | None) -> Mask | None:
    """Returns which elements belong to a real position, a view; None: all, or it cannot be told.

    Tokens are on the second axis, on the third of four (`[batch, heads, tokens, any]`), on a later
    one (keys that were turned), or one with the batch (`[batch * tokens, any]`,
    `[batch * heads, tokens, any]`).
    """
    if real is None or not shape:
        return None
    batch, tokens = real.shape
    rank = len(shape)
    if shape[0] == batch:
        order = [2, 1, 3] if rank == 4 else range(1, rank)
        axis = next((axis for axis in order if shape[axis] == tokens), None)
        if axis is not None:
            return _spread(real, shape, axis)
    if shape[0] == real.size:
        rows = real.reshape(-1, *[1] * (rank - 1))
        return np.broadcast_to(rows, shape)
    if rank == 3 and shape[1] == tokens and shape[0] % batch == 0:
        return _spread(np.repeat(real, shape[0] // batch, axis=0), shape, 1)
    return None


def _spread(real: Mask, shape: Sequence[int], axis: int) -> Mask:
    sizes = [1] * len(shape)
    sizes[0], sizes[axis] = real.shape
    return np.broadcast_to(real.reshape(sizes), shape)


def only(values: NDArray[Any], kept: Mask | None) -> NDArray[Any]:
    """Returns the elements that are kept, flat, or all of them as they are."""
    return values if kept is None else values[kept]
