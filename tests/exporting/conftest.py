"""Three tiny models, each exported once; ranges seen on their own batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from quantkit.exporting import export_float
from quantkit.models import projection_modules
from quantkit.probes import Activation, AttentionLogits, attach
from quantkit.results import Range

VOCABULARY = 128


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenBatch:
    input_ids: Tensor
    attention_mask: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Exported:
    """A model, its float graph, two batches, and the ranges seen on them."""

    model: PreTrainedModel
    path: Path
    batches: list[TokenBatch]
    ranges: dict[str, Range]

    @property
    def linears(self) -> dict[str, torch.nn.Module]:
        return dict(projection_modules(self.model))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return logits


def batch(rows: int, tokens: int, *, seed: int, padding: int = 0) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, tokens), generator=generator)
    mask = torch.ones(rows, tokens, dtype=torch.bool)
    if padding:
        mask[-1, -padding:] = False
    return TokenBatch(input_ids=ids, attention_mask=mask)


def tiny(kind: str) -> PreTrainedModel:
    """A random model with weights large enough for its logits to differ."""
    torch.manual_seed(7)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
    }
    model: PreTrainedModel
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    elif kind == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_positions=256,
                n_embd=64,
                n_layer=2,
                n_head=4,
                initializer_range=0.15,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
        with torch.no_grad():  # a new model's biases are 0
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.1)
    else:
        model = DiffLlamaForCausalLM(DiffLlamaConfig(**sizes))
    model.set_attn_implementation("sdpa")
    return model.eval().requires_grad_(False)


def seen_ranges(model: PreTrainedModel, batches: list[TokenBatch]) -> dict[str, Range]:
    """Min-max over valid positions: a number for inputs, a list over heads for logits."""
    low: dict[str, Tensor] = {}
    high: dict[str, Tensor] = {}

    def update(name: str, lo: Tensor, hi: Tensor) -> None:
        low[name] = torch.minimum(low[name], lo) if name in low else lo
        high[name] = torch.maximum(high[name], hi) if name in high else hi

    def look_at_input(visit: Activation) -> None:
        kept = visit.tensor[visit.real]
        update(f"linear_input/{visit.name}", kept.min(), kept.max())

    def look_at_logits(call: AttentionLogits) -> None:
        for tile in call.tiles():
            lo = tile.logits.masked_fill(~tile.valid, torch.inf).amin((0, 2, 3))
            hi = tile.logits.masked_fill(~tile.valid, -torch.inf).amax((0, 2, 3))
            update(f"attention_logit/{call.layer}/map {call.map}", lo, hi)

    with (
        torch.no_grad(),
        attach(model, {"linear_input": look_at_input, "attention_logit": look_at_logits}),
    ):
        for each in batches:
            model(input_ids=each.input_ids, attention_mask=each.attention_mask, use_cache=False)
    return {
        name: Range(
            lo=low[name].tolist(),
            hi=high[name].tolist(),
            method="minmax",
            granularity="head" if low[name].ndim else "tensor",
            count=1,
            point=name.split("/")[0],
        )
        for name in low
    }


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    known: dict[str, Exported] = {}

    def get(kind: str) -> Exported:
        if kind not in known:
            model = tiny(kind)
            batches = [batch(3, 24, seed=1, padding=7), batch(2, 17, seed=2)]
            known[kind] = Exported(
                model=model,
                path=export_float(model, tmp_path_factory.mktemp(kind)),
                batches=batches,
                ranges=seen_ranges(model, batches),
            )
        return known[kind]

    return get
