"""Proof of every quantizer by itself: the graph's own inputs in, torch's quantized result out.

End to end, a model whose outliers leave few levels to everything else disagrees with *itself*:
SmolLM2 with static 8-bit inputs, its embeddings moved by one part in a million, keeps a cosine of
0.97 and 74 % of its first choices, because one value at the tie of two steps moves by a whole one.
No graph can then meet an end-to-end gate, and such a gate could not see a wrong scale. Here each
quantizer gets the value that the graph itself computed, so ties fall the same way and only the
rounding of sums is left: 1e-6, where a scale that is wrong by 1 % gives 1e-2.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit.errors import InputError
from quantkit.exporting.graphs import load_graph, save_graph
from quantkit.exporting.parity import Batch
from quantkit.exporting.rewrite_linear import ModuleLinears, input_grid, linear_weight
from quantkit.exporting.rewrite_logits import logit_scales
from quantkit.numerics.affine import fake_quantize
from quantkit.numerics.qtypes import QType
from quantkit.onnx_runtime import open_decoder
from quantkit.quantization import weight_scale
from quantkit.recipe import Recipe
from quantkit.results import Range

LOCAL_TOLERANCE: Final = 1e-4
"""Of the largest |value| expected; a sum of float32 products is good to about 1e-6 of it."""


@dataclass(frozen=True, kw_only=True)
class QuantizerCheck:
    """One quantized place of the graph.

    Attributes:
        name: `linear/<module>` or `attention_logit/<layer>`.
        error: Largest |difference| over the largest |value| expected.
        elements: How many were compared; a place that never ran has none, and fails.
    """

    name: str
    error: float
    elements: int
    passed: bool


def check_quantizers(
    path: Path,
    batch: Batch,
    *,
    module_linears: ModuleLinears,
    recipe: Recipe,
    ranges: Mapping[str, Range],
    tokens: int = 64,
) -> list[QuantizerCheck]:
    """Returns one check for each quantized linear layer and logit product of the graph at `path`.

    Args:
        batch: Only the first sequence is used, up to `tokens` of it, to bound the memory: the
            inputs and outputs of all layers are held at once.
        module_linears, recipe, ranges: As given to `quantize_graph`.

    Raises:
        InputError: the graph lacks a quantizer that the recipe asks for; it is named.
    """
    model = load_graph(path)
    nodes = {str(node.name): node for node in model.graph}
    linears = {}
    if recipe.weights is not None or recipe.activations is not None:
        linears = {name: _linear_values(nodes, name, recipe) for name in module_linears}
    logits = _logit_values(nodes) if recipe.logits is not None else {}
    if recipe.logits is not None and not logits:
        raise InputError(f"{path} holds no quantized logits; the recipe {recipe} asks for them.")
    pairs = [*linears.values(), *logits.values()]
    found = _run(model, [value for pair in pairs for value in pair], batch, tokens)
    checks = []
    for name, (source, result) in linears.items():
        weight = linear_weight(name, module_linears[name])
        expected = _expected_linear(found[source], name, weight, recipe, ranges)
        checks.append(_check(f"linear/{name}", expected, found[result]))
    for name, (source, result) in logits.items():
        assert recipe.logits is not None  # there are no logit values otherwise
        real = found[source]
        layer = int(name.split("/")[1])
        parts = logit_scales(ranges, layer, real.shape[1], recipe.logits)
        scale = torch.from_numpy(np.concatenate(parts)).reshape(1, -1, 1, 1)
        qtype = QType(bits=recipe.logits.bits, narrow=True)
        checks.append(_check(name, fake_quantize(real, scale, 0, qtype), found[result]))
    return checks


def _linear_values(
    nodes: Mapping[str, ir.Node], name: str, recipe: Recipe
) -> tuple[ir.Value, ir.Value]:
    """Returns the real input and the output of a linear layer."""
    reads_weight = nodes.get(f"weight/{name}/dequantize")
    reads_input = nodes.get(f"linear_input/{name}/dequantize")
    for node, bits in ((reads_weight, recipe.weights), (reads_input, recipe.activations)):
        if bits is not None and node is None:
            raise InputError(f"linear layer {name!r} of the graph is not quantized.")
    reader = reads_weight or reads_input
    assert reader is not None  # the recipe quantizes one of them
    (use, *_) = reader.outputs[0].uses()
    source = use.node.inputs[0]
    assert source is not None  # a MatMul has an input
    return _real(source, "linear_input/"), use.node.outputs[0]


def _logit_values(nodes: Mapping[str, ir.Node]) -> dict[str, tuple[ir.Value, ir.Value]]:
    """Returns the real and the quantized logits of each product."""
    ends = {
        name.removesuffix("/dequantize"): node.outputs[0]
        for name, node in nodes.items()
        if name.startswith("attention_logit/") and name.endswith("/dequantize")
    }
    return {name: (_real(value, "attention_logit/"), value) for name, value in ends.items()}


def _real(value: ir.Value, prefix: str) -> ir.Value:
    """Returns what stands before the quantizer's own nodes."""
    while (node := value.producer()) is not None and str(node.name).startswith(prefix):
        before = node.inputs[0]
        assert before is not None  # a quantizer's nodes have an input
        value = before
    return value


def _run(
    model: ir.Model, values: list[ir.Value], batch: Batch, tokens: int
) -> dict[ir.Value, Tensor]:
    """Returns the values of a run on the first sequence."""
    known = set(model.graph.outputs)
    extra = [value for value in dict.fromkeys(values) if value not in known]
    original = len(model.graph.outputs)
    model.graph.outputs.extend(extra)
    ids = batch.input_ids[:1, :tokens].numpy().astype(np.int64)
    mask = batch.attention_mask[:1, :tokens].numpy().astype(np.int64)
    names = [str(value.name) for value in (*values, *extra)]
    with tempfile.TemporaryDirectory() as folder:
        opened = save_graph(model, Path(folder))
        arrays = open_decoder(opened, extra_outputs={str(value.name) for value in extra}).run_named(
            names, ids, mask
        )
    del model.graph.outputs[original:]
    return {value: _tensor(arrays[str(value.name)]) for value in values}


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.float32))


def _expected_linear(
    x: Tensor, name: str, weight: Tensor, recipe: Recipe, ranges: Mapping[str, Range]
) -> Tensor:
    if recipe.activations is not None:
        scale, zero_point = input_grid(ranges, name, recipe.activations)
        qtype = QType(bits=recipe.activations, signed=False)
        x = fake_quantize(x, torch.tensor(scale), zero_point, qtype)
    if recipe.weights is not None:
        narrow = QType(bits=recipe.weights, narrow=True)
        weight = fake_quantize(weight, weight_scale(weight, recipe.weights), 0, narrow)
    return x.double() @ weight.double().T


def _check(name: str, expected: Tensor, found: Tensor) -> QuantizerCheck:
    if expected.shape != found.shape:
        raise InputError(f"{name}: expected {list(expected.shape)}, got {list(found.shape)}.")
    gap = float((expected - found).abs().max()) if found.numel() else math.nan
    top = float(expected.abs().max()) if found.numel() else math.nan
    error = gap / top if top else gap
    return QuantizerCheck(
        name=name, error=error, elements=found.numel(), passed=error <= LOCAL_TOLERANCE
    )
