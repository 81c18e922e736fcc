"""Samples for a graph by the names of its inputs: text through a tokenizer, or a `.npz`.

Of text, only the tokens come from the data: masks are all ones (a sample is one unpadded block),
positions count up, token types are 0, and a cache is empty.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from transformers import AutoTokenizer

from quantkit.calib_sets import text_slice
from quantkit.calib_sets.numpy_files import check_numbers, common_length, read_arrays
from quantkit.errors import InputError
from quantkit.onnx_runtime.graph_tensors import input_names
from quantkit.results import DataInfo

Arrays = Mapping[str, NDArray[Any]]
IDS: Final = "input_ids"
_DEFAULT_TEXT: Final = "pydoc"
_MASKS: Final = ("attention_mask", "token_type_ids", "position_ids")
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json")


@dataclass(frozen=True, kw_only=True, eq=False)
class GraphSamples:
    """One dictionary of inputs a sample, and what a result file says about them."""

    batches: list[Arrays]
    data: DataInfo


def graph_samples(
    model: ir.Model,
    source: str | None,
    *,
    folders: Sequence[Path],
    tokenizer: str | None,
    seq_len: int,
    samples: int,
    bos: str,
) -> GraphSamples:
    """Returns up to `samples` samples, each as the graph takes it.

    Args:
        source: Text or a `.npz`; None: `pydoc`, for a graph that reads tokens.
        folders: Where a tokenizer may lie, where none is named.

    Raises:
        InputError: no data for this graph, no tokenizer, or an input that text cannot fill.
    """
    names = input_names(model)
    inputs = {str(v.name): v for v in model.graph.inputs if v.name in names}
    if source is not None and source.lower().endswith(".npz"):
        return _from_arrays(inputs, source, samples)
    if IDS not in inputs:
        raise InputError(
            f"the graph reads {', '.join(names)}: name samples of it with --calib FILE.npz, one "
            "array an input, first axis the samples."
        )
    fixed = _size(inputs[IDS], 1)
    text = text_slice(
        _DEFAULT_TEXT if source is None else source,
        _tokenizer(tokenizer, folders),
        seq_len=seq_len if fixed is None else fixed,
        samples=samples,
        bos=bos,
        encoder="token_type_ids" in inputs,
    )
    batches = [_filled(inputs, block.numpy()[None]) for block in text.ids]
    return GraphSamples(batches=batches, data=text.info(1))


def _filled(inputs: Mapping[str, ir.Value], ids: NDArray[np.int64]) -> Arrays:
    feeds: dict[str, NDArray[Any]] = {}
    for name, value in inputs.items():
        kind = np.dtype(np.float32 if value.dtype is None else value.dtype.numpy())
        if name == IDS:
            feeds[name] = ids.astype(kind)
        elif name in _MASKS and (value.shape is None or len(value.shape) == 2):
            made = {
                "attention_mask": np.ones_like(ids),
                "token_type_ids": np.zeros_like(ids),
                "position_ids": np.arange(ids.shape[1])[None],
            }
            feeds[name] = made[name].astype(kind)
        elif value.shape is not None and len(value.shape) == 4 and kind.kind == "f":
            heads, width = _size(value, 1), _size(value, 3)
            if heads is None or width is None:
                raise InputError(
                    f"cache input {name!r} has no fixed heads and width: {value.shape}. Give the "
                    "graph's inputs as --calib FILE.npz."
                )
            feeds[name] = np.zeros((1, heads, 0, width), kind)
        else:
            raise InputError(
                f"input {name!r} {value.dtype} {value.shape} is neither tokens, mask, positions "
                "nor cache: give the graph's inputs as --calib FILE.npz."
            )
    return feeds


def _from_arrays(inputs: Mapping[str, ir.Value], source: str, samples: int) -> GraphSamples:
    arrays = read_arrays(Path(source).expanduser(), source, next(iter(inputs)))
    check_numbers(arrays, source)
    missing = [name for name in inputs if name not in arrays]
    if missing:
        raise InputError(
            f"{source} lacks the graph's input {missing[0]!r}: expected {', '.join(inputs)}, got "
            f"{', '.join(arrays) or 'nothing'}."
        )
    arrays = {name: arrays[name] for name in inputs}
    count = min(common_length(arrays, source), samples)
    if not count:
        raise InputError(f"{source} holds no sample.")
    sizes = {size for value in inputs.values() if (size := _size(value, 0)) is not None}
    batches = list(_batches(arrays, count, max(sizes, default=1)))
    if not batches:
        raise InputError(f"{source} holds {count} samples: the graph takes {max(sizes)} at a time.")
    hashes = [_hash(batch) for batch in batches]
    data = DataInfo(
        source=source,
        sha256=hashlib.sha256("".join(hashes).encode()).hexdigest(),
        sequences=count,
        seq_len=0,
        tokens=count,
        batch_size=max(sizes, default=1),
        bos="never",
        block_hashes=hashes,
        skipped_blocks=0,
        python=platform.python_version(),
        modality="other",
        preprocessing="none: arrays as given",
    )
    return GraphSamples(batches=batches, data=data)


def _batches(arrays: Arrays, count: int, size: int) -> Iterator[Arrays]:
    for start in range(0, count - size + 1, size):
        yield {name: array[start : start + size] for name, array in arrays.items()}


def _hash(batch: Arrays) -> str:
    digest = hashlib.sha256()
    for name in sorted(batch):
        digest.update(f"{name} {batch[name].dtype} {batch[name].shape}".encode())
        digest.update(np.ascontiguousarray(batch[name]).tobytes())
    return digest.hexdigest()[:16]


def _tokenizer(named: str | None, folders: Sequence[Path]) -> Any:
    places = list(folders) if named is None else [Path(named).expanduser()]
    for folder in places:
        if any((folder / name).is_file() for name in _TOKENIZERS):
            try:
                return AutoTokenizer.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=False
                )
            except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
                raise InputError(f"the tokenizer in {folder} cannot be read.") from error
    raise InputError(
        f"no tokenizer in {', '.join(map(str, places))}: name its folder with --tokenizer, or give "
        "the graph's inputs as --calib FILE.npz."
    )


def _size(value: ir.Value, axis: int) -> int | None:
    """Returns a fixed size; None where it is open."""
    shape = value.shape
    if shape is None or len(shape) <= axis:
        return None
    size = shape[axis]
    return size if isinstance(size, int) else None
