"""batches x a float graph x observers -> one `Bundle` a tensor, without a torch model.

How this differs from ONNX Runtime's own histogram calibrators: they keep every output of every
batch until the last one and then count; here a tensor is counted and dropped before the next one.

Memory: the session, one batch's chosen tensors, and for each tensor a fixed number of bytes
(`Bundle`: 0.5 MiB at the very most, typically 0.1 MiB). Flat in the number of batches;
linear in batch size x sequence length x tensors, unless `bytes_at_once` bounds that product, at the
price of more forward passes. External weights are mapped and packed once by ONNX Runtime; weights
inside the .onnx file (2 GB at most) are held up to three times while a session opens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit.errors import InputError, suggest
from quantkit.numerics.observers import Bundle
from quantkit.numerics.scan import RowScan
from quantkit.onnx_runtime.graph_tensors import (
    choose_tensors,
    input_names,
    load_float_graph,
    reduced_to,
    shapes_of,
)
from quantkit.onnx_runtime.sessions import MESSAGE, first_line, open_graph
from quantkit.progress import Progress, silent

_FLOAT_BYTES: Final = 4
_ROW: Final = 256
"""Fewest elements of a scanned row: what is a row does not matter here, but short ones are slow."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GraphBatch:
    """What one run of the graph is given.

    Attributes:
        feeds: One array for each input of the graph, by name.
        real: bool `[batch, sequence]`, False where padded; None where nothing is padded.
    """

    feeds: Mapping[str, NDArray[Any]]
    real: NDArray[np.bool_] | None = None


def observe_graph(
    path: Path,
    batches: Iterable[GraphBatch],
    *,
    tensors: Sequence[str] | None = None,
    bytes_at_once: int | None = None,
    threads: int | None = None,
    k: int = 100,
    progress: Progress = silent,
) -> dict[str, Bundle]:
    """Returns what was seen of each chosen tensor: a bundle of one group, in graph order.

    ONNX Runtime runs the graph as it is written: no fusion changes a number, so extremes are those
    of any other unfused run. NaN and inf are counted, and no error: the caller judges them, and a
    tensor without an element. Padded positions are left out of tensors `[batch, sequence, ...]`
    and `[batch * sequence, ...]`; of other shapes every element counts. Tags of the top-k are the
    element's place in the stream of all elements of its tensor, padding included.

    Args:
        path: A float `.onnx` file; its external data lie beside it.
        batches: Run in order; with `bytes_at_once` it is gone through more than once.
        tensors: Names or glob patterns; None: the activation inputs of MatMul, Gemm and Conv whose
            weights are constant.
        bytes_at_once: Of chosen tensors that may be held at a time, by the sizes of the first
            batch. The tensors are dealt out in graph order to several sessions, one open at a
            time; each runs the part of the graph that its tensors need. A larger tensor is alone.
        threads: Of ONNX Runtime; None leaves the number to it.

    Raises:
        InputError: not an ONNX file, a pattern without a match, a missing or unknown input, a
            shape or type that the graph refuses, a tensor that is not float, a mask that fits
            no input, no batch.
    """
    model = load_float_graph(path)
    names, inputs = choose_tensors(model, tensors), input_names(model)
    seen = {name: Bundle.empty(1, k=k) for name in names}
    groups = [names]
    if bytes_at_once is not None:
        if iter(batches) is batches:
            raise InputError(
                "bytes_at_once goes through the batches more than once: expected a list, or an "
                "object that can be iterated again, got an iterator."
            )
        for first in batches:
            sizes = _sizes(path, names, inputs, first, threads)
            groups = _dealt(sizes, bytes_at_once)
            break
    for index, group in enumerate(groups):
        graph = reduced_to(load_float_graph(path), group)
        session = open_graph(path, graph, threads=threads)
        del graph
        part = f", part {index + 1} of {len(groups)}" if len(groups) > 1 else ""
        total = len(batches) if isinstance(batches, Sequence) else 0
        positions, done = dict.fromkeys(group, 0), 0
        for batch in batches:
            progress(f"observing {path.name}{part}", done, max(total, done + 1))
            values = _run(session, group, inputs, batch)
            for name in group:
                x = values.pop(name)  # freed at the end of its turn, before the next is counted
                seen[name] = seen[name].merge(
                    _seen_of(name, x, batch.real, positions[name], seen[name].floor, k)
                )
                positions[name] += x.size
                del x
            done += 1
        if not done:
            raise InputError("no batch to observe: expected at least one.")
        progress(f"observing {path.name}{part}", done, done)
    return seen


