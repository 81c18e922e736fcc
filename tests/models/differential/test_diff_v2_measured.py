"""DIFF V2 measured from its folder: probes, stats and a sweep against its equations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import quantkit
from quantkit.errors import ProbeError
from quantkit.models.differential import (
    DiffV2ForCausalLM,
)
from quantkit.models.families import attention_modules, differential_lambda
from quantkit.probes import attach
from tests.models.differential.v2_oracle import Array, Edit, nll, numpy_logits


def test_probes_see_both_maps_and_lambda(v2_model: DiffV2ForCausalLM, tokens: Tensor) -> None:
    seen: dict[tuple[int, int], Array] = {}
    given: dict[tuple[int, int], Array] = {}
    lambdas: list[Tensor] = []

    def look(call: Any) -> None:
        seen[call.layer, call.map] = torch.cat([t.logits for t in call.tiles()], 2)[0].numpy()
        if call.map == 2:
            lambdas.append(call.mix[0].clone())

    with torch.no_grad(), attach(v2_model, {"attention_logit": look}):
        v2_model(tokens[:1])

    def keep(logits: Array, which: int) -> Array:
        given[len(given) // 2, which] = logits
        return logits

    numpy_logits(v2_model, tokens[0], keep)
    assert seen.keys() == given.keys() == {(0, 1), (0, 2), (1, 1), (1, 2)}
    for place, logits in given.items():
        causal = np.tril(logits)  # a tile ends at the last key that its rows attend to
        np.testing.assert_allclose(np.tril(seen[place]), causal, rtol=0, atol=1e-3)
    assert len(lambdas) == 2 and all(x.shape == (4, 12) for x in lambdas)
    assert all(bool((x > -1).all() and (x < 0).all()) for x in lambdas)
    with pytest.raises(ProbeError, match="one forward"):
        differential_lambda(attention_modules(v2_model)[0][1])


@pytest.fixture
def text(tmp_path: Path, tokenizer: Any) -> tuple[Path, list[Tensor]]:
    """A file of four blocks of 32 letters, and the blocks' tokens."""
    letters = bytes(np.random.default_rng(4).integers(97, 123, size=4 * 32).tolist())
    path = tmp_path / "text.txt"
    path.write_bytes(letters)
    return path, list(torch.tensor(tokenizer(letters.decode())["input_ids"]).view(4, 32))


def test_stats_are_those_of_the_equations(
    v2_model: DiffV2ForCausalLM, v2_folder: Path, text: tuple[Path, list[Tensor]], tmp_path: Path
) -> None:
    path, blocks = text
    stats = quantkit.stats(v2_folder, path, seq_len=32, samples=4, out=tmp_path / "stats")
    found: dict[int, list[Array]] = {1: [], 2: []}

    def keep(logits: Array, which: int) -> Array:
        found[which].append(logits[:, *np.tril_indices(logits.shape[1])].ravel())
        return logits

    for block in blocks:
        numpy_logits(v2_model, block, keep)
    pooled = np.concatenate([*found[1], *found[2]])
    summary = stats.summary.attention_logit
    assert summary.count == len(pooled) == 4 * 2 * 8 * 32 * 33 // 2
    assert summary.max == pytest.approx(pooled.max(), rel=1e-4)
    assert summary.abs_top["10"] == pytest.approx(np.sort(np.abs(pooled))[-10], rel=1e-4)
    maps = [g for g in stats.points["attention_logit"] if g.layer == 0 and g.map and g.head is None]
    assert {g.map for g in maps} == {1, 2}
    for which in (1, 2):
        first_layer = np.concatenate(found[which][0::2])
        group = next(g for g in maps if g.map == which and g.token_class == "all")
        assert group.max == pytest.approx(first_layer.max(), rel=1e-4)
    assert [layer.layer for layer in stats.differential] == [0, 1]
    assert all(0 < layer.lambda_min < layer.lambda_max < 1 for layer in stats.differential)


def test_a_sweep_is_the_equations_with_quantized_logits(
    v2_model: DiffV2ForCausalLM, v2_folder: Path, text: tuple[Path, list[Tensor]], tmp_path: Path
) -> None:
    path, blocks = text
    sweep = quantkit.sweep(
        v2_folder, eval=path, calib=None, samples=4, seq_len=32, bits=(16, 4),
        granularity=("tensor", "head", "row"), quantize="w8a8:token", out=tmp_path / "sweep",
    )  # fmt: skip
    cells = {c.recipe: c for c in sweep.cells if c.metric == "perplexity"}

    def rounded(over: tuple[int, ...]) -> Edit:
        def edit(logits: Array, which: int) -> Array:
            size = np.abs(np.tril(logits)).max(axis=over, keepdims=True)  # valid entries alone
            scale = np.where(size > 0, size, 7.0) / 7
            return np.clip(np.round(logits / scale), -7, 7) * scale

        return edit

    edits = {
        "none": None,
        "logits4": rounded((0, 1, 2)),
        "logits4:head": rounded((1, 2)),
        "logits4:row": rounded((2,)),
    }
    assert cells.keys() == edits.keys() | {"w8a8:token"}
    for recipe, edit in edits.items():
        total = sum(nll(numpy_logits(v2_model, block, edit), block) for block in blocks)
        assert cells[recipe].value == pytest.approx(np.exp(total / (4 * 31)), rel=2e-3), recipe
    assert len({round(cells[recipe].value, 1) for recipe in edits}) == 4  # they do differ
    both = {f"attention_logit/{layer}/map {which}" for layer in (0, 1) for which in (1, 2)}
    assert set(cells["logits4:row"].quantizers) == both
