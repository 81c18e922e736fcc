"""Models: loading them by name or path, and the table of families."""

from quantkit.models.families import (
    AttentionLayout,
    attention_layout,
    attention_modules,
    backbone,
    differential_lambda,
    layer_modules,
)
from quantkit.models.loading import LoadedModel, load
from quantkit.models.shipped import SHIPPED, cache_dir, sha256_of

__all__ = [
    "SHIPPED",
    "AttentionLayout",
    "LoadedModel",
    "attention_layout",
    "attention_modules",
    "backbone",
    "cache_dir",
    "differential_lambda",
    "layer_modules",
    "load",
    "sha256_of",
]
