"""Finished tokens: a `.npz` with `input_ids`, or a `.jsonl` with `input_ids` in each row."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

import numpy as np

from quantkit.calib_sets.documents import data_of, decoded, is_jsonl
from quantkit.calib_sets.manifest import Manifest
from quantkit.calib_sets.numpy_files import check_numbers, common_length, read_arrays
from quantkit.errors import InputError

IDS: Final = "input_ids"
MASK: Final = "attention_mask"
_END: Final = 1 << 31
"""No vocabulary has that many; a larger number is no token, and would overflow further down."""


def read_tokens(path: Path, source: str) -> list[list[int]]:
    """Returns the real tokens of each row, without padding.

    Raises:
        InputError: no such file, no `input_ids`, what is no token, a mask that leaves a hole.
    """
    if is_jsonl(path):
        if not path.is_file():
            raise InputError(f"{source}: no such file.")
        return _jsonl_tokens(decoded(data_of(path), path.name), source)
    arrays = read_arrays(path, source, IDS)
    if IDS not in arrays or set(arrays) - {IDS, MASK}:
        raise InputError(
            f"{source} holds {', '.join(sorted(arrays)) or 'nothing'}; expected {IDS} and, where "
            f"it is padded, {MASK}."
        )
    check_numbers(arrays, source)
    common_length(arrays, source)
    ids = arrays[IDS]
    mask = arrays.get(MASK, np.ones(ids.shape, np.int64))
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or mask.shape != ids.shape:
        raise InputError(
            f"{source}: {IDS} is {ids.dtype} of shape {list(ids.shape)}, {MASK} has shape "
            f"{list(mask.shape)}; expected whole numbers [samples, tokens], both alike."
        )
    are_tokens = not ids.size or (int(ids.min()) >= 0 and int(ids.max()) < _END)
    if not are_tokens or not set(np.unique(mask).tolist()) <= {0, 1}:
        raise InputError(
            f"{source}: expected tokens of 0 or more, below 2^31, and a mask of 0 and 1."
        )
    rows = []
    for number, (row, real) in enumerate(zip(ids, mask.astype(bool), strict=True)):
        if bool((np.diff(np.flatnonzero(real)) > 1).any()):
            raise InputError(f"{source}, row {number}: {MASK} leaves a hole; expected one run.")
        rows.append([int(token) for token in row[real]])
    return rows


def tokenizer_sha256(tokenizer: Any) -> str:
    """Returns the hash of a tokenizer's vocabulary: what makes ids the same tokens."""
    vocabulary = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def check_vocabulary(
    manifest: Manifest, rows: list[list[int]], tokenizer: Any, vocab_size: int | None
) -> list[str]:
    """Returns what could not be made sure of: one sentence, or none.

    Args:
        vocab_size: Rows of the model's embedding, where they are known; it may be padded.

    Raises:
        InputError: the tokens are those of another tokenizer, or none of this one.
    """
    sizes = {vocab_size} if vocab_size else set()
    if tokenizer is not None:
        sizes.add(len(tokenizer))
    top = max((max(row) for row in rows if row), default=0)
    if sizes and top >= max(sizes):
        raise InputError(
            f"calibration set {manifest.name} holds token {top}; the model knows 0 to "
            f"{max(sizes) - 1}: expected tokens of its own tokenizer."
        )
    if manifest.tokenizer_sha256 and tokenizer is not None:
        found = tokenizer_sha256(tokenizer)
        if found != manifest.tokenizer_sha256:
            raise InputError(
                f"calibration set {manifest.name} holds tokens of another tokenizer (sha256 "
                f"{manifest.tokenizer_sha256[:10]}, the model's is {found[:10]})."
            )
        return []
    if manifest.vocab_size and sizes:
        if manifest.vocab_size not in sizes:
            raise InputError(
                f"calibration set {manifest.name} holds tokens of a vocabulary of "
                f"{manifest.vocab_size}; the model has {' or '.join(map(str, sorted(sizes)))}."
            )
        return []
    return [
        f"calibration set {manifest.name}: nothing says that its tokens are the model's; make it "
        "again with --tokenizer or --vocab-size"
    ]


def _jsonl_tokens(text: str, source: str) -> list[list[int]]:
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            ids = json.loads(line)[IDS]
        except (ValueError, KeyError, TypeError, RecursionError):
            ids = None
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < _END for i in ids):
            raise InputError(
                f"{source}, line {number}: expected a JSON object with {IDS!r}, a list of tokens."
            )
        rows.append(ids)
    return rows
