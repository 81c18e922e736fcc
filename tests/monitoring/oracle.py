"""Tiny models, and a second implementation of the figures: it stores all and loops over entries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

VOCAB = 61


def make_model(family: str, **changes: Any) -> Any:
    """A model in training mode whose heads and layers differ so much that no swap goes unseen."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    torch.manual_seed(5)
    if family == "diffllama":
        model: Any = DiffLlamaForCausalLM(DiffLlamaConfig(**sizes | changes))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes | changes))
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.k_proj.weight.mul_(9)
            heads = layer.self_attn.q_proj.weight.view(4, 8, 32)
            heads.mul_(torch.tensor([3.0, 12.0, 1.0, 30.0])[:, None, None] * (1 + index))
    return model.train()


def checkpoint(model: Any, *, use_reentrant: bool) -> None:
    """Turns gradient checkpointing on, by the name that transformers has for it."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": use_reentrant})


def make_batch(seed: int, *, rows: int = 3, length: int = 9, padded: bool = False) -> Any:
    """Token ids, labels and, where padded, a mask: one row padded on the left, one on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (rows, length), generator=generator)
    batch = {"input_ids": ids, "labels": ids}
    if padded:
        mask = torch.ones(rows, length, dtype=torch.long)
        mask[0, :3] = 0
        mask[1, -2:] = 0
        batch["attention_mask"] = mask
    return batch


def real_rows(batch: Any) -> list[torch.Tensor]:
    """The sequences of a batch without their padding."""
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    return [ids[kept] for ids, kept in zip(batch["input_ids"], mask, strict=True)]


def figures(model: Any, batches: list[Any]) -> dict[str, Any]:
    """`logits[layer, map]`: list of valid logits by head; `hidden[layer]`: states by sequence.

    Each sequence runs alone and without padding; q and k come from the projections' outputs.
    """
    maps = 2 if model.config.model_type == "diffllama" else 1
    seen: dict[Any, torch.Tensor] = {}
    handles = [model.model.rotary_emb.register_forward_hook(lambda m, a, o: seen.update(rope=o))]
    for index, layer in enumerate(model.model.layers):
        for slot, module in (
            ("q", layer.self_attn.q_proj), ("k", layer.self_attn.k_proj), ("h", layer)
        ):  # fmt: skip
            handles.append(
                module.register_forward_hook(
                    lambda m, a, o, key=(slot, index): seen.update(
                        {key: o[0] if isinstance(o, tuple) else o}
                    )
                )
            )
    logits: dict[tuple[int, int], list[list[float]]] = {}
    hidden: dict[int, list[np.ndarray]] = {}
    for row in (row for batch in batches for row in real_rows(batch)):
        with torch.no_grad():
            model(input_ids=row[None])
        for index in range(len(model.model.layers)):
            query, key = (
                seen[slot, index].view(1, len(row), -1, 8).transpose(1, 2) for slot in ("q", "k")
            )
            query, key = (x[0].numpy() for x in apply_rotary_pos_emb(query, key, *seen["rope"]))
            for head in range(4):
                per_map = 4 // maps
                slots = logits.setdefault(
                    (index, head // per_map + 1), [[] for _ in range(per_map)]
                )
                for i in range(len(row)):
                    for j in range(i + 1):
                        dot = float(query[head, i].astype(np.float64) @ key[head // 2, j])
                        slots[head % per_map].append(dot / math.sqrt(8))
            hidden.setdefault(index, []).append(seen["h", index][0].double().numpy())
    for handle in handles:
        handle.remove()
    return {"logits": logits, "hidden": hidden}


def assert_line(step: Any, oracle: dict[str, Any], *, rel: float = 2e-5) -> None:
    """The recorded line says what the brute force found."""
    assert [(c.layer, c.map) for c in step.logits] == sorted(oracle["logits"])
    for curve in step.logits:
        heads = oracle["logits"][curve.layer, curve.map]
        flat = [value for head in heads for value in head]
        assert curve.max == pytest.approx(max(flat), rel=rel)
        assert curve.min == pytest.approx(min(flat), rel=rel)
        assert curve.abs_max == pytest.approx(max(map(abs, flat)), rel=rel)
        peaks = [max(map(abs, head)) for head in heads]
        assert curve.head == peaks.index(max(peaks))
        assert curve.nan == 0
    assert [c.layer for c in step.hidden] == sorted(oracle["hidden"])
    for state in step.hidden:
        sequences = oracle["hidden"][state.layer]
        x = np.concatenate([sequence.ravel() for sequence in sequences])
        off = x - x.mean()
        peaks = [np.abs(sequence).max() for sequence in sequences]
        assert state.abs_max == pytest.approx(np.abs(x).max(), rel=rel)
        assert state.inf_norm_mean == pytest.approx(np.mean(peaks), rel=rel)
        assert state.kurtosis == pytest.approx((off**4).mean() / (off**2).mean() ** 2, rel=rel)
        assert state.nan == 0
