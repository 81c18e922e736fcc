"""Asymmetric static logits in the graph: zero points, full grids, and the simulation's numbers.

The grid of each head is computed in numpy from the ranges, not taken from quantkit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from quantkit.errors import InputError
from quantkit.exporting import load_graph, quantize_graph
from quantkit.recipe import Recipe
from quantkit.results import Range
from tests.exporting.conftest import Exported
from tests.exporting.test_quantize import KINDS, build, forced, parity, planted, run_values

Array = NDArray[Any]
RECIPES = [
    "logits8:tensor:static:asymmetric",
    "logits8:head:static:asymmetric",
    "logits6:head:static:asymmetric",  # clipped as integers
    "logits4:tensor:static:asymmetric",
    "logits4:head:static:asymmetric",
    "logits3:head:static:asymmetric",  # clipped as reals
    "logits12:head:static:asymmetric",
]


def lopsided(case: Exported) -> Exported:
    """The case with the upper half of every logit range cut, and by another amount a head."""

    def cut(found: Range) -> Range:
        share = np.linspace(0.1, 0.5, np.size(found.hi))
        return dataclasses.replace(
            found, lo=(np.array(found.lo) * 0.8).tolist(), hi=(np.array(found.hi) * share).tolist()
        )

    ranges = {
        name: cut(found) if name.startswith("attention_logit/") else found
        for name, found in case.ranges.items()
    }
    return dataclasses.replace(case, ranges=ranges)


def grid(case: Exported, recipe: str, layer: int) -> tuple[Array, Array, int, int]:
    """Returns (scale, zero point, lowest, highest integer), one a head, in numpy."""
    quant = Recipe.parse(recipe).logits
    assert quant is not None
    low, high = -(2 ** (quant.bits - 1)), 2 ** (quant.bits - 1) - 1
    los, his = [], []
    for map_ in (1, 2):
        found = case.ranges.get(f"attention_logit/{layer}/map {map_}")
        if found is None:
            continue
        lo, hi = np.array(found.lo, np.float32), np.array(found.hi, np.float32)
        if quant.granularity == "tensor":
            lo, hi = np.full_like(lo, lo.min()), np.full_like(hi, hi.max())
        los.append(np.minimum(lo, 0))
        his.append(np.maximum(hi, 0))
    lo, hi = np.concatenate(los), np.concatenate(his)
    scale = ((hi - lo) / np.float32(high - low)).astype(np.float32)
    return scale, np.rint(low - lo / scale).astype(np.int32), low, high


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RECIPES[:5])
def test_parity_with_the_simulation(
    exported: Callable[[str], Exported], kind: str, recipe: str, tmp_path: Path
) -> None:
    case = lopsided(exported(kind))
    path = build(case, recipe, tmp_path)
    onnx.checker.check_model(str(path), full_check=True)
    assert all(run.passed for run in parity(case, recipe, path))
    whole, steps = forced(case, recipe, path)
    assert whole.passed, steps[:3]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("optimize", [True, False], ids=["optimized", "as written"])
def test_the_grid_is_full_and_each_heads_own(
    exported: Callable[[str], Exported], kind: str, recipe: str, optimize: bool, tmp_path: Path
) -> None:
    case = lopsided(exported(kind))
    path = build(case, recipe, tmp_path)
    node = load_graph(path).graph.node("attention_logit/0/quantize")
    source = node.inputs[0]
    while source.producer().op_type in ("Max", "Min"):  # the clip of a grid below 4 or 16 bits
        source = source.producer().inputs[0]
    names = [source.name, "attention_logit/0/dequantize_output"]
    raw, real = run_values(path, names, case, optimize=optimize)
    scale, zero, low, high = (
        np.reshape(v, (1, -1, 1, 1)) if isinstance(v, np.ndarray) else v
        for v in grid(case, recipe, 0)
    )
    steps = np.clip(np.rint(raw / scale) + zero, low, high)
    np.testing.assert_array_equal(real, ((steps - zero).astype(np.float32) * scale))
    assert (steps.min(), steps.max()) == (low, high)
    assert (zero != 0).any() and ("tensor" in recipe or len(set(zero.flat)) > 1)


def test_the_reference_evaluator_agrees(
    exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    """Only the nodes of one quantizer: a third witness of zero points along an axis."""
    case, recipe = lopsided(exported("llama")), "logits6:head:static:asymmetric"
    path = build(case, recipe, tmp_path)
    whole = onnx.load(path)
    nodes = [n for n in whole.graph.node if n.name.startswith("attention_logit/1/")]
    source = nodes[0].input[0]
    used = {name for node in nodes for name in node.input}
    graph = onnx.helper.make_graph(
        nodes,
        "quantizer",
        [onnx.helper.make_tensor_value_info(source, onnx.TensorProto.FLOAT, [2, 4, 5, 5])],
        [onnx.helper.make_tensor_value_info(nodes[-1].output[0], onnx.TensorProto.FLOAT, None)],
        [tensor for tensor in whole.graph.initializer if tensor.name in used],
    )
    model = onnx.helper.make_model(graph, opset_imports=whole.opset_import)
    x = np.random.default_rng(0).normal(size=(2, 4, 5, 5)).astype(np.float32) * 30
    (found,) = ReferenceEvaluator(model).run(None, {source: x})
    scale, zero, low, high = grid(case, recipe, 1)
    scale, zero = scale.reshape(1, -1, 1, 1), zero.reshape(1, -1, 1, 1)
    steps = np.clip(np.rint(x / scale) + zero, low, high)
    np.testing.assert_array_equal(found, (steps - zero).astype(np.float32) * scale)


def test_the_type_is_said(exported: Callable[[str], Exported]) -> None:
    case = exported("diff")
    for recipe, qtype in (("logits8:head:static", "int8n"), (RECIPES[1], "int8")):
        _, infos = quantize_graph(
            case.path, module_linears={}, recipe=Recipe.parse(recipe), ranges=case.ranges
        )
        assert {info.qtype for info in infos} == {qtype}
        assert len(infos) == 4


def test_a_wrong_scale_fails_the_gate(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    case, recipe = lopsided(exported("llama")), "logits4:head:static:asymmetric"
    path = planted(build(case, recipe, tmp_path), "attention_logit/1/scale", 1.3)
    found, steps = forced(case, recipe, path)
    assert not found.passed and steps[0].name == "attention_logit/1/map 1"


def test_dynamic_is_refused_with_what_to_write(exported: Callable[[str], Exported]) -> None:
    case = exported("llama")
    with pytest.raises(InputError, match="logits8:head:static:asymmetric"):
        quantize_graph(
            case.path,
            module_linears={},
            recipe=Recipe.parse("logits8:asymmetric"),
            ranges=case.ranges,
        )
    with pytest.raises(InputError, match="logits8:head:static:asymmetric"):
        Recipe.parse("logits8:asymmetric").require_exportable()


@pytest.mark.parametrize("recipe", ["a6", "logits6:tensor:static", "logits6:static:asymmetric"])
def test_a_range_for_another_width_is_refused(
    exported: Callable[[str], Exported], recipe: str
) -> None:
    case = exported("llama")
    ranges = {
        name: dataclasses.replace(
            found, method="mse", bits=8, symmetric=recipe == "logits6:tensor:static"
        )
        for name, found in case.ranges.items()
    }
    with pytest.raises(InputError, match="chosen by mse for 8 bits, and is asked for 6"):
        quantize_graph(
            case.path, module_linears=case.linears, recipe=Recipe.parse(recipe), ranges=ranges
        )
