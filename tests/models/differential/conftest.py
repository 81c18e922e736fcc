"""Layers whose maps are sharp and whose lambda is away from its start: no swap goes unseen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.models.differential import DiffAttention, DiffAttentionV2, DiffV2ForCausalLM
from tests.models.differential.v2_oracle import make_v2


@pytest.fixture
def v1() -> Callable[..., DiffAttention]:
    """Makes a V1 layer: hidden size 32, four pairs, width 4, depth 2, or with changes to these."""

    def make(**changes: Any) -> DiffAttention:
        torch.manual_seed(3)
        layer = DiffAttention(**{"hidden_size": 32, "num_heads": 4, "depth": 2} | changes)
        with torch.no_grad():
            layer.q_proj.weight.mul_(4)
            layer.lambda_q1.add_(0.2)
            layer.lambda_k1.add_(0.3)
        return layer

    return make


@pytest.fixture
def v2() -> Callable[..., DiffAttentionV2]:
    """Makes a V2 layer: hidden size 32, four heads, width 4, or with changes to these."""

    def make(**changes: Any) -> DiffAttentionV2:
        torch.manual_seed(4)
        layer = DiffAttentionV2(**{"hidden_size": 32, "num_heads": 4, "head_dim": 4} | changes)
        with torch.no_grad():
            layer.q_proj.weight.mul_(4)
            layer.lambda_proj.weight.mul_(5)
        return layer

    return make


@pytest.fixture(params=("v1", "v2"))
def make(request: pytest.FixtureRequest) -> Any:
    """Makes a layer of either version."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=(4, 2, 1), ids=("mha", "grouped", "one_kv"))
def kv_heads(request: pytest.FixtureRequest) -> Any:
    """Key-value heads for four heads."""
    return request.param


@pytest.fixture(params=(True, False), ids=("causal", "full"))
def causal(request: pytest.FixtureRequest) -> Any:
    """Whether a query sees only what is before it."""
    return request.param


@pytest.fixture
def x() -> Tensor:
    """Hidden states of two sequences of seven tokens, `[2, 7, 32]`."""
    torch.manual_seed(5)
    return torch.randn(2, 7, 32)


@pytest.fixture
def v2_model() -> DiffV2ForCausalLM:
    """DIFF V2 of two layers, four heads and two key-value heads."""
    return make_v2(tie_word_embeddings=True)


@pytest.fixture
def v2_folder(v2_model: DiffV2ForCausalLM, tokenizer: Any, tmp_path: Path) -> Path:
    """The model and a byte tokenizer, saved."""
    path = tmp_path / "v2"
    v2_model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def tokens() -> Tensor:
    """Three rows of twelve, `[3, 12]`."""
    return torch.randint(0, 257, (3, 12), generator=torch.Generator().manual_seed(2))
