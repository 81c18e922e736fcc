"""Faults planted in a quantized graph are named first; a good one is not blamed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from quantkit.errors import InputError
from quantkit.exporting.diagnosis.diagnose import diagnose
from quantkit.results import Diagnosis, read_json, write_json
from tests.exporting.planted_graphs import (
    LOWEST,
    Block,
    Grid,
    block,
    data_info,
    quantized,
    saved,
)


@pytest.fixture(scope="module")
def made() -> Block:
    return block()


def found(made: Block, model: onnx.ModelProto, folder: Path, **options: Any) -> Diagnosis:
    float_path = saved(made.model, folder / "float.onnx")
    path = saved(model, folder / "quantized.onnx")
    return diagnose(float_path, path, made.batches, data=data_info(), **options)


def test_a_good_graph_is_not_blamed(made: Block, tmp_path: Path) -> None:
    result = found(made, quantized(made, made.clean()), tmp_path)
    assert result.findings == []
    assert result.begins == ""
    assert (result.in_float, result.weight_only) == ([], [])
    assert result.metric == "relative" and 0 < result.total < 1e-3
    assert result.measured == len(result.quantizers) == 4 + 6
    assert math.isclose(sum(row.share for row in result.quantizers), 1.0)
    write_json(tmp_path / "diagnosis.json", result)
    assert read_json(tmp_path / "diagnosis.json", Diagnosis) == result


PLANTED: dict[str, tuple[dict[str, Grid], str, str, str]] = {
    "zero scale": ({"act": (0.0, 0)}, "broken", "scale", "the scale is zero"),
    "infinite scale": ({"act": (math.inf, 0)}, "broken", "scale", "the scale is infinite"),
    "NaN scale": ({"act": (math.nan, 0)}, "broken", "scale", "the scale is NaN"),
    "subnormal scale": ({"act": (1e-42, 0)}, "broken", "scale", "the scale is subnormal"),
    "saturation": ({"act": (0.2 / 255, 128)}, "costly", "saturation", "lie below and"),
    "wide range": ({"act": (60.0 / 255, 128)}, "costly", "wide_range", "bits wasted"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_grid_is_named_first(made: Block, tmp_path: Path, fault: str) -> None:
    grids, severity, kind, words = PLANTED[fault]
    result = found(made, quantized(made, made.clean() | grids), tmp_path)
    first = result.findings[0]
    assert (first.severity, first.kind, first.where) == (severity, kind, "input of down")
    assert words in first.what and first.advice
    assert first.quantizer == "act_Q"
    assert first.share == max(row.share for row in result.quantizers)


@pytest.mark.parametrize("mask", [LOWEST, -1e4, -100.0], ids=["finfo.min", "-1e4", "-100"])
def test_a_mask_inside_a_range_is_named_first(tmp_path: Path, mask: float) -> None:
    made = block(mask)
    grids = made.clean() | {"masked": made.grid("masked")}
    first = found(made, quantized(made, grids), tmp_path).findings[0]
    assert (first.severity, first.kind, first.where) == ("broken", "mask", "logits of softmax")
    assert "before the mask" in first.advice


def test_an_infinite_scale_of_logits_is_their_mask(tmp_path: Path) -> None:
    made = block(-math.inf)
    grids = made.clean() | {"masked": (math.inf, 255)}
    first = found(made, quantized(made, grids), tmp_path).findings[0]
    assert (first.severity, first.kind) == ("broken", "mask")
    assert "-inf" in first.what


def test_logits_quantized_before_a_mask_are_not_blamed_for_it(made: Block, tmp_path: Path) -> None:
    grids = made.clean() | {"logits_raw": made.grid("logits_raw")}
    result = found(made, quantized(made, grids), tmp_path)
    assert result.findings == []
    row = next(row for row in result.quantizers if row.name == "logits_raw_Q")
    assert row.place == "logits"
    assert math.isclose(row.hidden_frac, 0.5 - 0.5 / 48)  # what lies above the diagonal


def test_a_mask_outside_of_a_range_is_no_fault(made: Block, tmp_path: Path) -> None:
    """A grid of the visible logits alone: the mask saturates, and still weighs nothing."""
    scale, zero = made.grid("logits_raw", 8.0)
    grids = made.clean() | {"masked": (scale, zero)}
    kinds = {f.kind for f in found(made, quantized(made, grids), tmp_path).findings}
    assert "scale" not in kinds


def test_a_layer_left_in_float_is_named(made: Block, tmp_path: Path) -> None:
    result = found(made, quantized(made, made.clean(), float_layers=("up",)), tmp_path)
    assert result.in_float == ["up"]
    first = result.findings[0]
    assert (first.severity, first.kind, first.where) == ("note", "in_float", "up")
    assert "1 of 6 layers" in first.what


def test_weight_only_layers_are_told_from_float_ones(made: Block, tmp_path: Path) -> None:
    result = found(made, quantized(made, {}), tmp_path)
    assert result.in_float == []
    assert result.weight_only == ["q", "k", "v", "o", "up", "down"]
    assert [f.kind for f in result.findings] == ["weight_only"]


@pytest.mark.kind(6, "diagnose")
def test_operators_of_another_domain_are_named(made: Block, tmp_path: Path) -> None:
    result = found(made, quantized(made, made.clean(), domain="com.microsoft"), tmp_path)
    first = result.findings[0]
    assert (first.kind, first.where) == ("domain", "com.microsoft")
    assert "8 nodes" in first.what and "QuantizeLinear" in first.what
    assert result.quantized_graph.domains["com.microsoft"] == 8


def test_a_weight_with_a_bad_channel_is_named(made: Block, tmp_path: Path) -> None:
    model = quantized(made, made.clean(), weights={"down": 60.0})
    result = found(made, model, tmp_path)
    first = result.findings[0]
    assert (first.severity, first.kind, first.where) == ("costly", "weight", "weight of down")
    held = {c.name: numpy_helper.to_array(c) for c in model.graph.initializer}
    a, b = held["down_w"].astype(float), held["down_w_q"] * held["down_w_scale"].astype(float)
    levels = 10 * np.log10((a**2).sum(0) / ((a - b) ** 2).sum(0))
    row = next(row for row in result.quantizers if row.layer == "down" and row.kind == "weight")
    assert row.worst_channel == int(levels.argmin())
    assert math.isclose(row.worst_channel_sqnr_db, levels.min(), rel_tol=1e-5)
    assert row.granularity == "channel"


def test_figures_of_a_grid_are_numpys(made: Block, tmp_path: Path) -> None:
    scale, zero = 0.6 / 255, 100
    grids = made.clean() | {"act": (scale, zero)}
    rows = found(made, quantized(made, grids), tmp_path).quantizers
    row = next(row for row in rows if row.name == "act_Q")
    x = made.seen["act"].astype(np.float64).reshape(3, -1)
    step = np.float64(np.float32(scale))
    q = np.round(x / step) + zero
    assert row.below_frac == (q < 0).mean() and row.above_frac == (q > 255).mean()
    assert row.levels_used == np.unique(np.clip(q, 0, 255)).size
    assert (row.zero_point_min, row.levels, row.dtype) == (zero, 256, "UINT8")
    y = (np.clip(q, 0, 255) - zero) * step
    db = 10 * np.log10((x**2).sum() / ((x - y) ** 2).sum())
    assert math.isclose(row.local_sqnr_db, db, rel_tol=1e-5)
    assert (row.lo, row.hi) == ((0 - zero) * step, (255 - zero) * step)
    ordered = np.sort(x, 1)
    last = x.shape[1] - 1
    lo, hi = ordered[:, round(0.0005 * last)].min(), ordered[:, round(0.9995 * last)].max()
    assert math.isclose(row.span_lo, lo, rel_tol=1e-6)
    assert math.isclose(row.wasted_bits, math.log2(255 * step / (hi - lo)), rel_tol=1e-5)


def test_errors_of_tensors_and_damage_are_those_of_a_reference(made: Block, tmp_path: Path) -> None:
    model = quantized(made, made.clean() | {"act": (60.0 / 255, 128)})
    result = found(made, model, tmp_path)
    runs = [ReferenceEvaluator(model).run(["y"], feeds)[0] for feeds in made.batches]
    y = made.seen["y"].astype(np.float64)
    noise = ((y - np.concatenate(runs)) ** 2).sum()
    tensor = result.tensors[-1]
    assert (tensor.name, tensor.op) == ("y", "Add")
    assert math.isclose(tensor.sqnr_db, 10 * np.log10((y**2).sum() / noise), rel_tol=1e-3)
    noise = ((y[0] - runs[0][0]) ** 2).sum()
    assert math.isclose(result.total, noise / (y[0] ** 2).sum(), rel_tol=1e-2)
    alone = quantized(made, {"act": (60.0 / 255, 128)}, float_layers=("q", "k", "v", "o", "up"))
    del alone.graph.initializer[:]
    alone.graph.initializer.extend(c for c in model.graph.initializer if "_w_q" not in c.name)
    for node in alone.graph.node:  # the weight of `down` in float as well: the input alone
        if node.name == "down":
            node.input[1] = "down_w"
    kept = [n for n in alone.graph.node if not n.output[0].endswith("_w_dq")]
    del alone.graph.node[:]
    alone.graph.node.extend(kept)
    run = ReferenceEvaluator(alone).run(["y"], made.batches[0])[0]
    noise = ((y[0] - run[0]) ** 2).sum()
    row = next(row for row in result.quantizers if row.name == "act_Q")
    assert math.isclose(row.alone, noise / (y[0] ** 2).sum(), rel_tol=1e-3)


def test_the_error_begins_where_it_was_planted(made: Block, tmp_path: Path) -> None:
    model = quantized(made, made.clean() | {"mixed": (200.0 / 255, 128)})
    result = found(made, model, tmp_path)
    assert result.begins == "o"  # the first float tensor behind the planted grid
    names = [tensor.name for tensor in result.tensors]
    order = [o for n in made.model.graph.node for o in n.output]
    assert names == [name for name in order if name in names]
    assert {"product", "masked", "weights", "h"} <= set(names)


def test_a_victim_is_told_from_the_culprit(made: Block, tmp_path: Path) -> None:
    model = quantized(made, made.clean() | {"mixed": (200.0 / 255, 128)})
    rows = {row.name: row for row in found(made, model, tmp_path).quantizers}
    culprit, victim = rows["mixed_Q"], rows["act_Q"]
    assert culprit.local_inlier_sqnr_db < 15 < 30 < culprit.arriving_sqnr_db
    assert victim.arriving_sqnr_db < 25 < 30 < victim.local_inlier_sqnr_db


def test_bounded_memory_changes_no_figure(made: Block, tmp_path: Path) -> None:
    model = quantized(made, made.clean() | {"masked": made.grid("logits_raw")})
    whole = found(made, model, tmp_path)
    parts = found(made, model, tmp_path, bytes_at_once=1)
    assert parts.tensors == whole.tensors
    assert [vars(row) for row in parts.quantizers] == [vars(row) for row in whole.quantizers]


def test_renamed_tensors_are_matched_by_order(made: Block, tmp_path: Path) -> None:
    model = quantized(made, made.clean() | {"act": (0.2 / 255, 128)})
    inner = [o for node in model.graph.node for o in node.output if o != "y"]
    for node in model.graph.node:
        for names in (node.input, node.output):
            for at, name in enumerate(names):
                names[at] = f"t{inner.index(name)}" if name in inner else name
    result = found(made, model, tmp_path)
    first = result.findings[0]
    assert (first.kind, first.where) == ("saturation", "input of down")
    assert {"q", "k", "v", "o", "up", "down"} <= {tensor.name for tensor in result.tensors}


def test_measuring_fewer_takes_the_worst(made: Block, tmp_path: Path) -> None:
    model = quantized(made, made.clean() | {"act": (0.2 / 255, 128)})
    rows = found(made, model, tmp_path, measure=1).quantizers
    assert [row.name for row in rows if not math.isnan(row.alone)] == ["act_Q"]


@pytest.mark.kind(8, "diagnose")
def test_bad_files(made: Block, tmp_path: Path) -> None:
    float_path = saved(made.model, tmp_path / "f.onnx")
    path = saved(quantized(made, made.clean()), tmp_path / "q.onnx")

    def refused(one: Path, other: Path) -> str:
        with pytest.raises(InputError) as caught:
            diagnose(one, other, made.batches, data=data_info())
        return str(caught.value)

    assert "Swap them" in refused(path, float_path)
    assert "same graph" in refused(float_path, float_path)
    copy = saved(made.model, tmp_path / "copy.onnx")
    assert "same graph" in refused(float_path, copy)
    assert "is quantized itself" in refused(
        path, saved(quantized(made, {"x": made.grid("x")}), tmp_path / "q2.onnx")
    )
    changed = onnx.ModelProto()
    changed.CopyFrom(made.model)
    changed.graph.name = "other"
    assert "no quantizer" in refused(float_path, saved(changed, tmp_path / "f2.onnx"))
    assert "no ONNX file" in refused(float_path, tmp_path / "none.onnx")
    other = block()
    for held in other.model.graph.initializer:
        if held.name.endswith("_w"):
            array = numpy_helper.to_array(held)
            noise = np.random.default_rng(9).normal(size=array.shape).astype(np.float32)
            held.CopyFrom(numpy_helper.from_array(noise, held.name))
    said = refused(saved(other.model, tmp_path / "o.onnx"), path)
    assert "these are two models" in said
    with pytest.raises(InputError, match="reads 'x', which the samples lack"):
        diagnose(float_path, path, [{"z": made.batches[0]["x"]}], data=data_info())
