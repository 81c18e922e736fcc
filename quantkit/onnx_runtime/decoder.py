"""Decoder graphs in ONNX Runtime: which input is what, and a run with a cache that may be empty.

Nothing here knows how a graph was made. Names are read from the session: token ids and the mask by
name, a cache entry is any input of rank 4 that holds floats or bytes (a quantized cache), and
outputs that are not the logits are the grown cache in the order of the cache inputs. What a
quantized cache holds means something to the graph alone: its owner hands it back as it came.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.onnx_runtime.sessions import first_line

_CACHE_TYPES: dict[str, type[np.generic]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
}
_QUIET = 3
"""ONNX Runtime's severity "error": it writes warnings to stderr by itself, the library does not."""

_FLOAT_ACTIVATIONS = ("session.qdq_matmulnbits_accuracy_level", "1")
"""Weights-only graphs keep float activations, as written. By default ONNX Runtime fuses their
DequantizeLinear and MatMul into an int8 product, which quantizes the activations too."""


@dataclass(frozen=True, kw_only=True)
class CacheInput:
    """One tensor of the KV cache, `[batch, heads, past, width]`."""

    name: str
    heads: int
    width: int
    dtype: type[np.generic]


@dataclass(frozen=True, kw_only=True)
class DecoderLayout:
    """The names of a decoder graph. `present[i]` is `past[i]` grown by this call's tokens.

    `mask` is None where the graph takes none, and `past` is empty where it has no cache.
    """

    ids: str
    mask: str | None
    positions: str | None
    past: tuple[CacheInput, ...]
    logits: str
    present: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DecoderOutput:
    """Logits `[batch, tokens, vocabulary]` float32, and the cache to give to the next call."""

    logits: NDArray[np.float32]
    present: tuple[NDArray[Any], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class DecoderSession:
    """An ONNX Runtime session of a decoder graph, and its names."""

    session: ort.InferenceSession
    layout: DecoderLayout

    def run(
        self,
        ids: NDArray[np.int64],
        mask: NDArray[np.int64] | None = None,
        past: Sequence[NDArray[Any]] = (),
    ) -> DecoderOutput:
        """Returns logits and the grown cache.

        Args:
            ids: `[batch, tokens]`, the new tokens only.
            mask: `[batch, past + tokens]`, 1 for a real token; None for no padding.
            past: What the previous call gave as `present`; nothing means an empty cache.

        Raises:
            InputError: the cache has another number of tensors, or padding meets a graph
                without a mask.
        """
        names = (self.layout.logits, *self.layout.present)
        values = self.run_named(names, ids, mask, past)
        return DecoderOutput(
            logits=np.asarray(values[self.layout.logits], np.float32),
            present=tuple(values[name] for name in self.layout.present),
        )

    def run_named(
        self,
        names: Sequence[str],
        ids: NDArray[np.int64],
        mask: NDArray[np.int64] | None = None,
        past: Sequence[NDArray[Any]] = (),
    ) -> dict[str, NDArray[Any]]:
        """Returns these outputs of the graph by name; the arguments are those of `run`."""
        layout = self.layout
        if past and len(past) != len(layout.past):
            raise InputError(f"expected a cache of {len(layout.past)} tensors, got {len(past)}.")
        batch, tokens = ids.shape
        cached = int(past[0].shape[2]) if past else 0
        if mask is None:
            mask = np.ones((batch, cached + tokens), np.int64)
        if mask.shape != (batch, cached + tokens):
            raise InputError(
                f"expected a mask [{batch}, {cached} + {tokens}], got {list(mask.shape)}."
            )
        feeds: dict[str, NDArray[Any]] = {layout.ids: ids.astype(np.int64)}
        if layout.mask is not None:
            feeds[layout.mask] = mask.astype(np.int64)
        elif not mask.all():
            raise InputError("this graph has no attention mask, so it cannot take padding.")
        if layout.positions is not None:
            feeds[layout.positions] = np.broadcast_to(
                np.arange(cached, cached + tokens, dtype=np.int64), (batch, tokens)
            ).copy()
        for index, entry in enumerate(layout.past):
            empty = np.zeros((batch, entry.heads, 0, entry.width), entry.dtype)
            feeds[entry.name] = past[index] if past else empty
        wanted = list(dict.fromkeys(names))
        try:
            values = self.session.run(wanted, feeds)
        except Exception as error:  # ONNX Runtime's own classes share no base but Exception
            raise InputError(f"ONNX Runtime cannot run the graph: {first_line(error)}") from error
        return dict(zip(wanted, values, strict=True))


def open_decoder(
    path: Path, *, threads: int | None = None, extra_outputs: Collection[str] = ()
) -> DecoderSession:
    """Returns a session on the CPU; `threads` None leaves the number to ONNX Runtime.

    Args:
        extra_outputs: Outputs of the graph that are neither logits nor cache.

    Raises:
        InputError: no such file, ONNX Runtime refuses it, or it is not a decoder.
    """
    if not path.is_file():
        raise InputError(f"no ONNX file {path}.")
    options = ort.SessionOptions()
    options.log_severity_level = _QUIET
    options.add_session_config_entry(*_FLOAT_ACTIVATIONS)
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's own classes share no base but Exception
        raise InputError(f"ONNX Runtime cannot load {path}: {error}") from error
    return DecoderSession(session=session, layout=decoder_layout(session, extra_outputs))


def decoder_layout(
    session: ort.InferenceSession, extra_outputs: Collection[str] = ()
) -> DecoderLayout:
    """Returns which input and output of the graph is what.

    Raises:
        InputError: no token ids, no logits, an input that is none of these, or cache inputs and
            outputs that do not pair up.
    """
    inputs = {value.name: value for value in session.get_inputs()}
    outputs = [value.name for value in session.get_outputs()]
    past: list[CacheInput] = []
    for name, value in inputs.items():
        if name in ("input_ids", "attention_mask", "position_ids"):
            continue
        if value.type not in _CACHE_TYPES or len(value.shape) != 4:
            is_window = "sliding_window" in name
            raise InputError(
                f"input {name!r} {value.type} is neither tokens, mask nor cache"
                + (": graphs with a sliding window are not supported." if is_window else ".")
            )
        heads, width = value.shape[1], value.shape[3]
        if not isinstance(heads, int) or not isinstance(width, int):
            raise InputError(f"cache input {name!r} has no fixed heads and width: {value.shape}.")
        past.append(CacheInput(name=name, heads=heads, width=width, dtype=_CACHE_TYPES[value.type]))
    present = tuple(name for name in outputs if name != "logits" and name not in extra_outputs)
    if "input_ids" not in inputs or "logits" not in outputs or len(present) != len(past):
        raise InputError(
            "not a decoder graph: expected input_ids, logits, and one output for each cache "
            f"input, got inputs {', '.join(inputs)} and outputs {', '.join(outputs)}."
        )
    return DecoderLayout(
        ids="input_ids",
        mask="attention_mask" if "attention_mask" in inputs else None,
        positions="position_ids" if "position_ids" in inputs else None,
        past=tuple(past),
        logits="logits",
        present=present,
    )
