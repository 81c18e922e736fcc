"""Callbacks that replace queries, keys, values and softmax outputs, against the sum by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantkit import record_qk
from quantkit.errors import ProbeError
from quantkit.models.families import AttentionLayout
from quantkit.probes import AttentionEdit, AttentionLogits, AttentionValue, LogitTile, attach
from quantkit.quantization import fake_quantized
from quantkit.recipe import Recipe

BATCH, HEADS, TOKENS, WIDTH = 2, 4, 9, 8


class OwnAttention(nn.Module):
    """Attention that is computed by torch's functions, in one of two ways."""

    def __init__(self, way: str, layout: AttentionLayout | None = None, kv_heads: int = HEADS):
        super().__init__()
        torch.manual_seed(5)
        self.way, self.kv_heads = way, kv_heads
        self.q = nn.Linear(WIDTH * HEADS, WIDTH * HEADS)
        self.k, self.v = (nn.Linear(WIDTH * HEADS, WIDTH * kv_heads) for _ in range(2))
        if layout is not None:
            self.attention_layout = layout

    def differential_lambda(self) -> float:
        return 0.5

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            layer(x).view(*x.shape[:2], -1, WIDTH).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inputs(x)
        if self.way == "sdpa":
            shared = self.kv_heads != HEADS
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=shared)
        return torch.softmax(q @ k.transpose(2, 3) * WIDTH**-0.5, dim=-1) @ v


