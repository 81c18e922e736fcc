"""What stays in float and what is smoothed, in the graph and in `export.json`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from quantkit.calib_sets import TokenSlice
from quantkit.errors import InputError
from quantkit.exporting import forced_parity, load_graph, quantize_graph, save_graph
from quantkit.exporting.proof import SMOOTHING_KEY, export_and_prove
from quantkit.models import LoadedModel
from quantkit.models.smoothing_groups import smoothing_groups
from quantkit.quantization import quantizer_names, smoothed
from quantkit.recipe import Recipe
from quantkit.results import Ranges, Smoothing
from tests.exporting.conftest import Exported, seen_ranges, tiny

RECIPE = "w8a8+logits8:head:static"
KEEP = {
    "linear_input/model.layers.0.self_attn.k_proj",
    "linear_input/model.layers.1.mlp.down_proj",
    "weight/model.layers.1.mlp.down_proj",
    "attention_logit/0/map 1",
}


def test_kept_nodes_stay_in_float(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    case = exported("llama")
    # what is kept is not asked of the ranges
    ranges = {name: found for name, found in case.ranges.items() if name not in KEEP}
    recipe = Recipe.parse(RECIPE)
    graph, infos = quantize_graph(
        case.path, module_linears=case.linears, recipe=recipe, ranges=ranges, keep=KEEP
    )
    names = {info.name for info in infos}
    assert names == set(quantizer_names(case.model, recipe)) - KEEP
    path = save_graph(graph, tmp_path)
    onnx.checker.check_model(str(path), full_check=True)
    nodes = {node.name for node in graph.graph}
    assert "attention_logit/1/quantize" in nodes and "attention_logit/0/quantize" not in nodes
    stored = {value.const_value.name for value in graph.graph.initializers.values()}
    assert "model.layers.0.mlp.down_proj.weight_quantized" in stored
    assert "model.layers.1.mlp.down_proj.weight_quantized" not in stored
    parity, steps = forced_parity(graph, case.model, recipe, ranges, case.batches[0], keep=KEEP)
    assert parity.passed, steps[:3]
    assert KEEP.isdisjoint(step.name for step in steps)
    assert len(steps) == 14 + 2 - 3
    with pytest.raises(InputError, match="holds no quantizer"):
        forced_parity(graph, case.model, recipe, case.ranges, case.batches[0])


def test_keeping_everything_is_the_float_graph(exported: Callable[[str], Exported]) -> None:
    case = exported("diff")
    recipe = Recipe.parse(RECIPE)
    keep = quantizer_names(case.model, recipe)
    graph, infos = quantize_graph(
        case.path, module_linears=case.linears, recipe=recipe, ranges={}, keep=keep
    )
    assert infos == []
    assert len(list(graph.graph)) == len(list(load_graph(case.path).graph))


@pytest.mark.parametrize(
    ("kind", "keep", "said"),
    [
        ("llama", "weight/model.layers.0.mlp.up_porj", r"Did you mean 'weight/.*up_proj'"),
        ("llama", "attention_logit/2/map 1", "no logit of the layers 0 to 1"),
        ("llama", "attention_logit/x", "no logit of the layers 0 to 1"),
        ("diff", "attention_logit/0/map 2", "Keep 'attention_logit/0/map 1' too"),
    ],
)
def test_what_cannot_be_kept_is_named(
    exported: Callable[[str], Exported], kind: str, keep: str, said: str
) -> None:
    case = exported(kind)
    with pytest.raises(InputError, match=said):
        quantize_graph(
            case.path,
            module_linears=case.linears,
            recipe=Recipe.parse(RECIPE),
            ranges=case.ranges,
            keep=[keep],
        )


def uneven_model() -> Any:
    """A tiny Llama with a few channels far larger than the others, in front of each linear."""
    model = tiny("llama")
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.data[::9] *= 20
        layer.mlp.up_proj.weight.data[::11] *= 20
    return model


def made(model: Any, case: Exported) -> tuple[Ranges, dict[str, Smoothing], TokenSlice]:
    smoothing = {}
    modules = dict(model.named_modules())
    for group in smoothing_groups(model):
        channels = modules[group.linears[0]].in_features
        scales = np.ones(channels)
        scales[:: 9 if group.kind == "norm" else 11] = 5.5
        smoothing[group.linears[0]] = Smoothing(
            producer=group.producer,
            linears=list(group.linears),
            alpha=0.5,
            scales=scales.tolist(),
            expected_error=0.0,
            expected_error_without=0.0,
        )
    with smoothed(model, smoothing):
        tensors = seen_ranges(model, case.batches)
    blocks = tuple(row[:16] for row in case.batches[0].input_ids)
    text = TokenSlice(
        source="random", source_sha256="0", ids=blocks, seq_len=16, skip=0, bos="never"
    )
    ranges = Ranges(
        model=loaded(model).info(),
        data=text.info(2),
        method="minmax",
        environment={},
        tensors=tensors,
        smoothing=smoothing,
    )
    return ranges, smoothing, text


def loaded(model: Any) -> LoadedModel:
    return LoadedModel(name="tiny", source="tiny", model=model, tokenizer=None, sha256="0")


def test_export_with_smoothing_and_kept_tensors(
    exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    model = uneven_model()
    ranges, smoothing, text = made(model, exported("llama"))
    before = {name: (t.data_ptr(), t.clone()) for name, t in model.state_dict().items()}
    keep = ["linear_input/model.layers.0.mlp.down_proj"]
    recipe = Recipe.parse(RECIPE)

    result = export_and_prove(loaded(model), text, ranges, tmp_path, recipe=recipe, keep=keep)

    for name, tensor in model.state_dict().items():
        assert tensor.data_ptr() == before[name][0] and torch.equal(tensor, before[name][1]), name
    assert result.passed, result.parity
    # the float graph carries the scales, and is compared with the model without them
    assert {entry.reference for entry in result.parity["float"]} == {"torch float"}
    assert min(entry.cosine for entry in result.parity["float"]) > 0.99999
    assert result.kept == keep
    assert result.smoothed == dict.fromkeys(smoothing, 0.5)
    assert keep[0] not in {info.name for info in result.quantizers}

    float_path = tmp_path / "float/model.onnx"
    stored = onnx.load(float_path).graph.initializer
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in stored}
    name = "model.layers.0.input_layernorm.weight"
    np.testing.assert_allclose(
        arrays[name], before[name][1].numpy() / smoothing_scales(smoothing), rtol=1e-6
    )

    # the same smoothing uses the float graph again, another one does not
    stamp = float_path.stat().st_mtime_ns
    float_only = Recipe()
    export_and_prove(loaded(model), text, ranges, tmp_path, recipe=float_only, smoothing=smoothing)
    assert float_path.stat().st_mtime_ns == stamp
    assert load_graph(float_path).metadata_props[SMOOTHING_KEY]
    plain = export_and_prove(loaded(model), text, ranges, tmp_path, recipe=float_only, smoothing={})
    assert float_path.stat().st_mtime_ns != stamp
    assert plain.kept == [] and plain.smoothed == {} and plain.passed
    assert SMOOTHING_KEY not in load_graph(float_path).metadata_props


def smoothing_scales(smoothing: dict[str, Smoothing]) -> np.ndarray[Any, Any]:
    return np.array(smoothing["model.layers.0.self_attn.q_proj"].scales, np.float32)


def test_a_name_that_is_not_there_costs_no_export(
    exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    model = tiny("llama")
    ranges, _, text = made(model, exported("llama"))
    with pytest.raises(InputError, match="is none of"):
        export_and_prove(
            loaded(model), text, ranges, tmp_path, recipe=Recipe.parse("w8"), keep=["weight/x"]
        )
    assert list(tmp_path.iterdir()) == []
