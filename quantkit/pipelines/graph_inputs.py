"""Samples for a graph that nobody but its input names describes: text, images or arrays.

What is given comes from the source; masks, token types, positions and an empty cache are filled in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoTokenizer

from quantkit.calib_sets import SHAPES, DataSlice, find_set, image_slice, text_slice
from quantkit.calib_sets.arrays import ArraySlice, slice_of
from quantkit.calib_sets.batches import Batch
from quantkit.calib_sets.check import verified
from quantkit.calib_sets.numpy_files import (
    ARRAY_SUFFIXES,
    check_numbers,
    common_length,
    read_arrays,
)
from quantkit.errors import InputError, suggest
from quantkit.jobs.choices import DEFAULT_TEXT
from quantkit.models import LoadedModel
from quantkit.onnx_runtime import GraphBatch

IDS: Final = "input_ids"
MASK: Final = "attention_mask"
_TYPES: Final = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}
_TOKENIZERS: Final = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model"),
    *("vocab.json", "vocab.txt"),
)
_FILLED: Final = (MASK, "token_type_ids", "position_ids", "cache_position")
_PAST: Final = "past"
_CHANNELS: Final = 3
_SIZE: Final = 224
_YOLO_SIZE: Final = 640
_LETTERBOXED: Final = ("detect", "segment", "pose", "obb")
"""What Ultralytics' exports say under `task`, beside `stride`: these read 0 to 1, letterboxed."""


@dataclass(frozen=True, kw_only=True)
class GraphInput:
    """One input of a graph; of its shape, None stands for what a caller may choose."""

    name: str
    shape: tuple[int | None, ...]
    type: str
    letterbox: tuple[int, int] | None = None
    """Height and width of its images where the file's metadata say that they have a border rather
    than a cut."""

    @property
    def is_cache(self) -> bool:
        """Whether it is a part of a KV cache, which may be empty."""
        return len(self.shape) == 4 and self.name.startswith(_PAST) and "float" in self.type

    @property
    def is_image(self) -> bool:
        """Whether it takes images of three channels, `[batch, 3, height, width]`."""
        is_pixels = len(self.shape) == 4 and "float" in self.type and not self.is_cache
        return is_pixels and self.shape[1] in (None, _CHANNELS)


@dataclass(frozen=True, kw_only=True, eq=False)
class GraphData:
    """Samples, and how they become what the graph is given.

    Attributes:
        inputs: All of the graph's.
        samples: What the source gave, by name.
        batch_size: The graph's own where it is fixed.
    """

    inputs: tuple[GraphInput, ...]
    samples: DataSlice
    batch_size: int

    def __iter__(self) -> Iterator[GraphBatch]:
        for batch in self.samples.batches(self.batch_size):
            yield graph_batch(batch, self.inputs)

    @property
    def left_out(self) -> int:
        """Samples of the source that cannot be read, between those that are used."""
        return self.samples.left_out if isinstance(self.samples, ArraySlice) else 0

    @property
    def alone(self) -> GraphData:
        """The same samples, one a batch, unless the graph's batch is fixed."""
        return replace(self, batch_size=_fixed_batch(self.inputs) or 1)


def inputs_of(session: ort.InferenceSession) -> tuple[GraphInput, ...]:
    """Returns the inputs of a graph as ONNX Runtime knows them."""
    letterbox = _letterbox(session.get_modelmeta().custom_metadata_map)
    return tuple(
        GraphInput(
            name=value.name,
            shape=tuple(size if isinstance(size, int) else None for size in value.shape),
            type=value.type,
            letterbox=letterbox,
        )
        for value in session.get_inputs()
    )


def _letterbox(told: Mapping[str, str]) -> tuple[int, int] | None:
    """Returns the height and width that an export of Ultralytics names; None of other files."""
    if told.get("task") not in _LETTERBOXED or "stride" not in told:
        return None
    try:
        found = json.loads(told.get("imgsz", ""))
    except ValueError:
        return (_YOLO_SIZE, _YOLO_SIZE)
    sides = found if isinstance(found, list) else [found, found]
    if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
        return (_YOLO_SIZE, _YOLO_SIZE)
    return sides[0], sides[1]


