"""Maps on grids block by block, in place, against the plain equations on whole tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, MistralConfig, MistralForCausalLM

import quantkit.probes.attend as attend_module
from quantkit.numerics.affine import affine_params, fake_quantize, symmetric_scale
from quantkit.numerics.qtypes import QType
from quantkit.probes import AttentionEdit, AttentionLogits, LogitBlock
from quantkit.probes.attend import attend, softmax_blocks
from quantkit.quantization import fake_quantized, logit_quantizer
from quantkit.quantization.maps import ByRow, OnGrid, logit_reach, probability_reach
from quantkit.recipe import Recipe
from quantkit.results import Range
from tests.conftest import make_tiny
from tests.monitoring.oracle import checkpoint

BATCH, HEADS, KV, TOKENS, WIDTH = 2, 4, 2, 150, 16
RECIPES = [
    f"logits{bits}:{rest}"
    for bits in (4, 9)
    for rest in (
        "tensor", "head", "row", "tensor:asymmetric", "head:asymmetric", "row:asymmetric",
        "tensor:static", "head:static", "tensor:static:asymmetric", "head:static:asymmetric",
    )
]  # fmt: skip
RANGES = {
    "attention_logit/0/map 1": Range(
        lo=[-3.0, -1.0, 0.5, -9.0], hi=[2.0, 1.5, 4.0, 0.0], method="minmax", granularity="head",
        count=1, point="attention_logit",
    )
}  # fmt: skip


def call_of(masking: str = "causal") -> AttentionLogits:
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(BATCH, HEADS, TOKENS, WIDTH, generator=generator) * 3 + 0.5
    key = torch.randn(BATCH, KV, TOKENS, WIDTH, generator=generator) - 0.3
    real = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    mask: Tensor | None = None
    if masking == "left":
        real[1, :40] = False
    elif masking == "right":
        real[1, -40:] = False
    row, column = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
    if masking == "window":
        mask = ((column <= row) & (column > row - 30))[None, None]
    elif masking == "holes":
        mask = ((column <= row) & ((column % 3 != 1) | (column == row)))[None, None]
    elif masking == "heads":
        mask = torch.stack([(column <= row) & (column % n == 0) for n in (1, 2, 3, 4)])[None]
    elif masking in ("left", "right"):
        mask = ((column <= row) & real[:, None, :])[:, None]
    return AttentionLogits(
        layer=0, name="any", map=1, query=query, key=key, scale=WIDTH**-0.5, mask=mask,
        causal=mask is None, real_queries=real,
    )  # fmt: skip


MASKINGS = ("causal", "left", "right", "window", "holes", "heads")


def transform_of(recipe: str, call: AttentionLogits) -> Any:
    quant = Recipe.parse(recipe).logits
    assert quant is not None
    return logit_quantizer(quant, RANGES)(call)


def block_valid(block: LogitBlock) -> Tensor:
    if block.valid is not None:
        return block.valid.expand_as(block.logits)
    column = torch.arange(block.logits.shape[2])
    inside = (column >= block.lo[:, None]) & (column < block.hi[:, None])
    return inside.expand_as(block.logits)


@pytest.mark.parametrize("masking", MASKINGS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_blocks_are_the_bits_of_the_plain_equations(recipe: str, masking: str) -> None:
    """The grid's numbers, from extremes that are taken here, on the logits of each block."""
    call = call_of(masking)
    transform, quant = transform_of(recipe, call), Recipe.parse(recipe).logits
    assert quant is not None
    qtype = QType(bits=quant.bits, narrow=quant.symmetric)
    whole = torch.full((BATCH, HEADS, TOKENS, TOKENS), torch.nan)
    for block in call.blocks():
        place = whole[block.sequence, block.heads, block.rows, block.keys]
        place.copy_(block.logits.masked_fill(~block_valid(block), torch.nan))
    axes = {"tensor": (1, 2, 3), "head": (2, 3), "row": (3,)}[quant.granularity]
    lo = whole.nan_to_num(nan=0.0).amin(axes, keepdim=True).clamp_max(0)
    hi = whole.nan_to_num(nan=0.0).amax(axes, keepdim=True).clamp_min(0)
    if quant.range == "static":
        found = RANGES["attention_logit/0/map 1"]
        lo, hi = (torch.tensor(x)[None, :, None, None] for x in (found.lo, found.hi))
        if quant.granularity == "tensor":
            lo, hi = lo.amin().reshape(1, 1, 1, 1), hi.amax().reshape(1, 1, 1, 1)
    scale, zero = affine_params(lo, hi, qtype)
    expected = fake_quantize(whole, scale, zero, qtype)
    if quant.symmetric:
        expected = fake_quantize(whole, symmetric_scale(torch.maximum(-lo, hi), qtype), 0, qtype)
    assert bool(whole.isfinite().any(-1)[call.query_is_real()[:, None].expand(-1, HEADS, -1)].all())
    seen = 0
    for block in call.blocks():
        transform.in_place(block)
        valid = block_valid(block)
        wanted = expected[block.sequence, block.heads, block.rows, block.keys][valid]
        assert torch.equal(block.logits[valid].view(torch.int32), wanted.view(torch.int32))
        seen += len(wanted)
    assert seen == int(whole.isfinite().sum())


