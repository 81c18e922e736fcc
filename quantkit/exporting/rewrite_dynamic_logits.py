"""Attention logits on a range that the graph finds as it runs: the absmax of what the mask leaves.

Before: `x` -> mask -> Softmax. After: `s * Q/DQ(x / s)` -> mask -> Softmax, with `s` the largest
|x| of the valid positions over qmax. What is quantized is in whole steps, so one constant scale, 1,
serves every call, and the grid is that of `fake_quantized` to the last bit: `q = x / (absmax /
qmax)`. What is masked may saturate.

Valid is what the graph's own masks leave on the way to the Softmax; of a tensor or a head also no
query of padding, as the input `attention_mask` says. A call knows no rows but its own: behind a
filled cache a tensor's or head's range is that of the new tokens, a row's is what it always was.

The operators are those of opset 18. It costs four more passes over the logits: fidelity, not speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.exporting.graphs import constant, quantize_value
from quantkit.exporting.logits import MASKED_BELOW, LogitMask, LogitValue
from quantkit.exporting.rewrite_tokens import TINY, UNIT
from quantkit.quantization.grids import logit_qtype
from quantkit.recipe import LogitQuant
from quantkit.results import QuantizerInfo

_LAST: Final = np.iinfo(np.int64).max
_PREFIX: Final = "attention_logit"


@dataclass(frozen=True, kw_only=True, eq=False)
class DynamicLogits:
    """The rewrite of one graph; layers share what they can of their masks and constants.

    Raises:
        InputError: an asymmetric grid.
    """

    model: ir.Model
    quant: LogitQuant
    known: dict[tuple[str, ...], ir.Value] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if not self.quant.symmetric:
            bits = self.quant.bits
            raise InputError(
                f"a graph has dynamic ranges of logits on symmetric grids only, got "
                f"{str(self.quant)!r}: write logits{bits}:head:static:asymmetric or logits{bits}."
            )

    def insert(
        self, logit: LogitValue, names: Sequence[str], *, call: int, suffix: str
    ) -> list[QuantizerInfo]:
        """Puts the grid behind the product; returns a quantizer for each name, one of a map.

        Their scales are those of x over its range: 1 / (2^(bits-1) - 1). The graph is to be sorted
        afterwards.

        Raises:
            InputError: a mask that cannot be read, or none.
        """
        if not logit.masks:
            raise InputError(
                f"attention of layer {logit.layer}: the graph shows no mask that says which logits "
                f"are valid, so it cannot find their range: write logits{self.quant.bits}"
                ":head:static."
            )
        if logit.heads % len(names):
            raise InputError(
                f"layer {logit.layer} has {logit.heads} heads, not as many for each of "
                f"{len(names)} maps."
            )
        name, qtype = f"{_PREFIX}/{logit.layer}{suffix}", logit_qtype(self.quant)
        uses = list(logit.value.uses())
        before = min((user for user, _ in uses), key=self.model.graph.index)
        step = self._step(logit, len(names), name, qtype.qmax, before)
        unit = self._node("Div", [logit.value, step], f"{name}{UNIT}", before)
        unit.shape = logit.value.shape
        grid = quantize_value(
            self.model,
            unit,
            name=name,
            scale=np.asarray(1.0, np.float32),
            zero_point=0,
            qtype=qtype,
            before=before,
        )
        steps = grid.dequantize(self.model, before, f"{name}/dequantize")
        replaced = self._node("Mul", [steps, step], f"{name}/rescale", before)
        replaced.shape = logit.value.shape
        for user, index in uses:
            user.replace_input_with(index, replaced)
        return [
            QuantizerInfo(
                name=each,
                qtype=str(qtype),
                granularity=self.quant.granularity,
                scale_min=1.0 / qtype.qmax,
                scale_max=1.0 / qtype.qmax,
                hits=call,
            )
            for each in names
        ]

    def _step(
        self, logit: LogitValue, maps: int, name: str, qmax: int, before: ir.Node
    ) -> ir.Value:
        """Returns absmax / qmax, `[batch, heads or 1, query or 1, 1]`."""
        valid, is_row = self._valid(logit, before), self.quant.granularity == "row"
        zero = self._constant("zero", 0.0)
        kept = self._node("Where", [valid, logit.value, zero], f"{name}/valid", before)
        size = self._node("Abs", [kept], f"{name}/abs", before)
        axes = [3] if is_row else [2, 3]
        if self.quant.granularity == "tensor" and maps == 1:
            axes = [1, 2, 3]
        found = self._largest(size, axes, f"{name}/reduce_max", before)
        if self.quant.granularity == "tensor" and maps > 1:
            found = self._of_maps(found, maps, logit.heads // maps, name, before)
        step = self._node("Div", [found, self._constant("qmax", qmax)], f"{name}/step", before)
        # as `symmetric_scale`: nothing is divided by 0, and zeros stay zeros on any grid
        return self._node("Max", [step, self._constant("least", TINY)], f"{name}/scale", before)

    def _of_maps(
        self, heads: ir.Value, maps: int, each: int, name: str, before: ir.Node
    ) -> ir.Value:
        """Returns the largest of each map's heads, once a head again; map 1 has the first ones."""
        shape = self._constant(f"{maps} maps of {each}", np.asarray([0, maps, each, 1]))
        split = self._node("Reshape", [heads, shape], f"{name}/maps", before)
        largest = self._largest(split, [2], f"{name}/map_max", before)
        repeats = self._constant(f"repeated {each}", np.asarray([1, 1, each, 1]))
        tiled = self._node("Tile", [largest, repeats], f"{name}/map_tile", before)
        back = self._constant(f"{maps * each} heads", np.asarray([0, maps * each, 1, 1]))
        return self._node("Reshape", [tiled, back], f"{name}/map_heads", before)

    def _valid(self, logit: LogitValue, before: ir.Node) -> ir.Value:
        """Returns which positions count, bool, to be broadcast against the logits."""
        parts = [self._open(mask, before) for mask in logit.masks or ()]
        if self.quant.granularity != "row":
            real = self._real_queries(logit, before)
            parts += [] if real is None else [real]
        valid = parts[0]
        for part in parts[1:]:
            key = ("and", str(valid.name), str(part.name))
            if key not in self.known:
                name = f"{_PREFIX}/valid {len(self.known)}"
                self.known[key] = self._node("And", [valid, part], name, before)
            valid = self.known[key]
        return valid

    def _open(self, mask: LogitMask, before: ir.Node) -> ir.Value:
        """Returns where one mask leaves the logit as it is."""
        if mask.keeps:
            return mask.operand
        key = ("open", str(mask.operand.name), str(mask.keeps))
        if key not in self.known:
            name = f"{_PREFIX}/valid {len(self.known)}"
            if mask.keeps is None:
                inputs = [mask.operand, self._constant("masked_below", MASKED_BELOW)]
                self.known[key] = self._node("Greater", inputs, name, before)
            else:
                self.known[key] = self._node("Not", [mask.operand], name, before)
        return self.known[key]

    def _real_queries(self, logit: LogitValue, before: ir.Node) -> ir.Value | None:
        """Returns which queries are no padding, `[batch, 1, query, 1]`; None: no input says."""
        inputs = {value.name: value for value in self.model.graph.inputs}
        mask = inputs.get("attention_mask")
        if mask is None or mask.shape is None or len(mask.shape) != 2:
            return None
        key = ("queries",)
        if key not in self.known:
            name, ends = f"{_PREFIX}/queries", self._constant("ends", np.asarray([_LAST]))
            span = {"start": 2, "end": 3}
            count = self._node("Shape", [logit.value], f"{name}/count", before, span)
            starts = self._node("Neg", [count], f"{name}/start", before)
            axis = self._constant("axis", np.asarray([1]))
            own = self._node("Slice", [mask, starts, ends, axis], f"{name}/own", before)
            real = self._node("Cast", [own], f"{name}/real", before, {"to": ir.DataType.BOOL})
            axes = self._constant("around", np.asarray([1, 3]))
            self.known[key] = self._node("Unsqueeze", [real, axes], f"{name}/rows", before)
        return self.known[key]

    def _largest(self, value: ir.Value, axes: list[int], name: str, before: ir.Node) -> ir.Value:
        kept = self._constant("axes" + "".join(map(str, axes)), np.asarray(axes))
        return self._node("ReduceMax", [value, kept], name, before, {"keepdims": 1})

    def _node(
        self,
        operation: str,
        inputs: list[ir.Value],
        name: str,
        before: ir.Node,
        attributes: dict[str, int] | None = None,
    ) -> ir.Value:
        node = ir.node(operation, inputs, attributes or {}, name=name)
        node.outputs[0].name = f"{name}_output"
        if operation in ("Where", "Abs", "ReduceMax", "Div", "Max", "Mul", "Reshape", "Tile"):
            node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        elif operation in ("And", "Not", "Greater", "Cast", "Unsqueeze"):
            node.outputs[0].type = ir.TensorType(ir.DataType.BOOL)
        self.model.graph.insert_before(before, node)
        return node.outputs[0]

    def _constant(self, name: str, number: float | NDArray[np.int64]) -> ir.Value:
        """Returns a constant that all layers share: a float, or integers of a shape."""
        key = ("constant", name)
        if key not in self.known:
            is_real = not isinstance(number, np.ndarray)
            dtype = ir.DataType.FLOAT if is_real else ir.DataType.INT64
            array = np.asarray(number, np.float32 if is_real else np.int64)
            self.known[key] = constant(self.model, f"{_PREFIX}/{name}", array, dtype)
        return self.known[key]
