"""Small models, what probes are put on them, and all that could stay behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quantkit.outliers import record
from quantkit.probes import POINTS, attach
from quantkit.quantization import fake_quantized
from tests.conftest import make_tiny

IDS = torch.arange(1, 13).reshape(2, 6)


def gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    ).eval()


def bloom() -> Any:
    """Computes attention itself, with torch's functions."""
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
    return BloomForCausalLM(config).eval()


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: make_tiny(LlamaForCausalLM, LlamaConfig),
    "diffllama": lambda: make_tiny(DiffLlamaForCausalLM, DiffLlamaConfig),
    "gpt2": gpt2,
    "bloom": bloom,
}


def nothing(_visit: object) -> None:
    """Looks away."""


def traces(model: nn.Module) -> dict[str, Any]:
    """All that quantkit could leave on a model or in the process."""
    return {
        "hooks": [
            (name, list(m._forward_hooks), list(m._forward_pre_hooks), "forward" in vars(m))
            for name, m in model.named_modules()
        ],
        "training": [m.training for m in model.modules()],
        "weights": [(n, id(p), p.data_ptr(), p._version) for n, p in model.named_parameters()],
        "grads": [p.requires_grad for p in model.parameters()],
        "attention": str(getattr(model, "config", None) and model.config._attn_implementation),  # type: ignore[union-attr]
        "registries": (
            sorted(ALL_ATTENTION_FUNCTIONS.valid_keys()),
            sorted(ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()),
        ),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "modes": torch._C._len_torch_function_stack(),
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
    }


USES: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    "attach": lambda m: attach(m, dict.fromkeys(POINTS, nothing)),
    "record": lambda m: record(m, points=()),
    "logits": lambda m: fake_quantized(m, "logits4:row"),
    "everything": lambda m: fake_quantized(m, "w4+a8:token+logits4+probs8:row"),
}
