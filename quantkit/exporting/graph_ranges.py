"""Static ranges of a float graph's linear inputs and attention logits, seen by ONNX Runtime.

There is no torch model here, so the graph itself says which logits count: `add_valid_logits` puts
nodes into a copy of it that read the mask behind each logit and drop what it hides. The rest is
`observe_graph`: fixed memory a tensor, any method from one pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from torch import Tensor

from quantkit.calibration import failed_guards
from quantkit.errors import InputError
from quantkit.exporting.graphs import constant
from quantkit.exporting.linears import LinearNode
from quantkit.exporting.logits import MASKED_BELOW, LogitMask, LogitValue
from quantkit.numerics.choose import choose_range
from quantkit.numerics.methods import Method, MethodChoice
from quantkit.numerics.observers import Bundle, merged
from quantkit.onnx_runtime import GraphBatch, observe_graph
from quantkit.recipe import LogitQuant, Recipe
from quantkit.results import Range

REAL_INPUT: Final = "quantkit_real"
"""An input that `add_valid_logits` adds: bool `[batch or 1, query or 1]`, False where padded."""
BYTES_AT_ONCE: Final = 1 << 28
"""Of observed tensors that are held at a time."""


def add_valid_logits(
    model: ir.Model, logits: Sequence[LogitValue], quant: LogitQuant
) -> dict[str, list[list[str]]]:
    """Adds, for each logit, tensors of its valid entries alone, and the input `REAL_INPUT`.

    Valid: neither hidden by a mask between the logit and its Softmax, nor of a padded query.

    Returns:
        By layer's range (`attention_logit/<layer>/map 1`), for each of its calls the names of one
        tensor a head, or of one tensor where the recipe has a scale a tensor. Both maps of a
        differential head count as map 1 with all heads.

    Raises:
        InputError: a mask that cannot be read.
    """
    graph = model.graph
    real = ir.val(REAL_INPUT, ir.DataType.BOOL, ["real_batch", "real_query"])
    graph.inputs.append(real)
    number = 0

    def put(operation: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        nonlocal number
        number += 1
        node = ir.node(operation, inputs, attributes, name=f"quantkit_valid/{number}")
        node.outputs[0].name = f"{node.name}/output"
        graph.append(node)
        return node.outputs[0]

    def integers(name: str, *numbers: int) -> ir.Value:
        return constant(model, f"quantkit_valid/{name}", np.asarray(numbers), ir.DataType.INT64)

    flat, axes = integers("flat", -1), integers("axes", 1, 3)
    bound = constant(model, "quantkit_valid/bound", np.asarray(MASKED_BELOW), ir.DataType.FLOAT)
    found: dict[str, list[list[str]]] = {}
    for index, logit in enumerate(logits):
        valid = put("Unsqueeze", real, axes)
        for mask in _masks_of(logit):
            if mask.keeps is None:
                shown = put("Greater", mask.operand, bound)
            else:
                shown = mask.operand if mask.keeps else put("Not", mask.operand)
            valid = put("And", valid, shown)
        valid = put("Expand", valid, put("Shape", logit.value))
        names: list[str] = []
        for head in range(logit.heads if quant.granularity == "head" else 1):
            parts = [logit.value, valid]
            if quant.granularity == "head":
                place = integers(f"{index}/{head}", head)
                parts = [put("Gather", part, place, axis=1) for part in parts]
            kept = put("Compress", *(put("Reshape", part, flat) for part in parts))
            kept.type = ir.TensorType(ir.DataType.FLOAT)
            names.append(str(kept.name))
        found.setdefault(f"attention_logit/{logit.layer}/map 1", []).append(names)
    return found


def graph_ranges(
    path: Path,
    batches: Iterable[GraphBatch],
    recipe: Recipe,
    methods: MethodChoice,
    linears: Sequence[LinearNode],
    logits: Mapping[str, list[list[str]]],
) -> dict[str, Range]:
    """Returns the static ranges that the recipe reads, of the graph's `linears` and `logits`.

    Args:
        path: The float graph, with what `add_valid_logits` added.
        batches: May be gone through more than once.
        linears: Each has a range by `linear_input/<module>`; layers that share an input share it.
        logits: What `add_valid_logits` returned.

    Raises:
        InputError: what `observe_graph` says; a method that asks for the order of the samples; or
            a range that cannot be trusted, e.g. of a tensor that never ran, or holds NaN.
    """
    require_unordered(methods)
    inputs = {f"linear_input/{linear.module}": _input_name(linear) for linear in linears}
    tensors = [*dict.fromkeys(inputs.values())]
    tensors += [name for calls in logits.values() for names in calls for name in names]
    if not tensors:
        return {}
    seen = observe_graph(path, batches, tensors=tensors, bytes_at_once=BYTES_AT_ONCE)
    found: dict[str, Range] = {}
    known: dict[str, Range] = {}
    for name, tensor in inputs.items():
        assert recipe.activations is not None  # only then does a linear layer have a range
        if tensor not in known:
            method, bits = methods.of("linear_input"), recipe.activations.bits
            known[tensor] = _range(name, [seen[tensor]], method, bits, symmetric=False)
        found[name] = known[tensor]
    for name, calls in logits.items():
        assert recipe.logits is not None
        heads = [merged([seen[tensor] for tensor in each]) for each in zip(*calls, strict=True)]
        method, quant = methods.of("attention_logit"), recipe.logits
        found[name] = _range(name, heads, method, quant.bits, symmetric=quant.symmetric)
    return found


def require_unordered(methods: MethodChoice) -> None:
    """Raises InputError for a method that looks at the order of the samples."""
    for method in methods.methods:
        if method.is_order_dependent:
            raise InputError(
                f"method {method} follows the order of the samples, which a graph's observers do "
                "not keep: take minmax, mse, entropy or a percentile."
            )


def batch_of(feeds: Mapping[str, NDArray[Any]], sample: Mapping[str, object]) -> GraphBatch:
    """Returns a batch with the padding that a sample's `attention_mask` says.

    The mask `[batch, past + sequence]` is read beside `input_ids` or `inputs_embeds`; its last
    `sequence` columns are the new tokens'. A mask of another kind (`[batch, heads, query, key]`, or
    an encoder's beside a decoder's tokens) says nothing about rows, and all count.
    """
    mask = sample.get("attention_mask")
    tokens = next((sample[n] for n in ("input_ids", "inputs_embeds") if n in sample), None)
    real: NDArray[np.bool_] | None = None
    if isinstance(mask, Tensor) and isinstance(tokens, Tensor) and mask.ndim == 2:
        rows, length = tokens.shape[:2]
        if mask.shape[0] == rows and mask.shape[1] >= length and "decoder_input_ids" not in sample:
            real = mask[:, mask.shape[1] - length :].bool().cpu().numpy()
    return GraphBatch(feeds=feeds, real=real)


def completed(
    feeds: Mapping[str, NDArray[Any]], inputs: Iterable[ir.Value]
) -> dict[str, NDArray[Any]]:
    """Returns the feeds with what `generate` leaves out: a mask of ones, and a cache that is empty.

    A prompt has no cache yet, and the mask of samples without padding is dropped on the way.
    """
    found = dict(feeds)
    tokens = next((found[n] for n in ("input_ids", "inputs_embeds") if n in found), None)
    if tokens is None:
        return found
    past = 0
    for value in inputs:
        name, shape = str(value.name), value.shape
        if shape is None or len(shape) != 4 or value.dtype != ir.DataType.FLOAT:
            continue
        sizes = [str(dim.value if isinstance(dim, ir.SymbolicDim) else dim) for dim in shape]
        if name not in found and sizes[1].isdecimal() and sizes[3].isdecimal():
            empty = (tokens.shape[0], int(sizes[1]), 0, int(sizes[3]))
            found[name] = np.zeros(empty, np.float32)
        elif name in found:
            past = max(past, found[name].shape[2])
    if "attention_mask" not in found and any(value.name == "attention_mask" for value in inputs):
        found["attention_mask"] = np.ones((tokens.shape[0], past + tokens.shape[1]), np.int64)
    return found


def with_real_input(batch: GraphBatch) -> GraphBatch:
    """Returns the batch for a graph with `REAL_INPUT`."""
    real = np.ones((1, 1), np.bool_) if batch.real is None else batch.real
    return GraphBatch(feeds={**batch.feeds, REAL_INPUT: real}, real=batch.real)


def _range(
    name: str, groups: Sequence[Bundle], method: Method, bits: int, *, symmetric: bool
) -> Range:
    """Returns the range of one tensor, one interval a group."""
    ends: list[tuple[float, float]] = []
    for bundle in groups:
        failed = failed_guards(bundle)
        if failed:
            raise InputError(
                f"the range of {name!r} cannot be trusted: it holds {', '.join(failed.values())}. "
                f"Mend the samples, or leave it in float: keep=({name!r},)."
            )
        lo, hi = choose_range(method, bundle, bits, symmetric=symmetric)
        ends.append((float(lo), float(hi)))
    alone = len(ends) == 1
    return Range(
        lo=ends[0][0] if alone else [lo for lo, _ in ends],
        hi=ends[0][1] if alone else [hi for _, hi in ends],
        method=str(method),
        granularity="tensor" if alone else "head",
        count=sum(int(bundle.minmax.count.sum()) for bundle in groups),
        point=name.split("/")[0],
        bits=bits if method.depends_on_bits else None,
        symmetric=symmetric,
    )


def _masks_of(logit: LogitValue) -> tuple[LogitMask, ...]:
    if logit.masks is None:
        raise InputError(
            f"the mask of layer {logit.layer} cannot be read in the graph, so its logits cannot be "
            "calibrated there: `quantkit export MODEL` calibrates them in torch."
        )
    return logit.masks


def _input_name(linear: LinearNode) -> str:
    source = linear.node.inputs[0]
    assert source is not None and source.name  # a product's first input is not optional
    return source.name
