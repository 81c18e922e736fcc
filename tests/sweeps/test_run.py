"""Cells: rows against a loop, what an interrupted sweep leaves, and whose cells are taken."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from quantkit.calib_sets import TokenSlice
from quantkit.errors import InputError, ProbeError
from quantkit.models import LoadedModel, projection_modules
from quantkit.processes import Processes
from quantkit.progress import Progress, silent
from quantkit.quantization import fake_quantized
from quantkit.recipe import Recipe
from quantkit.results import Fired
from quantkit.sweeps import Measured, Subject, logit_recipes, planned, run_cells, unique
from quantkit.sweeps.figures import cells_of, figures_of
from quantkit.sweeps.run import FLOAT_FEATURES
from quantkit.tasks import Perplexity
from quantkit.tasks.forward import text_forward

BLOCKS, BATCHES = 5, 3
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


def subject(loaded: LoadedModel, text: TokenSlice) -> Subject:
    tasks = [Perplexity.of(text, None, batch_size=2)]
    return Subject(loaded=loaded, group=loaded.name, tasks=tasks)


def run(
    loaded: LoadedModel, text: TokenSlice, store: Path, progress: Progress = silent
) -> list[Measured]:
    return run_cells(subject(loaded, text), RECIPES, store=store, progress=progress)


def figures(found: list[Measured]) -> list[Any]:
    return [
        (str(m.recipe), m.task.name, [metric.total.tolist() for metric in m.scores.metrics],
         dict(m.fired))
        for m in found
    ]  # fmt: skip


def block_nll(loaded: LoadedModel, text: TokenSlice, recipe: Any) -> list[float]:
    """Row by row, in numpy and float64."""
    nll = []
    with fake_quantized(loaded.model, recipe), torch.inference_mode():
        for block in text.ids:
            scores = loaded.model(input_ids=block[None]).logits[0, :-1].double().numpy()
            top = scores.max(-1, keepdims=True)
            logs = scores - top - np.log(np.exp(scores - top).sum(-1, keepdims=True))
            nll.append(-float(logs[np.arange(len(logs)), block[1:].numpy()].sum()))
    return nll


def test_rows_equal_a_loop(loaded: LoadedModel, text: TokenSlice, tmp_path: Path) -> None:
    found = run(loaded, text, tmp_path)
    assert [m.recipe for m in found] == RECIPES
    for measured in found:
        perplexity = measured.scores.metrics[0]
        expected = block_nll(loaded, text, measured.recipe)
        assert perplexity.name == "perplexity"
        assert perplexity.total == pytest.approx(expected, rel=1e-5)
        assert perplexity.weight.tolist() == [23, 8, 16, 23, 1]
        lengths = 23 + 8 + 16 + 23 + 1
        assert perplexity.value == pytest.approx(np.exp(sum(expected) / lengths), rel=1e-5)
        if measured.recipe.is_float:
            assert measured.fired == {}
        else:  # 4 heads; batches of similar length: 24 and 24, 17 and 9, 2
            entries = sum(rows * 4 * n * n for rows, n in ((2, 24), (2, 17), (1, 2)))
            assert measured.fired == {
                f"attention_logit/{n}/map 1": Fired(hits=BATCHES, elements=entries) for n in (0, 1)
            }


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


@pytest.mark.kind(4, "sweep")
def test_an_interrupted_sweep_goes_on_where_it_stopped(
    loaded: LoadedModel, text: TokenSlice, tmp_path: Path
) -> None:
    before = {name: t.clone() for name, t in loaded.model.state_dict().items()}
    whole = run(loaded, text, tmp_path / "whole")
    first = Stopper(loaded.model, at=3)
    with pytest.raises(KeyboardInterrupt):
        run(loaded, text, tmp_path / "cells", first.progress)
    first.handle.remove()
    assert first.forwards == 2 * BATCHES + 1  # two cells, and one batch of the third
    kept = sorted((tmp_path / "cells").iterdir())
    assert [path.name.rpartition("_")[0] for path in kept] == [
        "tiny_logits4_perplexity",
        "tiny_none_perplexity",
    ]
    dates = [path.stat().st_mtime_ns for path in kept]
    second = Stopper(loaded.model)
    assert figures(run(loaded, text, tmp_path / "cells", second.progress)) == figures(whole)
    assert second.forwards == (len(RECIPES) - 2) * BATCHES
    assert [path.stat().st_mtime_ns for path in kept] == dates
    second.forwards = 0
    assert figures(run(loaded, text, tmp_path / "cells", second.progress)) == figures(whole)
    assert second.forwards == 0
    second.handle.remove()
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_cells_of_another_model_or_text_are_not_taken(
    loaded: LoadedModel, text: TokenSlice, tmp_path: Path
) -> None:
    run(loaded, text, tmp_path)
    stopper = Stopper(loaded.model)
    run(replace(loaded, sha256="1" * 64), text, tmp_path)
    assert stopper.forwards == len(RECIPES) * BATCHES
    stopper.forwards = 0
    run(replace(loaded, sha256="1" * 64), text.first(2), tmp_path)
    stopper.handle.remove()
    assert stopper.forwards == len(RECIPES)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(lambda cell: cell.update(schema="quantkit.cell/9"), "cell/2", id="later"),
        pytest.param(lambda cell: cell["rows"].pop(), "changed since", id="a row less"),
        pytest.param(lambda cell: cell.pop("fired"), "changed since", id="no hits"),
        pytest.param(lambda cell: cell.update(rows=[["x"]]), "changed since", id="no numbers"),
    ],
)
def test_a_damaged_cell_is_named(
    loaded: LoadedModel, text: TokenSlice, tmp_path: Path, change: Any, said: str
) -> None:
    run(loaded, text, tmp_path)
    path = sorted(tmp_path.iterdir())[0]
    cell = json.loads(path.read_text())
    change(cell)
    path.write_text(json.dumps(cell))
    with pytest.raises(InputError, match=said) as raised:
        run(loaded, text, tmp_path)
    assert path.name in str(raised.value)


def test_a_cell_of_an_older_version_is_computed_again(
    loaded: LoadedModel, text: TokenSlice, tmp_path: Path
) -> None:
    whole = run(loaded, text, tmp_path)
    path = sorted(tmp_path.iterdir())[0]
    path.write_text('{"schema": "quantkit.cell/1", "nll": [1.0]}')
    assert figures(run(loaded, text, tmp_path)) == figures(whole)


@pytest.mark.kind(2, "sweep")
def test_an_item_that_is_not_finite_is_named(
    loaded: LoadedModel, text: TokenSlice, tmp_path: Path
) -> None:
    others = {int(token) for n in (0, 1, 2, 4) for token in text.ids[n]}
    own = next(int(token) for token in text.ids[3] if int(token) not in others)
    with torch.no_grad():
        loaded.model.model.embed_tokens.weight[own] = float("nan")
    with pytest.raises(ProbeError, match="figures of item 3 are not finite"):
        run(loaded, text, tmp_path)
    assert not list(tmp_path.iterdir())


class OneOf(Processes):
    """A process of two that share nothing: what it would send is kept."""

    def __init__(self, rank: int, sent: list[Any]) -> None:
        super().__init__(rank=rank, count=2)
        object.__setattr__(self, "sent", sent)

    def everywhere(self, work: Any) -> Any:
        return work()

    def at_first(self, work: Any) -> Any:
        return work() if self.rank == 0 else None

    def gather(self, value: Any) -> Any:
        sent: list[Any] = self.sent  # type: ignore[attr-defined]
        if self.rank:
            sent.append(pickle.loads(pickle.dumps(value)))  # as it travels
            return
        yield value
        yield sent.pop(0)


@pytest.mark.kind(4, "sweep")
def test_what_two_processes_share_is_what_one_finds(
    loaded: LoadedModel, text: TokenSlice, tmp_path: Path
) -> None:
    recipe = Recipe.parse("w8+logits4")
    whole = run_cells(subject(loaded, text), [recipe], store=tmp_path / "whole")
    sent: list[Any] = []
    one = subject(loaded, text)
    with pytest.raises(AttributeError):  # the other process has nothing to go on with
        run_cells(one, [recipe], store=tmp_path / "x", processes=OneOf(1, sent))
    assert len(sent) == 1 and list(sent[0].rows) == [1]  # it had the middle one of three batches
    shared = run_cells(one, [recipe], store=tmp_path / "shared", processes=OneOf(0, sent))
    assert figures(shared) == figures(whole)


def float_features_by_hand(loaded: LoadedModel, text: TokenSlice, threshold: float) -> float:
    """Share of each layer's input features that reach the threshold in a block, by numpy."""
    shares: dict[str, list[float]] = {}

    def look(name: str) -> Any:
        def hook(_module: Any, args: Any) -> None:
            x = np.abs(args[0][0].numpy())
            shares.setdefault(name, []).append(float((x.max(0) >= threshold).mean()))

        return hook

    hooks = [
        module.register_forward_pre_hook(look(name))
        for name, module in projection_modules(loaded.model)
    ]
    for block in text.ids:
        with torch.inference_mode():
            loaded.model(input_ids=block[None])
    for hook in hooks:
        hook.remove()
    return float(np.mean([np.mean(found) for found in shares.values()]))


