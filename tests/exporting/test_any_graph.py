"""Layers of a graph without a torch model on their grids, against numpy and two evaluators."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from quantkit.errors import InputError
from quantkit.exporting.any_graph import GraphLayers, graph_layers, quantize_layers
from quantkit.exporting.graphs import save_graph
from quantkit.exporting.prepare import prepare_graph
from quantkit.recipe import Recipe
from quantkit.results import Range

W8A8 = Recipe.parse("w8a8")


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def graph_of(
    path: Path,
    nodes: list[onnx.NodeProto],
    constants: dict[str, np.ndarray],
    inputs: dict[str, tuple[int | str, ...]],
    outputs: tuple[str, ...],
    dtype: int = TensorProto.FLOAT,
) -> ir.Model:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, dtype, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path
    )
    return prepare_graph(path)


def range_of(lo: float, hi: float) -> Range:
    return Range(lo=lo, hi=hi, method="minmax", granularity="tensor", count=1, point="linear_input")


def session(
    path: Path, *, optimised: bool = True, saved: Path | None = None
) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if saved is not None:
        options.optimized_model_filepath = str(saved)
        level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.graph_optimization_level = level
    elif not optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def on_grid(x: np.ndarray, lo: float, hi: float, bits: int = 8) -> tuple[np.ndarray, float]:
    """The asymmetric unsigned grid, written out again: real numbers and the step."""
    lo, hi = min(lo, 0.0), max(hi, 0.0)
    most = 2**bits - 1
    scale = np.float32((hi - lo) / most)
    zero = np.rint(-lo / scale)
    integers = np.clip(np.rint(x / scale) + zero, 0, most)
    return ((integers - zero) * scale).astype(np.float32), float(scale)


def weight_on_grid(weight: np.ndarray) -> np.ndarray:
    rows = weight.reshape(len(weight), -1)
    scale = np.abs(rows).max(1, keepdims=True) / 127
    return (np.clip(np.rint(rows / scale), -127, 127) * scale).reshape(weight.shape)


def convolution(path: Path, *, group: int, relu: bool) -> ir.Model:
    nodes = [helper.make_node("Conv", ["x", "w", "b"], ["c"], name="conv", group=group)]
    nodes += [helper.make_node("Relu", ["c"], ["y"])] if relu else []
    constants = {"w": noise(8, 4 // group, 3, 3), "b": noise(8, seed=1)}
    shape: tuple[int | str, ...] = ("batch", 4, 7, 7)
    return graph_of(path, nodes, constants, {"x": shape}, ("y" if relu else "c",))


@pytest.mark.parametrize("group", [1, 2, 4], ids=["plain", "grouped", "depthwise"])
@pytest.mark.parametrize("relu", [False, True], ids=["alone", "behind it a Relu"])
@pytest.mark.parametrize("bits", [8, 16])
def test_a_convolution_is_the_integers_of_numpy(
    tmp_path: Path, group: int, relu: bool, bits: int
) -> None:
    recipe = Recipe.parse(f"w8a{bits}")
    x = noise(2, 4, 7, 7, seed=5)
    weight, bias = noise(8, 4 // group, 3, 3), noise(8, seed=1)
    plain = F.conv2d(torch.from_numpy(x), torch.from_numpy(weight), groups=group).numpy()
    plain += bias[:, None, None]
    plain = np.maximum(plain, 0) if relu else plain
    lo, hi = float(plain.min()), float(plain.max())
    ranges = {
        "linear_input/conv": range_of(-2.0, 2.5),
        "linear_input/conv/result": range_of(lo, hi),
    }
    model = convolution(tmp_path / "m.onnx", group=group, relu=relu)
    infos = quantize_layers(model, graph_layers(model, recipe), recipe, ranges=ranges)
    path = save_graph(model, tmp_path / "out")
    onnx.checker.check_model(str(path), full_check=True)
    assert sorted(info.name for info in infos) == [
        "linear_input/conv",
        "linear_input/conv/result",
        "weight/conv",
    ]

    real, _ = on_grid(x, -2.0, 2.5, bits)
    quantized = torch.from_numpy(weight_on_grid(weight).astype(np.float32))
    product = F.conv2d(torch.from_numpy(real), quantized, groups=group).numpy()
    product += bias[:, None, None]
    expected, step = on_grid(np.maximum(product, 0) if relu else product, lo, hi, bits)
    saved = tmp_path / "optimised.onnx"
    runs = {
        "reference": ReferenceEvaluator(str(path)).run(None, {"x": x})[0],
        "as written": session(path, optimised=False).run(None, {"x": x})[0],
        "fused": session(path, saved=saved).run(None, {"x": x})[0],
    }
    for name, found in runs.items():
        off = np.abs(np.asarray(found) - expected) / step
        assert off.max() < 1.01, name  # a tie goes either way with the last bit of a sum
        assert (off > 0.01).mean() < (0.02 if bits == 8 else 0.1), name
    kinds = Counter(node.op_type for node in onnx.load(saved, load_external_data=False).graph.node)
    is_float = kinds["Conv"] + kinds["FusedConv"]
    assert (kinds["QLinearConv"], is_float) == ((1, 0) if bits == 8 else (0, 1))


def test_a_bias_that_dwarfs_its_weights_survives(tmp_path: Path) -> None:
    weight = noise(2, 3, 1, 1)
    weight[1] *= 1e-9
    bias = np.array([0.5, 300.0], np.float32)
    model = graph_of(
        tmp_path / "m.onnx",
        [helper.make_node("Conv", ["x", "w", "b"], ["y"], name="conv")],
        {"w": weight, "b": bias},
        {"x": (1, 3, 2, 2)},
        ("y",),
    )
    ranges = {
        "linear_input/conv": range_of(-1.0, 1.0),
        "linear_input/conv/result": range_of(-5.0, 300.0),
    }
    quantize_layers(model, graph_layers(model, W8A8), W8A8, ranges=ranges)
    path = save_graph(model, tmp_path / "out")
    (found,) = session(path).run(None, {"x": np.zeros((1, 3, 2, 2), np.float32)})
    np.testing.assert_allclose(found[0, :, 0, 0], bias, atol=305 / 255)


def chain(path: Path) -> ir.Model:
    """Two convolutions, the second one's result an output beside the first one's, and a Gemm."""
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("Conv", ["r", "w2"], ["b"], name="second"),
        helper.make_node("GlobalAveragePool", ["b"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "w3", "bias"], ["y"], name="last", transB=1),
    ]
    constants = {
        "w1": noise(6, 3, 3, 3) / 4,
        "w2": noise(5, 6, 3, 3) / 6,
        "w3": noise(4, 5),
        "bias": noise(4),
    }
    return graph_of(path, nodes, constants, {"x": ("batch", 3, 8, 8)}, ("y", "b"))


def chain_ranges(layers: GraphLayers) -> dict[str, Range]:
    """Wide enough for noise; a Relu's result begins at 0, or ONNX Runtime would not fuse it."""
    low = {"r": 0.0}
    return {name: range_of(low.get(of, -6.0), 6.0) for name, of in layers.observed.items()}


