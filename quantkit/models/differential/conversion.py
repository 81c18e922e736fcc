"""Weights of `DiffAttention` (unilm's layout) as those of transformers' DiffLlama, and back.

With h pairs of query heads, g pairs of key heads, width d, and rows counted from 0:

| rows of | `DiffAttention` | DiffLlama |
|---|---|---|
| `q_proj` | pair p, map m, component 2j+c: `(2p + m) d + 2j + c` | `(m h + p) d + c d/2 + j` |
| `k_proj` | pair p, map m, component 2j+c: `(2p + m) d + 2j + c` | `(m g + p) d + c d/2 + j` |
| `v_proj` | pair p, half s, component i: `(2p + s) d + i` | `(s g + p) d + i` |

m, c and s are 0 or 1, j runs to d/2 and i to d. The first change separates the maps, the second
turns RoPE's neighbours (2j, 2j+1) into the halves' (j, j + d/2); values have no RoPE. The output
projection (`out_proj`, `o_proj`) and the lambda vectors are the same in both.

Two things are not in a state dict and must be equal on both sides: lambda_init (`depth` is
DiffLlama's `layer_idx`) and the norm's epsilon (`rms_norm_eps=1e-5`), beside RoPE's theta.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from quantkit.errors import InputError

_LAMBDAS: Final = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
_INPUTS: Final = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


def to_diffllama(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state dict of a DiffLlama attention that computes what `DiffAttention` does.

    DiffLlama's norm has no gain. It is the same for every pair and stands before the output
    projection, so it always folds: `o_proj[:, 2d p + i] = out_proj[:, 2d p + i] * gain[i]`. Where
    every gain is 1, `from_diffllama` gives the weights back bit for bit.

    Args:
        state: `DiffAttention.state_dict()`; not changed.

    Raises:
        InputError: a name is missing or one too many, or a shape does not fit.
    """
    _check_names(state, {*_INPUTS, *_LAMBDAS, "out_proj.weight", "subln.weight"})
    d = _check_shapes(state, "out_proj.weight")
    out, gain = state["out_proj.weight"], state["subln.weight"]
    if gain.shape != (2 * d,):
        raise InputError(f"subln.weight must be [2d] = [{2 * d}], got {list(gain.shape)}.")
    return {
        "q_proj.weight": _rotary_halves(_maps_apart(state["q_proj.weight"], d), d),
        "k_proj.weight": _rotary_halves(_maps_apart(state["k_proj.weight"], d), d),
        "v_proj.weight": _maps_apart(state["v_proj.weight"], d),
        "o_proj.weight": (out * gain.repeat(out.shape[1] // len(gain))).to(out.dtype),
        **{name: state[name].clone() for name in _LAMBDAS},
    }


def from_diffllama(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state dict of a `DiffAttention` that computes what a DiffLlama attention does.

    Its gain is 1.

    Args:
        state: `DiffLlamaAttention.state_dict()`, without biases; not changed.

    Raises:
        InputError: a name is missing or one too many, or a shape does not fit.
    """
    _check_names(state, {*_INPUTS, *_LAMBDAS, "o_proj.weight"})
    d = _check_shapes(state, "o_proj.weight")
    out = state["o_proj.weight"]
    return {
        "q_proj.weight": _maps_together(_rotary_neighbours(state["q_proj.weight"], d), d),
        "k_proj.weight": _maps_together(_rotary_neighbours(state["k_proj.weight"], d), d),
        "v_proj.weight": _maps_together(state["v_proj.weight"], d),
        "out_proj.weight": out.clone(),
        "subln.weight": torch.ones(2 * d, dtype=out.dtype, device=out.device),
        **{name: state[name].clone() for name in _LAMBDAS},
    }


def _maps_apart(weight: Tensor, d: int) -> Tensor:
    """Returns the rows of [pair, map, d] in the order [map, pair, d]."""
    return weight.reshape(-1, 2, d, weight.shape[1]).transpose(0, 1).flatten(0, 2).clone()


def _maps_together(weight: Tensor, d: int) -> Tensor:
    """Returns the rows of [map, pair, d] in the order [pair, map, d]."""
    return weight.reshape(2, -1, d, weight.shape[1]).transpose(0, 1).flatten(0, 2).clone()


def _rotary_halves(weight: Tensor, d: int) -> Tensor:
    """Returns each head's rows, 2j and 2j+1, as rows j and j + d/2."""
    return weight.reshape(-1, d // 2, 2, weight.shape[1]).transpose(1, 2).flatten(0, 2)


def _rotary_neighbours(weight: Tensor, d: int) -> Tensor:
    """Returns each head's rows, j and j + d/2, as rows 2j and 2j+1."""
    return weight.reshape(-1, 2, d // 2, weight.shape[1]).transpose(1, 2).flatten(0, 2)


def _check_names(state: Mapping[str, Tensor], expected: set[str]) -> None:
    missing, extra = sorted(expected - state.keys()), sorted(state.keys() - expected)
    if missing or extra:
        raise InputError(
            "not the state dict of one differential attention layer without biases: "
            f"missing {', '.join(missing) or 'nothing'}, not known {', '.join(extra) or 'nothing'}."
        )


def _check_shapes(state: Mapping[str, Tensor], output: str) -> int:
    """Returns d, the size of the lambda vectors, after every shape was compared with it."""
    d = state["lambda_q1"].numel()
    for name in _LAMBDAS:
        if state[name].shape != (d,) or d < 2 or d % 2:
            raise InputError(
                f"{name} must be [d] with an even d, as lambda_q1 [{d}], "
                f"got {list(state[name].shape)}."
            )
    for name in _INPUTS:
        shape = state[name].shape
        if len(shape) != 2 or not shape[0] or shape[0] % (2 * d):
            raise InputError(
                f"{name} must be [a multiple of 2d = {2 * d}, hidden_size], got {list(shape)}."
            )
    queries, keys, values = (state[name].shape[0] for name in _INPUTS)
    if keys != values or queries % keys or state[output].shape[1:] != (queries,):
        raise InputError(
            f"q_proj, k_proj, v_proj and {output} do not fit each other: {queries}, {keys} and "
            f"{values} rows, {list(state[output].shape)}; expected as many rows of k as of v, a "
            "multiple of them of q, and an output projection as wide as q has rows."
        )
    return d
