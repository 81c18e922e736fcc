"""Proof, layer by layer, that a written graph holds and computes what its recipe says.

A graph without a torch model has no simulation to be compared with. So every layer is: on samples,
run as the graph is written, without any fusion, beside arithmetic on the float graph's weights and
the calibrated ranges that shares no code with the passes.

| what | must be |
|---|---|
| a weight `w` | within half a step of numpy's grid of the float weight, and on that grid |
| an input | the same of the value that the graph itself quantizes; scale and zero point as ranged |
| a product | the float node's operation on those two, with the float node's bias |

Each layer is given what the graph gives it, so a fault is named where it is, and not where it ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnx_ir as ir

from quantkit.errors import GateError
from quantkit.exporting.any_graph import GraphLayers
from quantkit.exporting.diagnosis.quantized_graph import array_of
from quantkit.exporting.diagnosis.quantized_weights import blocks_of
from quantkit.exporting.diagnosis.tensor_runs import Arrays, TensorRuns, dealt, tensor_bytes
from quantkit.exporting.graphs import load_graph
from quantkit.exporting.grid_proof import (
    ROUNDING,
    Array,
    GridProof,
    as_rows,
    channels_off,
    on_grid,
    steps_off,
)
from quantkit.exporting.rewrite_tokens import TINY, UNIT
from quantkit.onnx_runtime import open_graph
from quantkit.quantization import linear_input_grid
from quantkit.recipe import Recipe, WeightQuant
from quantkit.results import Range

MOST_STEPS: Final = 1e-3
"""Beyond half a step, and beyond what float32 rounds away."""
MOST_OF_PRODUCT: Final = 1e-3
"""Of a channel's norm and a tenth of the largest channel's: sums differ in their last bits."""
_INT32: Final = (-(1 << 31), (1 << 31) - 1)
_BIAS_STEPS: Final = float(1 << 30)
"""Most steps of a convolution's bias; a weight's scale is made coarser for it."""
_ON_THE_WAY: Final = ("/quantize", "/clip", "/clip_lo", "/clip_hi", UNIT)
"""How nodes end that stand between a tensor and its integers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Layer:
    """A layer in both graphs.

    Attributes:
        output: With its bias, in real numbers.
        bias: What is added in the written graph, before `beta`; None for nothing.
        rows: Its float weight, `[out, inputs of one]`.
    """

    name: str
    float_node: ir.Node
    node: ir.Node
    output: ir.Value
    bias: ir.Value | None
    rows: Array
    is_conv: bool
    transposed: bool

    @property
    def input(self) -> ir.Value:
        return _given(self.node, 0)

    @property
    def source(self) -> ir.Value:
        """What is quantized; the input itself where nothing is."""
        return _before_grid(self.input)

    def weight_rows(self, weight: Array) -> Array:
        """Returns a weight of the layer's own layout as `rows`."""
        if self.is_conv:
            return weight.reshape(len(weight), -1)
        return weight if self.transposed else weight.T


