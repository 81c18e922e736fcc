"""`--layout optimum`: positions as an input, which batches padded on the left need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.exporting.checks import check_graph
from quantkit.exporting.graphs import load_graph, save_graph
from quantkit.exporting.layouts import apply_layout
from quantkit.exporting.quantize import quantize_graph
from quantkit.onnx_runtime import DecoderSession, open_decoder
from quantkit.recipe import Recipe
from tests.exporting.conftest import VOCABULARY, Exported

KINDS = ["llama", "gpt2", "diff"]


def rewritten(case: Exported, folder: Path, recipe: str | None = None) -> DecoderSession:
    if recipe is None:
        model = load_graph(case.path)
    else:
        model, _ = quantize_graph(
            case.path,
            module_linears=case.linears,
            recipe=Recipe.parse(recipe),
            ranges=case.ranges,
        )
    apply_layout(model, "optimum")
    path = save_graph(model, folder)
    check_graph(path, ["ai.onnx"])
    return open_decoder(path, threads=1)


def tokens(*shape: int) -> NDArray[np.int64]:
    return np.random.default_rng(3).integers(0, VOCABULARY, shape)


@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_an_input_behind_the_mask(
    exported: Callable[[str], Exported], tmp_path: Path, kind: str
) -> None:
    rewritten(exported(kind), tmp_path)
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    names = [value.name for value in model.graph.input]
    before = [value.name for value in load_graph(exported(kind).path).graph.inputs]
    assert names == [*before[:2], "position_ids", *before[2:]]
    assert set(names[:3]) == {"input_ids", "attention_mask", "position_ids"}
    dims = model.graph.input[names.index("position_ids")].type.tensor_type.shape.dim
    assert [dim.dim_param for dim in dims] == ["batch", "sequence"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", [None, "w8a8"], ids=["float", "w8a8"])
def test_positions_behind_the_cache_change_nothing(
    exported: Callable[[str], Exported], tmp_path: Path, kind: str, recipe: str | None
) -> None:
    case = exported(kind)
    theirs = rewritten(case, tmp_path / "optimum", recipe)
    if recipe is None:
        ours = open_decoder(case.path, threads=1)
    else:
        plain = rewritten_as_it_is(case, tmp_path / "plain", recipe)
        ours = open_decoder(plain, threads=1)
    ids = tokens(3, 9)
    first = [session.run(ids[:, :5]) for session in (ours, theirs)]
    second = [
        session.run(ids[:, 5:], None, past.present)
        for session, past in zip((ours, theirs), first, strict=True)
    ]
    for pair in (first, second):
        np.testing.assert_allclose(pair[0].logits, pair[1].logits, rtol=1e-5, atol=1e-5)


def rewritten_as_it_is(case: Exported, folder: Path, recipe: str) -> Path:
    model, _ = quantize_graph(
        case.path, module_linears=case.linears, recipe=Recipe.parse(recipe), ranges=case.ranges
    )
    return save_graph(model, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_on_the_left_is_what_torch_makes_of_it(
    exported: Callable[[str], Exported], tmp_path: Path, kind: str
) -> None:
    """A table of positions (GPT-2) is wrong without the input, rotary embeddings are not."""
    case = exported(kind)
    ids = tokens(2, 7)
    mask = np.ones_like(ids)
    mask[1, :3] = 0
    positions = np.maximum(mask.cumsum(-1) - 1, 0)
    with torch.no_grad():
        expected = case.model(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy(mask),
            position_ids=torch.from_numpy(positions),
        ).logits.numpy()
    session = rewritten(case, tmp_path).session
    feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    for value in session.get_inputs():
        if value.name.startswith("past"):
            feeds[value.name] = np.zeros((2, value.shape[1], 0, value.shape[3]), np.float32)
    got = session.run(["logits"], feeds)[0]
    real = mask.astype(bool)
    np.testing.assert_allclose(got[real], expected[real], rtol=1e-3, atol=1e-3)
    without = open_decoder(case.path, threads=1).run(ids, mask).logits
    apart = np.abs(without[real] - expected[real]).max()
    assert apart > 0.1 if kind == "gpt2" else apart < 1e-3


def test_transformers_layout_changes_nothing(
    exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    model = load_graph(exported("llama").path)
    apply_layout(model, "transformers")
    again = save_graph(model, tmp_path)
    assert (
        again.read_bytes()
        == save_graph(load_graph(exported("llama").path), tmp_path / "as it was").read_bytes()
    )


def test_a_graph_with_positions_is_left_as_it_is(
    exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    rewritten(exported("llama"), tmp_path)
    model = load_graph(tmp_path / "model.onnx")
    nodes = len(model.graph)
    apply_layout(model, "optimum")
    assert len(model.graph) == nodes
    assert [value.name for value in model.graph.inputs].count("position_ids") == 1


def test_a_graph_without_positions_says_so() -> None:
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[n] x) => (float[n] y) { y = Neg(x) }'
    )
    with pytest.raises(InputError, match="this graph has none that follow its cache"):
        apply_layout(model, "optimum")


def test_an_unknown_layout_says_which_there_are() -> None:
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 21}), ir_version=10)
    with pytest.raises(InputError, match="transformers or optimum, got 'onnx'"):
        apply_layout(model, "onnx")
