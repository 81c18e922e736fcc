"""Attention by flex_attention's score_mod, unfused on the CPU, against the plain equations.

The CPU is let in by `flex.DEVICES`; what it runs is what a GPU would be given. Queries and keys are
multiples of 1/4 with a few bits, so that a logit is the same number in whatever order it is added
up, ties included; the oracle is numpy's and knows nothing of quantkit but the recipe's fields.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit.numerics.qtypes import QType
from quantkit.probes import AttentionEdit, AttentionLogits, Spans, flex
from quantkit.probes.attend import attend
from quantkit.probes.flex import BLOCK, block_mask
from quantkit.quantization import fake_quantized, logit_quantizer
from quantkit.quantization.maps import ByRow
from quantkit.recipe import LogitQuant, Recipe
from quantkit.results import Range

Array = NDArray[Any]
BATCH, HEADS, KV, TOKENS, WIDTH = 2, 4, 2, 150, 16
LO, HI = [-3.0, -1.0, 0.5, -9.0], [2.0, 1.5, 4.0, 0.0]
RANGES = {
    "attention_logit/0/map 1": Range(
        lo=LO, hi=HI, method="minmax", granularity="head", count=1, point="attention_logit"
    )
}
GRIDS = [
    f"logits{bits}:{rest}{grid}"
    for bits in (3, 8)
    for rest in ("tensor", "head", "row", "tensor:static", "head:static")
    for grid in ("", ":asymmetric")
]
MASKINGS = ("causal", "bidirectional", "left", "right", "window", "later queries")


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Lets the CPU in; lists for each map whether flex_attention has made it."""
    monkeypatch.setattr(flex, "DEVICES", ["cpu"])
    found: list[bool] = []
    original = flex.attend_flex

    def watched(*args: Any) -> Tensor | None:
        made = original(*args)
        found.append(made is not None)
        return made

    monkeypatch.setattr("quantkit.probes.attend.attend_flex", watched)
    yield found
    flex._kernel.cache_clear()


def attended(masking: str) -> Tensor:
    """Which entries of the map are attended to, bool `[batch, query, key]`."""
    queries = 40 if masking == "later queries" else TOKENS
    row = torch.arange(TOKENS - queries, TOKENS)[:, None]
    column = torch.arange(TOKENS)
    seen = torch.ones(queries, TOKENS, dtype=torch.bool)
    if masking != "bidirectional":
        seen = column <= row
    if masking == "window":
        seen = seen & (column > row - 30)
    both = seen.repeat(BATCH, 1, 1)
    if masking == "left":
        both[1, :40] = False
        both[1, :, :40] = False
    if masking == "right":
        both[1, -40:] = False
        both[1, :, -40:] = False
    return both


def call_of(masking: str = "causal", dtype: torch.dtype = torch.float32) -> AttentionLogits:
    generator = torch.Generator().manual_seed(3)
    seen = attended(masking)

    def quarters(*shape: int) -> Tensor:
        return (torch.randint(-9, 11, shape, generator=generator) / 4).to(dtype)

    real = seen.any(2) if masking in ("left", "right") else None
    is_plain = masking in ("causal", "bidirectional")
    return AttentionLogits(
        layer=0,
        name="any",
        map=1,
        query=quarters(BATCH, HEADS, seen.shape[1], WIDTH),
        key=quarters(BATCH, KV, TOKENS, WIDTH),
        scale=0.25,
        mask=None if is_plain else seen[:, None],
        causal=masking == "causal",
        real_queries=real,
    )