def graph_data(
    source: str,
    path: Path,
    inputs: Sequence[GraphInput],
    *,
    samples: int,
    skip: int = 0,
    seq_len: int,
    bos: str = "auto",
    batch_size: int = 1,
    tokenizer: str | None = None,
    folders: Sequence[Path] | None = None,
) -> GraphData:
    """Returns up to `samples` samples of what the graph reads, after the first `skip`.

    Args:
        source: A `.npz` or `.npy`, or a folder of them, whose arrays are called as the graph's
            inputs; for `input_ids` text; for an image input images, `shapes` where nothing was
            asked for.
        path: The graph's file.
        seq_len: Tokens of a block of text, at most; a graph of a fixed width pads the rest.
        tokenizer: A folder with one; None: the first of `folders` that has one.
        folders: None: those `beside` the graph.

    Raises:
        InputError: the graph has an input that such a source cannot fill, by name; no tokenizer;
            fewer samples than a fixed batch; and all that the slices refuse.
    """
    names = [value.name for value in inputs]
    named = find_set(source)
    files = _array_files(Path(source).expanduser()) if named is None else []
    if named is not None and named.manifest.kind == "arrays":
        files = list(verified(named)[0].paths.values())
    found: DataSlice
    if files:
        found = _array_slice(files, source, path, inputs, samples=samples, skip=skip)
        given = set(next(iter(found.batches(1))).inputs)
    elif IDS in names:
        given = {IDS, MASK}
        _require_fillable(inputs, given)
        ids = next(value for value in inputs if value.name == IDS)
        width = ids.shape[1] if len(ids.shape) == 2 else None
        found = text_slice(
            source,
            _tokenizer(path, tokenizer, beside(path) if folders is None else folders),
            seq_len=seq_len if width is None else min(width, seq_len),
            samples=samples,
            skip=skip,
            bos=bos,
            encoder=not any(value.is_cache for value in inputs),
        )
    else:
        images = [value for value in inputs if value.is_image]
        if len(images) != 1:
            raise InputError(
                f"{path} reads {', '.join(names)}: neither token ids nor one image, so give "
                "--calib a .npz with arrays of these names, first axis the samples."
            )
        given = {images[0].name}
        _require_fillable(inputs, given)
        chosen = SHAPES if source == DEFAULT_TEXT else source
        found = image_slice(chosen, _stand_in(path, images[0]), samples=samples, skip=skip)
    _require_fillable(inputs, given)
    fixed = _fixed_batch(inputs)
    if fixed is not None and found.sequences % fixed:
        if found.sequences < fixed:
            raise InputError(
                f"{path} takes batches of {fixed}, and {source} holds {found.sequences} "
                "samples: expected as many at least."
            )
        found = found.first(found.sequences // fixed * fixed)
    return GraphData(inputs=tuple(inputs), samples=found, batch_size=fixed or batch_size)


def graph_batch(batch: Batch, inputs: Sequence[GraphInput]) -> GraphBatch:
    """Returns what a run of the graph is given for some samples."""
    given: dict[str, NDArray[Any]] = {name: x.numpy() for name, x in batch.inputs.items()}
    known = {value.name: value for value in inputs}
    ids = given.get(IDS)
    if ids is not None:
        mask = given.get(MASK, np.ones_like(ids))
        width = known[IDS].shape[1] if IDS in known else None
        missing = 0 if width is None else width - ids.shape[1]
        if missing > 0:
            ids, mask = (np.pad(x, ((0, 0), (0, missing))) for x in (ids, mask))
        given |= {IDS: ids, MASK: mask}
    images = [value.name for value in inputs if value.is_image]
    if ids is None and len(images) == 1 and images[0] not in given:
        # a processor of transformers has a name of its own for it
        given[images[0]] = next(x for x in given.values() if x.ndim == 4)
    feeds = {value.name: _fed(value, given, ids) for value in inputs}
    real = given[MASK].astype(np.bool_) if ids is not None and ids.ndim == 2 else None
    return GraphBatch(feeds=feeds, real=None if real is None or real.all() else real)


def _fed(
    value: GraphInput, given: dict[str, NDArray[Any]], ids: NDArray[Any] | None
) -> NDArray[Any]:
    kind = _TYPES[value.type]
    if value.name in given:
        return np.ascontiguousarray(given[value.name], kind)
    batch, tokens = next(iter(given.values())).shape[:2] if ids is None else ids.shape
    if value.is_cache:
        return np.zeros((batch, value.shape[1] or 0, 0, value.shape[3] or 0), kind)
    if value.name == "token_type_ids":
        return np.zeros((batch, tokens), kind)
    positions: NDArray[Any] = np.arange(tokens, dtype=kind)
    if len(value.shape) == 1:
        return positions
    return np.ascontiguousarray(np.broadcast_to(positions, (batch, tokens)))


def _require_fillable(inputs: Sequence[GraphInput], given: set[str]) -> None:
    """Raises InputError for an input that is neither given nor filled in."""
    for value in inputs:
        is_known = value.name in given or (IDS in given and value.name in _FILLED)
        if value.is_cache:
            is_known = is_known or (value.shape[1] is not None and value.shape[3] is not None)
        if value.type not in _TYPES or not is_known:
            raise InputError(
                f"input {value.name!r} ({value.type}, shape {_words(value.shape)}) cannot be "
                "filled: give --calib (and --eval, where there is one) a .npz that holds it by "
                "that name, first axis the samples."
            )


def _words(shape: Sequence[int | None]) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"


def _fixed_batch(inputs: Sequence[GraphInput]) -> int | None:
    sizes = [value.shape[0] for value in inputs if len(value.shape) > 1 and not value.is_cache]
    return next((size for size in sizes if size is not None), None)


def _array_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix.lower() in ARRAY_SUFFIXES)
    return [path] if path.suffix.lower() in ARRAY_SUFFIXES else []


