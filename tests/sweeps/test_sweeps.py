"""The sweep's cells: intervals against a loop, and what an interrupted sweep leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from quantkit.calib_sets import TokenSlice
from quantkit.models import LoadedModel
from quantkit.progress import Progress, silent
from quantkit.quantization import fake_quantized
from quantkit.results import Cell, Delta
from quantkit.sweeps import RESAMPLES, logit_recipes, run_cells

BLOCKS = 5
RECIPES = logit_recipes((16, 4, 3), ("tensor", "row"))


@pytest.fixture
def text() -> TokenSlice:
    generator = torch.Generator().manual_seed(3)
    ids = tuple(torch.randint(0, 257, (n,), generator=generator) for n in (24, 9, 17, 24, 2))
    return TokenSlice(source="random", source_sha256="0", ids=ids, seq_len=24, skip=0, bos="never")


@pytest.fixture
def loaded(tiny_llama: LlamaForCausalLM) -> LoadedModel:
    model: Any = tiny_llama
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name or "embed" in name or "lm_head" in name:
                parameter.mul_(20)
    return LoadedModel(name="tiny", source="tiny", model=model, tokenizer=None, sha256="0" * 64)


def run(
    loaded: LoadedModel, text: TokenSlice, store: Path, progress: Progress = silent, seed: int = 0
) -> tuple[list[Cell], list[Delta]]:
    return run_cells(loaded, text, RECIPES, batch_size=2, seed=seed, store=store, progress=progress)


def block_nll(loaded: LoadedModel, text: TokenSlice, recipe: Any) -> tuple[list[float], list[int]]:
    """Row by row, in numpy and float64."""
    nll, tokens = [], []
    with fake_quantized(loaded.model, recipe), torch.inference_mode():
        for block in text.ids:
            scores = loaded.model(input_ids=block[None]).logits[0, :-1].double().numpy()
            top = scores.max(-1, keepdims=True)
            logs = scores - top - np.log(np.exp(scores - top).sum(-1, keepdims=True))
            nll.append(-float(logs[np.arange(len(logs)), block[1:].numpy()].sum()))
            tokens.append(len(block) - 1)
    return nll, tokens


@pytest.mark.parametrize("seed", [0, 7])
def test_intervals_equal_a_loop(
    loaded: LoadedModel, text: TokenSlice, tmp_path: Path, seed: int
) -> None:
    cells, deltas = run(loaded, text, tmp_path, seed=seed)
    assert [cell.recipe for cell in cells] == [str(recipe) for recipe in RECIPES]
    chosen = np.random.default_rng(seed).integers(0, BLOCKS, size=(RESAMPLES, BLOCKS))
    resampled = []
    for cell, recipe in zip(cells, RECIPES, strict=True):
        nll, tokens = block_nll(loaded, text, recipe)
        values = []
        for blocks in chosen:
            total = sum(nll[block] for block in blocks)
            values.append(np.exp(total / sum(tokens[block] for block in blocks)))
        resampled.append(np.array(values))
        assert cell.value == pytest.approx(np.exp(sum(nll) / sum(tokens)), rel=1e-5)
        low, high = np.percentile(values, [2.5, 97.5])
        assert (cell.ci_low, cell.ci_high) == pytest.approx((low, high), rel=1e-4)
        assert cell.stderr == pytest.approx(np.std(values, ddof=1), rel=1e-4)
        assert (cell.n, cell.seed) == (BLOCKS, seed)
        assert cell.hits == (0 if recipe.is_float else 2 * 3)
    assert [delta.recipe for delta in deltas] == [cell.recipe for cell in cells[1:]]
    for delta, cell, values in zip(deltas, cells[1:], resampled[1:], strict=True):
        paired = values - resampled[0]
        assert delta.against == "none"
        assert delta.value == cell.value - cells[0].value
        wanted = tuple(np.percentile(paired, [2.5, 97.5]))
        assert (delta.ci_low, delta.ci_high) == pytest.approx(
            wanted, rel=1e-3, abs=1e-4 * cells[0].value
        )


class Stopper:
    """Counts forwards, and interrupts once at the first progress of cell `at`."""

    def __init__(self, model: Any, at: int | None = None) -> None:
        self.forwards = 0
        self.at = at
        self.handle = model.register_forward_pre_hook(self.count)

    def count(self, *_: Any) -> None:
        self.forwards += 1

    def progress(self, what: str, done: int, _total: int) -> None:
        if self.at is not None and f"cell {self.at} of" in what and done:
            raise KeyboardInterrupt


def test_an_interrupted_sweep_goes_on_where_it_stopped(
    loaded: LoadedModel, text: TokenSlice, tmp_path: Path
) -> None:
    batches = 3
    before = {name: t.clone() for name, t in loaded.model.state_dict().items()}
    whole = run(loaded, text, tmp_path / "whole")
    first = Stopper(loaded.model, at=3)
    with pytest.raises(KeyboardInterrupt):
        run(loaded, text, tmp_path / "cells", first.progress)
    first.handle.remove()
    assert first.forwards == 2 * batches + 1  # two cells, and one batch of the third
    kept = sorted((tmp_path / "cells").iterdir())
    assert [path.name for path in kept] == ["tiny_logits4.json", "tiny_none.json"]
    dates = [path.stat().st_mtime_ns for path in kept]
    second = Stopper(loaded.model)
    assert run(loaded, text, tmp_path / "cells", second.progress) == whole
    assert second.forwards == (len(RECIPES) - 2) * batches
    assert [path.stat().st_mtime_ns for path in kept] == dates
    second.forwards = 0
    assert run(loaded, text, tmp_path / "cells", second.progress) == whole
    assert second.forwards == 0
    second.handle.remove()
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_cells_of_another_model_or_text_are_not_taken(
    loaded: LoadedModel, text: TokenSlice, tmp_path: Path
) -> None:
    run(loaded, text, tmp_path)
    other = LoadedModel(
        name="tiny", source="tiny", model=loaded.model, tokenizer=None, sha256="1" * 64
    )
    stopper = Stopper(loaded.model)
    run(other, text, tmp_path, stopper.progress)
    assert stopper.forwards == len(RECIPES) * 3
    shorter = TokenSlice(
        source="random", source_sha256="0", ids=text.ids[:2], seq_len=24, skip=0, bos="never"
    )
    stopper.forwards = 0
    run(other, shorter, tmp_path, stopper.progress)
    stopper.handle.remove()
    assert stopper.forwards == len(RECIPES)


def test_the_float_row_comes_first_and_once() -> None:
    names = [str(recipe) for recipe in logit_recipes((8, 16), ("head", "tensor"))]
    assert names == ["none", "logits8:head", "logits8"]
    assert [str(recipe) for recipe in logit_recipes((4,), ("row",))] == ["none", "logits4:row"]
