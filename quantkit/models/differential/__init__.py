"""Differential attention that transformers does not have, as definitions that can be run.

`attention` holds the two layers, `decoder` the smallest model around them, `conversion` the way
between unilm's weights and those of transformers' DiffLlama.
"""

from quantkit.models.differential.attention import DiffAttention, DiffAttentionV2, lambda_init
from quantkit.models.differential.conversion import from_diffllama, to_diffllama
from quantkit.models.differential.decoder import DiffDecoder, DiffDecoderLayer, DiffSizes

__all__ = [
    "DiffAttention",
    "DiffAttentionV2",
    "DiffDecoder",
    "DiffDecoderLayer",
    "DiffSizes",
    "from_diffllama",
    "lambda_init",
    "to_diffllama",
]
