"""One model of each kind, of the same sizes: only the attention differs.

| arm | class | attention |
|---|---|---|
| `baseline` | `LlamaForCausalLM` | softmax, h heads |
| `diff` | `DiffLlamaForCausalLM` | differential V1, h/2 pairs of heads; 4 d more weights a layer |
| `diff-v2` | `DiffV2ForCausalLM` | differential V2, 2h query heads; a narrower MLP pays for them |
"""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

from quantkit.errors import InputError
from quantkit.jobs import PairSpec, Sizes
from quantkit.models.differential.diff_v2 import (
    COUNT_TOLERANCE_FRAC,
    DiffV2ForCausalLM,
    v2_config,
)
from quantkit.models.placement import parameter_count

NORM_EPS: Final = 1e-5


def new_model(arm: str, sizes: Sizes, *, seed: int, dropout: float = 0.0) -> Any:
    """Returns an untrained model in float32.

    Every weight that a baseline of these sizes has under the same name and shape begins as there,
    so that arms of one seed share all of those; what only this arm has is drawn after them.

    Args:
        dropout: Of the attention weights; a baseline's alone.

    Raises:
        InputError: dropout of another arm.
    """
    if dropout and arm != "baseline":
        raise InputError(f"[training] dropout: {arm} has none; expected 0.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        baseline = _drawn("baseline", sizes, dropout)
        if arm == "baseline":
            return baseline
        model = _drawn(arm, sizes)
    shared, own = baseline.state_dict(), model.state_dict()
    with torch.no_grad():
        for name, weight in own.items():
            if name in shared and shared[name].shape == weight.shape:
                weight.copy_(shared[name])
    return model


def require_matched(spec: PairSpec) -> dict[str, int]:
    """Returns the number of parameters of each arm.

    Raises:
        InputError: they differ from the first arm's by more than `COUNT_TOLERANCE_FRAC` of it.
    """
    with torch.device("meta"):
        found = {arm: parameter_count(_drawn(arm, spec.sizes)) for arm in spec.arms}
    first, *others = found.items()
    for arm, count in others:
        apart = abs(count - first[1]) / first[1]
        if apart > COUNT_TOLERANCE_FRAC:
            raise InputError(
                f"{arm} has {count:,} parameters and {first[0]} {first[1]:,}, {apart:.2%} apart; "
                f"expected at most {COUNT_TOLERANCE_FRAC:.1%}: give the models more width, or "
                "fewer arms."
            )
    return found


def _drawn(arm: str, sizes: Sizes, dropout: float = 0.0) -> Any:
    """Returns an arm with all its weights drawn by torch's state; on `meta`, with none."""
    if arm == "baseline":
        return LlamaForCausalLM(_llama(LlamaConfig, sizes, dropout))
    if arm == "diff":
        return DiffLlamaForCausalLM(_llama(DiffLlamaConfig, sizes, 0.0))
    return DiffV2ForCausalLM(v2_config(sizes))


def _llama(kind: Any, sizes: Sizes, dropout: float) -> Any:
    config = kind(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.mlp_width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        head_dim=sizes.head_size,
        max_position_embeddings=sizes.context,
        rms_norm_eps=NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
        tie_word_embeddings=sizes.tie_embeddings,
        attention_dropout=dropout,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
    )
    config._attn_implementation = "sdpa"
    return config