def test_what_llm_int8_keeps_in_float_stands_in_the_file(
    loaded: LoadedModel, text: TokenSlice, tmp_path: Path
) -> None:
    """The same from one process, from two, and from the file of a finished cell."""
    recipes = [Recipe(), Recipe.parse("llm-int8:1.5"), Recipe.parse("w8")]
    one, sent = subject(loaded, text), list[Any]()
    whole = run_cells(one, recipes, store=tmp_path / "whole")
    plain, int8, rounded = ([*m.scores.details] for m in whole)
    assert FLOAT_FEATURES not in (*plain, *rounded) and FLOAT_FEATURES in int8
    frac = whole[1].scores.details[FLOAT_FEATURES]
    # the layers behind the first see what int8 left of its outputs
    assert frac == pytest.approx(float_features_by_hand(loaded, text, 1.5), abs=0.02)
    assert 0.05 < frac < 0.95
    with pytest.raises(AttributeError):  # the other process has nothing to go on with
        run_cells(one, recipes[1:2], store=tmp_path / "x", processes=OneOf(1, sent))
    (shared,) = run_cells(one, recipes[1:2], store=tmp_path / "shared", processes=OneOf(0, sent))
    (again,) = run_cells(one, recipes[1:2], store=tmp_path / "whole")
    for found in (shared, again):
        assert found.scores.details == whole[1].scores.details
        assert found.fired == whole[1].fired
    seen = whole[1].fired["weight/model.layers.0.mlp.up_proj"]
    assert seen.hits == BATCHES  # at each forward, unlike a weight that is rounded once
    cells = cells_of(
        figures_of(
            model="tiny", recipe=recipes[1], task="perplexity", items=one.tasks[0].item_hashes,
            scores=whole[1].scores, fired=whole[1].fired, seed=0,
        )
    )  # fmt: skip
    assert cells[0].details == {FLOAT_FEATURES: frac}


