"""Logits on their grids, tile by tile, against numpy written from the definition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

from quantkit.errors import InputError, ProbeError
from quantkit.probes import AttentionLogits, LogitTile, LogitTransform, attach
from quantkit.quantization import (
    fake_quantized,
    linear_input_grid,
    logit_quantizer,
    static_logit_grid,
)
from quantkit.recipe import Recipe
from quantkit.results import Interval, Range
from tests.conftest import make_tiny

Array = NDArray[Any]
SHARED = {"tensor": (1, 2, 3), "head": (2, 3), "row": (3,)}
LENGTH = 150  # two tiles


def affine(x: Array, lo: Array, hi: Array, bits: int) -> Array:
    """Returns x on the signed full grid over lo, hi and 0; everything broadcasts."""
    lo, hi = (np.asarray(v, np.float32) for v in (np.minimum(lo, 0), np.maximum(hi, 0)))
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    scale = np.where(hi - lo == 0, 1, (hi - lo) / np.float32(high - low)).astype(np.float32)
    zero = np.where(hi - lo == 0, 0, np.rint(np.clip(low - lo / scale, low, high)))
    q = np.clip(np.rint(x / scale) + zero, low, high)
    return ((q - zero).astype(np.float32) * scale).astype(np.float32)


def make(kind: str) -> Any:
    """A model whose logits lie mostly on one side of 0, as SmolLM2's do."""
    classes: dict[str, Any] = {
        "llama": (LlamaForCausalLM, LlamaConfig),
        "diff": (DiffLlamaForCausalLM, DiffLlamaConfig),
    }
    model = make_tiny(*classes[kind], max_position_embeddings=256)
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            for projection, sign in ((attention.q_proj, 1.0), (attention.k_proj, -1.0)):
                projection.weight.mul_(15)
                projection.bias = torch.nn.Parameter(torch.full((len(projection.weight),), sign))
    return model


