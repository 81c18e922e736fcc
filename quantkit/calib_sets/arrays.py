"""Samples that are no text: what a model is given, by the names of its forward arguments."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from quantkit.calib_sets.batches import Span
from quantkit.calib_sets.check import SetInfo, set_fields
from quantkit.errors import InputError
from quantkit.models import LoadedModel
from quantkit.results import DataInfo

_HASH_DIGITS: Final = 16


class Rows(Protocol):
    """The samples, made or read one at a time: memory does not grow with their number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Tensor]: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class ArrayBatch:
    """Some samples, stacked. See `Batch`."""

    inputs: dict[str, Tensor]
    real: Tensor | None
    first_sequence: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ArraySlice:
    """Consecutive samples of one source.

    Attributes:
        modality: `text`, `image`, `audio` or `other`.
        rows: One dict of tensors a sample, float32 where they are numbers with a fraction.
        hashes: One a sample, over names, shapes, types and values.
        skip: Samples of the source before the first one.
        preprocessing: What was done to each sample, in words.
        seq_len: Tokens a sample; 0 where it has no token axis.
        tokens: Real tokens in all where there are `input_ids`, else the number of samples.
        dtype: What batches cast the float32 to.
        named: The calibration set that they come from, if they do.
        warnings: One sentence each, e.g. which images could not be read.
        left_out: Samples of the source that are skipped in between, since they cannot be read.
    """

    source: str
    modality: str
    rows: Rows
    hashes: tuple[str, ...]
    skip: int
    preprocessing: str
    seq_len: int
    tokens: int
    dtype: torch.dtype = torch.float32
    named: SetInfo | None = None
    warnings: tuple[str, ...] = ()
    left_out: int = 0

    @property
    def sequences(self) -> int:
        """Number of samples."""
        return len(self.hashes)

    @property
    def block_hashes(self) -> tuple[str, ...]:
        """One short hash a sample."""
        return tuple(digest[:_HASH_DIGITS] for digest in self.hashes)

    @property
    def fingerprints(self) -> tuple[np.ndarray[Any, np.dtype[np.uint64]], ...]:
        """None: samples are compared whole."""
        return (np.empty(0, np.uint64),) * self.sequences

    @property
    def spans(self) -> tuple[Span, ...]:
        """None: the samples are no stream."""
        return ()

    @property
    def sha256(self) -> str:
        """Hash of all samples in order."""
        return hashlib.sha256("".join(self.hashes).encode()).hexdigest()

    def first(self, samples: int) -> ArraySlice:
        """Returns the slice of the first so many samples."""
        kept = self.hashes[:samples]
        tokens = sum(_tokens(self.rows[index]) for index in range(len(kept)))
        return replace(self, hashes=kept, tokens=tokens)

    def batches(self, batch_size: int) -> Iterator[ArrayBatch]:
        """Yields the samples in order, `batch_size` at a time."""
        for start in range(0, self.sequences, batch_size):
            rows = [self.rows[i] for i in range(start, min(start + batch_size, self.sequences))]
            inputs = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
            inputs = {
                name: tensor.to(self.dtype) if tensor.is_floating_point() else tensor
                for name, tensor in inputs.items()
            }
            mask = inputs.get("attention_mask")
            is_text = mask is not None and "input_ids" in inputs and mask.ndim == 2
            real = mask.bool() if is_text and mask is not None else None
            yield ArrayBatch(inputs=inputs, real=real, first_sequence=start)

    def info(self, batch_size: int) -> DataInfo:
        """Returns what a result file says about the slice."""
        fields = set_fields(self.named)
        return DataInfo(
            source=self.source,
            sha256=self.sha256,
            sequences=self.sequences,
            seq_len=self.seq_len,
            tokens=self.tokens,
            batch_size=batch_size,
            bos="never",
            block_hashes=list(self.block_hashes),
            skipped_blocks=self.skip,
            python=platform.python_version(),
            modality=self.modality,
            preprocessing=self.preprocessing,
            **fields | {"warnings": [*fields.get("warnings", ()), *self.warnings]},
        )


def slice_of(
    rows: Rows,
    loaded: LoadedModel,
    *,
    source: str,
    skip: int,
    preprocessing: str,
    named: SetInfo | None = None,
) -> ArraySlice:
    """Returns the slice over `rows`, each of which is looked at once, for its hash.

    Raises:
        InputError: samples of different shapes, NaN or inf.
    """
    hashes, tokens, seq_len = [], 0, 0
    shapes: dict[str, torch.Size] = {}
    for index in range(len(rows)):
        row = rows[index]
        digest = hashlib.sha256()
        for name in sorted(row):
            tensor = row[name]
            if shapes.setdefault(name, tensor.shape) != tensor.shape:
                raise InputError(
                    f"{source}: sample {index} has {name} of shape {list(tensor.shape)}, the first "
                    f"{list(shapes[name])}: expected one shape, which the samples of a batch share."
                )
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise InputError(
                    f"{source}: {name} of sample {skip + index} holds "
                    f"{int((~tensor.isfinite()).sum())} NaN or inf values; expected finite ones."
                )
            digest.update(f"{name} {list(tensor.shape)} {tensor.dtype};".encode())
            digest.update(np.ascontiguousarray(tensor.numpy()).tobytes())
        hashes.append(digest.hexdigest())
        ids = row.get("input_ids")
        seq_len = 0 if ids is None else ids.shape[-1]
        tokens += _tokens(row)
    return ArraySlice(
        source=source,
        modality=loaded.modality,
        rows=rows,
        hashes=tuple(hashes),
        skip=skip,
        preprocessing=preprocessing,
        seq_len=seq_len,
        tokens=tokens,
        dtype=_float_type(loaded.model),
        named=named,
    )


def _tokens(row: dict[str, Tensor]) -> int:
    """Returns the real tokens of a sample; 1 where it has none."""
    ids, mask = row.get("input_ids"), row.get("attention_mask")
    return 1 if ids is None else int(ids.numel() if mask is None else mask.sum())


def _float_type(model: Any) -> torch.dtype:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            kind: torch.dtype = parameter.dtype
            return kind
    return torch.float32
