"""Calibrated ranges of weights in the graph: exactly the simulation's, and refused by group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from quantkit.calib_sets import TokenSlice
from quantkit.calibration import WeightPlan, WeightRanges, choose_weight_ranges
from quantkit.errors import InputError
from quantkit.exporting import forced_parity, quantize_graph, save_graph
from quantkit.exporting.proof import export_and_prove
from quantkit.models import LoadedModel
from quantkit.numerics.granularity import weight_granularity
from quantkit.numerics.methods import MseRange
from quantkit.quantization import fake_quantized
from quantkit.recipe import Recipe
from quantkit.results import Ranges
from tests.exporting.conftest import Exported


def ranges_of(case: Exported, words: str, bits: int) -> WeightRanges:
    granularity = weight_granularity(words)
    plan = WeightPlan(method=MseRange(), bits=bits, granularity=granularity)
    return choose_weight_ranges(case.model, plan)[0]


@pytest.mark.parametrize("recipe", ["w8a8", "w4", "w3a8+logits8:head:static"])
@pytest.mark.parametrize("kind", ["llama", "diff"])
def test_the_graph_holds_the_simulations_weights(
    kind: str, recipe: str, exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    case, parsed = exported(kind), Recipe.parse(recipe)
    assert parsed.weight_bits is not None
    ranges = ranges_of(case, "channel", parsed.weight_bits)
    graph, infos = quantize_graph(
        case.path,
        module_linears=case.linears,
        recipe=parsed,
        ranges=case.ranges,
        weight_ranges=ranges,
    )
    path = save_graph(graph, tmp_path)
    onnx.checker.check_model(str(path), full_check=True)
    values = graph.graph.initializers
    with fake_quantized(case.model, Recipe(weights=parsed.weights), weight_ranges=ranges):
        for name, module in case.linears.items():
            integers, scale = (
                values[f"{name}.weight_{what}"].const_value.numpy()  # type: ignore[union-attr]
                for what in ("quantized", "scale")
            )
            steps = 2 ** (parsed.weight_bits - 1) - 1
            assert np.array_equal(scale, ranges.absmax[name].numpy()[:, 0] / np.float32(steps)), (
                name
            )
            stored = integers.T.astype(np.float32) * scale[:, None]
            assert np.array_equal(stored, module.weight.numpy()), name
    by_name = {info.name: info for info in infos}
    name = next(iter(case.linears))
    assert by_name[f"weight/{name}"].scale_max == pytest.approx(
        float(ranges.absmax[name].max()) / steps
    )
    parity, found = forced_parity(
        graph, case.model, parsed, case.ranges, case.batches[0], weight_ranges=ranges
    )
    assert parity.passed, found[:3]
    other, _ = forced_parity(graph, case.model, parsed, case.ranges, case.batches[0])
    assert parity.max_abs < other.max_abs  # absmax is not what the graph holds


def proof(case: Exported, ranges: WeightRanges, recipe: str, folder: Path) -> bool:
    loaded = LoadedModel(name="tiny", source="tiny", model=case.model, tokenizer=None, sha256="0")
    blocks = tuple(row[:16] for row in case.batches[0].input_ids)
    text = TokenSlice(
        source="random", source_sha256="0", ids=blocks, seq_len=16, skip=0, bos="never"
    )
    known = Ranges(
        model=loaded.info(),
        data=text.info(2),
        method="minmax",
        environment={},
        tensors=case.ranges,
    )
    result = export_and_prove(
        loaded, text, known, folder, recipe=Recipe.parse(recipe), weight_ranges=ranges
    )
    assert result.parity.keys() >= {"quantized", "quantized, end to end"}
    return result.passed


def test_the_whole_proof_takes_them(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    case = exported("llama")
    before = {name: module.weight.clone() for name, module in case.linears.items()}
    assert proof(case, ranges_of(case, "channel", 4), "w4a8", tmp_path)
    for name, module in case.linears.items():
        assert torch.equal(module.weight, before[name])


@pytest.mark.parametrize(
    ("words", "bits", "said"),
    [
        ("group:16", 8, r"by group \(16 inputs each\).*one scale a channel.*--weights channel"),
        ("channel", 4, "for 4 bits, and are asked for 8"),
    ],
)
def test_what_cannot_be_exported_costs_no_export(
    words: str, bits: int, said: str, exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    case = exported("llama")
    ranges = ranges_of(case, words, bits)
    with pytest.raises(InputError, match=said):
        proof(case, ranges, "w8a8", tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match=said):
        quantize_graph(
            case.path,
            module_linears=case.linears,
            recipe=Recipe.parse("w8a8"),
            ranges=case.ranges,
            weight_ranges=ranges,
        )
    # where no weight is quantized, nothing is asked of them
    quantize_graph(
        case.path,
        module_linears=case.linears,
        recipe=Recipe.parse("a8"),
        ranges=case.ranges,
        weight_ranges=ranges,
    )
