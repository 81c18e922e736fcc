"""What holds of the layers: V1 beside V2, sums of rows, padding, gradients, low precision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quantkit.errors import InputError
from quantkit.models.differential import DiffAttention, DiffAttentionV2

HIDDEN, HEADS, WIDTH, TOKENS = 32, 4, 4, 7


class Constant(nn.Module):
    """Gives the same rows for whatever comes in, `[token, width]` for each sequence."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, hidden: Tensor) -> Tensor:
        return self.rows.to(hidden.dtype).expand(len(hidden), -1, -1)


def test_v2_does_v1_where_both_maps_have_the_same_keys(
    kv_heads: int, v1: Callable[..., DiffAttention], v2: Callable[..., DiffAttentionV2], x: Tensor
) -> None:
    """The most V1 and V2 have in common.

    Three things of V1 are not in V2: a map's own keys, values of width 2d, and the norm. So: V1's
    K1 = K2; V2 has a head for each half of a value, hence every pair of queries and every key
    twice (heads 2p and 2p+1 of V2 are the halves of pair p, and what they give stands side by
    side as in V1), and, as these two do not stand in one group, no groups in V2: V1's key and
    value pairs are repeated for it; no norm in V1, and its factor 1 - lambda_init, which stays,
    goes into V2's output projection. Lambda: 0.5 everywhere, in V1 by its vectors, in V2 by
    sigmoid(0).
    """
    h, g, d = HEADS, kv_heads, WIDTH
    one = v1(num_kv_heads=g, depth=0).double()
    two = v2(num_heads=2 * h).double()
    with torch.no_grad():
        for vector in (one.lambda_k1, one.lambda_q2, one.lambda_k2):
            vector.zero_()
        one.lambda_q1.fill_(1.0)
        one.lambda_k1.fill_(np.log(1.3) / d)  # exp(log 1.3) - exp(0) + 0.2 = 0.5
        one.subln = nn.Identity()
        keys = one.k_proj.weight.view(g, 2, d, HIDDEN)
        keys[:, 1] = keys[:, 0]
        # V2 query heads: [pair, half of the value, map]; V1's: [pair, map]
        queries = one.q_proj.weight.view(h, 1, 2 * d, HIDDEN)
        two.q_proj.weight.copy_(queries.expand(h, 2, 2 * d, HIDDEN).reshape(-1, HIDDEN))
        for ours, theirs in ((two.k_proj, one.k_proj), (two.v_proj, one.v_proj)):
            pairs = theirs.weight.view(g, 2 * d, HIDDEN).repeat_interleave(h // g, dim=0)
            ours.weight.copy_(pairs.flatten(0, 1))
        two.o_proj.weight.copy_(one.out_proj.weight * (1 - one.lambda_init))
        two.lambda_proj.weight.zero_()
        x = x.double()

        assert one.differential_lambda() == pytest.approx(0.5, abs=1e-12)
        torch.testing.assert_close(one(x), two(x), rtol=0, atol=1e-12)
        keys[:, 1] *= -1
        assert (one(x) - two(x)).abs().max() > 1e-2  # with keys of its own, V1 does more


def effective_map(layer: DiffAttention | DiffAttentionV2, x: Tensor, heads: int) -> Tensor:
    """Returns `[batch, heads, query, key]`: what comes out where token t's value is e_t."""
    layer = copy.deepcopy(layer)
    wide = 2 * layer.head_dim if isinstance(layer, DiffAttention) else layer.head_dim
    assert x.shape[1] <= wide
    layer.v_proj = Constant(torch.eye(x.shape[1], wide).repeat(1, layer.num_kv_heads))
    if isinstance(layer, DiffAttention):
        layer.subln = layer.out_proj = nn.Identity()
    else:
        layer.o_proj = nn.Identity()
    with torch.no_grad():
        out: Tensor = layer(x).unflatten(-1, (heads, wide)).transpose(1, 2)[..., : x.shape[1]]
    return out


def test_rows_of_the_effective_map_sum_to_one_minus_lambda(
    v1: Callable[..., DiffAttention], v2: Callable[..., DiffAttentionV2], x: Tensor
) -> None:
    x = x.double()
    one = v1().double()
    effective = effective_map(one, x, HEADS) / (1 - one.lambda_init)
    expected = torch.full_like(effective[..., 0], 1 - one.differential_lambda())
    torch.testing.assert_close(effective.sum(-1), expected)
    assert effective.min() < -0.05  # subtracting makes weights negative
    assert torch.equal(effective, effective.tril())

    two = v2(head_dim=8).double()
    effective = effective_map(two, x, HEADS)
    torch.testing.assert_close(effective.sum(-1), 1 - two.lambda_of(x))
    assert effective.min() < -0.05
    assert torch.equal(effective, effective.tril())


def test_padding_changes_nothing_for_real_tokens(
    make: Callable[..., Any], causal: bool, x: Tensor
) -> None:
    layer = make(causal=causal, num_kv_heads=2)
    x.requires_grad_()
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, :3] = 0  # on the left: causal rows without any key
    mask[1, 4:] = 0

    out = layer(x, mask)

    with torch.no_grad():
        torch.testing.assert_close(out[:1, 3:], layer(x[:1, 3:]), rtol=0, atol=1e-5)
        torch.testing.assert_close(out[1:, :4], layer(x[1:, :4]), rtol=0, atol=1e-5)
        torch.testing.assert_close(layer(x, mask.bool()), out)
    assert out.isfinite().all()
    (grad,) = torch.autograd.grad((out * mask[..., None]).square().sum(), x)
    assert grad.isfinite().all()
    assert grad[0, :3].abs().max() == grad[1, 4:].abs().max() == 0
    with pytest.raises(InputError, match=r"\[batch, token\] = \[2, 7\], got \[2, 6\]"):
        layer(x, mask[:, 1:])


def test_gradients_reach_every_parameter(make: Callable[..., Any], x: Tensor) -> None:
    layer = make(num_kv_heads=2)

    layer(x).square().sum().backward()

    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_bfloat16(make: Callable[..., Any], x: Tensor) -> None:
    layer = make(num_kv_heads=2)
    x = x.bfloat16()
    low = copy.deepcopy(layer).bfloat16()
    rounded = copy.deepcopy(low).float()

    got = low(x)

    assert got.dtype == torch.bfloat16
    expected = rounded(x.float())
    error = (got.float() - expected).norm() / expected.norm()
    assert error < 0.03  # 8 bits of mantissa, a handful of roundings
    got.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in low.parameters())
