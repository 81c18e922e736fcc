"""`QuantkitQuantizer`: quantkit's passes inside transformers' own export.

How this differs from `quantkit export`: transformers traces the model, and here is only the graph
that it made, so layers are found in the graph, ranges are seen by ONNX Runtime, and nothing is
proven: the proof (parity, perplexity, latency) is what the command is for. Grids and integers are
the same.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

import onnx_ir as ir
from onnx_ir.passes.common import DeduplicateInitializersPass
from transformers.exporters.configs import ExportFormat as Backend
from transformers.exporters.quantizers.base import CalibrationSet, ExportQuantizer
from transformers.exporters.utils import onnx_feed

from quantkit.errors import InputError
from quantkit.exporting.graph_ranges import (
    add_valid_logits,
    batch_of,
    completed,
    graph_ranges,
    require_unordered,
    with_real_input,
)
from quantkit.exporting.graphs import (
    all_nodes,
    constant,
    quantized_nodes,
    remove_unused_initializers,
    save_graph,
    scopes_of,
)
from quantkit.exporting.half import to_half
from quantkit.exporting.linears import LinearNode, find_linears
from quantkit.exporting.logits import find_logits
from quantkit.exporting.rewrite_linear import quantize_linears
from quantkit.exporting.rewrite_logits import quantize_logits
from quantkit.jobs import ExportFormat, Storage, with_attention_bits
from quantkit.jobs.formats import HALF
from quantkit.numerics.methods import parse_methods
from quantkit.onnx_runtime import GraphBatch, linear_inputs
from quantkit.quantization import require_known
from quantkit.recipe import UNQUANTIZED_BITS
from quantkit.results import Range

RECIPE_KEY: Final = "quantkit.recipe"
"""Of the graph's metadata: the recipe that it was made by."""
COUNT_KEY: Final = "quantkit.quantizers"
"""Of the graph's metadata: how many weights, inputs and maps are on a grid; 0 is possible in a
component without linear layers."""
_POINTS: Final = ("linear_input", "attention_logit")
_LOGIT: Final = "attention_logit/"
_LOGIT_NAME: Final = re.compile(rf"{_LOGIT}\d+/map \d+")
_LEAST_OPSET: Final = 18
"""What the passes' operators need; wide and narrow types need `_TYPES_OPSET`."""
_TYPES_OPSET: Final = 21
_AFTER_HEAD: Final = (
    *("Add", "Cast", "Div", "Identity", "Mul", "Reshape", "Slice", "Squeeze", "Tanh", "Unsqueeze"),
)
"""What may stand between the vocabulary's product and `logits`: bias, scale, soft cap, shape."""


