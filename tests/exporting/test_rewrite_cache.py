"""A KV cache of int8 in the graph: the numbers of the simulation, in a quarter of the memory.

Grids are computed in numpy from the ranges, not taken from quantkit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from quantkit.errors import InputError
from quantkit.exporting import export_float, load_graph, quantize_graph, save_graph
from quantkit.exporting.rewrite_cache import find_cache, quantize_cache
from quantkit.jobs import ExportJob
from quantkit.onnx_runtime import open_decoder
from quantkit.probes import AttentionLogits, AttentionValue, attach
from quantkit.recipe import CacheQuant, Recipe
from quantkit.results import QuantizerInfo, Range
from tests.conftest import make_tiny
from tests.exporting.conftest import Exported, batch
from tests.exporting.test_quantize import build, forced, parity, planted

Array = NDArray[Any]
Cases = Callable[[str], Exported]
KINDS = ["llama", "diff", "gpt2"]
RECIPES = ["kv8:static", "kv8:static:symmetric", "kv8:tensor:static", "kv8:tensor:static:symmetric"]
STATIC = CacheQuant(bits=8, granularity="head", range="static")


def cache_ranges(model: PreTrainedModel, batches: list[Any]) -> dict[str, Range]:
    """Min-max of real tokens, a head, as `calibrate --points kv_cache` names them."""
    lows: dict[str, Tensor] = {}
    highs: dict[str, Tensor] = {}

    def see(name: str, x: Tensor, real: Tensor) -> None:
        kept = x.transpose(1, 2)[real]
        lo, hi = kept.amin((0, 2)), kept.amax((0, 2))
        lows[name] = torch.minimum(lows.get(name, lo), lo)
        highs[name] = torch.maximum(highs.get(name, hi), hi)

    def key(call: AttentionLogits) -> None:
        see(f"attention_key/{call.layer}/map {call.map}", call.key, call.real_keys())

    def value(visit: AttentionValue) -> None:
        part = f"/part {visit.part}" if visit.part > 1 else ""
        see(f"attention_value/{visit.layer}{part}", visit.tensor, visit.real)

    with torch.no_grad(), attach(model, {"attention_logit": key, "attention_value": value}):
        for each in batches:
            model(input_ids=each.input_ids, attention_mask=each.attention_mask, use_cache=False)
    return {
        name: Range(
            lo=lows[name].tolist(),
            hi=highs[name].tolist(),
            method="minmax",
            granularity="head",
            count=1,
            point=name.split("/")[0],
        )
        for name in lows
    }


@pytest.fixture(scope="module")
def cases(exported: Callable[[str], Exported]) -> Cases:
    known: dict[str, Exported] = {}

    def get(kind: str) -> Exported:
        if kind not in known:
            case = exported(kind)
            more = cache_ranges(case.model, case.batches)
            known[kind] = dataclasses.replace(case, ranges={**case.ranges, **more})
        return known[kind]

    return get


def rewritten(case: Exported, **options: Any) -> list[QuantizerInfo]:
    model = load_graph(case.path)
    return quantize_cache(model, STATIC, options.pop("ranges", case.ranges), **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", [*RECIPES, "w8a8+logits8:head:static+kv8:static"])
def test_parity_with_the_simulation_with_and_without_a_filled_cache(
    cases: Cases, kind: str, recipe: str, tmp_path: Path
) -> None:
    case = cases(kind)
    path = build(case, recipe, tmp_path)
    onnx.checker.check_model(str(path), full_check=True)
    found = parity(case, recipe, path)
    assert [run.cached > 0 for run in found] == [False, False, False, True]
    assert all(run.passed for run in found), found
    whole, steps = forced(case, recipe, path)
    assert whole.passed, steps[:3]
    maps = 2 if kind == "diff" else 1
    names = {step.name for step in steps if step.name.startswith("cache_")}
    assert len(names) == 2 * (maps + maps)  # two layers: keys of each map, values of each part
    assert all(step.elements > 0 for step in steps)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_is_int8_in_and_out(cases: Cases, kind: str, tmp_path: Path) -> None:
    case = cases(kind)
    decoder = open_decoder(build(case, "kv8:static", tmp_path))
    assert {entry.dtype for entry in decoder.layout.past} == {np.int8}
    ids = case.batches[0].input_ids.numpy()
    present = decoder.run(ids).present
    assert {array.dtype for array in present} == {np.dtype(np.int8)}
    plain = open_decoder(case.path).run(ids).present
    assert [array.shape for array in present] == [array.shape for array in plain]
    assert 4 * sum(array.nbytes for array in present) == sum(array.nbytes for array in plain)


def grid(case: Exported, recipe: str, names: list[str]) -> tuple[Array, Array, int]:
    """Returns (scale, zero point, lowest integer) of each head of a tensor of the cache."""
    quant = Recipe.parse(recipe).cache
    assert quant is not None
    scales, zeros = [], []
    for name in names:
        found = case.ranges[name]
        lo, hi = np.array(found.lo, np.float32), np.array(found.hi, np.float32)
        if name.startswith("attention_value") and len(names) > 1:  # each head is there twice
            lo, hi = np.split(lo, 2)[0], np.split(hi, 2)[0]
        if quant.granularity == "tensor":
            lo, hi = np.full_like(lo, lo.min()), np.full_like(hi, hi.max())
        if quant.symmetric:
            scale = (np.maximum(np.abs(lo), np.abs(hi)) / np.float32(127)).astype(np.float32)
            zero = np.zeros(len(lo), np.int32)
        else:
            lo, hi = np.minimum(lo, 0), np.maximum(hi, 0)
            scale = ((hi - lo) / np.float32(255)).astype(np.float32)
            zero = np.rint(-128 - lo / scale).astype(np.int32)
        scales.append(scale)
        zeros.append(zero)
    lowest = -127 if quant.symmetric else -128
    shape = (1, -1, 1, 1)
    return np.concatenate(scales).reshape(shape), np.concatenate(zeros).reshape(shape), lowest


@pytest.mark.parametrize("kind", ["llama", "diff"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("share", [1.0, 0.5], ids=["within ranges", "past them"])
def test_what_the_first_layer_keeps_is_its_float_keys_and_values_on_the_grid(
    cases: Cases, kind: str, recipe: str, share: float, tmp_path: Path
) -> None:
    case = cases(kind)
    shrunk = {
        name: dataclasses.replace(
            found,
            lo=(np.array(found.lo) * share).tolist(),
            hi=(np.array(found.hi) * share).tolist(),
        )
        for name, found in case.ranges.items()
    }
    small = dataclasses.replace(case, ranges=shrunk)
    ids = case.batches[0].input_ids.numpy()
    real = open_decoder(case.path).run(ids).present[:2]
    kept = open_decoder(build(small, recipe, tmp_path)).run(ids).present[:2]
    differential = kind == "diff"
    keys = [f"attention_key/0/map {n}" for n in (1, 2)][: 1 + differential]
    values = ["attention_value/0", "attention_value/0/part 2"][: 1 + differential]
    for names, floats, integers in zip((keys, values), real, kept, strict=True):
        scale, zero, lowest = grid(small, recipe, names)
        expected = np.clip(np.rint(floats / scale) + zero, lowest, 127)
        near = np.abs(expected - integers)
        assert near.max() <= 1 and (near > 0).mean() < 1e-3  # RoPE's last bit, at a tie
        if share < 1:
            assert (integers.min(), integers.max()) == (lowest, 127)


def test_the_reference_evaluator_agrees(cases: Cases, tmp_path: Path) -> None:
    case, recipe = cases("llama"), "kv8:static:symmetric"
    whole = onnx.load(build(case, recipe, tmp_path))
    nodes = [n for n in whole.graph.node if n.name.startswith("cache_key/0/")]
    (join,) = (n for n in whole.graph.node if "present.0.key" in n.output)
    nodes.insert(len(nodes) - 1, join)
    assert [n.op_type for n in nodes] == ["QuantizeLinear", "Clip", "Concat", "DequantizeLinear"]
    new, past, back = nodes[0].input[0], join.input[0], nodes[-1].output[0]
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes,
        "cache",
        [
            info(new, onnx.TensorProto.FLOAT, [2, 2, 3, 16]),
            info(past, onnx.TensorProto.INT8, [2, 2, 5, 16]),
        ],
        [
            info(join.output[0], onnx.TensorProto.INT8, None),
            info(back, onnx.TensorProto.FLOAT, None),
        ],
        [t for t in whole.graph.initializer if any(t.name in node.input for node in nodes)],
    )
    model = onnx.helper.make_model(graph, opset_imports=whole.opset_import)
    x = np.random.default_rng(0).normal(size=(2, 2, 3, 16)).astype(np.float32) * 5
    before = np.random.default_rng(1).integers(-127, 128, (2, 2, 5, 16)).astype(np.int8)
    joined, real = ReferenceEvaluator(model).run(None, {new: x, past: before})
    scale, _, _ = grid(case, recipe, ["attention_key/0/map 1"])
    steps = np.concatenate([before, np.clip(np.rint(x / scale), -127, 127)], axis=2)
    np.testing.assert_array_equal(joined, steps.astype(np.int8))
    np.testing.assert_array_equal(real, steps.astype(np.float32) * scale)


def test_two_calls_keep_what_one_call_keeps(cases: Cases, tmp_path: Path) -> None:
    case = cases("diff")
    decoder = open_decoder(build(case, "kv8:static", tmp_path))
    ids = case.batches[0].input_ids.numpy()
    once = decoder.run(ids)
    first = decoder.run(ids[:, :10])
    second = decoder.run(ids[:, 10:], past=first.present)
    for whole, grown, start in zip(once.present, second.present, first.present, strict=True):
        np.testing.assert_array_equal(grown[:, :, :10], start)  # what is kept is not touched
        assert np.abs(whole.astype(int) - grown).max() <= 1
    np.testing.assert_allclose(once.logits[:, 10:], second.logits, atol=0.05, rtol=0.05)


def test_one_key_head_too(tmp_path: Path) -> None:
    """A single scale of int8 is what ONNX Runtime 1.32 turns into a graph that it refuses."""
    model = make_tiny(LlamaForCausalLM, LlamaConfig, num_key_value_heads=1)
    batches = [batch(2, 12, seed=3, padding=3)]
    case = Exported(
        model=model,
        path=export_float(model, tmp_path / "float"),
        batches=batches,
        ranges=cache_ranges(model, batches),
    )
    path = build(case, "kv8:static", tmp_path)
    assert all(run.passed for run in parity(case, "kv8:static", path))
    whole, steps = forced(case, "kv8:static", path)
    assert whole.passed and len(steps) == 4


@pytest.mark.parametrize("name", ["cache_key/1", "cache_value/0"])
def test_a_wrong_scale_fails_the_gate(cases: Cases, name: str, tmp_path: Path) -> None:
    case = cases("llama")
    wrong = planted(build(case, "kv8:static", tmp_path), f"{name}/scale", 0.25)
    assert not any(run.passed for run in parity(case, "kv8:static", wrong))
    whole, steps = forced(case, "kv8:static", wrong)
    assert not whole.passed and steps[0].name.startswith(name)


def test_what_is_kept_stays_float(cases: Cases, tmp_path: Path) -> None:
    case, recipe = cases("diff"), Recipe.parse("kv8:static")
    keep = ["cache_key/0/map 1", "cache_key/0/map 2", "cache_value/1", "cache_value/1/part 2"]
    model, infos = quantize_graph(
        case.path, module_linears={}, recipe=recipe, ranges=case.ranges, keep=keep
    )
    assert not set(keep) & {info.name for info in infos} and len(infos) == 4
    types = {value.name: value.dtype for value in model.graph.inputs}
    assert types["past_key_values.0.key"] == types["past_key_values.1.value"] == ir.DataType.FLOAT
    assert types["past_key_values.1.key"] == types["past_key_values.0.value"] == ir.DataType.INT8
    decoder = open_decoder(save_graph(model, tmp_path))
    ids = case.batches[0].input_ids.numpy()
    first = decoder.run(ids[:, :4])
    assert decoder.run(ids[:, 4:], past=first.present).logits.shape[:2] == (3, 20)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (["cache_key/0/map 1"], "'cache_key/0/map 1' cannot stay in float alone.*map 2"),
        (["cache_value/1/part 2"], "'cache_value/1/part 2' cannot stay in float alone"),
        (["cache_key/7/map 1"], "'cache_key/7/map 1' is none of the graph's 8"),
    ],
    ids=["one map", "one part", "no such layer"],
)
def test_what_cannot_be_kept_is_named(cases: Cases, keep: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        rewritten(cases("diff"), keep=keep)


def test_a_missing_or_foreign_range_is_named(cases: Cases) -> None:
    case = cases("diff")
    without = {n: found for n, found in case.ranges.items() if n != "attention_value/1"}
    with pytest.raises(InputError, match=r"attention_value/1.*kv_cache"):
        rewritten(case, ranges=without)
    found = case.ranges["attention_key/0/map 1"]
    three = dataclasses.replace(found, lo=[-1.0] * 3, hi=[1.0] * 3)
    with pytest.raises(InputError, match=r"attention_key/0/map 1.* has 3 groups"):
        rewritten(case, ranges={**case.ranges, "attention_key/0/map 1": three})
    found = case.ranges["attention_value/0"]
    uneven = dataclasses.replace(found, hi=[1.0, 2.0])
    with pytest.raises(InputError, match=r"attention_value/0.* two ranges for one head"):
        rewritten(case, ranges={**case.ranges, "attention_value/0": uneven})
    more = {f"attention_key/0/map {n}": case.ranges["attention_key/0/map 1"] for n in (1, 2, 3)}
    with pytest.raises(InputError, match="2 heads, not as many for each of"):
        rewritten(case, ranges={**case.ranges, **more})


@pytest.mark.parametrize("recipe", ["kv8", "kv8:head", "kv4:static"])
def test_other_caches_are_refused_with_what_to_write(cases: Cases, recipe: str) -> None:
    quant = Recipe.parse(recipe).cache
    assert quant is not None
    with pytest.raises(InputError, match="write kv8:static"):
        quantize_cache(load_graph(cases("llama").path), quant, cases("llama").ranges)
    with pytest.raises(InputError, match="write kv8:static"):
        ExportJob(model="m", recipe=recipe)


def test_a_graph_without_a_cache_or_with_another_use_of_it_is_refused(cases: Cases) -> None:
    case = cases("llama")
    model = load_graph(case.path)
    assert [(c.layer, c.kind, c.heads, c.width) for c in find_cache(model)] == [
        (layer, kind, 2, 16) for layer in (0, 1) for kind in ("key", "value")
    ]
    past = next(v for v in model.graph.inputs if v.name == "past_key_values.1.key")
    node = ir.node("Abs", [past], name="look")
    model.graph.append(node)
    with pytest.raises(InputError, match=r"'past_key_values.1.key': expected heads"):
        quantize_cache(model, STATIC, case.ranges)
    for value in model.graph.inputs:
        value.name = str(value.name).replace("past_key_values", "state")
    with pytest.raises(InputError, match="no cache to quantize"):
        quantize_cache(model, STATIC, case.ranges)