def test_a_chain_shares_grids_and_keeps_its_outputs(tmp_path: Path) -> None:
    model = chain(tmp_path / "m.onnx")
    layers = graph_layers(model, W8A8)
    assert layers.observed["linear_input/first/result"] == "r"
    assert layers.observed["linear_input/second"] == "r"
    quantize_layers(model, layers, W8A8, ranges=chain_ranges(layers))
    path, saved = save_graph(model, tmp_path / "out"), tmp_path / "optimised.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    x = noise(3, 3, 8, 8, seed=2)
    float_outputs = session(tmp_path / "m.onnx").run(["y", "b"], {"x": x})
    outputs = session(path, saved=saved).run(["y", "b"], {"x": x})
    for found, expected in zip(outputs, float_outputs, strict=True):
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() < 0.2
    kinds = Counter(node.op_type for node in onnx.load(saved, load_external_data=False).graph.node)
    assert kinds["QLinearConv"] == 2
    grids = sum(node.op_type == "QuantizeLinear" for node in model.graph)
    assert grids == 4  # x, r, b and the Gemm's input: r's is both a result's and an input's


def test_what_is_kept_stays_in_float_whole(tmp_path: Path) -> None:
    model = chain(tmp_path / "m.onnx")
    layers = graph_layers(model, W8A8)
    infos = quantize_layers(
        model, layers, W8A8, ranges=chain_ranges(layers), keep=["weight/second", "weight/last"]
    )
    names = {info.name for info in infos}
    assert {"weight/first", "linear_input/last"} <= names
    assert not {name for name in names if "second" in name} | (names & {"weight/last"})
    with pytest.raises(InputError, match="to keep in float"):
        quantize_layers(model, layers, W8A8, ranges={}, keep=["weight/secnd"])