class QuantkitQuantizer(ExportQuantizer):
    """Puts an exported graph on the grids of a recipe: `OnnxConfig(quantizer=QuantkitQuantizer())`.

    Linear layers are all products with a constant matrix, named after the torch module that they
    were traced in (`model.layers.0.mlp.down_proj`), or their node where there is none. The product
    whose result is the output `logits` (`lm_head`, a classifier) stays in float, and so do
    convolutions, embeddings and the products of attention. Of a model that is exported as several
    graphs each is quantized alone, with ranges of its own; a component without linear layers stays
    as it is. What was done is in the graph's metadata (`quantkit.recipe`, `quantkit.quantizers`).

    transformers hands over a graph of opset 20 unless told otherwise; 4- and 16-bit types and
    weights by group in Q/DQ form take `OnnxConfig(opset_version=21)`.

    Args:
        recipe: A recipe or a name, as `quantkit export --quantize` takes it: `w8a8`,
            `w8a8-dynamic`, `w4a16`, `16`, ...; `auto` is the command's alone.
        calibration_dataset: Samples that ranges are seen on: of the model's forward, or of
            `generate` for `export_for_generation`. None: the export's own sample inputs, with
            transformers' warning. Recipes without static ranges read none.
        ranges: `Ranges.tensors` of a `ranges.json`, by the same names, instead of calibration.
        keep: Names of quantizers that stay in float: `linear_input/<module>`, `weight/<module>`,
            `attention_logit/<layer>/map <n>`.
        storage: How weights by group are held, `qdq` or `matmulnbits`; None: as the name says.
        method: How ranges are chosen from what was seen, e.g. `mse,attention_logit=minmax`.
        attention_bits: Below 16, attention logits too: pre-mask, static, a range a head.

    Raises:
        InputError: an unknown recipe, method or storage, or one that only the command can do; a
            name in `keep` of no form.
    """

    supported_formats: ClassVar[tuple[Backend, ...]] = (Backend.ONNX,)  # type: ignore[misc]
    required_packages: ClassVar[tuple[str, ...]] = ("onnx", "onnx_ir", "onnxruntime")  # type: ignore[misc]

    def __init__(
        self,
        recipe: str = "w8a8-dynamic",
        *,
        calibration_dataset: Iterable[dict[str, Any]] | None = None,
        ranges: Mapping[str, Range] | None = None,
        keep: Collection[str] = (),
        storage: Storage | None = None,
        method: str = "minmax",
        attention_bits: int = UNQUANTIZED_BITS,
    ) -> None:
        super().__init__(calibration_dataset)
        self.format = replace(
            ExportFormat.parse(recipe, storage), recipe=with_attention_bits(recipe, attention_bits)
        )
        self.methods = parse_methods(method, _POINTS)
        self.ranges = ranges
        self.keep = tuple(keep)
        if self.format.is_auto:
            raise InputError(
                "recipe 'auto' searches with the model at hand: `quantkit export MODEL --quantize "
                "auto`. Expected a recipe, e.g. 'w8a8-dynamic'."
            )
        self.format.recipe.require_exportable()
        if self.format.recipe.cache is not None:
            raise InputError(
                f"recipe {self.format.recipe}: a cache on integers changes a graph's inputs, which "
                "transformers' runner fills: `quantkit export MODEL` writes such a graph."
            )
        require_unordered(self.methods)
        for name in self.keep:
            if name.startswith(_LOGIT) and not _LOGIT_NAME.fullmatch(name):
                raise InputError(
                    f"to keep in float: {name!r} is no name of a logit; expected "
                    f"'{_LOGIT}<layer>/map <n>', e.g. '{_LOGIT}0/map 1'."
                )

    def quantize(
        self, model: ir.Model, sample_inputs: dict[str, Any], export_format: Backend
    ) -> ir.Model:
        """Returns a quantized graph; `model` is not changed.

        Raises:
            InputError: the graph is quantized already, is not float32, or has too low an opset; a
                name in `keep` that it does not have; no samples; or a range that is missing or
                cannot be trusted.
        """
        recipe = self.format.recipe
        _require_float(model)
        if self.format.is_half:
            half = to_half(model)
            half.metadata_props[RECIPE_KEY] = HALF
            return half
        _require_opset(model, self.format)
        quantized = model.clone()
        _fold_transposes(quantized)
        linears = named_linears(quantized) if recipe.weights or recipe.activations else []
        kinds = ("weight", "linear_input")
        known = [f"{kind}/{linear.module}" for kind in kinds for linear in linears]
        linear_keep = [name for name in self.keep if not name.startswith(_LOGIT)]
        require_known(linear_keep, known, "to keep in float")
        ranges = self._ranges(quantized, linears, sample_inputs)
        shared = len({linear.node.inputs[1] for linear in linears}) < len(linears)
        infos = quantize_linears(
            quantized,
            linears,
            recipe,
            ranges=ranges,
            keep=self.keep,
            storage=self.format.storage,
        )
        if recipe.logits is not None and _has_attention(quantized):
            infos += quantize_logits(quantized, recipe.logits, ranges, self.keep)
        remove_unused_initializers(quantized)
        if shared:
            # Layers that share a weight (ALBERT's) got integers of their own, of the same values.
            DeduplicateInitializersPass(size_limit=sys.maxsize)(quantized)
        quantized.metadata_props[RECIPE_KEY] = str(recipe)
        quantized.metadata_props[COUNT_KEY] = str(len(infos))
        return quantized

    def _ranges(
        self, model: ir.Model, linears: list[LinearNode], sample_inputs: dict[str, Any]
    ) -> Mapping[str, Range]:
        """Returns the ranges that were given, or else those that the samples show."""
        recipe = self.format.recipe
        if self.ranges is not None or not recipe.needs_ranges:
            return self.ranges or {}
        observed = model.clone()
        valid: dict[str, list[list[str]]] = {}
        if recipe.logits is not None and recipe.logits.range == "static" and _has_attention(model):
            kept = {int(n.split("/")[1]) for n in self.keep if n.startswith(_LOGIT)}
            logits = [logit for logit in find_logits(observed) if logit.layer not in kept]
            valid = add_valid_logits(observed, logits, recipe.logits)
        inputs = recipe.activations
        is_static = inputs is not None and inputs.range == "static"
        names = [n for n in linears if is_static and f"linear_input/{n.module}" not in self.keep]
        batches = self._batches(model, sample_inputs, is_real_input=bool(valid))
        with tempfile.TemporaryDirectory() as folder:
            path = save_graph(observed, Path(folder))
            return graph_ranges(path, batches, recipe, self.methods, names, valid)

    def _batches(
        self, model: ir.Model, sample_inputs: dict[str, Any], *, is_real_input: bool = False
    ) -> CalibrationSet:
        """Returns the samples as batches of the graph; they can be gone through again."""
        samples = self.calibration_dataset
        if samples is not None and iter(samples) is samples:
            samples = list(samples)
        if samples is not None and not any(True for _ in samples):
            raise InputError(
                "calibration_dataset has no samples: expected a list of model inputs, or None for "
                "the export's own."
            )
        inputs = list(model.graph.inputs)
        names = [str(value.name) for value in inputs]

        def batch(sample: Mapping[str, Any]) -> GraphBatch:
            made = batch_of(completed(onnx_feed(names, sample), inputs), sample)
            return with_real_input(made) if is_real_input else made

        return CalibrationSet(samples, sample_inputs, batch)