def value_of(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(BATCH, KV, TOKENS, 24, generator=torch.Generator().manual_seed(5)).to(dtype)


def edit_of(recipe: str, call: AttentionLogits) -> AttentionEdit:
    return AttentionEdit(logits=logit_quantizer(quant_of(recipe), RANGES)(call))


def quant_of(recipe: str) -> LogitQuant:
    quant = Recipe.parse(recipe).logits
    assert quant is not None
    return quant


def on_grid(x: Array, seen: Array, quant: LogitQuant) -> Array:
    """Returns logits `[batch, heads, query, key]` on the recipe's grid, in float32."""
    if quant.range == "static":
        lo, hi = (np.array(bound, np.float32).reshape(1, -1, 1, 1) for bound in (LO, HI))
        if quant.granularity == "tensor":
            lo, hi = lo.min(keepdims=True), hi.max(keepdims=True)
    else:
        axes = {"tensor": (1, 2, 3), "head": (2, 3), "row": (3,)}[quant.granularity]
        inside = np.where(seen, x, np.float32(0))
        lo, hi = inside.min(axes, keepdims=True), inside.max(axes, keepdims=True)
    lo, hi = np.minimum(lo, np.float32(0)), np.maximum(hi, np.float32(0))
    top = 2 ** (quant.bits - 1) - 1
    low = -top if quant.symmetric else -top - 1
    if quant.symmetric:
        reach, steps = np.maximum(-lo, hi), top
    else:
        reach, steps = hi - lo, top - low
    scale = np.where(reach == 0, 1, reach / np.float32(steps)).astype(np.float32)
    zero: Any = 0
    if not quant.symmetric:
        zero = np.where(reach == 0, 0, np.rint(np.clip(low - lo / scale, low, top)))
    q = np.clip(np.rint(x / scale) + zero, low, top)
    return ((q - zero).astype(np.float32) * scale).astype(np.float32)


def expected(call: AttentionLogits, seen: Tensor, value: Tensor, quant: LogitQuant) -> Array:
    """Returns attention with quantized logits, `[batch, query, heads, d]`; float64 from there."""
    query, key, values = (x.float().numpy() for x in (call.query, call.key, value))
    key, values = (x.repeat(HEADS // KV, axis=1) for x in (key, values))
    valid = seen[:, None].numpy()
    logits = on_grid(query @ key.swapaxes(2, 3) * np.float32(call.scale), valid, quant)
    logits = logits.astype(np.float64)
    if call.softcap is not None:
        logits = call.softcap * np.tanh(logits / call.softcap)
    weights = np.where(valid, np.exp(logits - logits.max(-1, keepdims=True)), 0)
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)
    return np.asarray((weights @ values.astype(np.float64)).swapaxes(1, 2))


@pytest.mark.parametrize("masking", MASKINGS)
@pytest.mark.parametrize("recipe", GRIDS)
def test_flex_gives_the_numbers_of_the_equations(
    recipe: str, masking: str, used: list[bool]
) -> None:
    call, value = call_of(masking), value_of()
    found = attend([(call, edit_of(recipe, call))], value)
    want = expected(call, attended(masking), value, quant_of(recipe))
    assert used == [True]
    np.testing.assert_allclose(found.numpy(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", ["logits4", "logits4:head:asymmetric", "logits4:row"])
def test_flex_gives_the_numbers_of_the_tiles(
    recipe: str, dtype: torch.dtype, used: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    call, value = call_of("left", dtype), value_of(dtype)
    found = attend([(call, edit_of(recipe, call))], value)
    monkeypatch.setattr("quantkit.probes.attend.in_blocks", lambda *_: False)
    monkeypatch.setattr(flex, "DEVICES", [])
    tiles = attend([(call, edit_of(recipe, call))], value)
    assert used == [True, False]
    assert found.dtype == tiles.dtype == dtype
    # both are rounded to the values' dtype once, at the end: never more than one step of it apart
    torch.testing.assert_close(found, tiles, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def test_a_softcap_comes_after_the_grid(used: list[bool]) -> None:
    call, value = replace(call_of(), softcap=2.0), value_of()
    found = attend([(call, edit_of("logits4:head", call))], value)
    want = expected(call, attended("causal"), value, quant_of("logits4:head"))
    assert used == [True]
    np.testing.assert_allclose(found.numpy(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.kind(1, "probes")
def test_rows_without_a_key_give_zeros(used: list[bool]) -> None:
    call = call_of("left")
    found = attend([(call, edit_of("logits4:row", call))], value_of())
    assert used == [True]
    assert not found[1, :40].any()
    assert found[1, 40:].any()


def test_the_grid_is_of_edited_queries(used: list[bool]) -> None:
    call, value = call_of(), value_of()
    other = replace(call, query=call.query.flip(2) * 2)
    edit = replace(edit_of("logits4", other), query=other.query)
    found = attend([(call, edit)], value)
    want = expected(other, attended("causal"), value, quant_of("logits4"))
    assert used == [True]
    np.testing.assert_allclose(found.numpy(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gqa", "diffllama", "diffllama_gqa", "mistral_window"])
@pytest.mark.parametrize("recipe", ["logits5", "logits5:head:asymmetric", "logits5:row"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_whole_model_computes_as_without_flex(
    make_family: Any,
    family: str,
    recipe: str,
    side: str,
    used: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_family(family)
    ids = torch.arange(2 * 33).reshape(2, 33) * 31 % 97
    mask = torch.ones_like(ids)
    mask[1, slice(0, 7) if side == "left" else slice(26, 33)] = 0

    def logits() -> Tensor:
        with torch.inference_mode(), fake_quantized(model, Recipe.parse(recipe)):
            out: Tensor = model(input_ids=ids, attention_mask=mask).logits
            return out[mask.bool()]

    found = logits()
    fired = list(used)
    monkeypatch.setattr(flex, "DEVICES", [])
    want = logits()
    maps = 4 if family.startswith("diff") else 1  # of two halves of the values
    assert fired == [True] * 3 * maps
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


LEFT_TO_TILES: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": torch.zeros(HEADS)},
    "a bias": {"bias": torch.zeros(1, 1, 1, TOKENS)},
    "masked entries that count": {"all_entries": True},
    "a mask with holes": {"mask": (torch.arange(TOKENS) % 3 > 0).expand(1, 1, TOKENS, -1)},
    "narrow heads": {
        "query": torch.ones(BATCH, HEADS, TOKENS, 8),
        "key": torch.ones(BATCH, KV, TOKENS, 8),
    },
    "logits of the model's own": {"given": torch.ones(BATCH, HEADS, TOKENS, TOKENS)},
}


@pytest.mark.parametrize("fields", LEFT_TO_TILES.values(), ids=LEFT_TO_TILES.keys())
def test_what_is_not_plain_takes_the_tiles(fields: dict[str, Any], used: list[bool]) -> None:
    call = replace(call_of(), **fields)
    attend([(call, edit_of("logits4", call))], value_of())
    assert used == [False]


def test_other_edits_take_the_tiles(used: list[bool]) -> None:
    call, value = call_of(), value_of()
    logits = edit_of("logits4", call).logits
    probabilities = ByRow(qtype=QType(bits=8, signed=False), symmetric=True, what="them")
    attend([(call, AttentionEdit(logits=logits, probabilities=probabilities))], value)
    attend([(call, AttentionEdit(logits=lambda tile: tile.logits * 2))], value)
    attend([(call, None)], value)
    assert used == [False] * 3


@pytest.mark.kind(7, "probes")
def test_gradients_take_the_tiles(used: list[bool]) -> None:
    call = call_of()
    call = replace(call, query=call.query.requires_grad_())
    out = attend([(call, edit_of("logits4", call))], value_of())
    assert used == [False]
    assert out.requires_grad


def test_another_device_never_comes_here(used: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "DEVICES", ["cuda"])
    call = call_of()
    attend([(call, edit_of("logits4", call))], value_of())
    assert used == [False]


def test_a_kernel_that_cannot_be_made_is_given_up_with_one_warning(used: list[bool]) -> None:
    def refuses(_graph: Any, _inputs: Any) -> Any:
        raise NotImplementedError("no such instruction")

    flex._kernel("cpu").run = torch.compile(flex.flex_attention, backend=refuses, fullgraph=True)
    call, value = call_of(), value_of()
    edit = edit_of("logits4", call)
    with pytest.warns(RuntimeWarning, match="cannot be compiled here .*goes on in tiles"):
        first = attend([(call, edit)], value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = attend([(call, edit)], value)
    assert used == [False, False]
    want = expected(call, attended("causal"), value, quant_of("logits4"))
    for found in (first, second):
        np.testing.assert_allclose(found.numpy(), want, rtol=1e-5, atol=1e-5)


def test_no_width_of_the_grid_is_another_kernel(used: list[bool]) -> None:
    compiled: list[int] = []

    def counted(graph: Any, _inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    flex._kernel("cpu").run = torch.compile(flex.flex_attention, backend=counted, fullgraph=True)
    call, value = call_of(), value_of()
    for recipe in GRIDS:
        attend([(call, edit_of(recipe, call))], value)
    assert used == [True] * len(GRIDS)
    assert len(compiled) == 1


def dense(counts: Tensor, blocks: Tensor, wide: int) -> Array:
    """Which blocks are listed, bool `[batch, rows, blocks]`, from (how many, which first)."""
    found = np.zeros((*counts.shape[::2], wide), dtype=bool)
    for b, i in np.ndindex(found.shape[:2]):
        found[b, i, blocks[b, 0, i, : int(counts[b, 0, i])].numpy()] = True
    return found


@pytest.mark.kind(1, "probes")
@pytest.mark.parametrize(
    "masking", ["causal", "full", "window", "padded", "padded by two blocks", "cache", "ragged"]
)
def test_blocks_are_those_that_are_attended_to(masking: str) -> None:
    queries, keys = (300, 700) if masking == "cache" else (640, 640)
    if masking == "ragged":
        queries = keys = 515
    row = np.arange(keys - queries, keys)[:, None]
    column = np.arange(keys)
    seen = np.broadcast_to(column <= row, (2, queries, keys)).copy()
    if masking == "full":
        seen[:] = True
    if masking == "window":
        seen &= column > row - 200
    if masking.startswith("padded"):
        padding = 260 if masking == "padded" else 2 * BLOCK
        seen[1, :padding] = False
        seen[1, :, :padding] = False
    spans = Spans.of([torch.from_numpy(seen)[:, None]])
    mask = block_mask(spans, queries, keys, torch.device("cpu"))
    high, wide = -(-queries // BLOCK), -(-keys // BLOCK)
    padded = np.zeros((2, high * BLOCK, wide * BLOCK), dtype=bool)
    padded[:, :queries, :keys] = seen
    blocks = padded.reshape(2, high, BLOCK, wide, BLOCK)
    some, whole = blocks.any((2, 4)), blocks.all((2, 4))
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    partial = dense(mask.kv_num_blocks, mask.kv_indices, wide)
    full = dense(mask.full_kv_num_blocks, mask.full_kv_indices, wide)
    np.testing.assert_array_equal(full, whole)
    np.testing.assert_array_equal(partial, some & ~whole)
    assert mask.kv_indices.dtype == torch.int32
    assert mask.shape == (2, 1, queries, keys)