class Wrapped(nn.Module):
    """A model of one such layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.attention = OwnAttention(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.attention(x)
        return found


def x() -> Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH * HEADS, generator=torch.Generator().manual_seed(6))


def by_hand(q: Tensor, k: Tensor, v: Tensor, factor: float = 1.0) -> Tensor:
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    weights = torch.softmax(q @ k.transpose(2, 3) * WIDTH**-0.5, dim=-1)
    return factor * weights @ v


def halved(tile: LogitTile) -> Tensor:
    return tile.logits * 0.5


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("with_softmax", [False, True])
@torch.no_grad()
def test_each_part_of_an_sdpa_call(kv_heads: int, with_softmax: bool) -> None:
    model = Wrapped("sdpa", kv_heads=kv_heads)
    q, k, v = model.attention.inputs(x())

    def edit(call: AttentionLogits) -> AttentionEdit:
        return AttentionEdit(
            query=call.query + 1,
            key=call.key * 3,
            probabilities=halved if with_softmax else None,
        )

    def value(visit: AttentionValue) -> Tensor:
        assert torch.equal(visit.tensor, v)
        return visit.tensor.cos()

    with attach(model, {"attention_logit": edit, "attention_value": value}) as attachment:
        found = model(x())
    expected = by_hand(q + 1, k * 3, v.cos(), 0.5 if with_softmax else 1.0)
    torch.testing.assert_close(found, expected)
    assert attachment.hits["attention_value"]["attention"].calls == 1
    with attach(model, {"attention_logit": lambda call: None, "attention_value": value}):
        torch.testing.assert_close(model(x()), by_hand(q, k, v.cos()))
    with attach(model, {"attention_logit": lambda call: AttentionEdit()}):
        assert torch.equal(model(x()), F.scaled_dot_product_attention(q, k, v, enable_gqa=True))


@pytest.mark.parametrize(
    ("order", "shared_keys"),
    [("halves", False), ("interleaved", False), ("interleaved", True)],
    ids=["halves", "interleaved", "shared keys"],
)
@torch.no_grad()
def test_an_edit_of_one_map_leaves_the_other(order: Any, shared_keys: bool) -> None:
    layout = AttentionLayout(maps=2, order=order, shared_keys=shared_keys)
    model = Wrapped("sdpa", layout=layout, kv_heads=2 if shared_keys else 4)
    q, k, v = model.attention.inputs(x())

    def edit(call: AttentionLogits) -> AttentionEdit | None:
        if call.map == 1:
            return AttentionEdit(query=call.query + 1)
        return AttentionEdit(query=call.query * 2, key=call.key * 3)

    with attach(model, {"attention_logit": edit}):
        found = model(x())
    repeats = HEADS // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1).clone(), v.repeat_interleave(repeats, 1)
    first = torch.tensor([True, True, False, False] if order == "halves" else [True, False] * 2)
    q = torch.where(first[None, :, None, None], q + 1, q * 2)
    k = torch.where(first[None, :, None, None], k, k * 3)
    torch.testing.assert_close(found, by_hand(q, k, v))


@torch.no_grad()
def test_softmax_outputs_of_a_model_that_multiplies_itself() -> None:
    model = Wrapped("softmax")
    q, k, v = model.attention.inputs(x())
    with attach(model, {"attention_logit": lambda c: AttentionEdit(probabilities=halved)}):
        torch.testing.assert_close(model(x()), by_hand(q, k, v, 0.5))
    both = AttentionEdit(probabilities=halved, logits=lambda tile: tile.logits * 2)
    with attach(model, {"attention_logit": lambda call: both}):
        torch.testing.assert_close(model(x()), by_hand(2 * q, k, v, 0.5))
    with (
        pytest.raises(ProbeError, match="q and k of attention cannot be replaced"),
        attach(model, {"attention_logit": lambda call: AttentionEdit(query=call.query)}),
    ):
        model(x())


@torch.no_grad()
def test_quantizers_of_a_model_that_multiplies_itself() -> None:
    model: Any = Wrapped("softmax")
    plain = model(x())
    with fake_quantized(model, Recipe.parse("logits3+probs3:row")) as quantizers:
        assert not torch.allclose(model(x()), plain, atol=1e-3)
    assert [seen.elements for seen in quantizers.fired.values()] == [BATCH * HEADS * TOKENS**2] * 2
    for recipe, name in (("qk8", "attention_query"), ("kv8", "cache_key")):
        with (
            pytest.raises(ProbeError, match=f"only their product is seen: '{name}/0/map 1'"),
            fake_quantized(model, Recipe.parse(recipe)),
        ):
            model(x())
    # of its values nothing can be seen: said, not passed over
    with (
        pytest.raises(ProbeError, match="a quantizer never fired: cache_value/0"),
        fake_quantized(model, Recipe.parse("kv8"), keep=["cache_key/0/map 1"]),
    ):
        model(x())


@torch.no_grad()
def test_both_halves_of_a_differential_layers_values(make_family: Any) -> None:
    model = make_family("diffllama_gqa")
    ids = torch.arange(24).reshape(2, 12)
    shares: dict[int, list[Tensor]] = {}

    def zero(visit: AttentionValue, part: int) -> Tensor | None:
        return torch.zeros_like(visit.tensor) if visit.part == part else None

    def keep(_module: Any, args: Any, index: int) -> None:
        shares.setdefault(index, []).append(args[0].clone())

    for part in (1, 2):
        handle = model.model.layers[0].self_attn.groupnorm.register_forward_pre_hook(
            lambda module, args, part=part: keep(module, args, part)
        )
        with attach(model, {"attention_value": lambda visit, part=part: zero(visit, part)}):
            model(input_ids=ids, use_cache=False)
        handle.remove()
    for part, other in ((1, 2), (2, 1)):
        halves = shares[part][0].chunk(2, dim=-1)
        assert not halves[part - 1].any() and halves[other - 1].any()


def test_record_qk_refuses_every_edit() -> None:
    class Reported(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            q, k, _ = self.attention.inputs(x)
            record_qk(self.attention, q, k, 1.0)
            return x

    model = Reported("sdpa")
    with (
        pytest.raises(ProbeError, match="can be looked at, not replaced"),
        attach(model, {"attention_logit": lambda call: AttentionEdit(key=call.key)}),
    ):
        model(x())
