"""A tiny Llama with one planted outlier channel, its ranges, and text beside theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from quantkit.calib_sets import TokenSlice
from quantkit.models import LoadedModel
from quantkit.probes import Activation, AttentionLogits, attach
from quantkit.results import Range, Ranges

PLANTED = "model.layers.1.mlp.down_proj"
SEQ_LEN = 16


def token_slice(seed: int, lengths: tuple[int, ...]) -> TokenSlice:
    generator = torch.Generator().manual_seed(seed)
    ids = tuple(torch.randint(0, 257, (n,), generator=generator) for n in lengths)
    return TokenSlice(
        source="random", source_sha256="0", ids=ids, seq_len=SEQ_LEN, skip=0, bos="never"
    )


def plant(model: Any) -> None:
    """Makes one channel of what enters `PLANTED` 3000 times larger, and its weight smaller."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name or "lm_head" in name:
                parameter.mul_(8)
        mlp = model.get_submodule(PLANTED.rpartition(".")[0])
        mlp.up_proj.weight[5] *= 3000
        mlp.down_proj.weight[:, 5] /= 3000


def minmax_ranges(loaded: LoadedModel, text: TokenSlice) -> Ranges:
    """Min-max of linear inputs, and of logits by head, over some blocks; without calibration."""
    found: dict[str, list[list[float]]] = {}

    def update(name: str, lo: torch.Tensor, hi: torch.Tensor) -> None:
        old = found.get(name, [[float("inf")] * len(lo), [-float("inf")] * len(hi)])
        found[name] = [
            [min(a, float(b)) for a, b in zip(old[0], lo, strict=True)],
            [max(a, float(b)) for a, b in zip(old[1], hi, strict=True)],
        ]

    def see_input(visit: Activation) -> None:
        update(f"linear_input/{visit.name}", visit.tensor.amin()[None], visit.tensor.amax()[None])

    def see_logits(call: AttentionLogits) -> None:
        for tile in call.tiles():
            lo = tile.logits.masked_fill(~tile.valid, torch.inf).amin((0, 2, 3))
            hi = tile.logits.masked_fill(~tile.valid, -torch.inf).amax((0, 2, 3))
            update(f"attention_logit/{call.layer}/map {call.map}", lo, hi)

    points: dict[str, Any] = {"linear_input": see_input, "attention_logit": see_logits}
    with torch.inference_mode(), attach(loaded.model, points):
        for block in text.ids:
            loaded.model(input_ids=block[None])
    tensors = {}
    for name, (lo, hi) in found.items():
        is_logit = name.startswith("attention_logit")
        tensors[name] = Range(
            lo=lo if is_logit else lo[0],
            hi=hi if is_logit else hi[0],
            method="minmax",
            granularity="head" if is_logit else "tensor",
            count=1,
            point=name.split("/")[0],
        )
    return Ranges(
        model=loaded.info(),
        data=text.info(1),
        method="minmax",
        environment={},
        tensors=tensors,
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    loaded: LoadedModel
    text: TokenSlice
    ranges: Ranges


@pytest.fixture
def case(tiny_llama: LlamaForCausalLM) -> Case:
    plant(tiny_llama)
    loaded = LoadedModel(
        name="tiny", source="tiny", model=tiny_llama, tokenizer=None, sha256="0" * 64
    )
    ranges = minmax_ranges(loaded, token_slice(1, (SEQ_LEN,) * 4))
    return Case(loaded=loaded, text=token_slice(2, (16, 9, 16, 12, 2)), ranges=ranges)