def prove_layers(
    float_path: Path,
    path: Path,
    layers: GraphLayers,
    recipe: Recipe,
    *,
    ranges: Mapping[str, Range],
    quantizers: Collection[str],
    feeds: Arrays,
    bytes_at_once: int,
) -> list[GridProof]:
    """Returns the proofs of weights, inputs and products, those that the recipe has.

    Args:
        float_path: The prepared graph; `path`: the quantized one that was made of it.
        layers: Of the former, with the weights as they were.
        quantizers: Names of all that are in the graph.
        feeds: Samples, one batch.
        bytes_at_once: Of tensors that may be held at a time.

    Raises:
        GateError: a quantizer or a layer that is not in the graph, by name.
    """
    prover = _Prover(path, recipe, ranges, frozenset(quantizers))
    found = list(_layers(float_path, path, prover.nodes, layers))
    changed = [x for x in found if prover.names(x) & prover.quantizers]
    results = [conv.name for conv in layers.convs]
    sizes = tensor_bytes(path, _unique(v for x in changed for v in _activations(x)), feeds)
    costs = [4 * x.rows.size + sum(sizes[n] for n in _unique(_activations(x))) for x in changed]
    for group in dealt(costs, bytes_at_once):
        some = [changed[index] for index in group]
        pairs = [p for x in some if x.name in results for p in prover.result_grids(x.name)]
        wanted = [v for x in some for v in (*_activations(x), *_others(x))]
        wanted += [value for pair in pairs for value in pair[1:]]
        values = dict(TensorRuns(path, _computed(wanted)).run(feeds))
        values |= {str(v.name): a for v in wanted if (a := array_of(v)) is not None}
        for layer in some:
            prover.prove(layer, values)
        for name, source, real in pairs:
            prover.prove_input(name, source, real, values)
    proven = {name for proof in prover.proofs for name in proof.off}
    missing = sorted(prover.quantizers - proven)
    if missing:
        raise GateError(f"{path}: quantizer {missing[0]!r} is not in the graph that was written.")
    return [proof for proof in prover.proofs if proof.off]


