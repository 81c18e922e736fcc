"""Sessions of any graph on the CPU, and what ONNX Runtime says in one line where it refuses one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import onnxruntime as ort

from quantkit.errors import InputError

MESSAGE: Final = 200
"""Most characters of what ONNX Runtime says, or of a list of shapes, in an error."""
_QUIET: Final = 4
"""ONNX Runtime's severity "fatal": a graph that fails is reported by its exception."""
_FOLDER: Final = "session.model_external_initializers_file_folder_path"
_SOURCE: Final = re.compile(
    r"Load model from .*? failed:|/\S+\.(?:cc|h):\d+ \w.*?\(.*?\)(?: const)? "
)
"""What its messages carry beside what they say: a file, a line and a function's signature."""
_FLOAT_ACTIVATIONS: Final = ("session.qdq_matmulnbits_accuracy_level", "1")
"""Weights-only graphs keep float activations, as written; see `decoder`."""


def open_graph(
    path: Path, graph: bytes | None = None, *, threads: int | None = None
) -> ort.InferenceSession:
    """Returns a session of the file, with all of ONNX Runtime's optimisations.

    Args:
        graph: What is run instead, and as it is written, without any fusion; weights outside of
            the bytes lie beside `path`.
        threads: None leaves the number to ONNX Runtime.

    Raises:
        InputError: ONNX Runtime refuses the graph.
    """
    options = ort.SessionOptions()
    options.log_severity_level = _QUIET
    options.add_session_config_entry(*_FLOAT_ACTIVATIONS)
    if threads is not None:
        options.intra_op_num_threads = threads
    if graph is not None:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry(_FOLDER, str(path.absolute().parent))
    source = str(path) if graph is None else graph
    try:
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's own classes share no base but Exception
        raise InputError(f"ONNX Runtime cannot load {path}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """Returns the first line of an error, at most `MESSAGE` characters; its class if it is mute.

    Where in ONNX Runtime's own source it was raised, and the path again, are left out.
    """
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return _SOURCE.sub("", first)[:MESSAGE]