@pytest.mark.parametrize("masking", MASKINGS)
@pytest.mark.parametrize("probabilities", [None, "grid", "row"])
@pytest.mark.parametrize("recipe", [None, "logits4:head", "logits4:row:asymmetric"])
def test_attention_in_blocks_is_attention_in_tiles(
    monkeypatch: pytest.MonkeyPatch, recipe: str | None, probabilities: str | None, masking: str
) -> None:
    call = call_of(masking)
    value = torch.randn(BATCH, KV, TOKENS, 5, generator=torch.Generator().manual_seed(4))
    unsigned = QType(bits=5, signed=False)
    logits = None if recipe is None else transform_of(recipe, call)
    softmax = {
        None: None,
        "grid": OnGrid(scale=torch.full((1, 1, 1, 1), 1 / 31), zero_point=0, qtype=unsigned),
        "row": ByRow(qtype=unsigned, symmetric=True, what="x"),
    }[probabilities]
    edit = AttentionEdit(logits=logits, probabilities=softmax)
    fast = attend([(call, edit)], value)
    monkeypatch.setattr(attend_module, "in_blocks", lambda *_: False)
    torch.testing.assert_close(fast, attend([(call, edit)], value), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_no_bit(threads: int) -> None:
    before = torch.get_num_threads()
    call, value = call_of("left"), torch.randn(BATCH, KV, TOKENS, 5)
    found = []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            edit = AttentionEdit(logits=transform_of("logits5:head:asymmetric", call))
            found.append(attend([(call, edit)], value))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.kind(1, "sweep")
@pytest.mark.parametrize("masking", MASKINGS)
def test_reach_of_blocks_is_that_of_tiles(monkeypatch: pytest.MonkeyPatch, masking: str) -> None:
    call = call_of(masking)
    transform = transform_of("logits4:head", call)
    fast = [logit_reach(call, name) for name in ("tensor", "head")]
    softmax = [probability_reach(call, transform, name) for name in ("tensor", "head")]
    monkeypatch.setattr("quantkit.quantization.maps.in_blocks", lambda *_: False)
    for found, name in zip(fast, ("tensor", "head"), strict=True):
        torch.testing.assert_close(found, logit_reach(call, name), rtol=1e-6, atol=0)
    for found, name in zip(softmax, ("tensor", "head"), strict=True):
        torch.testing.assert_close(
            found, probability_reach(call, transform, name), rtol=1e-5, atol=0
        )


@pytest.mark.kind(1, "sweep")
def test_softmax_of_what_is_masked_is_zero_and_rows_sum_to_one() -> None:
    for masking in MASKINGS:
        call = call_of(masking)
        total = torch.zeros(BATCH, HEADS, TOKENS)
        for block in softmax_blocks(call, None):
            assert not block.logits[~block_valid(block)].any()
            total[block.sequence, block.heads, block.rows] += block.logits.sum(-1)
        real = call.query_is_real()[:, None].expand_as(total)
        torch.testing.assert_close(total, real.float())


def test_memory_is_linear_in_the_length() -> None:
    """A block, and no map, is what a quantized call holds at 8 times the length."""
    largest = 0
    for tokens in (1024, 8192):
        query, key = torch.zeros(1, 3, tokens, 2), torch.zeros(1, 1, tokens, 2)
        call = AttentionLogits(
            layer=0, name="x", map=1, query=query, key=key, scale=1.0, mask=None, causal=True,
            real_queries=None,
        )  # fmt: skip
        largest = max(block.logits.untyped_storage().nbytes() for block in call.blocks())
        assert largest <= 4 * max(1 << 19, 32 * 3 * tokens)
    assert largest < 4 * 8192 * 8192 // 16


@pytest.mark.kind(7, "sweep")
@pytest.mark.parametrize("recipe", ["logits3", "qk3", "probs3", "kv3"])
@pytest.mark.parametrize("family", ["window", "diff"])
def test_a_repeated_forward_has_the_same_quantizers(family: str, recipe: str) -> None:
    """Gradient checkpointing runs a forward again: the loss's gradient needs the same one."""
    kinds: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "window": (MistralForCausalLM, MistralConfig, {"sliding_window": 7}),
        "diff": (DiffLlamaForCausalLM, DiffLlamaConfig, {}),
    }
    kind, config, changes = kinds[family]
    ids = torch.arange(40).reshape(2, 20) * 31 % 257
    gradients, counts = [], []
    for checkpointed in (False, True):
        model = make_tiny(kind, config, **changes).train()
        if checkpointed:
            checkpoint(model, use_reentrant=False)
        with fake_quantized(model, Recipe.parse(recipe)) as quantizers:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append(model.model.layers[0].mlp.up_proj.weight.grad)
        counts.append(quantizers.fired)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-7)
    assert counts[0] == counts[1]
