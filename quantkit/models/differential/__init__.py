"""Differential attention that transformers does not have, as definitions that can be run.

`attention` holds the two layers, `decoder` the smallest model around them, `diff_v2` that of V2 as
a model that transformers loads, `conversion` the way between unilm's weights and those of
transformers' DiffLlama.
"""

from quantkit.models.differential.attention import DiffAttention, DiffAttentionV2, lambda_init
from quantkit.models.differential.conversion import from_diffllama, to_diffllama
from quantkit.models.differential.decoder import DiffDecoder, DiffDecoderLayer, DiffSizes
from quantkit.models.differential.diff_v2 import (
    DiffV2Config,
    DiffV2ForCausalLM,
    DiffV2Model,
    register_diff_v2,
    v2_config,
)

__all__ = [
    "DiffAttention",
    "DiffAttentionV2",
    "DiffDecoder",
    "DiffDecoderLayer",
    "DiffSizes",
    "DiffV2Config",
    "DiffV2ForCausalLM",
    "DiffV2Model",
    "from_diffllama",
    "lambda_init",
    "register_diff_v2",
    "to_diffllama",
    "v2_config",
]
