"""The words of a report, each defined once."""

from __future__ import annotations

from typing import Final

DEFINITIONS: Final = (
    (
        "attention logit",
        "scale * q . k after position embedding and the model's own scale, before the mask. Masked "
        "positions never enter unless --count-masked was given; their count stands as excluded. A "
        "differential head has two maps.",
    ),
    ("hidden state", "The output of each decoder layer, after both residual additions."),
    ("top-k", "|x| at rank 1, 2, 3, 10 and 100, pooled over all layers, heads and maps."),
    ("max", "The signed maximum; abs_max is the largest |x|."),
    ("inf_norm_mean", "Mean over sequences of the per-sequence max |x|."),
    ("kurtosis", "Pearson's, non-excess: a Gaussian has 3."),
    (
        "massive activation",
        "|x| > 100 and |x| >= 1000 x the median |x| of that hidden state (per sequence and layer; "
        "pooled: per layer).",
    ),
    (
        "outlier feature",
        "|x| >= 6 in the same feature in at least 25 % of the layers and 6 % of the positions.",
    ),
    (
        "sink rate",
        "Share of (sequence, layer, head) whose mean attention to the first token exceeds 0.3, "
        "over queries 1 to 63.",
    ),
    (
        "bits",
        "Of the attention logits; 16 means not quantized. The grid is symmetric and narrow, "
        "rounding half to even.",
    ),
    (
        "granularity",
        "What shares one scale: tensor = a sequence, layer and map; head = also the head; row = "
        "also the query. Never a batch. Static ranges come from calibration.",
    ),
    (
        "perplexity",
        "exp of the mean negative log-likelihood over every predicted token (seq_len - 1 a block).",
    ),
    ("interval", "95 %, from resampling blocks (perplexity) or items (accuracies)."),
    (
        "gates",
        "Float graph: cosine >= 0.9999 and top-1 agreement >= 99.9 %. Quantized graph against its "
        "simulation: cosine >= 0.999 and top-1 agreement >= 97 %.",
    ),
)
