"""Logits on the range of the call itself: the absmax of what the graph's own mask leaves.

Which positions are valid is written down here by hand: causal, and no padding on either side.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.exporting import (
    QUANTIZED_GATE,
    check_parity,
    forced_parity,
    load_graph,
    quantize_graph,
    save_graph,
)
from quantkit.exporting.logits import find_logits, maps_of
from quantkit.exporting.parity import in_two_calls
from quantkit.exporting.rewrite_logits import quantize_logits
from quantkit.jobs import ExportJob
from quantkit.onnx_runtime import open_decoder
from quantkit.quantization import fake_quantized
from quantkit.recipe import LogitQuant, Recipe
from quantkit.results import QuantizerInfo
from tests.exporting.conftest import Exported
from tests.exporting.test_quantize import planted, run_values

Array = NDArray[Any]
Cases = Callable[[str], Exported]
KINDS = ["llama", "diff"]
RECIPES = ["logits8", "logits8:head", "logits8:row", "logits6:head", "logits4", "logits4:row"]
AXES = {"tensor": (1, 2, 3), "head": (2, 3), "row": (3,)}


def build(case: Exported, recipe: str, folder: Path, model: ir.Model | None = None) -> Path:
    made, infos = quantize_graph(
        model or case.path,
        module_linears=case.linears,
        recipe=Recipe.parse(recipe),
        ranges={n: r for n, r in case.ranges.items() if not n.startswith("attention_logit/")},
        maps=maps_of(case.model),
    )
    assert infos and all(info.hits for info in infos)
    return save_graph(made, folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", [*RECIPES, "logits12:head", "w8a8+logits8:head"])
def test_parity_with_the_simulation(
    exported: Cases, kind: str, recipe: str, tmp_path: Path
) -> None:
    """With a filled cache, too: torch in the same two calls, since a range is a call's."""
    case, parsed = exported(kind), Recipe.parse(recipe)
    path = build(case, recipe, tmp_path)
    onnx.checker.check_model(str(path), full_check=True)
    assert {opset.domain for opset in onnx.load(str(path)).opset_import} == {""}

    def two_calls(ids: torch.Tensor, mask: torch.Tensor, cached: int) -> torch.Tensor:
        with torch.no_grad():
            return in_two_calls(case.model, ids, mask, cached)

    with fake_quantized(case.model, parsed, case.ranges):
        found = check_parity(
            open_decoder(path),
            case.forward,
            case.batches,
            QUANTIZED_GATE,
            cached_forward=two_calls,
        )
    assert [run.cached > 0 for run in found] == [False, False, False, True]
    assert all(run.passed for run in found), found
    whole, steps = forced_parity(load_graph(path), case.model, parsed, case.ranges, case.batches[0])
    assert whole.passed, steps[:3]
    logits = [step for step in steps if step.name.startswith("attention_logit/")]
    assert len(logits) == (4 if kind == "diff" else 2)