def _sizes(
    path: Path, names: list[str], inputs: list[str], batch: GraphBatch, threads: int | None
) -> dict[str, int]:
    """Returns the bytes of each tensor in this batch, at 4 bytes an element."""
    session = open_graph(path, shapes_of(load_float_graph(path), names), threads=threads)
    outputs = [value.name for value in session.get_outputs()]
    shapes = _run(session, outputs, inputs, batch)
    return {
        name: prod(shapes[output].tolist()) * _FLOAT_BYTES
        for name, output in zip(names, outputs, strict=True)
    }


def _dealt(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Returns the names in runs that are at most `limit` bytes together, or one name."""
    groups: list[list[str]] = []
    held = 0
    for name, size in sizes.items():
        if not groups or held + size > limit:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return groups


def _run(
    session: ort.InferenceSession, names: list[str], inputs: list[str], batch: GraphBatch
) -> dict[str, NDArray[Any]]:
    """Returns these outputs of the session by name."""
    missing = [name for name in inputs if name not in batch.feeds]
    if missing:
        raise InputError(
            f"a batch lacks input {missing[0]!r}: expected {', '.join(inputs)}, "
            f"got {', '.join(batch.feeds) or 'nothing'}."
        )
    unknown = [name for name in batch.feeds if name not in inputs]
    if unknown:
        raise InputError(f"the graph has no input {unknown[0]!r}.{suggest(unknown[0], inputs)}")
    if batch.real is not None:
        _require_mask(batch.real, batch.feeds)
    try:
        values = session.run(names, dict(batch.feeds))
    except Exception as error:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in batch.feeds.items())
        raise InputError(
            f"ONNX Runtime cannot run a batch: {first_line(error)} (given {shapes[:MESSAGE]})"
        ) from error
    return dict(zip(names, values, strict=True))


def _require_mask(real: NDArray[np.bool_], feeds: Mapping[str, NDArray[Any]]) -> None:
    if real.dtype != np.bool_ or real.ndim != 2:
        raise InputError(
            f"expected real as bool [batch, sequence], got {real.dtype} {list(real.shape)}."
        )
    if not any(x.ndim and x.shape[0] == real.shape[0] for x in feeds.values()):
        raise InputError(f"real is for a batch of {real.shape[0]}, which no input has.")


def _seen_of(
    name: str,
    x: NDArray[Any],
    real: NDArray[np.bool_] | None,
    position: int,
    floor: Tensor,
    k: int,
) -> Bundle:
    """Returns the bundle of one batch's tensor; `position`: elements of it before this batch."""
    if not isinstance(x, np.ndarray) or x.dtype not in (np.float32, np.float16):
        kind = x.dtype if isinstance(x, np.ndarray) else type(x).__name__
        raise InputError(f"tensor {name!r} is {kind}: expected float32 or float16.")
    if not x.size:
        return Bundle.empty(1, k=k)
    rows, chosen = _rows(x, real)
    block = torch.from_numpy(np.ascontiguousarray(rows, np.float32))
    count, columns = block.shape
    hi = torch.full((count,), columns)
    if chosen is not None:
        hi = torch.where(torch.from_numpy(np.ascontiguousarray(chosen)), hi, 0)
    scan = RowScan(1, k=k, floor=floor)
    scan.add(block[None], torch.zeros_like(hi), hi, tag=position, row_step=columns)
    return scan.finish().bundle


def _rows(
    x: NDArray[Any], real: NDArray[np.bool_] | None
) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    """Returns `x` as `[rows, columns]`, and which rows count; None: all."""
    if real is not None:
        if x.shape[:2] == real.shape:
            return x.reshape(real.size, -1), real.reshape(-1)
        if x.ndim >= 2 and x.shape[0] == real.size:
            return x.reshape(real.size, -1), real.reshape(-1)
    columns = 1
    for size in reversed(x.shape):
        if columns >= _ROW:
            break
        columns *= size
    return x.reshape(-1, columns), None