@pytest.mark.parametrize("takes_positions", [True, False])
def test_the_head_runs_on_the_wanted_positions(
    loaded: LoadedModel, text: TokenSlice, takes_positions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = next(iter(text.batches(3)))
    model = loaded.model
    every = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    wanted = torch.tensor([0, 7, 23])
    heads: list[int] = []
    hook = model.lm_head.register_forward_pre_hook(lambda _m, args: heads.append(args[0].shape[1]))
    if not takes_positions:
        own = model.forward

        def forward(input_ids: Any, attention_mask: Any, use_cache: bool) -> Any:
            return own(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)

        monkeypatch.setattr(model, "forward", forward)
    found = text_forward(loaded)(batch, wanted)
    hook.remove()
    assert torch.allclose(found, every[:, wanted], atol=1e-6)
    assert heads == [3 if takes_positions else 24]
    assert torch.allclose(text_forward(loaded)(batch), every, atol=1e-6)


def test_a_plan_has_every_cell_and_writes_nothing(
    loaded: LoadedModel, text: TokenSlice, tmp_path: Path
) -> None:
    store = tmp_path / "cells"
    cells = planned(subject(loaded, text), RECIPES, store=store)
    assert not store.exists()
    assert [cell.recipe for cell in cells] == [str(recipe) for recipe in RECIPES]
    assert all(cell.seconds > 0 and not cell.finished for cell in cells)
    assert {(cell.items, cell.batches) for cell in cells} == {(BLOCKS, BATCHES)}
    assert {cell.tokens for cell in cells} == {2 * 24 + 2 * 17 + 2}
    run(loaded, text, store)
    again = planned(subject(loaded, text), RECIPES, store=store)
    assert all(cell.finished and cell.seconds == 0 for cell in again)


def test_the_float_row_comes_first_and_once() -> None:
    names = [str(recipe) for recipe in logit_recipes((8, 16), ("head", "tensor"))]
    assert names == ["none", "logits8:head", "logits8"]
    assert [str(recipe) for recipe in logit_recipes((4,), ("row",))] == ["none", "logits4:row"]


def test_static_ranges_have_no_row() -> None:
    found = logit_recipes(
        (16, 4), ("tensor", "head", "row"), ("dynamic", "static"), ("symmetric", "asymmetric")
    )
    assert [str(recipe) for recipe in found] == [
        "none", "logits4", "logits4:head", "logits4:row",
        "logits4:asymmetric", "logits4:head:asymmetric", "logits4:row:asymmetric",
        "logits4:tensor:static", "logits4:head:static",
        "logits4:tensor:static:asymmetric", "logits4:head:static:asymmetric",
    ]  # fmt: skip


def test_a_recipe_that_is_asked_for_twice_is_one_row() -> None:
    words = ("logits4:tensor", "none", "logits4", "w8+a8", "w8a8")
    assert [str(r) for r in unique([Recipe.parse(w) for w in words])] == ["logits4", "none", "w8a8"]