def named_linears(model: ir.Model) -> list[LinearNode]:
    """Returns the linear layers of a graph, without the one that makes `logits`, by their modules.

    The second layer of one module ends in `#2`: two products of one module, or one module that
    runs twice. Products of what no input reaches are left out.
    """
    head, active = _head(model), set(linear_inputs(model))
    counts: dict[str, int] = {}
    found: list[LinearNode] = []
    for linear in find_linears(model):
        source = linear.node.inputs[0]
        if linear.node is head or source is None or source.name not in active:
            continue
        scopes = scopes_of(linear.node)  # the last one is the node's own
        name = scopes[-2] if len(scopes) > 1 and scopes[-2] else linear.module
        counts[name] = counts.get(name, 0) + 1
        name += f"#{counts[name]}" if counts[name] > 1 else ""
        found.append(replace(linear, module=name))
    return found


def _head(model: ir.Model) -> ir.Node | None:
    """Returns the product whose result, biased, scaled, capped or reshaped, is `logits`."""
    values = [value for value in model.graph.outputs if value.name == "logits"]
    while values:
        node = values.pop().producer()
        if node is None or node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type in ("MatMul", "Gemm"):
            return node
        if node.op_type in _AFTER_HEAD:
            values += [value for value in reversed(node.inputs) if value is not None]
    return None


def _fold_transposes(model: ir.Model) -> None:
    """Makes constants of transposed constants that products read.

    The exporter leaves a large one that several layers share (ALBERT's). A vocabulary's, tied to
    the embedding, stays as it is: the table would be there twice.
    """
    head = _head(model)
    for node in list(model.graph):
        source = node.inputs[0] if node.op_type == "Transpose" else None
        if source is None or source.const_value is None or len(source.const_value.shape) != 2:
            continue
        output = node.outputs[0]
        if any(user is head or user.op_type != "MatMul" for user, _ in output.uses()):
            continue
        turned = source.const_value.numpy().T
        order = node.attributes.get_ints("perm", [1, 0])
        array = turned if list(order) == [1, 0] else turned.T
        folded = constant(model, f"{output.name}_folded", array, source.const_value.dtype)
        ir.convenience.replace_all_uses_with(output, folded)
        model.graph.remove(node, safe=True)


def _has_attention(model: ir.Model) -> bool:
    return any(node.op_type == "Softmax" for node in model.graph)


def _require_float(model: ir.Model) -> None:
    found = quantized_nodes(model)
    if found:
        node = next(node for node in all_nodes(model) if node.op_type in found)
        raise InputError(
            f"the graph is quantized already: node {node.name!r} is a {node.op_type}. Expected "
            "the float graph."
        )
    weights = {v for n in model.graph if n.op_type in ("MatMul", "Gemm") for v in n.inputs[:2]}
    for value in weights:
        if value is not None and value.is_initializer() and value.dtype != ir.DataType.FLOAT:
            raise InputError(
                f"weight {value.name!r} is {value.dtype}: expected a float32 graph. Load the model "
                "in float32 and export it again."
            )


def _require_opset(model: ir.Model, format_: ExportFormat) -> None:
    opset = model.opset_imports.get("", 0)
    least = _TYPES_OPSET if _needs_new_types(format_) else _LEAST_OPSET
    if opset < least:
        raise InputError(
            f"recipe {format_.recipe} needs opset {least}, the graph has {opset}: "
            f"OnnxConfig(opset_version={least}, ...)."
        )


def _needs_new_types(format_: ExportFormat) -> bool:
    """Returns whether the graph will hold integers of 4 or 16 bits, or scales by block."""
    recipe = format_.recipe
    if format_.has_groups and format_.storage == "matmulnbits":
        widths = [part.bits for part in (recipe.activations, recipe.logits) if part is not None]
    else:
        parts = (recipe.weights, recipe.activations, recipe.logits)
        widths = [part.bits for part in parts if part is not None]
        if format_.has_groups:
            return True
    return any(bits <= 4 or bits > 8 for bits in widths)
