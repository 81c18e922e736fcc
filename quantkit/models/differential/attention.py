"""The differential attention layers of microsoft/unilm, written from their equations.

V1 is the paper's (Differential Transformer, arXiv 2410.05258v2, equations 1 to 3):

    head   = (softmax(Q1 K1^T / sqrt d) - lambda softmax(Q2 K2^T / sqrt d)) V         (1)
    lambda = exp(lq1 . lk1) - exp(lq2 . lk2) + lambda_init                            (2)
    out    = Concat_i((1 - lambda_init) RMSNorm(head_i)) W^O                          (3)

V2 (microsoft/unilm, Diff-Transformer/Diff-Transformer-V2) is what an ordinary attention kernel can
do in one call: V is as wide as Q, both maps of a head have the same keys, lambda is a sigmoid of
the token, and no norm follows.

How these differ from transformers' DiffLlama: there the heads of map 1 come first and those of
map 2 after them, here the two maps of a pair stand side by side (heads 2i and 2i+1); there RoPE
turns the components (j, j + d/2), here (2j, 2j+1); there the norm has no gain, here it has one.
`conversion` says it as a permutation. Parameters are named as unilm names them.
"""

from __future__ import annotations

import math
from typing import ClassVar, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantkit.errors import InputError, ProbeError
from quantkit.models.families import AttentionLayout

LAMBDA_STD: Final = 0.1
"""Standard deviation of the four lambda vectors at the start (section 2.1 of the paper)."""
HEAD_NORM_EPS: Final = 1e-5
"""What the norm of a pair adds to the mean square (unilm)."""


def lambda_init(depth: int) -> float:
    """Returns `0.8 - 0.6 exp(-0.3 depth)`; the first layer has depth 0 (the paper's l - 1)."""
    return 0.8 - 0.6 * math.exp(-0.3 * depth)


class DiffAttention(nn.Module):
    """Differential attention, unilm's layout: pair i is heads 2i and 2i+1 of queries and keys.

    With `num_kv_heads < num_heads`, map m of pair i attends to map m of key pair
    `i // (num_heads / num_kv_heads)`, as in unilm's flash files (its naive file differs).

    Args:
        num_heads: Pairs h, half the heads of a Transformer with the same `head_dim`.
        num_kv_heads: Pairs of key heads, each with one value head of width 2d; default h.
        depth: Index of the layer, from 0.
        head_dim: d, the width of one query head; default `hidden_size / 2h`.
        causal: A query sees itself and what is before it.

    Raises:
        InputError: the sizes do not fit each other.
    """

    attention_layout: ClassVar[AttentionLayout] = AttentionLayout(maps=2, order="interleaved")

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        depth: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rope_theta: float = 10_000.0,
        causal: bool = True,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_dim = checked_head_dim(hidden_size, num_heads, num_kv_heads, head_dim, maps_wide=2)
        if depth < 0:
            raise InputError(f"depth is the layer's index from 0, got {depth}.")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.rope_theta, self.is_causal = rope_theta, causal
        self.lambda_init = lambda_init(depth)
        self.q_proj = nn.Linear(hidden_size, 2 * num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, 2 * num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * 2 * head_dim, bias=False)
        self.out_proj = nn.Linear(num_heads * 2 * head_dim, hidden_size, bias=False)
        self.lambda_q1 = _lambda_vector(head_dim)
        self.lambda_k1 = _lambda_vector(head_dim)
        self.lambda_q2 = _lambda_vector(head_dim)
        self.lambda_k2 = _lambda_vector(head_dim)
        self.subln = nn.RMSNorm(2 * head_dim, eps=HEAD_NORM_EPS, elementwise_affine=True)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Returns `[batch, token, hidden_size]`.

        Args:
            hidden: `[batch, token, hidden_size]`.
            attention_mask: `[batch, token]`, zero or False where a token is padding; what comes
                back for such a token has no meaning, but is finite.
        """
        h, g, d = self.num_heads, self.num_kv_heads, self.head_dim
        query = rotated(_heads(self.q_proj(hidden), 2 * h), self.rope_theta)
        key = rotated(_heads(self.k_proj(hidden), 2 * g), self.rope_theta)
        value = _heads(self.v_proj(hidden), g)
        # A pair of key heads is repeated as a pair: q-head 2i+m meets k-head 2(i // (h/g)) + m,
        # which SDPA's own grouping (head // (h/g)) would not give.
        key = torch.stack((key[:, 0::2], key[:, 1::2]), dim=2)  # [batch, g, map, key, d]
        key = key.repeat_interleave(h // g, dim=1).flatten(1, 2)
        value = value.repeat_interleave(2 * h // g, dim=1)
        both = _attention(query, key, value, self.is_causal, attention_mask)
        pairs = both[:, 0::2] - self._lambda() * both[:, 1::2]  # (1), [batch, h, query, 2d]
        normed = self.subln(pairs) * (1 - self.lambda_init)
        joined: Tensor = self.out_proj(normed.transpose(1, 2).reshape(*hidden.shape[:2], h * 2 * d))
        return joined  # (3)

    def differential_lambda(self) -> float:
        """Returns lambda, equation 2; the layer has one."""
        return float(self._lambda().detach())

    def _lambda(self) -> Tensor:
        first = (_wide(self.lambda_q1) * _wide(self.lambda_k1)).sum().exp()
        second = (_wide(self.lambda_q2) * _wide(self.lambda_k2)).sum().exp()
        return first - second + self.lambda_init


class DiffAttentionV2(nn.Module):
    """Differential attention V2: head i is query heads 2i and 2i+1 over the same keys and values.

        out_i = attn_2i - sigmoid(x W^lambda)_i attn_2i+1

    Args:
        num_heads: Heads h that leave the layer, as many as a Transformer's; 2h query heads.
        num_kv_heads: Heads of keys and of values; default h.
        head_dim: d, the width of every head; default `hidden_size / h`.
        causal: A query sees itself and what is before it.

    Raises:
        InputError: the sizes do not fit each other.
    """

    attention_layout: ClassVar[AttentionLayout] = AttentionLayout(
        maps=2, order="interleaved", shared_keys=True
    )

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rope_theta: float = 10_000.0,
        causal: bool = True,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_dim = checked_head_dim(hidden_size, num_heads, num_kv_heads, head_dim, maps_wide=1)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.rope_theta, self.is_causal = rope_theta, causal
        self.q_proj = nn.Linear(hidden_size, 2 * num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.lambda_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self._current_lambda: Tensor | None = None

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Returns `[batch, token, hidden_size]`; the arguments are those of `DiffAttention`."""
        h, g, d = self.num_heads, self.num_kv_heads, self.head_dim
        query = rotated(_heads(self.q_proj(hidden), 2 * h), self.rope_theta)
        key = rotated(_heads(self.k_proj(hidden), g), self.rope_theta)
        value = _heads(self.v_proj(hidden), g)
        token_lambda = self.lambda_of(hidden)
        self._current_lambda = token_lambda.detach()
        try:
            # Query head 2i+m meets k-head (2i+m) // (2h/g) = i // (h/g): the same for both maps.
            both = _attention(query, key, value, self.is_causal, attention_mask)
        finally:
            self._current_lambda = None
        heads = both[:, 0::2] - token_lambda[..., None] * both[:, 1::2]  # [batch, h, query, d]
        joined: Tensor = self.o_proj(heads.transpose(1, 2).reshape(*hidden.shape[:2], h * d))
        return joined

    def lambda_of(self, hidden: Tensor) -> Tensor:
        """Returns lambda of each head and token, `[batch, heads, query]`, between 0 and 1."""
        return torch.sigmoid(self.lambda_proj(hidden)).transpose(1, 2)

    def differential_lambda(self) -> Tensor:
        """Returns lambda of the forward that is under way, `[batch, heads, query]`, detached.

        It is there while the attention function runs, for whoever stands in for that function.

        Raises:
            ProbeError: no forward is under way.
        """
        if self._current_lambda is None:
            raise ProbeError(
                "DIFF V2's lambda belongs to the tokens of one forward, and none is under way: "
                "ask inside the attention call, or call lambda_of(hidden)."
            )
        return self._current_lambda