def _array_slice(
    files: list[Path],
    source: str,
    path: Path,
    inputs: Sequence[GraphInput],
    *,
    samples: int,
    skip: int,
) -> DataSlice:
    names = [value.name for value in inputs]
    rows: list[dict[str, Tensor]] = []
    count = 0
    for file in files:
        arrays = read_arrays(file, str(file), names[0])
        if file.suffix.lower() == ".npy" and len(names) > 1:
            raise InputError(
                f"{file}: the graph reads {', '.join(names)}: expected a .npz with these names."
            )
        for name in arrays:
            if name not in names:
                raise InputError(f"{file}: the graph has no input {name!r}.{suggest(name, names)}")
        check_numbers(arrays, str(file))
        for index in range(common_length(arrays, str(file))):
            if skip <= count < skip + samples:
                rows.append({n: torch.from_numpy(np.array(x[index])) for n, x in arrays.items()})
            count += 1
    if not rows:
        raise InputError(
            f"{source} holds {count} samples: expected at least one after {skip} that are used "
            "elsewhere."
        )
    main = next((value for value in inputs if value.name in rows[0]), inputs[0])
    return slice_of(
        _Rows(rows=rows),
        _stand_in(path, main),
        source=source,
        skip=skip,
        preprocessing="none: arrays as given",
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Rows:
    rows: list[dict[str, Tensor]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


def beside(*paths: Path) -> list[Path]:
    """Returns where the tokenizer of a graph may lie: the files' folders, then those above."""
    own = [path.absolute().parent for path in paths]
    return list(dict.fromkeys([*own, *(folder.parent for folder in own)]))


def _tokenizer(path: Path, named: str | None, folders: Sequence[Path]) -> Any:
    """Returns the tokenizer of the folder that is named, else of the first that has one."""
    for folder in folders if named is None else [Path(named).expanduser()]:
        if not any((folder / name).is_file() for name in _TOKENIZERS):
            continue
        try:
            return AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputError(f"{folder}: its tokenizer cannot be read: {first:.200}") from error
    where = f"in {named}" if named else "beside the file"
    raise InputError(
        f"{path} reads text, and there is no tokenizer {where}: expected tokenizer.json; name "
        "its folder with --tokenizer, or give token ids as .npz."
    )


class _StandIn(nn.Module):
    """What the slices ask of a model, for a graph: the name of its input, and its images' size."""

    def __init__(self, value: GraphInput) -> None:
        super().__init__()
        self.main_input_name = value.name
        if value.is_image:
            usual = value.letterbox or (_SIZE, _SIZE)
            sides = (size or named for size, named in zip(value.shape[2:], usual, strict=True))
            found: dict[str, Any] = {"input_size": (_CHANNELS, *sides)}
            if value.letterbox is not None:
                found |= {"fit": "letterbox", "mean": (0.0,) * 3, "std": (1.0,) * 3}
            self.pretrained_cfg = found


def _stand_in(path: Path, value: GraphInput) -> LoadedModel:
    return LoadedModel(
        name=path.stem,
        source=str(path),
        model=_StandIn(value),
        tokenizer=None,
        sha256="",
        folder=path.absolute().parent,
    )
