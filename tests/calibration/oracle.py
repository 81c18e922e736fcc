"""What calibration should see, by brute force: hooks of the tests' own, one unpadded row at a time.

Every tensor is `[groups, elements]` a sample, with a flag for the elements of first tokens.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quantkit.calib_sets import TokenSlice
from quantkit.models import LoadedModel


def loaded_model(model: Any) -> LoadedModel:
    return LoadedModel(name="tiny", source="tiny", model=model, tokenizer=None, sha256="0" * 64)


def text(lengths: tuple[int, ...], seed: int = 2) -> TokenSlice:
    generator = torch.Generator().manual_seed(seed)
    # token 0 is what padding is filled with: it is left to the padding
    ids = tuple(torch.randint(1, 257, (n,), generator=generator) for n in lengths)
    return TokenSlice(
        source="random", source_sha256="0", ids=ids, seq_len=max(lengths), skip=0, bos="never"
    )


@dataclass
class Seen:
    """One tensor: by sample, values `[groups, n]` and whether they are of the first token."""

    samples: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = field(default_factory=list)

    def values(self, group: int, *, without_first: bool = False) -> np.ndarray[Any, Any]:
        parts = [x[group][~first] if without_first else x[group] for x, first in self.samples]
        return np.concatenate(parts)

    def moving(
        self, group: int, constant: float, *, without_first: bool = False
    ) -> tuple[float, float]:
        """The sequential recursion, over samples that have an element."""
        low = high = None
        for x, first in self.samples:
            row = (x[group][~first] if without_first else x[group]).astype(np.float64)
            if not len(row):
                continue
            if low is None or high is None:
                low, high = row.min(), row.max()
            else:
                low += constant * (row.min() - low)
                high += constant * (row.max() - high)
        assert low is not None and high is not None
        return float(low), float(high)


def brute_force(model: Any, data: TokenSlice) -> dict[str, Seen]:
    """Every point of a Llama or DiffLlama, from plain hooks and the eager attention function."""
    seen: dict[str, Seen] = {}
    current: dict[str, list[tuple[Tensor, Tensor]]] = {}
    handles = []

    def add(name: str, x: Tensor, first: Tensor) -> None:
        """x: `[groups, tokens, width]`; first: `[tokens, width]` or `[tokens, 1]`."""
        flags = first.expand(x.shape[1:]).flatten()
        current.setdefault(name, []).append((x.flatten(1), flags))

    def first_token(tokens: int) -> Tensor:
        return (torch.arange(tokens) == 0)[:, None]

    for name, module in model.model.named_modules():
        if isinstance(module, nn.Linear):

            def look(_module: Any, args: Any, out: Tensor, name: str = f"model.{name}") -> None:
                add(f"linear_input/{name}", args[0], first_token(args[0].shape[1]))
                add(f"linear_output/{name}", out, first_token(out.shape[1]))

            handles.append(module.register_forward_hook(look))
    layers = {}
    for index, layer in enumerate(model.model.layers):
        layers[id(layer.self_attn)] = index

        def output(_module: Any, _args: Any, out: Any, index: int = index) -> None:
            x = out[0] if isinstance(out, tuple) else out
            add(f"attention_output/model.layers.{index}.self_attn", x, first_token(x.shape[1]))

        handles.append(layer.self_attn.register_forward_hook(output))
    source = sys.modules[type(model).__module__]
    maps = 2 if model.config.model_type == "diffllama" else 1
    eager = source.eager_attention_forward
    calls: dict[int, int] = {}

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **kwargs: Any
    ) -> Any:
        index = layers[id(module)]
        part = calls[index] = calls.get(index, 0) + 1
        suffix = f"/part {part}" if part > 1 else ""
        tokens = query.shape[2]
        add(f"attention_value/{index}{suffix}", value[0], first_token(tokens))
        if part == 1:  # DiffLlama attends twice with the same q and k
            keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
            logits = (query @ keys.transpose(2, 3))[0] * kwargs["scaling"]
            valid = torch.ones(tokens, tokens, dtype=torch.bool).tril()
            weights = torch.softmax(logits.masked_fill(~valid, -torch.inf), -1)
            is_first = (torch.arange(tokens) == 0)[None].expand(tokens, tokens)[valid][None]
            parts = zip(
                logits.chunk(maps),
                weights.chunk(maps),
                query[0].chunk(maps),
                key[0].chunk(maps),
                strict=True,
            )
            for number, (logit, weight, q, k) in enumerate(parts, 1):
                slot = f"{index}/map {number}"
                add(f"attention_logit/{slot}", logit[:, valid][:, None], is_first)
                add(f"attention_probability/{slot}", weight[:, valid][:, None], is_first)
                add(f"attention_query/{slot}", q, first_token(tokens))
                add(f"attention_key/{slot}", k, first_token(tokens))
        return eager(module, query, key, value, *rest, **kwargs)

    before = model.config._attn_implementation
    source.eager_attention_forward = attention
    model.set_attn_implementation("eager")
    try:
        for block in data.ids:
            calls.clear()
            current.clear()
            with torch.no_grad():
                model(input_ids=block[None], use_cache=False)
            for name, parts in current.items():
                values = torch.cat([x for x, _ in parts], 1).numpy()
                flags = torch.cat([first for _, first in parts]).numpy()
                seen.setdefault(name, Seen()).samples.append((values, flags))
    finally:
        source.eager_attention_forward = eager
        model.set_attn_implementation(before)
        for handle in handles:
            handle.remove()
    return seen
