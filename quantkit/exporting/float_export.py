"""One float decoder graph from a torch model, with a KV cache that may be empty.

The graph is the *decode* step traced on several tokens behind a filled cache. Four properties of
the trace decide what the graph can do, and each has been lost silently before:

1. The sample's mask has real padding: a mask of ones is dropped from the graph's inputs.
2. Its batch is 2: a batch of 1 becomes a constant.
3. It has several new tokens: one becomes a constant, and the graph could not take a prompt.
4. Its cache is filled, and the graph then takes an empty one too.

So a single export serves prompt and decoding; `export_for_generation` would trace twice.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import onnx_ir as ir
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.exporters.configs import OnnxConfig
from transformers.exporters.exporter_onnx import OnnxExporter

from quantkit.errors import InputError
from quantkit.exporting.graphs import save_graph, strip_metadata
from quantkit.progress import Progress, silent

DEFAULT_OPSET: Final = 21
"""The first opset whose QuantizeLinear knows 4 and 16 bits."""

_BATCH, _PAST, _NEW = 2, 4, 3


def export_float(
    model: PreTrainedModel,
    folder: Path,
    *,
    opset: int = DEFAULT_OPSET,
    metadata: Mapping[str, str] | None = None,
    progress: Progress = silent,
) -> Path:
    """Writes `model.onnx` and its weights to `folder` and returns the path of the graph.

    Inputs: `input_ids` [batch, sequence], `attention_mask` [batch, past_sequence + sequence],
    `past_key_values.<layer>.key|value`. Outputs: `logits`, `present.<layer>.key|value`. Positions
    count from the length of the cache, so padding belongs on the right. The two files appear whole
    or not at all; the model is left as it was.

    Args:
        metadata: Stored in the graph, and kept by what is made from it.

    Raises:
        InputError: the model is not a float32 decoder with a KV cache, or opset is below 21.
    """
    if opset < DEFAULT_OPSET:
        raise InputError(f"export takes opset {DEFAULT_OPSET} or more (4-bit types), got {opset}.")
    if model.dtype != torch.float32:
        raise InputError(f"export takes a float32 model, got {model.dtype}: load it in float32.")
    progress("exporting", 0, 3)
    sample = _sample(model)
    config = OnnxConfig(dynamic=True, opset_version=opset)
    progress("exporting", 1, 3)
    with _quiet(), torch.no_grad():
        exporter: Any = OnnxExporter()  # type: ignore[no-untyped-call]
        graph = exporter.export(model, sample, config).program
    strip_metadata(graph)
    _name_cache(graph)
    _name_dims(graph)
    graph.metadata_props.update(metadata or {})
    progress("exporting", 2, 3)
    path = save_graph(graph, folder)
    progress("exporting", 3, 3)
    return path


def _sample(model: PreTrainedModel) -> dict[str, Any]:
    """Returns keyword arguments of one decode step; see the module's four properties."""
    # transformers renamed the argument: 5.24's decoders take `cache`, others the old name.
    parameters = inspect.signature(model.forward).parameters
    cache_name = "cache" if "cache" in parameters else "past_key_values"
    cache = DynamicCache(config=model.config)
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)  # tokens are looked up in a table
    vocabulary = embedding.shape[0]
    ids = torch.arange(_BATCH * (_PAST + _NEW)).reshape(_BATCH, -1) % vocabulary
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    inputs = {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
    with torch.no_grad():
        prefix = {name: value[:, :_PAST] for name, value in inputs.items()}
        model(**prefix, **{cache_name: cache}, use_cache=True)
    if cache.get_seq_length() != _PAST:
        raise InputError(f"{type(model).__name__} keeps no KV cache; export takes decoders.")
    return {
        "input_ids": inputs["input_ids"][:, _PAST:],
        "attention_mask": inputs["attention_mask"],
        cache_name: cache,
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporters print, log and warn about their own insides; a library does none of it."""
    # Some of their loggers are named after a file, so no parent reaches them all.
    disabled = logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        # torch's own pytree deprecations, raised while it copies its own tree specs.
        warnings.filterwarnings("ignore", message=r".*LeafSpec.*", category=FutureWarning)
        # onnxscript and torch.onnx call deprecated parts of each other and of copyreg.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        logging.disable(max(disabled, logging.WARNING))
        try:
            yield
        finally:
            logging.disable(disabled)


def _name_cache(model: ir.Model) -> None:
    """Gives cache tensors the names that loaders of decoder graphs look for."""
    pattern = re.compile(r"\.layers\.(\d+)\.(key|value)s")
    for prefix, values in (
        ("past_key_values", model.graph.inputs),
        ("present", model.graph.outputs),
    ):
        for value in values:
            found = pattern.search(value.name or "")
            if found:
                value.name = f"{prefix}.{found[1]}.{found[2]}"


def _name_dims(model: ir.Model) -> None:
    """Replaces `s54` by `batch` and the like, and a number written as a symbol by the number."""
    inputs = {value.name: value for value in model.graph.inputs}
    past = next(v for n, v in inputs.items() if n and n.startswith("past_key_values"))
    names = {}
    for value, dims in (
        (inputs["attention_mask"], {0: "batch", 1: "total_sequence"}),
        (inputs["input_ids"], {0: "batch", 1: "sequence"}),
        (past, {2: "past_sequence"}),
    ):
        if value.shape is None:
            continue
        for axis, name in dims.items():
            dim = value.shape[axis]
            if isinstance(dim, int):
                raise InputError(f"the trace fixed {name} of {value.name} to {dim}.")
            names[str(dim.value)] = name
    for value in _values(model.graph):
        if value.shape is not None:
            value.shape = ir.Shape([_renamed(dim, names) for dim in value.shape])


def _renamed(dim: int | ir.SymbolicDim, names: dict[str, str]) -> int | str | None:
    if isinstance(dim, int) or dim.value is None:
        return dim if isinstance(dim, int) else None
    text = str(dim.value)
    if text.isdecimal():
        return int(text)
    text = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), text)
    both = {"past_sequence + sequence", "sequence + past_sequence"}
    return "total_sequence" if text in both else text


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in graph.all_nodes():
        yield from node.outputs