class _Prover:
    """The proofs of one graph, layer after layer."""

    def __init__(
        self,
        path: Path,
        recipe: Recipe,
        ranges: Mapping[str, Range],
        quantizers: frozenset[str],
    ) -> None:
        self.path, self.recipe, self.ranges, self.quantizers = path, recipe, ranges, quantizers
        model = load_graph(path)
        self.nodes = {str(node.name): node for node in model.graph}
        self.opset = int(model.opset_imports[""])
        unit = "steps beyond half of one"
        self.weights = GridProof(what="weights", unit=unit, most=MOST_STEPS)
        self.inputs = GridProof(what="inputs", unit=unit, most=MOST_STEPS)
        self.products = GridProof(what="products", unit="of its norm", most=MOST_OF_PRODUCT)

    @property
    def proofs(self) -> tuple[GridProof, ...]:
        return self.weights, self.inputs, self.products

    def names(self, layer: _Layer) -> set[str]:
        found = {f"weight/{layer.name}", f"linear_input/{layer.name}"}
        return found | ({f"linear_input/{layer.name}/result"} if layer.is_conv else set())

    def prove(self, layer: _Layer, values: Arrays) -> None:
        weight, bias = self._weight(layer, values), self._bias(layer, values)
        name = f"linear_input/{layer.name}"
        real = values[str(layer.input.name)]
        if name in self.quantizers:
            real = self.prove_input(name, layer.source, layer.input, values)
        expected = _product(layer.float_node, self.opset, real, weight, bias)
        found = values[str(layer.output.name)]
        axis = 1 if layer.is_conv else -1
        a, b = (np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis]) for x in (expected, found))
        self.products.add(f"product/{layer.name}", a, b, channels_off(a, b))

    def prove_input(self, name: str, source: ir.Value, real: ir.Value, values: Arrays) -> Array:
        """Returns what the quantizer gives, times the range of the token where that is dynamic."""
        inputs = self.recipe.activations
        assert inputs is not None  # there is a quantizer of inputs
        x, held = values[str(source.name)], values[str(real.name)]
        largest: Array = np.ones((), np.float32)
        if inputs.range == "dynamic":
            largest = np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(TINY))
            qmax = (1 << (inputs.bits - 1)) - 1
            scale, zero, ends = 1.0 / qmax, 0, (-qmax, qmax)
        else:
            grid = linear_input_grid(self.ranges, name.partition("/")[2], inputs.bits)
            scale, zero = float(grid.scale), int(grid.zero_point)
            ends = (-(1 << (inputs.bits - 1)), (1 << (inputs.bits - 1)) - 1)
        off = steps_off(x / largest, held, np.asarray(scale), zero, *ends)
        off = max(off, _constants_off(real, scale, zero + (1 << (inputs.bits - 1)), inputs.bits))
        expected = on_grid(x / largest, np.asarray(scale), zero, *ends)
        self.inputs.add(name, as_rows(expected), as_rows(held), off)
        return np.asarray(held * largest, np.float32)

    def result_grids(self, name: str) -> Iterator[tuple[str, ir.Value, ir.Value]]:
        """Yields (quantizer, source, real numbers) of a convolution's result, for each reader."""
        name = f"linear_input/{name}/result"
        for node in self.nodes.values() if name in self.quantizers else ():
            if str(node.name).startswith(f"{name}/dequantize"):
                yield name, _before_grid(node.outputs[0]), node.outputs[0]

    def _weight(self, layer: _Layer, values: Arrays) -> Array:
        """Returns the weight as the float node's operand, after its proof."""
        if layer.node.op_type == "MatMulNBits":
            found = blocks_of(layer.node)
            assert found is not None  # 4 or 8 bits, as quantkit writes them
            weight: Array = found.T if layer.transposed else found
        else:
            weight = values[str(_given(layer.node, 1).name)]
        quant, name = self.recipe.weights, f"weight/{layer.name}"
        if name in self.quantizers and quant is not None:
            size = quant.group_size if isinstance(quant, WeightQuant) else None
            scale = self._weight_scale(layer, values, quant.bits, size)
            qmax = (1 << (quant.bits - 1)) - 1
            rows = layer.weight_rows(weight)
            off = steps_off(layer.rows, rows, scale, 0, -qmax, qmax)
            self.weights.add(name, on_grid(layer.rows, scale, 0, -qmax, qmax), rows, off)
        return weight

    def _weight_scale(
        self, layer: _Layer, values: Arrays, bits: int, group_size: int | None
    ) -> Array:
        """Returns the step of each element: of its row, or its group of inputs, the largest."""
        width = layer.rows.shape[1]
        size = group_size or width
        largest = np.maximum.reduceat(np.abs(layer.rows), np.arange(0, width, size), axis=1)
        scale = np.where(largest > 0, largest / ((1 << (bits - 1)) - 1), 1.0)
        bias = self._float_bias(layer)
        if layer.is_conv and bias is not None:
            step = self._input_scale(layer)
            scale = np.maximum(scale, np.abs(bias)[:, None] / (step * _BIAS_STEPS))
            held = values[str(_given(layer.node, 2).name)]
            off = steps_off(bias, held, scale[:, 0].astype(np.float64) * step, 0, *_INT32)
            self.weights.add(f"bias/{layer.name}", bias[None], held[None], off)
        return np.repeat(scale.astype(np.float32), size, axis=1)[:, :width]

    def _input_scale(self, layer: _Layer) -> float:
        inputs = self.recipe.activations
        assert inputs is not None  # a convolution is quantized with its input
        return float(linear_input_grid(self.ranges, layer.name, inputs.bits).scale)

    def _bias(self, layer: _Layer, values: Arrays) -> Array | None:
        """Returns what the float node adds: its own constant, but a convolution's as it is held."""
        known = None if layer.is_conv else self._float_bias(layer)
        if known is None and layer.bias is not None:
            return values[str(layer.bias.name)]
        return known

    @staticmethod
    def _float_bias(layer: _Layer) -> Array | None:
        inputs = layer.float_node.inputs
        return array_of(inputs[2]) if len(inputs) > 2 else None


