"""Ranges of a graph count what is real and unmasked, by figures that can be checked by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from quantkit.errors import InputError
from quantkit.exporting import find_logits, load_graph, save_graph
from quantkit.exporting.graph_ranges import (
    add_valid_logits,
    batch_of,
    completed,
    graph_ranges,
    with_real_input,
)
from quantkit.exporting.quantizer import named_linears
from quantkit.numerics.methods import parse_methods
from quantkit.recipe import Recipe
from tests.exporting.conftest import Exported

HEADS, WIDTH = 4, 64


@pytest.mark.parametrize("granularity", ["head", "tensor"])
def test_padding_and_hidden_keys_do_not_count(
    exported: Callable[[str], Exported], tmp_path: Path, granularity: str
) -> None:
    case, recipe = exported("llama"), Recipe.parse(f"w8a8+logits8:{granularity}:static")
    model = load_graph(case.path)
    assert recipe.logits is not None
    logits = add_valid_logits(model, find_logits(model), recipe.logits)
    inputs = [v for v in model.graph.inputs if v.name != "quantkit_real"]
    batches = []
    for batch in case.batches:
        sample = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask.long()}
        feeds = completed({name: x.numpy() for name, x in sample.items()}, inputs)
        batches.append(with_real_input(batch_of(feeds, sample)))

    got = graph_ranges(
        save_graph(model, tmp_path),
        batches,
        recipe,
        parse_methods("minmax", ("linear_input", "attention_logit")),
        named_linears(model),
        logits,
    )

    lengths = [
        24,
        24,
        17,
        17,
        17,
    ]  # 3 x 24 tokens, one with 7 of padding, and 2 x 17
    pairs = sum(n * (n + 1) // 2 for n in lengths)  # a query sees the keys up to its own
    for layer in range(2):
        found = got[f"attention_logit/{layer}/map 1"]
        assert found.count == HEADS * pairs
        assert found.granularity == granularity
        assert len(np.atleast_1d(found.lo)) == (HEADS if granularity == "head" else 1)
    assert got["linear_input/model.layers.0.self_attn.q_proj"].count == WIDTH * sum(lengths)


@pytest.mark.parametrize(
    ("sample", "real"),
    [
        ({"input_ids": [[1, 2]], "attention_mask": [[0, 1]]}, [[False, True]]),
        ({"input_ids": [[1, 2]], "attention_mask": [[0, 0, 1, 1, 0]]}, [[True, False]]),
        ({"input_ids": [[1, 2]]}, None),
        ({"input_ids": [[1, 2]], "attention_mask": [[[[1]]]]}, None),
        ({"decoder_input_ids": [[1, 2]], "attention_mask": [[1, 0, 0]]}, None),
    ],
    ids=["prompt", "behind a cache of 3", "no mask", "a mask of rank 4", "an encoder's mask"],
)
def test_which_rows_are_real(
    sample: dict[str, list[object]], real: list[list[bool]] | None
) -> None:
    batch = batch_of({}, {name: torch.tensor(x) for name, x in sample.items()})

    assert (None if batch.real is None else batch.real.tolist()) == real


def test_what_generate_leaves_out_is_filled() -> None:
    inputs = [
        ir.val("attention_mask", ir.DataType.INT64, ["b", "t"]),
        ir.val("past.0", ir.DataType.FLOAT, ["b", 2, "p", "16"]),
        ir.val("past.1", ir.DataType.FLOAT, ["b", 2, "p", 16]),
    ]
    ids = np.zeros((3, 5), np.int64)

    empty = completed({"input_ids": ids}, inputs)
    behind = completed({"input_ids": ids, "past.0": np.ones((3, 2, 4, 16), np.float32)}, inputs[:2])

    assert empty["past.0"].shape == empty["past.1"].shape == (3, 2, 0, 16)
    assert empty["attention_mask"].shape == (3, 5)
    assert behind["attention_mask"].shape == (3, 9)
    assert completed({"pixel_values": ids}, inputs).keys() == {"pixel_values"}


def test_a_dead_input_is_named(tmp_path: Path, exported: Callable[[str], Exported]) -> None:
    case, recipe = exported("llama"), Recipe.parse("w8a8")
    model = load_graph(case.path)
    linears = named_linears(model)
    weight = next(x.node.inputs[1] for x in linears if x.module == "model.layers.0.mlp.up_proj")
    assert weight is not None and weight.const_value is not None
    weight.const_value = ir.tensor(np.zeros(weight.const_value.shape, np.float32))
    ids = case.batches[1].input_ids
    feeds = completed({"input_ids": ids.numpy()}, model.graph.inputs)
    path = save_graph(model, tmp_path)

    with pytest.raises(InputError, match=r"'linear_input/model.layers.0.mlp.down_proj' cannot be"):
        graph_ranges(
            path,
            [batch_of(feeds, {"input_ids": ids})],
            recipe,
            parse_methods("minmax", ("linear_input",)),
            linears,
            {},
        )
