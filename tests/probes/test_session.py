"""What a whole recording makes of maps, caches and repeated layers that the probes report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import quantkit
from quantkit.errors import ProbeError
from quantkit.outliers.session import record
from quantkit.probes import AttentionLogits, attach

HEADS, WIDTH, TOKENS = 2, 16, 6


class DiffAttention(nn.Module):
    """A differential attention in a kernel of its own, which says what it does map by map."""

    def __init__(self, first: dict[str, Any], second: dict[str, Any]) -> None:
        super().__init__()
        self.qk = nn.Linear(WIDTH, 4 * WIDTH)
        self.said = first, second

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        both = torch.zeros(len(x), HEADS, x.shape[1], x.shape[1])
        parts = self.qk(x).unflatten(-1, (4, HEADS, -1)).movedim(2, 0).transpose(2, 3)
        for said, factor, (q, k) in zip(self.said, (1.0, -0.3), parts.chunk(2), strict=True):
            quantkit.record_qk(self, q, k, 0.5, mask, **said)
            logits = (0.5 * q @ k.mT).masked_fill(~mask, -torch.inf)
            both = both + factor * F.softmax(logits, -1)
        self.effective = both
        return x


class Layer(nn.Module):
    def __init__(self, **said: Any) -> None:
        super().__init__()
        self.attn = DiffAttention({"map": 1, **said}, {"map": 2, "mix": -0.3, **said})

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x)


def test_two_maps_that_are_reported_one_by_one_have_an_effective_map() -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList([Layer(maps=2)])
    model = nn.Sequential(*layers)
    with torch.no_grad(), record(model, layers="0") as session:
        model(torch.randn(3, TOKENS, WIDTH))
    stats = session.stats()
    assert set(stats.points) >= {"attention_logit", "effective_map"}
    assert len(stats.differential) == 1
    effective = layers[0].attn.effective
    largest = max(
        group.abs_top["1"] for group in stats.points["effective_map"] if group.token_class == "all"
    )
    assert largest == pytest.approx(float(effective.abs().max()), rel=1e-5)


@pytest.mark.parametrize(
    ("first", "second", "word"),
    [
        ({"map": 1}, {"map": 2}, "pass maps=2 in both calls"),
        ({"map": 1}, {"map": 2, "maps": 2}, "pass the same maps"),
        ({"map": 1, "maps": 2}, {"maps": 2}, "without map"),
        ({"map": 3, "maps": 2}, {}, "1 <= map <= maps"),
    ],
)
def test_maps_that_do_not_fit_are_refused(
    first: dict[str, Any], second: dict[str, Any], word: str
) -> None:
    model = DiffAttention(first, second)
    with (
        pytest.raises(ProbeError, match=word),
        attach(model, {"attention_logit": lambda call: None}),
    ):
        model(torch.randn(1, TOKENS, WIDTH))


@pytest.fixture
def llama() -> Iterator[Any]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    yield LlamaForCausalLM(config)


def checkpoint(model: Any, use_reentrant: bool) -> None:
    """Turns gradient checkpointing on, by the name that transformers has for it."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": use_reentrant})


IDS = torch.arange(1, 13).reshape(2, 6)


@pytest.mark.kind(7, "probes", "stats")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_layer_that_checkpointing_repeats_is_counted_once(
    llama: Any, use_reentrant: bool
) -> None:
    checkpoint(llama.train(), use_reentrant)
    llama.enable_input_require_grads()
    points = ("attention_logit", "hidden_state", "linear_input", "mlp_down_input")
    runs: list[str] = []
    for layer in llama.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: runs.append("mlp"))
    with record(llama, points=points) as session:
        llama(IDS, labels=IDS).loss.backward()
    assert len(runs) == 4  # each was repeated
    assert llama.model.layers[0].self_attn.q_proj.weight.grad is not None
    hits = session.statistics.hits
    assert set(hits) == set(points)
    assert {calls for modules in hits.values() for calls, _ in modules.values()} == {1}
    elements = {n for name, (_, n) in hits["hidden_state"].items()}
    assert elements == {2 * 6 * 16}


@pytest.mark.kind(7, "probes", "stats")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_is_replaced_is_replaced_in_the_repeat_too(llama: Any, use_reentrant: bool) -> None:
    """Else the gradients are those of another forward, or the checkpoint's shapes differ."""
    points = {
        "attention_logit": lambda call: lambda tile: 0.5 * tile.logits,
        "linear_input": lambda visit: 0.5 * visit.tensor,
    }

    def gradients() -> list[Tensor]:
        llama.zero_grad()
        with attach(llama, points) as attachment:
            llama(IDS, labels=IDS).loss.backward()
        calls = {h.calls for modules in attachment.hits.values() for h in modules.values()}
        assert calls == {1}
        return [p.grad.clone() for p in llama.parameters() if p.grad is not None]

    llama.train()
    llama.enable_input_require_grads()
    expected = gradients()
    checkpoint(llama, use_reentrant)
    for one, two in zip(expected, gradients(), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")  # renamed in 5.40
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("fixed", [False, True])
def test_queries_behind_a_cache_know_where_they_stand(
    llama: Any, fixed: bool, implementation: str
) -> None:
    llama.eval().set_attn_implementation(implementation)
    cache = StaticCache(config=llama.config, max_cache_len=16) if fixed else None
    seen: list[tuple[int, int]] = []

    def see(call: AttentionLogits) -> None:
        if call.layer == 0:
            seen.append((call.query.shape[2], call.query_offset))

    mask = torch.ones_like(IDS)
    mask[1, :2] = 0
    with torch.no_grad(), attach(llama, {"attention_logit": see}):
        llama.generate(
            IDS,
            attention_mask=mask,
            past_key_values=cache,
            max_new_tokens=4,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert seen == [(6, 0), (1, 6), (1, 7), (1, 8)]
