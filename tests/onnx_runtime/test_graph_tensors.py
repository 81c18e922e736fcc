"""Which tensors are chosen: by what reads them, by name, by pattern."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from quantkit.errors import InputError
from quantkit.onnx_runtime import linear_inputs, load_float_graph
from quantkit.onnx_runtime.graph_tensors import choose_tensors, input_names, reduced_to
from tests.onnx_runtime.graphs import branching, convolutions, mlp, model, saved, whole


@pytest.mark.parametrize(
    ("make", "expected"),
    [(mlp, ["x", "b", "flat"]), (convolutions, ["image", "b"]), (branching, ["a"])],
    ids=["MatMul and Gemm", "Conv", "If"],
)
def test_linear_inputs(
    tmp_path: Path, make: Callable[[], onnx.ModelProto], expected: list[str]
) -> None:
    assert linear_inputs(load_float_graph(saved(make(), tmp_path))) == expected


def test_a_weight_on_the_left_and_one_that_is_drawn(tmp_path: Path) -> None:
    made = model(
        [
            helper.make_node("MatMul", ["w", "x"], ["a"]),
            helper.make_node("RandomNormalLike", ["w"], ["noise"]),
            helper.make_node("MatMul", ["noise", "a"], ["y"]),
        ],
        {"x": [4, "columns"]},
        {"y": [4, "columns"]},
        {"w": whole((4, 4), 1)},
    )

    assert linear_inputs(load_float_graph(saved(made, tmp_path))) == ["x"]


@pytest.mark.kind(6, "calibrate")
def test_an_initializer_that_is_listed_as_input(tmp_path: Path) -> None:
    made = mlp()
    made.graph.input.append(helper.make_tensor_value_info("w1", TensorProto.FLOAT, [4, 6]))
    graph = load_float_graph(saved(made, tmp_path))

    assert input_names(graph) == ["x"]
    assert linear_inputs(graph) == ["x", "b", "flat"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["b"], ["b"]),
        (["e*", "a"], ["a", "e", "e_t"]),
        (["*"], ["x", "a", "b", "c", "flat", "d", "e", "e_t", "y"]),
    ],
    ids=["a name", "two patterns", "everything that is no constant"],
)
def test_patterns(tmp_path: Path, patterns: list[str], expected: list[str]) -> None:
    graph = load_float_graph(saved(mlp(), tmp_path))

    assert choose_tensors(graph, patterns) == expected


def test_a_name_with_brackets_is_itself(tmp_path: Path) -> None:
    made = model(
        [helper.make_node("Relu", ["x"], ["h[0]"]), helper.make_node("Relu", ["h[0]"], ["h0"])],
        {"x": [4]},
        {"h0": [4]},
        {},
    )

    assert choose_tensors(load_float_graph(saved(made, tmp_path)), ["h[0]"]) == ["h[0]"]


@pytest.mark.parametrize(
    ("make", "patterns", "said"),
    [
        (mlp, ["flta"], r"matches 'flta'\. Nearest of 9: flat, "),
        (mlp, ["b", "w1"], "matches 'w1'"),
        (branching, ["is_positive"], "is BOOL: expected FLOAT or FLOAT16"),
        (branching, ["then_y"], "matches 'then_y'"),
    ],
    ids=["misspelt", "a constant", "no float", "inside a branch"],
)
def test_what_matches_nothing(
    tmp_path: Path, make: Callable[[], onnx.ModelProto], patterns: list[str], said: str
) -> None:
    typed = onnx.shape_inference.infer_shapes(make())

    with pytest.raises(InputError, match=said) as error:
        choose_tensors(load_float_graph(saved(typed, tmp_path)), patterns)

    assert "\n" not in str(error.value)


def test_a_graph_without_linear_layers_asks_for_names(tmp_path: Path) -> None:
    made = model([helper.make_node("Relu", ["x"], ["y"])], {"x": [4]}, {"y": [4]}, {})

    with pytest.raises(InputError, match="name the tensors"):
        choose_tensors(load_float_graph(saved(made, tmp_path)), None)


def test_external_weights_stay_in_their_file(tmp_path: Path) -> None:
    """What is opened refers to the file: a weight of 4 MB does not pass through the graph."""
    weight = np.ones((1000, 1000), np.float32)
    made = model(
        [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Relu", ["y"], ["z"])],
        {"x": [1, 1000]},
        {"z": [1, 1000]},
        {"w": weight},
    )
    inside = saved(made, tmp_path / "inside")
    outside = saved(made, tmp_path / "outside", external=True)

    assert len(reduced_to(load_float_graph(inside), ["y"])) > weight.nbytes
    assert len(reduced_to(load_float_graph(outside), ["y"])) < 1000