def _layers(
    float_path: Path, path: Path, nodes: Mapping[str, ir.Node], layers: GraphLayers
) -> Iterator[_Layer]:
    before = {str(node.name): node for node in load_graph(float_path).graph}
    linears = [(x.module, x.weight.numpy(), False, x.transposed) for x in layers.linears]
    convs = [(x.name, x.flat.weight.numpy(), True, True) for x in layers.convs]
    for name, rows, is_conv, transposed in linears + convs:
        places = (name, f"{name}/product", f"weight/{name}/product")
        node = next((nodes[place] for place in places if place in nodes), None)
        if node is None or name not in before:
            raise GateError(f"{path}: layer {name!r} is not in the graph that was written.")
        last = node
        for place in (f"linear_input/{name}/rescale", f"{name}/bias"):
            if place in nodes and nodes[place].inputs[0] is last.outputs[0]:
                last = nodes[place]
        yield _Layer(
            name=name,
            float_node=before[name],
            node=node,
            output=last.outputs[0],
            bias=_bias_of(node, nodes.get(f"{name}/bias")),
            rows=rows,
            is_conv=is_conv,
            transposed=transposed,
        )


def _given(node: ir.Node, place: int) -> ir.Value:
    value = node.inputs[place]
    assert value is not None  # a layer has an input and a weight; it was asked whether it has more
    return value


def _activations(layer: _Layer) -> tuple[ir.Value, ...]:
    return layer.source, layer.input, layer.output


def _others(layer: _Layer) -> list[ir.Value]:
    """Returns weight and bias as the written graph has them."""
    found = [] if layer.node.op_type == "MatMulNBits" else [_given(layer.node, 1)]
    return found if layer.bias is None else [*found, layer.bias]


def _bias_of(node: ir.Node, add: ir.Node | None) -> ir.Value | None:
    if add is None or node.name == add.name:
        own = node.op_type in ("Gemm", "Conv") and len(node.inputs) > 2
        return node.inputs[2] if own else None
    value = _given(add, 1)
    scaled = value.producer()
    name = f"{str(add.name).removesuffix('/bias')}/scaled_bias"
    return _given(scaled, 0) if scaled is not None and scaled.name == name else value


def _computed(values: Sequence[ir.Value]) -> list[str]:
    return _unique(value for value in values if array_of(value) is None)


def _unique(values: Iterator[ir.Value] | Sequence[ir.Value]) -> list[str]:
    return list(dict.fromkeys(str(value.name) for value in values))


def _before_grid(real: ir.Value) -> ir.Value:
    """Returns the float tensor that a DequantizeLinear of ours is of, else the value itself."""
    node = real.producer()
    if node is None or node.op_type != "DequantizeLinear":
        return real
    value = node.inputs[0]
    while value is not None and (node := value.producer()) is not None:
        if not str(node.name).endswith(_ON_THE_WAY):
            break
        value = node.inputs[0]
    return real if value is None else value


def _constants_off(real: ir.Value, scale: float, zero_point: int, bits: int) -> float:
    """Returns how far scale and zero point are off, in steps at the far end of the grid.

    Values alone would not tell: a shifted zero point shows where they saturate.
    """
    worst, value = 0.0, real
    while (node := value.producer()) is not None:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            ours, zero = array_of(node.inputs[1]), array_of(node.inputs[2])
            if ours is None or zero is None or ours.size != 1:
                return np.inf
            ratio = abs(float(ours) / scale - 1.0)
            worst = max(worst, (ratio - ROUNDING) * (1 << bits), abs(int(zero) - zero_point))
        if node.op_type == "QuantizeLinear":
            return worst
        value = _given(node, 0)
    return np.inf


def _product(node: ir.Node, opset: int, x: Array, weight: Array, bias: Array | None) -> Array:
    """Returns the float node's operation on these operands, in ONNX Runtime."""
    given = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    feeds = {name: np.ascontiguousarray(array, np.float32) for name, array in given.items()}
    values = [
        ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(ir.DataType.FLOAT))
        for name, array in feeds.items()
    ]
    alone = ir.node(node.op_type, values, dict(node.attributes.items()), name="product")
    alone.outputs[0].name, alone.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(values, alone.outputs, nodes=[alone], opset_imports={"": opset})
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    return np.asarray(open_graph(Path("product.onnx"), bytes(model)).run(None, feeds)[0])
