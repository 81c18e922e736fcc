"""Small graphs with whole-numbered weights: float32 adds whole numbers exactly in any order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

Arrays = Mapping[str, NDArray[Any]]


def whole(shape: Sequence[int], seed: int, top: int = 5) -> NDArray[np.float32]:
    return np.random.default_rng(seed).integers(-top, top + 1, shape).astype(np.float32)


def initializer(name: str, array: NDArray[Any]) -> onnx.TensorProto:
    return numpy_helper.from_array(array, name)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Sequence[int | str]],
    outputs: Mapping[str, Sequence[int | str]],
    constants: Arrays,
    dtype: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "tiny",
        [helper.make_tensor_value_info(n, dtype, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(n, dtype, s) for n, s in outputs.items()],
        [initializer(name, array) for name, array in constants.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(made)
    return made


def mlp() -> onnx.ModelProto:
    """From x [batch, sequence, 4]: MatMul, Relu, MatMul, and a Gemm on flattened rows.

    Weights: an initializer, a Constant node, and an initializer that is transposed on its way. The
    product of two activations is no linear layer.
    """
    second = numpy_helper.from_array(whole((6, 4), 2))
    return model(
        [
            helper.make_node("MatMul", ["x", "w1"], ["a"]),
            helper.make_node("Relu", ["a"], ["b"]),
            helper.make_node("Constant", [], ["w2"], value=second),
            helper.make_node("MatMul", ["b", "w2"], ["c"]),
            helper.make_node("Reshape", ["c", "rows"], ["flat"]),
            helper.make_node("Gemm", ["flat", "w3", "bias"], ["d"], transB=1),
            helper.make_node("Transpose", ["w4"], ["w4_t"]),
            helper.make_node("MatMul", ["b", "w4_t"], ["e"]),
            helper.make_node("Transpose", ["e"], ["e_t"], perm=[0, 2, 1]),
            helper.make_node("MatMul", ["e", "e_t"], ["y"]),
        ],
        {"x": ["batch", "sequence", 4]},
        {"y": ["batch", "sequence", "sequence"], "d": ["rows", 2]},
        {
            "w1": whole((4, 6), 1),
            "rows": np.array([-1, 4]),
            "w3": whole((2, 4), 3),
            "bias": whole((2,), 4),
            "w4": whole((3, 6), 5),
        },
    )


def convolutions() -> onnx.ModelProto:
    """From image [batch, 2, 5, 5]: Conv, Relu, Conv."""
    return model(
        [
            helper.make_node("Conv", ["image", "k1"], ["a"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["a"], ["b"]),
            helper.make_node("Conv", ["b", "k2"], ["y"]),
        ],
        {"image": ["batch", 2, 5, 5]},
        {"y": ["batch", 1, 3, 3]},
        {"k1": whole((3, 2, 3, 3), 1), "k2": whole((1, 3, 3, 3), 2)},
    )


def branching() -> onnx.ModelProto:
    """From x [batch, 4]: If (a MatMul with a weight of its own in each branch), then MatMul."""

    def branch(name: str, seed: int) -> onnx.GraphProto:
        return helper.make_graph(
            [helper.make_node("MatMul", ["x", f"{name}_w"], [f"{name}_y"])],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, ["batch", 4])],
            [initializer(f"{name}_w", whole((4, 4), seed))],
        )

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["is_positive"]),
        helper.make_node(
            "If",
            ["is_positive"],
            ["a"],
            then_branch=branch("then", 1),
            else_branch=branch("else", 2),
        ),
        helper.make_node("MatMul", ["a", "w"], ["y"]),
    ]
    return model(
        nodes,
        {"x": ["batch", 4]},
        {"y": ["batch", 2]},
        {"zero": np.array(0, np.float32), "w": whole((4, 2), 3)},
    )


def saved(made: onnx.ModelProto, folder: Path, *, external: bool = False) -> Path:
    """Small constants stay inside: ONNX Runtime reads shapes from nowhere else."""
    folder.mkdir(exist_ok=True)
    path = folder / "model.onnx"
    onnx.save(
        made, path, save_as_external_data=external, location="model.onnx.data", size_threshold=64
    )
    return path


def evaluated(
    made: onnx.ModelProto, names: Sequence[str], batches: Sequence[Arrays]
) -> dict[str, list[NDArray[Any]]]:
    """What ONNX's reference evaluator computes for each tensor, a list over the batches."""
    graph = onnx.ModelProto()
    graph.CopyFrom(made)
    del graph.graph.output[:]
    graph.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names
    )
    evaluator = ReferenceEvaluator(graph)
    runs = [evaluator.run(None, dict(batch)) for batch in batches]
    return {name: [np.asarray(run[i]) for run in runs] for i, name in enumerate(names)}
