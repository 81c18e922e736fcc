"""The quantized graph is the simulation: the same grids at the same places, and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.exporting import (
    QUANTIZED_GATE,
    StepAgreement,
    check_parity,
    find_logits,
    forced_parity,
    load_graph,
    match_linears,
    quantize_graph,
    save_graph,
)
from quantkit.onnx_runtime import open_decoder
from quantkit.probes import AttentionLogits, attach
from quantkit.quantization import fake_quantized
from quantkit.recipe import Recipe
from quantkit.results import Parity
from tests.exporting.conftest import Exported

KINDS = ["llama", "diff"]
RECIPES = [
    "w8",
    "w8a8",
    "logits8:tensor:static",
    "logits6:head:static",
    "logits4:head:static",
    "logits4:tensor:static",
    "logits12:head:static",
    "logits12:tensor:static",
    "w4a6",
    "w8a16+logits6:tensor:static",
    "w8a8:token:symmetric",
    "w4a6:token:symmetric",
    "w8:group32",
    "w4:group32",
    "w4a16:group32",
    "w4a8:group32:token:symmetric",
    "w8a8+logits8:head:static",
]


def build(case: Exported, recipe: str, folder: Path) -> Path:
    model, infos = quantize_graph(
        case.path, module_linears=case.linears, recipe=Recipe.parse(recipe), ranges=case.ranges
    )
    assert infos and all(info.hits for info in infos)
    return save_graph(model, folder)


def parity(case: Exported, recipe: str, path: Path) -> list[Parity]:
    with fake_quantized(case.model, Recipe.parse(recipe), case.ranges):
        return check_parity(open_decoder(path), case.forward, case.batches, QUANTIZED_GATE)


def forced(case: Exported, recipe: str, path: Path) -> tuple[Parity, list[StepAgreement]]:
    graph = load_graph(path)
    return forced_parity(graph, case.model, Recipe.parse(recipe), case.ranges, case.batches[0])


def run_values(
    path: Path, names: list[str], case: Exported, *, optimize: bool = True
) -> list[NDArray[np.generic]]:
    """Returns values inside the graph, on the first batch."""
    model = load_graph(path)
    by_name = {value.name: value for node in model.graph for value in node.outputs}
    model.graph.outputs.extend(by_name[name] for name in names)
    opened = save_graph(model, path.parent / "opened")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(opened), options, providers=["CPUExecutionProvider"])
    ids = case.batches[0].input_ids.numpy()
    feeds = {"input_ids": ids, "attention_mask": case.batches[0].attention_mask.numpy().astype(int)}
    for value in session.get_inputs()[2:]:
        feeds[value.name] = np.zeros((len(ids), value.shape[1], 0, value.shape[3]), np.float32)
    found: list[NDArray[np.generic]] = session.run(names, feeds)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_parity_with_the_simulation(
    exported: Callable[[str], Exported], kind: str, recipe: str, tmp_path: Path
) -> None:
    case = exported(kind)
    path = build(case, recipe, tmp_path)
    onnx.checker.check_model(str(path), full_check=True)
    assert {opset.domain for opset in onnx.load(str(path)).opset_import} == {""}
    found = parity(case, recipe, path)
    assert all(run.passed for run in found), found
    whole, steps = forced(case, recipe, path)
    assert whole.passed, steps[:3]


@pytest.mark.parametrize("kind", KINDS)
def test_the_value_that_is_quantized_is_the_scaled_logit_before_the_mask(
    exported: Callable[[str], Exported], kind: str, tmp_path: Path
) -> None:
    case = exported(kind)
    logits = find_logits(load_graph(case.path))
    assert [(logit.layer, logit.heads) for logit in logits] == [(0, 4), (1, 4)]
    save_graph(load_graph(case.path), tmp_path)
    names = [str(logit.value.name) for logit in logits]
    found = run_values(tmp_path / "model.onnx", names, case)
    seen: dict[int, dict[int, torch.Tensor]] = {}

    def look(call: AttentionLogits) -> None:
        tiles = [tile.logits for tile in call.tiles()]
        seen.setdefault(call.layer, {})[call.map] = torch.cat(tiles, dim=2)

    with attach(case.model, {"attention_logit": look}):
        case.forward(case.batches[0].input_ids, case.batches[0].attention_mask)
    for layer, values in enumerate(found):
        maps = seen[layer]
        expected = torch.cat([maps[map_] for map_ in sorted(maps)], dim=1).numpy()
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("recipe", "top"),
    [
        ("logits8:tensor:static", 127),
        ("logits8:head:static", 127),
        ("logits6:head:static", 31),
        ("logits4:tensor:static", 7),
    ],
)
@pytest.mark.parametrize("optimize", [True, False], ids=["optimized", "as written"])
def test_the_grid_is_narrow_where_logits_exceed_their_range(
    exported: Callable[[str], Exported], recipe: str, top: int, optimize: bool, tmp_path: Path
) -> None:
    case = exported("llama")
    shrunk = {
        name: dataclasses.replace(
            found, lo=(np.array(found.lo) / 3).tolist(), hi=(np.array(found.hi) / 3).tolist()
        )
        for name, found in case.ranges.items()
    }
    small = dataclasses.replace(case, ranges=shrunk)
    path = build(small, recipe, tmp_path)
    names = ["attention_logit/0/dequantize_output"]
    (dequantized,) = run_values(path, names, case, optimize=optimize)
    stored = load_graph(path).graph.initializers["attention_logit/0/scale"].const_value
    assert stored is not None
    scale = stored.numpy()
    steps = dequantized / np.reshape(scale, (1, -1, 1, 1))
    assert np.allclose(steps, steps.round(), atol=1e-4)
    assert (steps.round().min(), steps.round().max()) == (-top, top)


def test_weights_are_the_torch_grid_bit_for_bit(
    exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    case = exported("llama")
    path = build(case, "w8", tmp_path)
    name = "model.layers.1.mlp.down_proj"
    graph = load_graph(path).graph
    stored = graph.initializers[f"{name}.weight_quantized"].const_value.numpy()
    scale = graph.initializers[f"{name}.weight_scale"].const_value.numpy()
    assert stored.dtype == np.int8 and np.abs(stored).max() == 127
    with fake_quantized(case.model, Recipe.parse("w8")):
        expected = case.linears[name].weight.numpy().copy()
    assert np.array_equal(stored.T.astype(np.float32) * scale[:, None], expected)
    assert path.with_name("model.onnx.data").stat().st_size < (
        case.path.with_name("model.onnx.data").stat().st_size
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_layer_stays_in_float(exported: Callable[[str], Exported], kind: str) -> None:
    case = exported(kind)
    model, infos = quantize_graph(
        case.path, module_linears=case.linears, recipe=Recipe.parse("w8a8"), ranges=case.ranges
    )
    assert not [info.name for info in infos if "lm_head" in info.name]
    assert len(infos) == 2 * 2 * 7
    last = model.graph.outputs[0].producer()
    assert last is not None and last.op_type == "MatMul"
    assert last.inputs[1] is not None and last.inputs[1].dtype == ir.DataType.FLOAT
    kinds = [node.op_type for node in model.graph]
    # q, k and v share an input, gate and up share another: 4 inputs a layer; each reader has its
    # own DequantizeLinear, and each weight.
    assert kinds.count("QuantizeLinear") == 2 * 4
    assert kinds.count("DequantizeLinear") == 2 * (7 + 7)


def test_every_linear_layer_runs_in_integers(
    exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    path = build(exported("llama"), "w8a8", tmp_path)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    optimized = onnx.load(tmp_path / "optimized.onnx", load_external_data=False)
    kinds = [node.op_type for node in optimized.graph.node]
    assert kinds.count("MatMulIntegerToFloat") == 2 * 7


def test_the_float_graph_is_not_changed(exported: Callable[[str], Exported]) -> None:
    case = exported("llama")
    model = load_graph(case.path)
    before = (len(list(model.graph)), sorted(model.graph.initializers))
    quantize_graph(
        model,
        module_linears=case.linears,
        recipe=Recipe.parse("w8a8+logits8:head:static"),
        ranges=case.ranges,
    )
    assert (len(list(model.graph)), sorted(model.graph.initializers)) == before


def planted(path: Path, name: str, factor: float) -> Path:
    """Returns the graph with one scale of another size."""
    model = load_graph(path)
    value = model.graph.initializers[name]
    assert value.const_value is not None
    value.const_value = ir.tensor(value.const_value.numpy() * np.float32(factor), name=name)
    return save_graph(model, path.parent / "planted")


@pytest.mark.parametrize(
    "scale",
    [
        "linear_input/model.layers.0.mlp.down_proj/scale",
        "model.layers.1.self_attn.o_proj.weight_scale",
        "attention_logit/1/scale",
    ],
)
@pytest.mark.parametrize("factor", [2.0, 0.25])
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_scale_fails_the_gate(
    exported: Callable[[str], Exported], kind: str, scale: str, factor: float, tmp_path: Path
) -> None:
    case = exported(kind)
    recipe = "w8a8+logits4:head:static"
    good = build(case, recipe, tmp_path)
    assert all(run.passed for run in parity(case, recipe, good))
    assert not any(run.passed for run in parity(case, recipe, planted(good, scale, factor)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ["w8a8+logits8:head:static", "w8a8+logits4:tensor:static"])
def test_every_quantizer_agrees_step_by_step(
    exported: Callable[[str], Exported], kind: str, recipe: str, tmp_path: Path
) -> None:
    case = exported(kind)
    parity, steps = forced(case, recipe, build(case, recipe, tmp_path))
    assert parity.passed, steps[:3]
    maps = 2 if kind == "diff" else 1
    assert len(steps) == len(case.linears) + 2 * maps  # two layers
    assert {step.name for step in steps} >= {f"linear_input/{name}" for name in case.linears}


@pytest.mark.parametrize(
    ("scale", "place"),
    [
        (
            "linear_input/model.layers.0.mlp.down_proj/scale",
            "linear_input/model.layers.0.mlp.down_proj",
        ),
        # a weight shows where its output is quantized next
        (
            "model.layers.1.mlp.up_proj.weight_scale",
            "linear_input/model.layers.1.mlp.down_proj",
        ),
        ("attention_logit/1/scale", "attention_logit/1/map 1"),
    ],
)
def test_a_scale_that_is_a_little_wrong_is_found_by_name(
    exported: Callable[[str], Exported], scale: str, place: str, tmp_path: Path
) -> None:
    case, recipe = exported("diff"), "w8a8+logits8:head:static"
    path = planted(build(case, recipe, tmp_path), scale, 1.05)
    parity, steps = forced(case, recipe, path)
    assert not parity.passed
    assert steps[0].name == place
    assert not steps[0].passed


def test_a_quantizer_that_is_not_there_is_named(
    exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    case = exported("llama")
    with pytest.raises(InputError, match=r"no quantizer 'attention_logit/0'"):
        forced(case, "w8a8+logits8:head:static", build(case, "w8a8", tmp_path))


def test_a_linear_layer_that_the_graph_lacks_is_named(
    exported: Callable[[str], Exported],
) -> None:
    case = exported("llama")
    linears = {**case.linears, "model.layers.7.mlp.up_proj": torch.full((96, 64), 0.5)}
    with pytest.raises(InputError, match=r"'model\.layers\.7\.mlp\.up_proj'"):
        match_linears(load_graph(case.path), linears)


def test_equal_weights_are_told_apart_by_their_module(
    exported: Callable[[str], Exported],
) -> None:
    case = exported("llama")
    model = load_graph(case.path)
    first, second = "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"
    nodes = {found.module: found.node for found in match_linears(model, case.linears)}
    nodes[second].replace_input_with(1, nodes[first].inputs[1])
    linears = {**case.linears, second: case.linears[first]}
    again = {found.module: found.node for found in match_linears(model, linears)}
    assert again[first] is nodes[first] and again[second] is nodes[second]


def test_what_is_missing_is_named(exported: Callable[[str], Exported]) -> None:
    case = exported("llama")

    def attempt(recipe: str, without: str) -> None:
        ranges = {name: found for name, found in case.ranges.items() if name != without}
        quantize_graph(
            case.path, module_linears=case.linears, recipe=Recipe.parse(recipe), ranges=ranges
        )

    name = "linear_input/model.layers.1.mlp.down_proj"
    with pytest.raises(InputError, match=name):
        attempt("w8a8", name)
    with pytest.raises(InputError, match="attention_logit/1/map 1"):
        attempt("logits8:head:static", "attention_logit/1/map 1")
