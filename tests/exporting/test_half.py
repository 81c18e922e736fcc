"""Half precision: half the bytes, the same outputs, and what does not fit named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from quantkit.errors import InputError
from quantkit.exporting import load_graph, save_graph, to_half
from quantkit.exporting.half import KEPT_KEY
from quantkit.onnx_runtime import open_decoder
from tests.exporting.conftest import Exported


def two_layers(first: NDArray[np.float32], second: NDArray[np.float32]) -> ir.Model:
    """Returns a graph of two products and a bias."""
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "first"], ["hidden"]),
            helper.make_node("Add", ["hidden", "bias"], ["biased"]),
            helper.make_node("MatMul", ["biased", "second"], ["y"]),
        ],
        "two layers",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", first.shape[0]])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", second.shape[1]])],
        [
            numpy_helper.from_array(first, "first"),
            numpy_helper.from_array(np.linspace(-1, 1, first.shape[1], dtype=np.float32), "bias"),
            numpy_helper.from_array(second, "second"),
        ],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return ir.from_proto(made)


def weights(seed: int, rows: int = 32, columns: int = 64) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def test_a_decoder_halves_and_keeps_its_logits(
    exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    case = exported("gpt2")

    path = save_graph(to_half(load_graph(case.path)), tmp_path)

    onnx.checker.check_model(str(path), full_check=True)
    sizes = [Path(f"{p}.data").stat().st_size for p in (path, case.path)]
    assert 0.49 < sizes[0] / sizes[1] < 0.56
    ids = case.batches[1].input_ids.numpy()
    half, whole = (open_decoder(p).run(ids) for p in (path, case.path))
    a, b = half.logits.ravel(), whole.logits.ravel()
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.9999
    assert not np.array_equal(a, b)
    assert half.present[0].dtype == np.float32


def test_outputs_are_those_of_the_rounded_weights() -> None:
    first, second = weights(1), weights(2, 64, 32)

    got = to_half(two_layers(first, second))

    x = weights(3, 5, 32)
    (y,) = ReferenceEvaluator(ir.to_proto(got)).run(None, {"x": x})
    rounded = [w.astype(np.float16).astype(np.float32) for w in (first, second)]
    wanted = (x @ rounded[0] + np.linspace(-1, 1, 64, dtype=np.float32)) @ rounded[1]
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-4)
    types = {name: value.dtype for name, value in got.graph.initializers.items()}
    assert types == {
        "bias": ir.DataType.FLOAT,
        "first_float16": ir.DataType.FLOAT16,
        "second_float16": ir.DataType.FLOAT16,
    }


@pytest.mark.parametrize(
    ("largest", "fits"),
    [(65504.0, True), (65505.0, False), (-70000.0, False)],
    ids=["the largest", "beyond it", "beyond it below 0"],
)
def test_a_weight_that_would_overflow_stays_and_is_named(largest: float, fits: bool) -> None:
    first = weights(1)
    first[3, 4] = largest

    got = to_half(two_layers(first, weights(2, 64, 32)))

    assert ("first" in got.graph.initializers) is not fits
    said = got.metadata_props.get(KEPT_KEY, "")
    assert said.startswith("first (|x| up to ") is not fits
    (y,) = ReferenceEvaluator(ir.to_proto(got)).run(None, {"x": np.ones((1, 32), np.float32)})
    assert np.isfinite(y).all()


def test_the_float_graph_is_left_alone() -> None:
    model = two_layers(weights(1), weights(2, 64, 32))

    to_half(model)

    assert set(model.graph.initializers) == {"first", "bias", "second"}
    assert len(model.graph) == 3


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: two_layers(weights(1, 4, 4), weights(2, 4, 4)), "no float32 weight"),
        (lambda: to_half(two_layers(weights(1), weights(2, 64, 32))), "no float32 weight"),
        (lambda: two_layers(weights(1) * np.float32(np.nan), weights(2, 64, 32)), "'first' holds"),
        (
            lambda: two_layers(weights(1) * np.float32(1e6), weights(2, 64, 32) * np.float32(1e6)),
            "first .* is beyond it",
        ),
    ],
    ids=["small", "half already", "NaN", "all beyond"],
)
def test_what_cannot_be_halved(model: Callable[[], ir.Model], said: str) -> None:
    with pytest.raises(InputError, match=said):
        to_half(model())
