"""The decoder: DiffLlama's with V1, causal, trainable, and one error for bad sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import DiffLlamaForCausalLM

from quantkit.errors import InputError
from quantkit.models.differential import DiffDecoder, DiffSizes, from_diffllama, lambda_init

HIDDEN, HEADS = 32, 4


SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_layers": 2,
    "num_heads": HEADS,
    "num_kv_heads": 2,
}
KINDS = pytest.mark.parametrize("kind", ("v1", "v2"))


def decoder(kind: Any, **changes: Any) -> DiffDecoder:
    torch.manual_seed(6)
    return DiffDecoder(DiffSizes(attention=kind, **SIZES | changes))


def test_the_decoder_is_diffllama_with_v1(tiny_diffllama: DiffLlamaForCausalLM) -> None:
    config = tiny_diffllama.config
    ours = DiffDecoder(
        DiffSizes(
            attention="v1",
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads // 2,
            num_kv_heads=config.num_key_value_heads // 2,
        )
    )
    state = {name.removeprefix("model."): p for name, p in tiny_diffllama.state_dict().items()}
    for n in range(config.num_hidden_layers):
        prefix = f"layers.{n}.self_attn."
        names = [name for name in state if name.startswith(prefix)]
        part = from_diffllama({name.removeprefix(prefix): state.pop(name) for name in names})
        state |= {prefix + name: p for name, p in part.items()}
    ours.load_state_dict(state)
    tokens = torch.arange(18).view(2, 9)

    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), tiny_diffllama(tokens).logits, rtol=0, atol=1e-5)


@KINDS
def test_the_decoder_looks_back_only(kind: str) -> None:
    model = decoder(kind)
    tokens = torch.arange(10)[None]
    changed = tokens.clone()
    changed[0, 6] = 30

    with torch.no_grad():
        before, after = model(tokens), model(changed)

    assert before.shape == (1, 10, 31)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert (before[:, 6:] - after[:, 6:]).abs().amax(-1).min() > 1e-4


@KINDS
def test_the_decoder_learns(kind: str) -> None:
    model = decoder(kind, tie_embeddings=True)
    assert model.lm_head.weight is model.embed_tokens.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 31, (2, 12))
    losses = []
    for _ in range(15):
        loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))

    assert losses[0] == pytest.approx(np.log(31), abs=0.3)
    assert losses[-1] < losses[0] / 2


def test_depth_sets_each_layers_lambda() -> None:
    starts = [layer.self_attn.lambda_init for layer in decoder("v1", num_layers=3).layers]

    assert starts == [lambda_init(0), lambda_init(1), lambda_init(2)]


@pytest.mark.parametrize(
    ("changes", "said"),
    (
        ({"num_kv_heads": 3}, "multiple of num_kv_heads, got 4 and 3"),
        ({"num_kv_heads": 0}, "num_kv_heads must be at least 1, got 0"),
        ({"num_heads": -1}, "num_heads must be at least 1, got -1"),
        ({"hidden_size": 36}, r"hidden_size must be a multiple of 8 .*got 36"),
        ({"hidden_size": 24}, r"head_dim must be even and positive .*got 3"),
        ({"head_dim": 5}, r"head_dim must be even and positive .*got 5"),
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"attention": "v3"}, "unknown attention 'v3'.*v1, v2"),
    ),
)
def test_bad_sizes_are_one_error(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        DiffSizes(**{"attention": "v1"} | SIZES | changes)
