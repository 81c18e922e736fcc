"""Gemm with all its options under every recipe, against numpy's own grids."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantkit.errors import InputError
from quantkit.exporting.any_graph import graph_layers, quantize_layers
from quantkit.exporting.graphs import save_graph
from quantkit.exporting.linears import LinearNode, find_linears
from quantkit.exporting.prepare import prepare_graph
from quantkit.exporting.rewrite_blocks import quantize_weight_blocks
from quantkit.jobs import ExportFormat
from quantkit.results import Range

INPUTS, OUTPUTS, GROUP = 32, 6, 16


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def written(path: Path, *, bias: str = "constant", **attributes: float) -> ir.Model:
    """A Gemm with a weight of 32 inputs, which `transB` turns; `bias`: constant, input or none."""
    turned = attributes.get("transB", 0)
    weight = noise(OUTPUTS, INPUTS) if turned else noise(OUTPUTS, INPUTS).T.copy()
    node = helper.make_node(
        "Gemm", ["x", "w"] + ([] if bias == "none" else ["b"]), ["y"], name="gemm", **attributes
    )
    shape = (INPUTS, 5) if attributes.get("transA", 0) else ("batch", INPUTS)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    constants = [numpy_helper.from_array(weight, "w")]
    if bias == "input":
        inputs.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, (OUTPUTS,)))
    elif bias == "constant":
        constants.append(numpy_helper.from_array(noise(OUTPUTS, seed=3), "b"))
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph([node], "g", inputs, outputs, constants)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path
    )
    return prepare_graph(path)


def run(path: Path, feeds: dict[str, np.ndarray]) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


def narrow(x: np.ndarray, bits: int) -> np.ndarray:
    """Symmetric, one scale a row."""
    scale = np.abs(x).max(-1, keepdims=True) / (2 ** (bits - 1) - 1)
    return np.asarray(np.rint(x / scale) * scale)


def by_groups(weight: np.ndarray, bits: int) -> np.ndarray:
    parts = pairwise(range(0, INPUTS + 1, GROUP))
    return np.concatenate([narrow(weight[:, a:b], bits) for a, b in parts], axis=1)


def static(x: np.ndarray) -> np.ndarray:
    """Asymmetric 8 bits over -4 to 4.16."""
    scale = np.float32(8.16 / 255)
    zero = np.rint(4.0 / scale)
    return np.asarray((np.clip(np.rint(x / scale) + zero, 0, 255) - zero) * scale)


GRIDS = {
    "w8a8": (lambda w: narrow(w, 8), static),
    "w8a8-dynamic": (lambda w: narrow(w, 8), lambda x: narrow(x, 8)),
    "w8": (lambda w: narrow(w, 8), lambda x: x),
    "w4:group16": (lambda w: by_groups(w, 4), lambda x: x),
    "w8:group16": (lambda w: by_groups(w, 8), lambda x: x),
}


def quantized(model: ir.Model, word: str, folder: Path, storage: str | None = None) -> Path:
    form = ExportFormat.parse(word, storage)  # type: ignore[arg-type]
    found = Range(
        lo=-4.0, hi=4.16, method="minmax", granularity="tensor", count=1, point="linear_input"
    )
    quantize_layers(
        model,
        graph_layers(model, form.recipe),
        form.recipe,
        ranges={"linear_input/gemm": found},
        storage=form.storage,
    )
    return save_graph(model, folder)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, 2.0], ids=lambda x: f"beta {x}")
@pytest.mark.parametrize("alpha", [1.0, 0.25], ids=lambda x: f"alpha {x}")
@pytest.mark.parametrize("turned", [0, 1], ids=["in x out", "out x in"])
@pytest.mark.parametrize("word", list(GRIDS))
def test_every_option_is_that_of_numpy(
    tmp_path: Path, word: str, turned: int, alpha: float, beta: float
) -> None:
    model = written(tmp_path / "m.onnx", alpha=alpha, beta=beta, transB=turned)
    path = quantized(model, word, tmp_path / "out")
    x = noise(7, INPUTS, seed=9) * np.logspace(-2, 0, 7, dtype=np.float32)[:, None]
    of_weight, of_input = GRIDS[word]
    product = of_input(x) @ of_weight(noise(OUTPUTS, INPUTS)).T
    expected = alpha * product + beta * noise(OUTPUTS, seed=3)
    np.testing.assert_allclose(run(path, {"x": x}), expected, atol=2e-5)


@pytest.mark.parametrize("beta", [0.0, 0.5, 2.0], ids=lambda x: f"beta {x}")
@pytest.mark.parametrize("word", ["w8a8-dynamic", "w4:group16"])
def test_a_bias_that_is_computed_is_scaled_as_the_graph_runs(
    tmp_path: Path, word: str, beta: float
) -> None:
    model = written(tmp_path / "m.onnx", bias="input", beta=beta)
    path = quantized(model, word, tmp_path / "out")
    x, bias = noise(4, INPUTS, seed=9), noise(OUTPUTS, seed=11)
    of_weight, of_input = GRIDS[word]
    expected = of_input(x) @ of_weight(noise(OUTPUTS, INPUTS)).T + beta * bias
    np.testing.assert_allclose(run(path, {"x": x, "b": bias}), expected, atol=2e-5)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, 2.0], ids=lambda x: f"beta {x}")
@pytest.mark.parametrize("turned", [0, 1], ids=["in x out", "out x in"])
def test_matmulnbits_keeps_the_bias(tmp_path: Path, turned: int, beta: float) -> None:
    model = written(tmp_path / "m.onnx", beta=beta, transB=turned)
    path = quantized(model, "w8:group16", tmp_path / "out", "matmulnbits")
    assert "MatMulNBits" in {node.op_type for node in onnx.load(path).graph.node}
    x = noise(7, INPUTS, seed=9)
    expected = x @ by_groups(noise(OUTPUTS, INPUTS), 8).T + beta * noise(OUTPUTS, seed=3)
    np.testing.assert_allclose(run(path, {"x": x}), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("bias", "attributes"),
    [("constant", {}), ("none", {"alpha": 0.5}), ("none", {"transA": 1})],
    ids=["a bias", "alpha", "transA"],
)
def test_matmulnbits_refuses_what_it_would_drop(
    tmp_path: Path, bias: str, attributes: dict[str, float]
) -> None:
    model = written(tmp_path / "m.onnx", bias=bias, **attributes)
    node = next(iter(model.graph))
    weight = find_linears(written(tmp_path / "plain.onnx"))[0].weight
    linear = LinearNode(module="gemm", node=node, weight=weight, transposed=False)
    with pytest.raises(InputError, match="gemm: MatMulNBits cannot stand for a Gemm with"):
        quantize_weight_blocks(model, linear, 8, GROUP, "matmulnbits", None)


@pytest.mark.parametrize("word", list(GRIDS))
def test_an_input_that_is_turned_keeps_the_layer_in_float(tmp_path: Path, word: str) -> None:
    """Its tokens lie on the last axis, so a range a token would be one of a feature."""
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["a"], name="turned", transA=1),
        helper.make_node("MatMul", ["a", "v"], ["y"], name="plain"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (INPUTS, 5))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [
            numpy_helper.from_array(noise(INPUTS, INPUTS), "w"),
            numpy_helper.from_array(noise(INPUTS, OUTPUTS), "v"),
        ],
    )
    path = tmp_path / "m.onnx"
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(made, path)
    layers = graph_layers(prepare_graph(path), ExportFormat.parse(word).recipe)
    assert [linear.module for linear in layers.linears] == ["plain"]
    assert layers.left == (
        "1 Gemm nodes with transA stay in float: their inputs lie on the first axis",
    )


def test_a_graph_of_turned_layers_alone_says_so(tmp_path: Path) -> None:
    model = written(tmp_path / "m.onnx", transA=1)
    with pytest.raises(InputError, match="1 Gemm nodes with transA stay in float"):
        graph_layers(model, ExportFormat.parse("w8a8").recipe)