def checked_head_dim(
    hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int | None, *, maps_wide: int
) -> int:
    """Returns the width d of one query head.

    Args:
        maps_wide: Width of what one head gives, in d: 2 for V1, 1 for V2.

    Raises:
        InputError: the sizes do not fit each other.
    """
    sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    for name, size in sizes.items():
        if size < 1:
            raise InputError(f"{name} must be at least 1, got {size}.")
    if num_heads % num_kv_heads:
        raise InputError(
            f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}."
        )
    if head_dim is None:
        if hidden_size % (num_heads * maps_wide):
            raise InputError(
                f"hidden_size must be a multiple of {num_heads * maps_wide} ({num_heads} heads, "
                f"{maps_wide} x head_dim wide), got {hidden_size}: change it, or give head_dim."
            )
        head_dim = hidden_size // (num_heads * maps_wide)
    if head_dim < 2 or head_dim % 2:
        raise InputError(f"head_dim must be even and positive (RoPE turns pairs), got {head_dim}.")
    return head_dim


def rotated(x: Tensor, theta: float) -> Tensor:
    """Returns `[batch, heads, token, d]` with RoPE, in `x`'s dtype.

    Token t's components (2j, 2j+1) are turned by the angle `t theta^(-2j/d)` (unilm's flash files,
    `interleaved=True`). Tokens count from 0, padding too: a logit depends on distances alone.
    """
    wide = _wide(x)
    steps = torch.arange(0, x.shape[-1], 2, device=x.device, dtype=wide.dtype) / x.shape[-1]
    tokens = torch.arange(x.shape[-2], device=x.device, dtype=wide.dtype)
    angle = tokens[:, None] * theta**-steps  # [token, d/2]
    cos, sin = angle.cos(), angle.sin()
    even, odd = wide[..., 0::2], wide[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, attention_mask: Tensor | None
) -> Tensor:
    """Returns softmax(q k^T / sqrt d) v, `[batch, heads, query, width of v]`: one call for all."""
    batch, heads, tokens, _ = query.shape
    mask = None
    if attention_mask is not None:
        if attention_mask.shape != (batch, tokens):
            raise InputError(
                f"attention_mask must be [batch, token] = {[batch, tokens]}, "
                f"got {list(attention_mask.shape)}."
            )
        mask = attention_mask.bool()[:, None, None, :].expand(batch, 1, tokens, tokens)
        mask = mask.tril() if causal else mask
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=causal and mask is None,
        enable_gqa=key.shape[1] != heads,
    )


def _heads(x: Tensor, heads: int) -> Tensor:
    """Returns `[batch, token, heads * width]` as `[batch, heads, token, width]`."""
    return x.reshape(*x.shape[:-1], heads, -1).transpose(1, 2)


def _lambda_vector(size: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(size, dtype=torch.float32) * LAMBDA_STD)


def _wide(x: Tensor) -> Tensor:
    """Returns x in float32, or in float64 where it already is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
