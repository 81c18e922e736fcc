"""GPT-2's Conv1D in the graph: a Gemm whose weight is stored [in, out], on the same grids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx_ir import Model
from transformers.pytorch_utils import Conv1D

from quantkit.errors import InputError
from quantkit.exporting import (
    QUANTIZED_GATE,
    check_parity,
    forced_parity,
    load_graph,
    match_linears,
    quantize_graph,
    save_graph,
)
from quantkit.onnx_runtime import open_decoder
from quantkit.quantization import fake_quantized
from quantkit.recipe import Recipe
from tests.exporting.conftest import Exported


@pytest.fixture
def gpt2(exported: Callable[[str], Exported]) -> Exported:
    case = exported("gpt2")
    assert len(case.linears) == 8
    assert all(isinstance(module, Conv1D) for module in case.linears.values())
    return case


def quantized(case: Exported, recipe: str, keep: tuple[str, ...] = ()) -> Model:
    return quantize_graph(
        case.path,
        module_linears=case.linears,
        recipe=Recipe.parse(recipe),
        ranges=case.ranges,
        keep=keep,
    )[0]


def operations(path: Path) -> Counter[str]:
    """What ONNX Runtime makes of a graph."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(path.parent / "optimized.onnx")
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    found = onnx.load(options.optimized_model_filepath, load_external_data=False)
    return Counter(node.op_type for node in found.graph.node)


@pytest.mark.parametrize("recipe", ["w8", "w4", "w8a8", "w8a16", "a8", "w8a8+logits8:head:static"])
def test_parity_with_the_simulation(gpt2: Exported, recipe: str, tmp_path: Path) -> None:
    parsed = Recipe.parse(recipe)
    path = save_graph(quantized(gpt2, recipe), tmp_path)
    onnx.checker.check_model(str(path), full_check=True)
    with fake_quantized(gpt2.model, parsed, gpt2.ranges):
        found = check_parity(open_decoder(path), gpt2.forward, gpt2.batches, QUANTIZED_GATE)
    assert all(run.passed for run in found), found
    whole, steps = forced_parity(load_graph(path), gpt2.model, parsed, gpt2.ranges, gpt2.batches[0])
    assert whole.passed, steps[:3]
    inputs = [step for step in steps if step.name.startswith("linear_input/")]
    assert len(inputs) == (8 if "a" in recipe.partition("+")[0] else 0)


def test_the_graph_holds_the_simulations_weights(gpt2: Exported) -> None:
    values = quantized(gpt2, "w3").graph.initializers
    with fake_quantized(gpt2.model, Recipe.parse("w3")):
        for name, module in gpt2.linears.items():
            integers, scale = (
                values[f"{name}.weight_{what}"].const_value.numpy()  # type: ignore[union-attr]
                for what in ("quantized", "scale")
            )
            assert len(scale) == integers.shape[1] == module.nf, name  # [in, out], one an output
            stored = integers.astype(np.float32) * scale
            assert np.array_equal(stored, module.weight.numpy()), name


def test_onnx_runtime_computes_them_in_integers(gpt2: Exported, tmp_path: Path) -> None:
    """Though each has a bias in float, which alone would send it back to float."""
    name = "transformer.h.1.mlp.c_fc"
    biases = {n: m.bias.abs().min() for n, m in gpt2.linears.items()}
    assert all(smallest > 0 for smallest in biases.values())
    found = operations(save_graph(quantized(gpt2, "w8a8"), tmp_path))
    assert (found["QGemm"], found["Gemm"], found["DequantizeLinear"]) == (8, 0, 0)
    kept = quantized(gpt2, "w8a8", keep=(f"weight/{name}", f"linear_input/{name}"))
    found = operations(save_graph(kept, tmp_path / "kept"))
    assert (found["QGemm"], found["Gemm"]) == (7, 1)


def test_a_wrong_scale_is_found(gpt2: Exported) -> None:
    """Of one input, and of one weight."""
    recipe = Recipe.parse("w8a8")
    name = "transformer.h.0.mlp.c_proj"
    for constant, factor in ((f"linear_input/{name}/scale", 1.5), (f"{name}.weight_scale", 3.0)):
        graph = quantized(gpt2, "w8a8")
        value = graph.graph.initializers[constant]
        assert value.const_value is not None
        array = np.array(value.const_value.numpy() * np.float32(factor), np.float32)
        value.const_value = type(value.const_value)(array, name=constant)
        parity, _ = forced_parity(graph, gpt2.model, recipe, gpt2.ranges, gpt2.batches[0])
        assert not parity.passed, constant


def test_a_graph_of_other_weights_is_refused(gpt2: Exported) -> None:
    name, module = next(iter(gpt2.linears.items()))
    turned = module.weight.detach() + 1.0  # as a tensor, a weight is [out, in]
    with pytest.raises(InputError, match=rf"no node of the graph .*'{name}'"):
        match_linears(load_graph(gpt2.path), {name: turned})
    (found,) = match_linears(load_graph(gpt2.path), {name: module.weight.detach().t()})
    assert found.module == name and not found.transposed