def batch() -> dict[str, Tensor]:
    ids = torch.arange(2 * LENGTH).reshape(2, LENGTH) * 31 % 257
    mask = torch.ones_like(ids)
    mask[1, -40:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def seen(
    model: Any, recipe: str, ranges: dict[str, Range]
) -> list[tuple[AttentionLogits, Array, Array, Array]]:
    """Returns (call, raw logits, valid, quantized logits) of each layer and map."""
    quant = Recipe.parse(recipe).logits
    assert quant is not None
    make_transform = logit_quantizer(quant, ranges)
    found: list[tuple[AttentionLogits, Array, Array, Array]] = []

    def look(call: AttentionLogits) -> LogitTransform | None:
        transform = make_transform(call)
        tiles = list(call.tiles())
        assert len(tiles) == 2
        raw, valid, quantized = np.zeros((3, 2, call.heads, LENGTH, LENGTH), np.float32)
        for tile in tiles:
            rows, keys = tile.logits.shape[2:]
            place = np.s_[:, :, tile.start : tile.start + rows, :keys]
            raw[place], valid[place] = tile.logits.numpy(), tile.valid.numpy()
            before = tile.logits.clone()
            quantized[place] = transform(tile).numpy()
            assert torch.equal(tile.logits, before)
        found.append((call, raw, valid.astype(bool), quantized))
        return None

    with torch.inference_mode(), attach(model, {"attention_logit": look}):
        model(**batch(), use_cache=False)
    return found


@pytest.mark.parametrize("granularity", SHARED)
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("kind", ["llama", "diff"])
def test_dynamic_asymmetric(kind: str, bits: int, granularity: str) -> None:
    found = seen(make(kind), f"logits{bits}:{granularity}:asymmetric", {})
    assert len(found) == (2 if kind == "llama" else 4)
    for _, raw, valid, quantized in found:
        axes = SHARED[granularity]
        lo = np.where(valid, raw, 0).min(axes, keepdims=True)
        hi = np.where(valid, raw, 0).max(axes, keepdims=True)
        expected = affine(raw, lo, hi, bits)
        np.testing.assert_array_equal(quantized[valid], expected[valid])


@pytest.mark.parametrize("granularity", ["tensor", "head"])
@pytest.mark.parametrize("bits", [8, 6, 3])
def test_static_asymmetric(bits: int, granularity: str) -> None:
    # a lopsided range, one on one side of 0 only, one that cuts, one that is empty
    lo, hi = [-5.0, 1.0, -0.5, 0.0], [1.0, 3.0, 0.25, 0.0]
    ranges = {
        f"attention_logit/{layer}/map 1": Range(
            lo=lo, hi=hi, method="minmax", granularity="head", count=1, point="attention_logit"
        )
        for layer in range(2)
    }
    recipe = f"logits{bits}:{granularity}:static:asymmetric"
    for _, raw, valid, quantized in seen(make("llama"), recipe, ranges):
        low, high = np.array(lo), np.array(hi)
        if granularity == "tensor":
            low, high = low.min(keepdims=True), high.max(keepdims=True)
        shape = (1, -1, 1, 1)
        expected = affine(raw, low.reshape(shape), high.reshape(shape), bits)
        np.testing.assert_array_equal(quantized[valid], expected[valid])


def by_row(recipe: str, logits: Tensor) -> Tensor:
    """The logits `[batch, heads, query, key]`, all valid, on the grid of each row."""
    quant = Recipe.parse(recipe).logits
    assert quant is not None
    valid = torch.ones_like(logits, dtype=torch.bool)
    tile = LogitTile(start=0, logits=logits, valid=valid, attended=valid)
    call: Any = SimpleNamespace(name="any", map=1)
    return logit_quantizer(quant, {})(call)(tile)


def test_one_sided_logits_have_smaller_errors() -> None:
    """The reason for the option: of a symmetric grid half the steps would never be used."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.rand(1, 2, 8, 500, generator=generator) * 8 - 7
    errors = {
        grid: float((by_row(f"logits4:row:{grid}", logits) - logits).square().mean())
        for grid in ("symmetric", "asymmetric")
    }
    # steps of 7/7 and of 8/15
    assert errors["asymmetric"] / errors["symmetric"] == pytest.approx((8 / 15) ** 2, rel=0.05)


@pytest.mark.kind(2, "sweep")
def test_all_zero_stays_zero() -> None:
    assert torch.equal(
        by_row("logits4:row:asymmetric", torch.zeros(1, 1, 2, 3)), torch.zeros(1, 1, 2, 3)
    )


@pytest.mark.kind(2, "sweep")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_named(bad: float) -> None:
    model = make("llama")
    model.model.layers[1].self_attn.q_proj.bias.data.fill_(bad)
    with (
        pytest.raises(ProbeError, match=r"model\.layers\.1\.self_attn, map 1, are not finite"),
        fake_quantized(model, Recipe.parse("logits8:head:asymmetric")),
    ):
        model(**batch(), use_cache=False)


def widths(point: str, **changes: Any) -> Range:
    """A range chosen at 8 bits that knows 4 too."""
    fields: dict[str, Any] = {
        "lo": -4.0,
        "hi": 2.0,
        "method": "mse",
        "granularity": "tensor",
        "count": 1,
        "point": point,
        "bits": 8,
        "other_bits": {"4": Interval(lo=-1.0, hi=2.0)},
    }
    return Range(**fields | changes)


@pytest.mark.parametrize(("bits", "span"), [(8, 6.0), (4, 3.0)])
def test_each_width_has_its_own_range(bits: int, span: float) -> None:
    ranges = {"linear_input/a": widths("linear_input"), "attention_logit/0/map 1": widths("x")}
    expected = pytest.approx(span / (2**bits - 1))
    assert float(linear_input_grid(ranges, "a", bits).scale) == expected
    quant = Recipe.parse(f"logits{bits}:static:asymmetric").logits
    assert quant is not None
    assert float(static_logit_grid(ranges, 0, 1, quant).scale) == expected
    symmetric = Recipe.parse(f"logits{bits}:static").logits
    assert symmetric is not None
    reach = 4.0 if bits == 8 else 2.0
    ranges["attention_logit/0/map 1"] = widths("x", symmetric=True)
    found = static_logit_grid(ranges, 0, 1, symmetric)
    assert float(found.scale) == pytest.approx(reach / (2 ** (bits - 1) - 1))
    assert found.zero_point.tolist() == [0]
    with pytest.raises(InputError, match="for the symmetric grid, and is asked for the asymmetric"):
        static_logit_grid(ranges, 0, 1, quant)


@pytest.mark.parametrize("recipe", ["a6", "logits6:static", "logits6:head:static:asymmetric"])
def test_a_range_for_another_width_is_refused(recipe: str) -> None:
    model = make("llama")
    names = ["attention_logit/0/map 1", "attention_logit/1/map 1"]
    names += [f"linear_input/{name}" for name, _ in model.named_modules()]
    is_symmetric = recipe == "logits6:static"
    ranges = {name: widths("x", symmetric=is_symmetric) for name in names}
    with (
        pytest.raises(InputError, match="chosen by mse for 8,4 bits, and is asked for 6"),
        fake_quantized(model, Recipe.parse(recipe), ranges),
    ):
        model(**batch(), use_cache=False)


def test_a_linear_input_has_one_range() -> None:
    ranges = {"linear_input/a": widths("linear_input", lo=[-1.0, -2.0], hi=[1.0, 2.0])}
    with pytest.raises(InputError, match="has 2 groups"):
        linear_input_grid(ranges, "a", 8)
