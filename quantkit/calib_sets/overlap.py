"""Proof that two slices have no data in common, whatever their cuts.

Equal samples have equal hashes. Blocks that one text was cut into at other lengths or offsets have
none: where both slices come from one stream of tokens their places in it decide; where they do not,
fingerprints do, which depend on the content alone (winnowing: Schleimer, Wilkerson and Aiken 2003,
"Winnowing: local algorithms for document fingerprinting", section 3).

A text that repeats itself (`pydoc` does: one topic stands in another) is no overlap of slices cut
from different places of it. `repeated_blocks` counts such blocks.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from quantkit.calib_sets.batches import DataSlice
from quantkit.errors import InputError

GRAM: Final = 16
"""Tokens a fingerprint is made of: what is shorter and shared is a phrase."""
WINDOW: Final = 16
"""One fingerprint at least is kept of so many neighbours: a run of GRAM + WINDOW - 1 = 31 equal
tokens has one in both slices."""
SHARED_FRAC: Final = 0.5
Fingerprints = np.ndarray[Any, np.dtype[np.uint64]]
_NONE: Final[Fingerprints] = np.empty(0, np.uint64)


def fingerprints(ids: np.ndarray[Any, Any]) -> Fingerprints:
    """Returns the fingerprints of a run of tokens, sorted, each once: about 2 / 17 of its length.

    Empty for fewer than GRAM tokens.
    """
    if len(ids) < GRAM:
        return _NONE
    windows = np.lib.stride_tricks.sliding_window_view
    # multiplication wraps at 2^64 in arrays of unsigned integers, as it is meant to
    mixed = _mixed(ids.astype(np.uint64) + np.uint64(1))
    grams = _mixed((windows(mixed, GRAM) * _POWERS).sum(1, dtype=np.uint64))
    if len(grams) <= WINDOW:
        return np.asarray([grams.min()], np.uint64)
    return np.unique(windows(grams, WINDOW).min(1))


def shared_blocks(one: DataSlice, other: DataSlice) -> int:
    """Returns how many blocks two slices share: those of `one` or of `other`, whichever are more.

    A block is shared where its hash is in the other slice, where its tokens lie in the part of the
    stream that the other slice has, or, of different streams, where half of its fingerprints or
    more are in the other slice.
    """
    return max(_shared(one, other), _shared(other, one))


def repeated_blocks(one: DataSlice, other: DataSlice) -> int:
    """Returns how many blocks of `other` are text of `one`, wherever they were cut from."""
    hashes = set(one.block_hashes)
    repeats = _contained(one, other)
    pairs = zip(other.block_hashes, repeats, strict=True)
    return sum(digest in hashes or bool(again) for digest, again in pairs)


def require_disjoint(one: DataSlice, other: DataSlice, what: str, *, allow: bool = False) -> int:
    """Returns the number of blocks that two slices share: 0, unless sharing is allowed.

    Raises:
        InputError: they share blocks, and `allow` is not set.
    """
    shared = shared_blocks(one, other)
    if shared and not allow:
        raise InputError(
            f"{what} share {shared} blocks of data: expected disjoint "
            "slices. Name another source for one of them, or fewer samples; --allow-overlap goes "
            "on and records it."
        )
    return shared


def _shared(one: DataSlice, other: DataSlice) -> int:
    """Returns how many blocks of `other` are in `one`."""
    hashes = set(one.block_hashes)
    equal = [digest in hashes for digest in other.block_hashes]
    if one.spans and other.spans and one.spans[0].stream == other.spans[0].stream:
        begin, end = one.spans[0].begin, one.spans[-1].end
        inside = [span.begin < end and begin < span.end for span in other.spans]
    else:
        inside = _contained(one, other)
    return sum(map(any, zip(equal, inside, strict=True)))


def _contained(one: DataSlice, other: DataSlice) -> list[bool]:
    """Returns which blocks of `other` have half of their fingerprints in `one`."""
    theirs = other.fingerprints
    everything = np.concatenate([_NONE, *one.fingerprints])
    return [
        len(block) > 0 and float(np.isin(block, everything).mean()) >= SHARED_FRAC
        for block in theirs
    ]


def _mixed(values: Fingerprints) -> Fingerprints:
    """Returns 64-bit values whose bits each depend on every bit (Steele et al. 2014, SplitMix)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_POWERS: Final = np.array([pow(0x9E3779B97F4A7C15, i, 2**64) for i in range(GRAM)], np.uint64)
