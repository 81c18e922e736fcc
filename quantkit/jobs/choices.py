"""What options offer: help pages, checks and errors read it here, once."""

from __future__ import annotations

from typing import Final

DEFAULT_TEXT: Final = "pydoc"
DEFAULT_SAMPLES: Final = 128
DEFAULT_EVAL_SAMPLES: Final = 64
DTYPES: Final = ("float32", "bfloat16", "float16")
BOS: Final = ("auto", "always", "never")
CALIBRATION_POINTS: Final = (
    "linear_input",
    "linear_output",
    "attention_logit",
    "attention_probability",
    "attention_query",
    "attention_key",
    "attention_value",
    "attention_output",
)
"""The points whose ranges `calibrate` fixes. What a KV cache holds are the keys and the values."""
DEFAULT_CALIBRATION_POINTS: Final = ("linear_input", "attention_logit")
DEFAULT_SYMMETRIC: Final = ("attention_logit",)
KV_CACHE: Final = "kv_cache"
"""Short for the two points that a KV cache holds."""
RANGE_GRANULARITIES: Final = ("head", "tensor")
GUARDS: Final = ("unseen", "nonfinite", "mask", "zero", "constant")
UNTIL_STABLE_SAMPLES: Final = 1024
"""The most samples that --until-stable takes where --samples says nothing."""
DEFAULT_WEIGHT_METHOD: Final = "minmax"
DEFAULT_WEIGHT_BITS: Final = 8
STATS_POINTS: Final = (
    "attention_logit",
    "hidden_state",
    "attention_output",
    "mlp_input",
    "mlp_down_input",
    "linear_input",
)
"""The points that `stats` can measure; the probes' own, in the order of a report."""
DEVICE_MAPS: Final = ("auto",)
ATTENTION_BITS: Final = (16, 8, 6, 4)
OPSETS: Final = (21, 22)
"""From 23 on the exporter writes rotary embeddings as one operator, in a form that ONNX Runtime
1.32 refuses to run."""
LAYOUTS: Final = ("transformers", "optimum")
"""Whose loaders the names of an exported graph and its files are for."""
SHIPPED_PAIR: Final = ("baseline", "diff")
"""The matched models that ship in the package; `compare` takes them when none is named."""
