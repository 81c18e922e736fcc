"""The ranking against brute force: whole forwards, one block at a time, KL in numpy."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantkit.calib_sets import TokenSlice
from quantkit.errors import InputError, ProbeError
from quantkit.models import LoadedModel
from quantkit.quantization import fake_quantized, quantizer_names
from quantkit.recipe import Recipe
from quantkit.results import Ranges, Sensitivity, Smoothing, dumps, read_json, write_json
from quantkit.search import sensitivity
from quantkit.search.cells import CELLS_FILE

PLANTED = "linear_input/model.layers.1.mlp.down_proj"
RECIPES = ("w8a8", "a6", "w8a8+logits4:head:static")


def run(case: Any, store: Path, recipe: str = "w8a8", batch_size: int = 2, **rest: Any) -> Any:
    return sensitivity(
        case.loaded,
        case.text,
        Recipe.parse(recipe),
        case.ranges,
        ranges_run="the-run",
        batch_size=batch_size,
        store=store,
        **rest,
    )


def log_softmax(logits: torch.Tensor) -> Any:
    x = logits.numpy().astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def brute_force(
    loaded: LoadedModel, text: TokenSlice, ranges: Ranges, recipe: Recipe, names: list[str]
) -> tuple[Any, Any]:
    """KL of each block summed over its predicted tokens, and how many those are."""
    kl, tokens = [], []
    for block in text.ids:
        with torch.inference_mode():
            expected = log_softmax(loaded.model(input_ids=block[None]).logits[0, :-1])
            with fake_quantized(
                loaded.model, recipe, ranges.tensors, only=names, smoothing=ranges.smoothing
            ):
                got = log_softmax(loaded.model(input_ids=block[None]).logits[0, :-1])
        kl.append(float((np.exp(expected) * (expected - got)).sum()))
        tokens.append(len(block) - 1)
    return np.array(kl), np.array(tokens)


def shortened(case: Any, blocks: int) -> Any:
    """The case on fewer blocks: brute force is slow."""
    return dataclasses.replace(
        case, text=dataclasses.replace(case.text, ids=case.text.ids[:blocks])
    )


def check_against_brute_force(case: Any, found: Sensitivity, recipe: str) -> None:
    parsed = Recipe.parse(recipe)
    names = quantizer_names(case.loaded.model, parsed)
    arguments = (case.loaded, case.text, case.ranges, parsed)
    all_kl, tokens = brute_force(*arguments, names)
    total = all_kl.sum() / tokens.sum()
    assert found.total_kl == pytest.approx(total, rel=1e-6)
    blocks = len(tokens)
    for row in found.rows:
        kl, _ = brute_force(*arguments, row.quantizers)
        assert row.enable_one_kl == pytest.approx(kl.sum() / tokens.sum(), rel=1e-4, abs=1e-9)
        apart = sum((k - row.enable_one_kl * t) ** 2 for k, t in zip(kl, tokens, strict=True))
        stderr = math.sqrt(apart / (blocks - 1) / blocks) / tokens.mean()
        assert row.enable_one_stderr == pytest.approx(stderr, rel=1e-4, abs=1e-9)
        others = [name for name in names if name not in row.quantizers]
        kl, _ = brute_force(*arguments, others)
        without = kl.sum() / tokens.sum()
        assert row.disable_one_kl == pytest.approx(without, rel=1e-5)
        assert row.removed_frac == pytest.approx(1 - without / total, abs=1e-5)
        gone = (all_kl - kl) / total
        mean = gone.sum() / tokens.sum()
        apart = sum((g - mean * t) ** 2 for g, t in zip(gone, tokens, strict=True))
        stderr = math.sqrt(apart / (blocks - 1) / blocks) / tokens.mean()
        assert row.removed_stderr_frac == pytest.approx(stderr, rel=1e-3, abs=1e-6)
        assert row.tokens == tokens.sum()
    for point in found.kept:
        kept = {name for row in found.rows[: point.units] for name in row.quantizers}
        kl, _ = brute_force(*arguments, [name for name in names if name not in kept])
        assert point.kl == pytest.approx(kl.sum() / tokens.sum(), rel=1e-5)
        assert point.remaining_frac == pytest.approx(point.kl / total, rel=1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_number_equals_brute_force(case: Any, tmp_path: Path, recipe: str) -> None:
    case = shortened(case, 3)
    found = run(case, tmp_path, recipe, batch_size=1)
    points = 14 + (2 if "logits" in recipe else 0)
    assert len(found.rows) == points
    check_against_brute_force(case, found, recipe)


@pytest.mark.parametrize(
    ("group", "recipe", "units", "quantizers"),
    [
        ("tensor", "w4+logits4", 16, 16),
        ("module", "w4a8+logits4", 16, 30),
        ("layer", "w4a8+logits4", 2, 30),
    ],
)
def test_switched_weights_equal_brute_force(
    case: Any, tmp_path: Path, group: str, recipe: str, units: int, quantizers: int
) -> None:
    case = shortened(case, 2)
    found = run(case, tmp_path, recipe, group=group, weights=True, batch_size=1)
    assert len(found.rows) == units
    assert sum(len(row.quantizers) for row in found.rows) == quantizers
    check_against_brute_force(case, found, recipe)


def test_smoothed_ranges_equal_brute_force(case: Any, tmp_path: Path) -> None:
    name = "model.layers.0.mlp"
    scales = [0.5 + 0.1 * n for n in range(32)]
    group = Smoothing(
        producer="model.layers.0.post_attention_layernorm",
        linears=[f"{name}.gate_proj", f"{name}.up_proj"],
        alpha=0.5,
        scales=scales,
        expected_error=0.0,
        expected_error_without=0.0,
    )
    case = shortened(case, 2)
    ranges = dataclasses.replace(case.ranges, smoothing={f"{name}.gate_proj": group})
    smooth = dataclasses.replace(case, ranges=ranges)
    found = run(smooth, tmp_path, "w8a8", batch_size=1)
    check_against_brute_force(smooth, found, "w8a8")
    assert found.total_kl != run(case, tmp_path / "plain", "w8a8", batch_size=1).total_kl


@pytest.mark.parametrize("modes", [("enable-one",), ("disable-one",)])
def test_the_planted_layer_is_the_worst_in_each_mode(
    case: Any, tmp_path: Path, modes: tuple[str, ...]
) -> None:
    found = run(case, tmp_path, modes=modes)
    first, second = found.rows[:2]
    assert (first.name, first.rank, first.point) == (PLANTED, 1, "linear_input")
    if modes == ("enable-one",):
        assert first.enable_one_kl > 10 * second.enable_one_kl > 0
        assert math.isnan(first.disable_one_kl) and math.isnan(first.removed_frac)
    else:
        assert first.removed_frac > 0.5 > abs(second.removed_frac)
        assert math.isnan(first.enable_one_kl)
    assert found.reached and found.keep[0] == PLANTED


def test_keeping_is_as_short_as_measuring_allows(case: Any, tmp_path: Path) -> None:
    found = run(case, tmp_path, "a8", target_frac=0.05)
    enough = [point for point in found.kept if point.remaining_frac < 0.05]
    few = enough[0].units
    assert found.keep == [row.name for row in found.rows[:few]]
    assert few == 1 or any(point.units == few - 1 for point in found.kept)
    nothing = run(case, tmp_path / "w", "w4a8", target_frac=0.001)
    assert (nothing.reached, nothing.keep) == (False, [])  # the weights' error stays
    assert nothing.kept[-1].units == len(nothing.rows)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.kind(4, "sensitivity")
def test_batches_do_not_matter(case: Any, tmp_path: Path, batch_size: int) -> None:
    case = shortened(case, 3)
    case.loaded.model.double()  # in float32 a batch's rounding can tip a value to the next level
    two = run(case, tmp_path / "2", "w8a8+logits4")
    other = run(case, tmp_path / "other", "w8a8+logits4", batch_size=batch_size)
    by_name = {row.name: row for row in other.rows}
    assert other.total_kl == pytest.approx(two.total_kl, rel=1e-6)
    for row in two.rows:
        again = by_name[row.name]
        assert again.enable_one_kl == pytest.approx(row.enable_one_kl, rel=1e-6)
        assert again.disable_one_kl == pytest.approx(row.disable_one_kl, rel=1e-6)


class Stop:
    """A progress that interrupts at a step, and counts forwards."""

    def __init__(self, model: Any, at: int | None = None) -> None:
        self.at, self.steps, self.forwards = at, 0, 0
        self.handle = model.register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.forwards += 1

    def progress(self, _what: str, _done: int, _total: int) -> None:
        self.steps += 1
        if self.steps == self.at:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("at", "again"), [(10, 2), (20, 3), (70, 2)])
@pytest.mark.kind(9, "sensitivity")
def test_an_interrupted_search_goes_on_and_ends_the_same(
    case: Any, tmp_path: Path, at: int, again: int
) -> None:
    counted = Stop(case.loaded.model)
    whole = run(case, tmp_path / "whole")
    counted.handle.remove()
    weights = {name: t.clone() for name, t in case.loaded.model.state_dict().items()}
    first = Stop(case.loaded.model, at)
    with pytest.raises(KeyboardInterrupt):
        run(case, tmp_path / "cells", progress=first.progress)
    first.handle.remove()
    cells = tmp_path / "cells" / CELLS_FILE
    before = cells.read_bytes()
    with cells.open("ab") as file:
        file.write(b'{"mode":"enable-one","unit":"linear_in')  # killed while it wrote
    second = Stop(case.loaded.model)
    assert dumps(run(case, tmp_path / "cells", progress=second.progress)) == dumps(whole)
    assert cells.read_bytes().startswith(before)
    assert cells.read_bytes() == (tmp_path / "whole" / CELLS_FILE).read_bytes()
    # again: the batch's float forward, whether layer 1 can be started at, the quantized forward
    assert first.forwards + second.forwards == counted.forwards + again
    second.forwards = 0
    run(case, tmp_path / "cells", progress=second.progress)
    assert second.forwards == 0
    second.handle.remove()
    for name, tensor in case.loaded.model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    assert not any("forward" in vars(module) for module in case.loaded.model.modules())


def test_cells_of_another_search_are_not_taken(case: Any, tmp_path: Path) -> None:
    run(case, tmp_path, modes=("enable-one",))
    names = list(case.ranges.tensors)
    wide = dataclasses.replace(case.ranges.tensors[names[0]], lo=-1e3, hi=1e3)
    other = dataclasses.replace(
        case,
        ranges=dataclasses.replace(case.ranges, tensors={**case.ranges.tensors, names[0]: wide}),
    )
    fresh = run(other, tmp_path / "fresh", modes=("enable-one",))
    assert dumps(run(other, tmp_path, modes=("enable-one",))) == dumps(fresh)


def test_a_line_that_is_no_cell_is_named(case: Any, tmp_path: Path) -> None:
    run(case, tmp_path, modes=("enable-one",))
    path = tmp_path / CELLS_FILE
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], "{half", *lines[3:]]) + "\n")
    with pytest.raises(InputError, match="line 4: not a whole record"):
        run(case, tmp_path, modes=("enable-one",))
    plain = json.loads(lines[1])
    path.write_text(lines[0] + "\n" + json.dumps({**plain, "kl": "much"}) + "\n")
    with pytest.raises(InputError, match=r"line 2: .*kl"):
        run(case, tmp_path, modes=("enable-one",))


def test_the_result_is_read_back(case: Any, tmp_path: Path) -> None:
    found = run(case, tmp_path, modes=("enable-one",))
    write_json(tmp_path / "sensitivity.json", found)
    assert dumps(read_json(tmp_path / "sensitivity.json", Sensitivity)) == dumps(found)
    plain = json.loads((tmp_path / "sensitivity.json").read_text())
    assert next(iter(plain)) == "schema" and plain["schema"] == "quantkit.sensitivity/1"
    plain["rows"][0]["enable_kl"] = 1.0
    (tmp_path / "bad.json").write_text(json.dumps(plain))
    with pytest.raises(InputError, match=r"unknown field `rows\[0\]\.enable_kl`"):
        read_json(tmp_path / "bad.json", Sensitivity)


def test_a_missing_range_is_named(case: Any, tmp_path: Path) -> None:
    tensors = {name: r for name, r in case.ranges.tensors.items() if name != PLANTED}
    lacks = dataclasses.replace(case, ranges=dataclasses.replace(case.ranges, tensors=tensors))
    with pytest.raises(InputError, match=PLANTED):
        run(lacks, tmp_path)


def test_weights_alone_are_switched_only_where_asked_for(case: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"leaves nothing to switch.*--weights"):
        run(case, tmp_path, "w8")
    found = run(case, tmp_path, "w4", weights=True)
    assert {row.point for row in found.rows} == {"weight"}


def test_logits_that_are_not_finite_are_an_error(case: Any, tmp_path: Path) -> None:
    with torch.no_grad():
        case.loaded.model.lm_head.weight[3] = torch.nan
    with pytest.raises(
        ProbeError, match=r"linear_input/model.layers.0.self_attn.q_proj .* is not finite"
    ):
        run(case, tmp_path)


def test_one_block_has_no_standard_error(case: Any, tmp_path: Path) -> None:
    text = dataclasses.replace(case.text, ids=case.text.ids[:1])
    found = run(dataclasses.replace(case, text=text), tmp_path)
    assert math.isnan(found.total_stderr)
    assert all(math.isnan(row.enable_one_stderr) for row in found.rows)