def valid_of(case: Exported) -> Array:
    """Returns which entries of the first batch's maps count, bool `[batch, 1, query, key]`."""
    real = case.batches[0].attention_mask.numpy()
    tokens = real.shape[1]
    causal = np.arange(tokens)[:, None] >= np.arange(tokens)
    both = real[:, :, None] & real[:, None, :] & causal
    assert 0 < both.sum() < real.shape[0] * causal.sum()
    return both[:, None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("optimize", [True, False], ids=["optimized", "as written"])
def test_the_range_is_that_of_the_valid_entries(
    exported: Cases, kind: str, recipe: str, optimize: bool, tmp_path: Path
) -> None:
    case, quant = exported(kind), Recipe.parse(recipe).logits
    assert quant is not None
    path = build(case, recipe, tmp_path)
    raw_name = str(find_logits(load_graph(case.path))[0].value.name)
    names = [raw_name, "attention_logit/0/scale_output", "attention_logit/0/rescale_output"]
    raw, scale, real = run_values(path, names, case, optimize=optimize)
    top = np.float32(2 ** (quant.bits - 1) - 1)
    valid = np.broadcast_to(valid_of(case), raw.shape)
    maps = np.split(np.where(valid, np.abs(raw), 0), maps_of(case.model), axis=1)
    axes = AXES[quant.granularity]
    absmax = [np.broadcast_to(m.max(axes, keepdims=True), (*m.shape[:3], 1)) for m in maps]
    expected = np.concatenate(absmax, axis=1) / top
    rows = np.broadcast_to(valid.any(-1, keepdims=True), expected.shape)
    scale = np.broadcast_to(scale, expected.shape)
    np.testing.assert_array_equal(scale[rows], expected[rows])
    with np.errstate(over="ignore"):
        steps = np.clip(np.rint(raw / scale), -top, top)
    np.testing.assert_array_equal(real[valid], (steps * scale)[valid])
    assert np.isfinite(real).all() and np.abs(steps[valid]).max() == top
    masked = np.abs(raw) > np.broadcast_to(expected * top, raw.shape)
    assert (masked & ~valid).any()  # what is masked is larger somewhere, and did not count


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ["logits4", "logits4:head", "logits4:row"])
def test_neither_padding_nor_the_batch_changes_a_sequence(
    exported: Cases, kind: str, recipe: str, tmp_path: Path
) -> None:
    case = exported(kind)
    decoder = open_decoder(build(case, recipe, tmp_path))
    ids, mask = (x.numpy() for x in (case.batches[0].input_ids, case.batches[0].attention_mask))
    together = decoder.run(ids, mask.astype(np.int64)).logits
    length = int(mask[-1].sum())
    assert length < ids.shape[1]
    alone = decoder.run(ids[-1:, :length]).logits
    np.testing.assert_allclose(together[-1:, :length], alone, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("recipe", RECIPES[:3])
def test_only_a_row_is_the_same_in_two_calls(exported: Cases, recipe: str, tmp_path: Path) -> None:
    case = exported("llama")
    decoder = open_decoder(build(case, recipe.replace("8", "4"), tmp_path))
    ids = case.batches[0].input_ids.numpy()
    whole = decoder.run(ids).logits[:, 10:]
    first = decoder.run(ids[:, :10])
    rest = decoder.run(ids[:, 10:], past=first.present).logits
    assert np.allclose(whole, rest, rtol=1e-3, atol=1e-3) == recipe.endswith("row")


def test_one_constant_scale_and_the_type_of_the_grid(exported: Cases) -> None:
    case = exported("llama")
    for bits, dtype in ((8, ir.DataType.INT8), (6, ir.DataType.INT8), (4, ir.DataType.INT4)):
        model = load_graph(case.path)
        infos = quantize_logits(model, LogitQuant(bits=bits, granularity="head"), {})
        node = model.graph.node("attention_logit/1/quantize")
        scale, zero_point = (node.inputs[i].const_value for i in (1, 2))
        assert scale is not None and zero_point is not None
        assert float(scale.numpy()) == 1.0 and zero_point.dtype == dtype
        top = 2 ** (bits - 1) - 1
        assert infos == [
            QuantizerInfo(
                name=f"attention_logit/{layer}/map 1",
                qtype="int8n" if bits == 8 else f"int{bits}n",
                granularity="head",
                scale_min=1 / top,
                scale_max=1 / top,
                hits=1,
            )
            for layer in (0, 1)
        ]


def test_a_wrong_step_fails_the_gate(exported: Cases, tmp_path: Path) -> None:
    case, recipe = exported("llama"), Recipe.parse("logits4:head")
    wrong = planted(build(case, "logits4:head", tmp_path), "attention_logit/qmax", 0.6)
    whole, steps = forced_parity(
        load_graph(wrong), case.model, recipe, case.ranges, case.batches[0]
    )
    assert not whole.passed and not steps[0].passed


# Masks


def with_mask(case: Exported, kind: str) -> ir.Model:
    """Returns the float graph with another kind of mask in the place of its addition."""
    model = load_graph(case.path)
    fill = ir.Value(
        name="fill",
        shape=ir.Shape([]),
        type=ir.TensorType(ir.DataType.FLOAT),
        const_value=ir.tensor(np.float32(0.0 if kind == "zero" else -np.inf), name="fill"),
    )
    model.graph.register_initializer(fill)
    for softmax in [node for node in model.graph if node.op_type == "Softmax"]:
        add = softmax.inputs[0].producer()
        logit, added = add.inputs
        if kind == "none":
            softmax.replace_input_with(0, logit)
            continue
        masked = added.producer().inputs[0].producer().inputs[0]  # Mul <- Cast <- Not(valid)
        assert masked.producer().op_type == "Not"
        valid = masked.producer().inputs[0]
        inputs = [masked, fill, logit] if kind == "masked" else [valid, logit, fill]
        if kind == "twice":
            other = ir.node("Add", [logit, added], name=f"{add.name}/first")
            model.graph.insert_before(add, other)
            inputs[1] = other.outputs[0]
        where = ir.node("Where", inputs, name=f"{add.name}/where")
        where.outputs[0].name = f"{where.name}_output"
        model.graph.insert_before(add, where)
        softmax.replace_input_with(0, where.outputs[0])
    return model


@pytest.mark.parametrize("kind", ["valid", "masked", "twice"])
@pytest.mark.parametrize("recipe", ["logits4", "logits4:row"])
def test_every_kind_of_mask_says_the_same(
    exported: Cases, kind: str, recipe: str, tmp_path: Path
) -> None:
    case = exported("llama")
    ids = case.batches[0].input_ids.numpy()
    mask = case.batches[0].attention_mask.numpy()
    added = open_decoder(build(case, recipe, tmp_path / "added"))
    other = open_decoder(build(case, recipe, tmp_path / "other", with_mask(case, kind)))
    expected, found = (d.run(ids, mask.astype(np.int64)).logits for d in (added, other))
    np.testing.assert_allclose(found[mask], expected[mask], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["none", "zero"])
def test_without_a_mask_it_is_refused(exported: Cases, kind: str) -> None:
    model = with_mask(exported("llama"), kind)
    with pytest.raises(InputError, match=r"layer 0: the graph shows no mask.*logits8:head:static"):
        quantize_logits(model, LogitQuant(bits=8), {})


def test_zeros_stay_zeros(exported: Cases, tmp_path: Path) -> None:
    """All logits 0: nothing is divided by 0, also where a whole sequence is padding."""
    case = exported("llama")
    model = load_graph(case.path)
    for logit in find_logits(model):
        half = logit.value.producer().inputs[0].producer().inputs[1]
        half.const_value = ir.tensor(np.float32(0.0), name=half.name)
    plain = open_decoder(save_graph(model, tmp_path / "float"))
    ids = case.batches[0].input_ids.numpy()
    mask = np.ones_like(ids)
    mask[0] = 0
    for recipe in ("logits4", "logits8:row"):
        decoder = open_decoder(build(case, recipe, tmp_path / recipe.replace(":", " "), model))
        np.testing.assert_array_equal(decoder.run(ids, mask).logits, plain.run(ids, mask).logits)


# What is taken and refused


def test_asymmetric_dynamic_logits_are_refused(exported: Cases) -> None:
    quant = LogitQuant(bits=8, symmetric=False)
    with pytest.raises(InputError, match=r"symmetric grids only.*logits8:head:static:asymmetric"):
        quantize_logits(load_graph(exported("llama").path), quant, {})
    with pytest.raises(InputError, match=r"symmetric grids only.*logits8:head:static:asymmetric"):
        ExportJob(model="m", recipe="logits8:asymmetric")


def test_a_job_takes_them_and_attention_bits_stay_static() -> None:
    assert str(ExportJob(model="m", recipe="w8a8+logits4:row").full_recipe) == "w8a8+logits4:row"
    job = ExportJob(model="m", recipe="w8a8", attention_bits=4)
    assert str(job.full_recipe) == "w8a8+logits4:head:static"


def test_maps_that_do_not_share_the_heads_are_refused(exported: Cases) -> None:
    model = load_graph(exported("llama").path)
    with pytest.raises(InputError, match="4 heads, not as many for each of 3 maps"):
        quantize_logits(model, LogitQuant(bits=8), {}, maps=3)


def test_one_map_of_two_cannot_be_kept(exported: Cases) -> None:
    model = load_graph(exported("diff").path)
    keep = ["attention_logit/0/map 1"]
    with pytest.raises(InputError, match="'attention_logit/0/map 1' cannot stay in float alone"):
        quantize_logits(model, LogitQuant(bits=8), {}, keep, maps=2)
