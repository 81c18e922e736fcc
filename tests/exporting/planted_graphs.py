"""One attention block by hand, and Q/DQ on any of its tensors, so that faults can be planted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from quantkit.results import DataInfo

WIDTH, TOKENS, SAMPLES = 16, 48, 3
INPUTS = {"x": ("q", "k", "v"), "mixed": ("o",), "h": ("up",), "act": ("down",)}
"""Tensor -> the products with a weight that read it."""
LOWEST = float(np.finfo(np.float32).min)
Grid = tuple[float, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """The float graph, samples, and what every tensor is on them."""

    model: onnx.ModelProto
    batches: list[dict[str, NDArray[Any]]]
    seen: dict[str, NDArray[np.float32]]

    def grid(self, name: str, keep: float = 1.0) -> Grid:
        """The uint8 min-max grid of a tensor, `keep` times as wide."""
        lo = min(0.0, float(self.seen[name].min())) * keep
        hi = max(0.0, float(self.seen[name].max())) * keep
        scale = float(np.float32((hi - lo) / 255))
        return scale, round(-lo / scale)

    def clean(self) -> dict[str, Grid]:
        """Good grids for all inputs of layers."""
        return {name: self.grid(name) for name in INPUTS}


def block(mask: float = LOWEST) -> Block:
    """From x: x -> attention over earlier tokens, plus x -> MLP, plus that -> y."""
    rng = np.random.default_rng(5)
    sizes = {name: (WIDTH, WIDTH) for name in ("q", "k", "v", "o")}
    sizes |= {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    weights = {
        f"{name}_w": rng.normal(size=size).astype(np.float32) / 4 for name, size in sizes.items()
    }
    hidden = np.triu(np.full((TOKENS, TOKENS), mask, np.float32), 1)
    node = helper.make_node
    nodes = [
        *(node("MatMul", ["x", f"{n}_w"], [n], name=n) for n in ("q", "k", "v")),
        node("Transpose", ["k"], ["k_t"], perm=[0, 2, 1]),
        node("MatMul", ["q", "k_t"], ["product"], name="qk"),
        node("Mul", ["product", "scale"], ["logits_raw"]),
        node("Add", ["logits_raw", "mask"], ["masked"], name="mask_add"),
        node("Softmax", ["masked"], ["weights"], name="softmax"),
        node("MatMul", ["weights", "v"], ["mixed"], name="pv"),
        node("MatMul", ["mixed", "o_w"], ["o"], name="o"),
        node("Add", ["x", "o"], ["h"]),
        node("MatMul", ["h", "up_w"], ["up"], name="up"),
        node("Tanh", ["up"], ["act"]),
        node("MatMul", ["act", "down_w"], ["down"], name="down"),
        node("Add", ["h", "down"], ["y"]),
    ]
    shape = [1, TOKENS, WIDTH]
    graph = helper.make_graph(
        nodes,
        "block",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [
            *(numpy_helper.from_array(w, name) for name, w in weights.items()),
            numpy_helper.from_array(np.float32(0.5), "scale"),
            numpy_helper.from_array(hidden, "mask"),
        ],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    made = onnx.shape_inference.infer_shapes(made)
    batches = [{"x": rng.normal(size=shape).astype(np.float32)} for _ in range(SAMPLES)]
    names = [value for n in nodes for value in n.output]
    probe = onnx.ModelProto()
    probe.CopyFrom(made)
    del probe.graph.output[:]
    probe.graph.output.extend(
        helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in names
    )
    runs = [ReferenceEvaluator(probe).run(None, feeds) for feeds in batches]
    seen = {n: np.concatenate([run[i] for run in runs]) for i, n in enumerate(names)}
    seen["x"] = np.concatenate([feeds["x"] for feeds in batches])
    return Block(model=made, batches=batches, seen=seen)


def quantized(
    made: Block,
    grids: Mapping[str, Grid],
    *,
    weights: Mapping[str, float] | None = None,
    float_layers: tuple[str, ...] = (),
    domain: str = "",
) -> onnx.ModelProto:
    """Q/DQ (uint8) in front of every reader of these tensors, int8 weights a channel.

    Args:
        weights: Layer -> factor on the scales of its weight.
        float_layers: They keep their float weight, and read the float tensor.
        domain: Of the QuantizeLinear and DequantizeLinear nodes of activations.
    """
    model = onnx.ModelProto()
    model.CopyFrom(made.model)
    nodes, constants = list(model.graph.node), model.graph.initializer
    if domain:
        model.opset_import.append(helper.make_opsetid(domain, 1))
    front: dict[str, list[onnx.NodeProto]] = {}
    for name, (scale, zero) in grids.items():
        parameters = [f"{name}_scale", f"{name}_zero"]
        constants.append(numpy_helper.from_array(np.float32(scale), parameters[0]))
        constants.append(numpy_helper.from_array(np.uint8(zero), parameters[1]))
        front[name] = [
            helper.make_node(
                "QuantizeLinear", [name, *parameters], [f"{name}_q"], f"{name}_Q", domain=domain
            ),
            helper.make_node(
                "DequantizeLinear", [f"{name}_q", *parameters], [f"{name}_dq"], domain=domain
            ),
        ]
        for node in nodes:
            if node.name not in float_layers:
                for at, read in enumerate(node.input):
                    node.input[at] = f"{name}_dq" if read == name else read
    held = {c.name: numpy_helper.to_array(c) for c in constants}
    back = []
    for node in nodes:
        name = f"{node.name}_w"
        if name not in held or node.name in float_layers:
            continue
        scale = np.abs(held[name]).max(0) / 127 * (weights or {}).get(node.name, 1.0)
        with np.errstate(all="ignore"):
            integers = np.nan_to_num(np.clip(np.round(held[name] / scale), -127, 127))
        constants.append(numpy_helper.from_array(integers.astype(np.int8), f"{name}_q"))
        constants.append(numpy_helper.from_array(scale.astype(np.float32), f"{name}_scale"))
        constants.append(numpy_helper.from_array(np.zeros(len(scale), np.int8), f"{name}_zero"))
        inputs = [f"{name}_q", f"{name}_scale", f"{name}_zero"]
        back.append(helper.make_node("DequantizeLinear", inputs, [f"{name}_dq"], axis=1))
        node.input[1] = f"{name}_dq"
    del model.graph.node[:]
    model.graph.node.extend([*back, *front.get("x", [])])
    for node in nodes:
        model.graph.node.append(node)
        for output in node.output:
            model.graph.node.extend(front.get(output, []))
    del model.graph.value_info[:]
    return model


def saved(made: onnx.ModelProto, path: Path) -> Path:
    onnx.save(made, path)
    return path


def data_info() -> DataInfo:
    return DataInfo(
        source="planted", sha256="", sequences=SAMPLES, seq_len=0, tokens=SAMPLES, batch_size=1,
        bos="never", block_hashes=[], skipped_blocks=0, python="",
    )  # fmt: skip
