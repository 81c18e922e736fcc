"""Peak memory of a graph: a fresh process that loads it and runs one prompt.

What counts is the largest resident set (Linux's VmHWM) of that process, above one that has only
imported ONNX Runtime and numpy. Weights that are mapped from a file count as far as they were read,
and what ONNX Runtime repacks counts beside them. Neither torch nor anything else of this package is
in the process, which is the one that a user of the graph would have.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from torch import Tensor

from quantkit.errors import InputError
from quantkit.exporting.graphs import load_graph

_CHILD: Final = Path(__file__).with_name("peak_child.py")


def memory(path: Path, ids: Tensor) -> int | None:
    """Returns the peak bytes of a process that loads the decoder and runs `ids` once.

    The cache is empty, of whatever type the graph takes it in. None where the system does not tell:
    there is no /proc outside of Linux.

    Args:
        ids: `[batch, tokens]`.

    Raises:
        InputError: no such file, an input that is neither tokens, mask, positions nor cache, or
            ONNX Runtime cannot load or run the graph.
    """
    return feeds_memory(path, _decoder_feeds(path, ids.cpu().numpy().astype(np.int64)))


def feeds_memory(path: Path, feeds: Mapping[str, NDArray[Any]]) -> int | None:
    """Returns the peak bytes of a process that loads any graph and runs it once, as `memory`."""
    if not Path("/proc/self/status").is_file():
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "feeds.npz"
        # By number: a name may hold a slash, which is a folder in a .npz file.
        np.savez(file, np.array(list(feeds)), *feeds.values())
        return _peak(path, str(path), str(file)) - _peak(path)


def _decoder_feeds(path: Path, ids: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Returns a prompt without a cache for the graph's own inputs, read without its weights."""
    if not path.is_file():
        raise InputError(f"no ONNX file {path}.")
    batch, tokens = ids.shape
    feeds: dict[str, NDArray[Any]] = {}
    for value in load_graph(path).graph.inputs:
        name = value.name or ""
        if name == "input_ids":
            feeds[name] = ids
        elif name == "attention_mask":
            feeds[name] = np.ones_like(ids)
        elif name == "position_ids":
            feeds[name] = np.broadcast_to(np.arange(tokens), (batch, tokens)).copy()
        else:
            feeds[name] = _empty_cache(value, batch)
    return feeds


def _empty_cache(value: ir.Value, batch: int) -> NDArray[Any]:
    """Returns `[batch, heads, 0, width]`."""
    shape = list(value.shape or ())
    if len(shape) == 4 and value.dtype is not None:
        _, heads, _, width = shape
        if isinstance(heads, int) and isinstance(width, int):
            return np.zeros((batch, heads, 0, width), value.dtype.numpy())
    raise InputError(
        f"input {value.name!r} {shape} is neither tokens, mask, positions nor a cache [batch, "
        "heads, past, width] of fixed heads and width."
    )


def _peak(path: Path, *arguments: str) -> int:
    """Returns the peak bytes of one process."""
    # -P: the folder of the script is this package's, whose modules are not to shadow any others.
    command = [sys.executable, "-P", str(_CHILD), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        says = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise InputError(f"memory of {path} cannot be measured: {says}")
    return int(done.stdout.split()[-1])
