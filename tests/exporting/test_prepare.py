"""A prepared graph computes what the file computes, and holds what the passes look for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from quantkit.errors import InputError
from quantkit.exporting.graphs import save_graph
from quantkit.exporting.linears import find_linears
from quantkit.exporting.prepare import prepare_graph


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def written(
    path: Path,
    nodes: list[onnx.NodeProto],
    constants: dict[str, np.ndarray],
    *,
    x: tuple[int | str, ...],
    opset: int = 13,
    dtype: int = TensorProto.FLOAT,
    ir_version: int = 8,
) -> Path:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", dtype, x)],
        [helper.make_tensor_value_info("y", dtype, None)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version
    )
    onnx.save(model, path)
    return path


def constant(name: str, array: np.ndarray) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array, name))


def old_convolutions(path: Path) -> Path:
    """Opset 13: weights in Constant nodes, a batch norm, a transposed matrix, an old ReduceMean."""
    nodes = [
        constant("w", noise(6, 3, 3, 3)),
        constant("scale", np.abs(noise(6)) + 0.5),
        constant("shift", noise(6, seed=1)),
        constant("mean", noise(6, seed=2)),
        constant("var", np.abs(noise(6, seed=3)) + 0.5),
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "scale", "shift", "mean", "var"], ["n"]),
        helper.make_node("ReduceMean", ["n"], ["m"], axes=[2, 3], keepdims=0),
        helper.make_node("Transpose", ["matrix"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["m", "turned"], ["y"]),
    ]
    return written(path, nodes, {"matrix": noise(400, 6)}, x=("batch", 3, 5, 5))


def expected_of_old(x: np.ndarray) -> np.ndarray:
    """The same in torch."""
    torch_x, weight = torch.from_numpy(x), torch.from_numpy(noise(6, 3, 3, 3))
    scale, var = (np.abs(noise(6, seed=seed)) + 0.5 for seed in (0, 3))
    numbers = [torch.from_numpy(a) for a in (noise(6, seed=2), var, scale, noise(6, seed=1))]
    normed = F.batch_norm(F.conv2d(torch_x, weight, padding=1), *numbers)
    found: np.ndarray = normed.mean((2, 3)).numpy() @ noise(400, 6).T
    return found


@pytest.mark.kind(6, "export")
def test_an_old_graph_is_raised_and_computes_the_same(tmp_path: Path) -> None:
    path = old_convolutions(tmp_path / "old.onnx")
    before = path.read_bytes()
    prepared = prepare_graph(path)
    kinds = [node.op_type for node in prepared.graph]
    assert prepared.opset_imports[""] == 21
    assert kinds == ["Conv", "ReduceMean", "MatMul"]  # norm folded, constants lifted
    (linear,) = find_linears(prepared)
    assert linear.weight.shape == (400, 6)
    out = save_graph(prepared, tmp_path / "out")
    onnx.checker.check_model(str(out), full_check=True)
    x = noise(2, 3, 5, 5, seed=9)
    (found,) = ReferenceEvaluator(str(out)).run(None, {"x": x})
    np.testing.assert_allclose(found, expected_of_old(x), rtol=1e-4, atol=1e-4)
    assert path.read_bytes() == before


@pytest.mark.kind(6, "export")
def test_weights_in_a_file_of_their_own_pass_the_converter(tmp_path: Path) -> None:
    source = written(
        tmp_path / "inside.onnx",
        [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Add", ["a", "b"], ["y"])],
        {"w": noise(64, 32), "b": noise(32)},
        x=("batch", 64),
    )
    path = tmp_path / "model.onnx"
    ir.save(ir.load(source), path, external_data="model.onnx.data", size_threshold_bytes=0)
    prepared = prepare_graph(path)
    assert prepared.opset_imports[""] == 21
    assert [value.name for value in prepared.graph.inputs] == ["x"]
    np.testing.assert_array_equal(find_linears(prepared)[0].weight.numpy(), noise(64, 32).T)


def test_a_higher_opset_of_its_own_stays(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    path = written(tmp_path / "m.onnx", nodes, {"w": noise(4, 4)}, x=("b", 4), opset=22)
    assert prepare_graph(path).opset_imports[""] == 22


@pytest.mark.kind(6, "export")
@pytest.mark.parametrize(
    ("nodes", "dtype", "said"),
    [
        (
            [
                helper.make_node("QuantizeLinear", ["x", "s"], ["q"]),
                helper.make_node("DequantizeLinear", ["q", "s"], ["y"]),
            ],
            TensorProto.FLOAT,
            r"quantized already \(1 DequantizeLinear, 1 QuantizeLinear\)",
        ),
        (
            [helper.make_node("MatMul", ["x", "half"], ["y"], name="layer")],
            TensorProto.FLOAT16,
            "the weight of 'layer' is FLOAT16: expected a float32 graph",
        ),
        (
            [helper.make_node("Upsample", ["x", "s"], ["y"])],
            TensorProto.FLOAT,
            "opset 13, which cannot be raised to 21",
        ),
    ],
    ids=["quantized", "float16", "an operator that is gone"],
)
def test_what_cannot_be_prepared_is_refused_in_one_line(
    tmp_path: Path, nodes: list[onnx.NodeProto], dtype: int, said: str
) -> None:
    constants = {"s": np.float32(1), "half": noise(4, 4).astype(np.float16)}
    used = {name for node in nodes for name in node.input}
    path = written(
        tmp_path / "m.onnx",
        nodes,
        {name: np.asarray(array) for name, array in constants.items() if name in used},
        x=("b", 4),
        dtype=dtype,
    )
    with pytest.raises(InputError, match=said) as error:
        prepare_graph(path)
    assert "\n" not in str(error.value)


@pytest.mark.kind(8, "export")
@pytest.mark.parametrize("content", [None, b"", b"no graph"], ids=["missing", "empty", "text"])
def test_what_is_no_graph_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "m.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"no such file|no ONNX file|ONNX"):
        prepare_graph(path)


@pytest.mark.kind(6, "export")
def test_what_an_if_holds_is_left_alone(tmp_path: Path) -> None:
    def branch(name: str, factor: float) -> onnx.GraphProto:
        weight = noise(4, 4) * np.float32(factor)
        return helper.make_graph(
            [constant(f"w_{name}", weight), helper.make_node("MatMul", ["x", f"w_{name}"], [name])],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)],
        )

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
        helper.make_node("Greater", ["total", "zero"], ["positive"]),
        helper.make_node(
            "If", ["positive"], ["y"], then_branch=branch("a", 1), else_branch=branch("b", -3)
        ),
    ]
    path = written(tmp_path / "m.onnx", nodes, {"zero": np.asarray(np.float32(0))}, x=("b", 4))
    prepared = prepare_graph(path)
    assert find_linears(prepared) == []
    out = save_graph(prepared, tmp_path / "out")
    for x in (np.ones((2, 4), np.float32), -np.ones((2, 4), np.float32)):
        (expected,) = ReferenceEvaluator(str(path)).run(None, {"x": x})
        (found,) = ReferenceEvaluator(str(out)).run(None, {"x": x})
        np.testing.assert_allclose(found, expected, rtol=1e-6)
