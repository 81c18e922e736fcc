"""Models: loading them by name or path, and the table of families."""

from quantkit.models.architectures import is_decoder_only
from quantkit.models.differential import (
    DiffAttention,
    DiffAttentionV2,
    DiffDecoder,
    DiffDecoderLayer,
    DiffSizes,
    DiffV2Config,
    DiffV2ForCausalLM,
    from_diffllama,
    to_diffllama,
    v2_config,
)
from quantkit.models.families import (
    AttentionLayout,
    attention_layout,
    attention_modules,
    backbone,
    block_modules,
    differential_lambda,
    layer_modules,
    layout_of,
    mixes_of,
)
from quantkit.models.loading import LoadedModel, load, prepare, run_batch
from quantkit.models.mlps import Mlp, as_matrix, holds_fused_experts, mlp_of, projection_modules
from quantkit.models.shipped import (
    PAIR_RESULTS,
    SHIPPED,
    cache_dir,
    pair_results,
    sha256_of,
)

__all__ = [
    "PAIR_RESULTS",
    "SHIPPED",
    "AttentionLayout",
    "DiffAttention",
    "DiffAttentionV2",
    "DiffDecoder",
    "DiffDecoderLayer",
    "DiffSizes",
    "DiffV2Config",
    "DiffV2ForCausalLM",
    "LoadedModel",
    "Mlp",
    "as_matrix",
    "attention_layout",
    "attention_modules",
    "backbone",
    "block_modules",
    "cache_dir",
    "differential_lambda",
    "from_diffllama",
    "holds_fused_experts",
    "is_decoder_only",
    "layer_modules",
    "layout_of",
    "load",
    "mixes_of",
    "mlp_of",
    "pair_results",
    "prepare",
    "projection_modules",
    "run_batch",
    "sha256_of",
    "to_diffllama",
    "v2_config",
]
