"""A second implementation of the statistics: it stores everything and shares no code with ours."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


@dataclass
class Stored:
    """Everything of some sequences, each run alone and without padding.

    Attributes:
        logits: By sequence, layer and (map, head): float64 `[query, key]`, masked ones included.
        states: By sequence and layer: float64 `[position, channel]`.
        window: Sliding window, or None.
        lambdas: One a layer for differential attention.
    """

    logits: list[list[dict[tuple[int, int], np.ndarray]]]
    states: list[list[np.ndarray]]
    window: int | None
    lambdas: list[float] = field(default_factory=list)

    @property
    def layers(self) -> int:
        return len(self.states[0])

    @property
    def heads(self) -> list[tuple[int, int]]:
        """The (map, head) pairs of a layer."""
        return sorted(self.logits[0][0])

    def mask(self, length: int) -> np.ndarray:
        """Which (query, key) a causal, maybe windowed, model sees."""
        seen = np.zeros((length, length), dtype=bool)
        for query in range(length):
            for key in range(query + 1):
                seen[query, key] = self.window is None or query - key < self.window
        return seen

    def entries(self, layer: int, map_: int, head: int, token_class: str) -> np.ndarray:
        """All valid logits of one group."""
        parts = []
        for sequence in self.logits:
            logits = sequence[layer][map_, head]
            seen = self.mask(len(logits))
            if token_class != "all":
                seen[0, 0] = False
            if token_class == "first":
                seen[:, 1:] = False
            if token_class == "others":
                seen[:, 0] = False
            parts.append(logits[seen])
        return np.concatenate(parts)

    def largest(self, sequence: int, layer: int, map_: int, head: int) -> float:
        """The largest valid |logit| of one sequence and head."""
        logits = self.logits[sequence][layer][map_, head]
        return float(np.abs(logits[self.mask(len(logits))]).max())

    def state_entries(self, layer: int, token_class: str) -> np.ndarray:
        """All hidden-state elements of one layer and class of tokens."""
        kept = {"all": slice(None), "first": slice(1), "others": slice(1, None)}[token_class]
        return np.concatenate([states[layer][kept].ravel() for states in self.states])

    def sink_rate(self) -> float:
        """Share of (sequence, layer, head) with a mean share of the first token above 0.3."""
        above = []
        for sequence in self.logits:
            length = len(sequence[0][self.heads[0]])
            if length < 2:
                continue
            for layer, maps in enumerate(sequence):
                for head in sorted({head for _, head in maps}):
                    attention = self._softmax(maps[1, head])
                    if self.lambdas:
                        attention -= self.lambdas[layer] * self._softmax(maps[2, head])
                    size = np.abs(attention[1:64])
                    above.append((size[:, 0] / size.sum(1)).mean() > 0.3)
        return float(np.mean(above))

    def _softmax(self, logits: np.ndarray) -> np.ndarray:
        masked = np.where(self.mask(len(logits)), logits, -np.inf)
        weights = np.exp(masked - masked.max(1, keepdims=True))
        return weights / weights.sum(1, keepdims=True)


def store(model: Any, rows: list[torch.Tensor]) -> Stored:
    """Runs each row alone and recomputes q and k after RoPE from the projections' outputs."""
    config = model.config
    maps = 2 if config.model_type == "diffllama" else 1
    base, seen = model.model, {}
    handles = [base.rotary_emb.register_forward_hook(lambda m, a, out: seen.update(rope=out))]
    for index, layer in enumerate(base.layers):
        for name in ("q_proj", "k_proj"):
            module = getattr(layer.self_attn, name)
            handles.append(
                module.register_forward_hook(
                    lambda m, a, out, slot=(name, index): seen.update({slot: out})
                )
            )
        handles.append(
            layer.register_forward_hook(
                lambda m, a, out, index=index: seen.update(
                    {("state", index): out[0] if isinstance(out, tuple) else out}
                )
            )
        )
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    logits, states = [], []
    for row in rows:
        seen.clear()
        with torch.no_grad():
            model(row[None])
        by_layer, by_state = [], []
        for index in range(len(base.layers)):
            query, key = (
                seen[name, index].view(1, len(row), -1, width).transpose(1, 2)
                for name in ("q_proj", "k_proj")
            )
            query, key = (
                part[0].numpy() for part in apply_rotary_pos_emb(query, key, *seen["rope"])
            )
            per_map, per_key = len(query) // maps, len(query) // len(key)
            by_layer.append(
                {
                    (head // per_map + 1, head % per_map): query[head].astype(np.float64)
                    @ key[head // per_key].astype(np.float64).T
                    / math.sqrt(width)
                    for head in range(len(query))
                }
            )
            by_state.append(seen["state", index][0].numpy().astype(np.float64))
        logits.append(by_layer)
        states.append(by_state)
    for handle in handles:
        handle.remove()
    lambdas = []
    if maps == 2:
        for index, layer in enumerate(base.layers):
            part = {
                name: getattr(layer.self_attn, f"lambda_{name}").detach().numpy().astype(np.float64)
                for name in ("q1", "k1", "q2", "k2")
            }
            initial = 0.8 - 0.6 * math.exp(-0.3 * index)
            one, two = part["q1"] @ part["k1"], part["q2"] @ part["k2"]
            lambdas.append(math.exp(one) - math.exp(two) + initial)
    window = config.sliding_window if config.model_type == "mistral" else None
    return Stored(logits=logits, states=states, window=window, lambdas=lambdas)


@pytest.fixture(scope="session")
def brute_force() -> Any:
    """`brute_force(model, rows)` -> `Stored`."""
    return store
