"""A small DIFF V2, and the whole of it in numpy: head by head, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit.models import DiffV2Config, DiffV2ForCausalLM

Array = NDArray[np.float64]
Edit = Callable[[Array, int], Array]
"""Changes one layer's and map's logits, `[heads, query, key]`."""

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "rope_theta": 500.0,
}


def make_v2(**changes: Any) -> DiffV2ForCausalLM:
    """Sharp maps, norms that are not 1, lambda far from 1/2: no swap goes unseen."""
    torch.manual_seed(8)
    model = DiffV2ForCausalLM(DiffV2Config(**SIZES | changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 2)
            elif "lambda" in name or "_proj" in name:
                parameter.mul_(15)
    return model


def weight(model: Any, name: str) -> Array:
    return model.state_dict()[name].double().numpy()


def normed(x: Array, gain: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain


def turned(x: Array, theta: float) -> Array:
    """RoPE as a complex factor of neighbouring components: `[token, d]`."""
    d = x.shape[1]
    z = x[:, 0::2] + 1j * x[:, 1::2]
    z *= np.exp(1j * np.arange(len(x))[:, None] * theta ** (-np.arange(0, d, 2) / d))
    return np.stack((z.real, z.imag), -1).reshape(x.shape)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def numpy_logits(model: DiffV2ForCausalLM, row: Tensor, edit: Edit | None = None) -> Array:
    """Logits of one sequence, `[token, vocabulary]`."""
    c = model.config
    d, pairs, groups = c.head_dim, c.num_attention_heads // 2, c.num_key_value_heads
    hidden = weight(model, "model.embed_tokens.weight")[row.numpy()]
    seen = np.tril(np.ones((len(row), len(row)), dtype=bool))
    for n in range(c.num_hidden_layers):

        def of(name: str, n: int = n) -> Array:
            return weight(model, f"model.layers.{n}.{name}.weight")

        x = normed(hidden, of("input_layernorm"), c.rms_norm_eps)
        q, k, v = (x @ of(f"self_attn.{name}_proj").T for name in "qkv")
        lam = 1 / (1 + np.exp(-x @ of("self_attn.lambda_proj").T))

        def head(x: Array, h: int) -> Array:
            return x[:, h * d : (h + 1) * d]

        maps = []
        for which in (0, 1):
            s = [
                turned(head(q, 2 * h + which), c.rope_theta)
                @ turned(head(k, h // (pairs // groups)), c.rope_theta).T
                / np.sqrt(d)
                for h in range(pairs)
            ]
            logits = np.stack(s)
            logits = logits if edit is None else edit(logits, which + 1)
            maps.append(softmax(np.where(seen, logits, -np.inf)))
        mixed = [
            (maps[0][h] - lam[:, h : h + 1] * maps[1][h]) @ head(v, h // (pairs // groups))
            for h in range(pairs)
        ]
        hidden = hidden + np.concatenate(mixed, 1) @ of("self_attn.o_proj").T
        x = normed(hidden, of("post_attention_layernorm"), c.rms_norm_eps)
        gate = x @ of("mlp.gate_proj").T
        up = x @ of("mlp.up_proj").T
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ of("mlp.down_proj").T
    final = normed(hidden, weight(model, "model.norm.weight"), c.rms_norm_eps)
    return final @ weight(model, "lm_head.weight").T


def nll(logits: Array, row: Tensor) -> float:
    """Summed over predicted tokens, nats."""
    p = softmax(logits[:-1])
    return -float(np.log(p[np.arange(len(p)), row[1:].numpy()]).sum())
