"""The smallest decoder around a differential layer: pre-norm, SwiGLU, RoPE inside the attention.

As Llama but for the attention, so that it can stand beside a Llama and a DiffLlama of one recipe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from quantkit.errors import InputError, suggest
from quantkit.models.differential.attention import (
    DiffAttention,
    DiffAttentionV2,
    checked_head_dim,
)

WEIGHT_STD: Final = 0.02
"""Standard deviation of a new weight: transformers' `initializer_range` of Llama and DiffLlama."""
_WIDE: Final = {"v1": 2, "v2": 1}
"""Width of what a head gives, in head_dim."""


@dataclass(frozen=True, kw_only=True)
class DiffSizes:
    """What a `DiffDecoder` is made of.

    Attributes:
        attention: `v1` is `DiffAttention`, `v2` is `DiffAttentionV2`.
        num_heads: Heads that leave the attention: pairs of width 2d in V1, heads of width d in V2;
            a Transformer of this width has twice as many as V1, as many as V2.
        num_kv_heads: The same for keys and values; default `num_heads`.
        head_dim: d; default what makes the heads together as wide as `hidden_size`.
        norm_eps: Of the decoder's norms; the norm inside V1 keeps its own.
        tie_embeddings: The logits are made with the token embeddings.

    Raises:
        InputError: the sizes do not fit each other.
    """

    attention: Literal["v1", "v2"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    causal: bool = True
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.attention not in _WIDE:
            raise InputError(
                f"unknown attention {self.attention!r}.{suggest(str(self.attention), _WIDE)}"
            )
        for name in ("vocab_size", "intermediate_size", "num_layers"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}.")
        kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        wide = _WIDE[self.attention]
        checked_head_dim(self.hidden_size, self.num_heads, kv_heads, self.head_dim, maps_wide=wide)


class DiffDecoder(nn.Module):
    """A language model of differential layers: tokens in, logits out; new weights are random."""

    def __init__(self, sizes: DiffSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.layers = nn.ModuleList(DiffDecoderLayer(sizes, n) for n in range(sizes.num_layers))
        self.norm = nn.RMSNorm(sizes.hidden_size, eps=sizes.norm_eps)
        self.lm_head = nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False)
        if sizes.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=WEIGHT_STD)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Returns logits, `[batch, token, vocab_size]`.

        Args:
            tokens: Ids, `[batch, token]`.
            attention_mask: `[batch, token]`, zero or False where a token is padding.
        """
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask)
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits


class DiffDecoderLayer(nn.Module):
    """Attention and a SwiGLU MLP, each after an RMSNorm and added to what came in.

    Args:
        depth: Index of the layer, from 0.
    """

    def __init__(self, sizes: DiffSizes, depth: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(sizes.hidden_size, eps=sizes.norm_eps)
        self.self_attn = _attention(sizes, depth)
        self.post_attention_layernorm = nn.RMSNorm(sizes.hidden_size, eps=sizes.norm_eps)
        self.mlp = SwiGLU(sizes.hidden_size, sizes.intermediate_size)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Returns the hidden state, `[batch, token, hidden_size]`, after both additions."""
        attended: Tensor = self.self_attn(self.input_layernorm(hidden), attention_mask)
        hidden = hidden + attended
        changed: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + changed


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))` (arXiv 2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns `[batch, token, hidden_size]`."""
        changed: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return changed


def _attention(sizes: DiffSizes, depth: int) -> DiffAttention | DiffAttentionV2:
    if sizes.attention == "v1":
        return DiffAttention(
            hidden_size=sizes.hidden_size,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            rope_theta=sizes.rope_theta,
            causal=sizes.causal,
            depth=depth,
        )
    return DiffAttentionV2(
        hidden_size=sizes.hidden_size,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        rope_theta=sizes.rope_theta,
        causal=sizes.causal,
    )