@pytest.mark.parametrize("word", ["w8a8:token:symmetric", "w8", "w4:group2"])
def test_other_recipes_leave_convolutions_in_float_and_say_so(tmp_path: Path, word: str) -> None:
    recipe = Recipe.parse(word)
    model = chain(tmp_path / "m.onnx")
    layers = graph_layers(model, recipe)
    assert [linear.module for linear in layers.linears] == ["last"]
    assert layers.convs == []
    assert "2 convolutions stay in float" in layers.left[0]
    quantize_layers(model, layers, recipe, ranges=chain_ranges(layers))
    path = save_graph(model, tmp_path / "out")
    x = noise(3, 3, 8, 8, seed=2)
    (expected,) = session(tmp_path / "m.onnx").run(["y"], {"x": x})
    (found,) = session(path).run(["y"], {"x": x})
    assert 0 < np.abs(found - expected).max() < (0.5 if "w4" in word else 0.05)


def test_a_missing_range_is_named(tmp_path: Path) -> None:
    model = chain(tmp_path / "m.onnx")
    layers = graph_layers(model, W8A8)
    ranges = chain_ranges(layers)
    del ranges["linear_input/second/result"]
    with pytest.raises(InputError, match="linear_input/second/result"):
        quantize_layers(model, layers, W8A8, ranges=ranges)


@pytest.mark.parametrize("word", ["logits8:head:static", "w8a8+logits4:head:static"])
def test_attention_is_refused(tmp_path: Path, word: str) -> None:
    with pytest.raises(InputError, match="says nothing of which tensors are attention's"):
        graph_layers(chain(tmp_path / "m.onnx"), Recipe.parse(word))


def test_a_vocabulary_projection_stays_in_float(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["e"]),
        helper.make_node("MatMul", ["e", "w"], ["h"], name="inner"),
        helper.make_node("MatMul", ["h", "head"], ["scores"], name="head"),
        helper.make_node("Add", ["bias", "scores"], ["logits"]),
    ]
    constants = {"table": noise(9, 4), "w": noise(4, 4), "head": noise(4, 9), "bias": noise(9)}
    model = graph_of(
        tmp_path / "m.onnx",
        nodes,
        constants,
        {"input_ids": ("batch", "sequence")},
        ("logits",),
        TensorProto.INT64,
    )
    layers = graph_layers(model, W8A8)
    assert [linear.module for linear in layers.linears] == ["inner"]
    assert "vocabulary projection" in layers.left[0]


def test_a_graph_without_layers_says_what_it_lacks(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    model = graph_of(tmp_path / "m.onnx", nodes, {}, {"x": (1, 3)}, ("y",))
    with pytest.raises(InputError, match=r"no MatMul, Gemm or Conv with constant weights"):
        graph_layers(model, W8A8)
