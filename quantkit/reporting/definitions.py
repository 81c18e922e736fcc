"""The words of a report, each defined once: formula, source, and how it differs from the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Definition:
    """One entry; what is "" is left out.

    Attributes:
        meaning: What the number says, in a sentence or two.
        formula: How it is computed.
        source: Where the definition is from.
        unlike: What it is easily taken for, and how it differs.
    """

    term: str
    meaning: str
    formula: str = ""
    source: str = ""
    unlike: str = ""


_DIFF: Final = "Differential Transformer, arXiv 2410.05258v2"
_OFT: Final = "Quantizable Transformers, arXiv 2306.12929"

DEFINITIONS: Final = (
    Definition(
        term="attention logit",
        meaning="A scaled product of query and key after position embedding, before mask, softcap "
        "and position bias. Masked positions never enter unless --count-masked was given; their "
        "count stands as excluded. A differential head has two maps.",
        formula="s[b,h,i,j] = scale * q_i . k_j",
        source=f"{_DIFF}, Table 5 and microsoft/unilm issue 1666",
        unlike="Not the modified logit, which is what the softmax gets; not the vocabulary logit.",
    ),
    Definition(
        term="modified logit",
        meaning="The logit as the model changed it before the softmax, by softcap or position "
        "bias; only of models that do so.",
        formula="e.g. cap * tanh(s / cap), or s + bias",
        unlike="The attention logit is the same number before that step; entropy is of this one.",
    ),
    Definition(
        term="effective map",
        meaning="The attention weights that a differential head applies to its values: they can "
        "be negative.",
        formula="softmax(map 1) - lambda softmax(map 2)",
        source=f"{_DIFF}, equation 1",
        unlike="Attention logits stand before the softmax; these are weights, after it.",
    ),
    Definition(
        term="row sum",
        meaning="Mean sum of a row of the effective map, as measured.",
        formula="1 - lambda",
        source=f"{_DIFF}, equation 1",
        unlike="Rows of ordinary attention sum to 1.",
    ),
    Definition(
        term="lambda",
        meaning="The share of map 2 that a differential head subtracts; one number a layer (in "
        "V2 one a token and head: then mean, lowest and highest).",
        formula="exp(lq1 . lk1) - exp(lq2 . lk2) + lambda_init, lambda_init = 0.8 - 0.6 "
        "exp(-0.3 depth)",
        source=f"{_DIFF}, equation 2",
    ),
    Definition(
        term="hidden state",
        meaning="The output of each layer, after both residual additions; padding is left out.",
        source=f"{_DIFF}, Table 5",
        unlike="The other points (attention output, MLP input, MLP down-projection input, inputs "
        "of linear layers) are inside of a layer.",
    ),
    Definition(
        term="top-k",
        meaning="The magnitude at rank 1, 2, 3, 10 and 100 of all elements, and their median, "
        "pooled over layers, heads and maps.",
        formula="|x|_(k), the k-th largest",
        source=f"{_DIFF}, Table 5",
        unlike="A rank, not a percentile: with more tokens the same rank lies further out.",
    ),
    Definition(
        term="reading",
        meaning="Which logits a row counts: valid positions = those that the mask lets through; "
        "all of QK^T = every entry, masked ones too (--count-masked), as in the paper.",
        source="microsoft/unilm issue 1666",
    ),
    Definition(
        term="max",
        meaning="The largest value with its sign; of logits, the max logit that QK-Clip watches.",
        formula="max x",
        source="QK-Clip, Kimi K2, arXiv 2507.20534",
        unlike="abs_max and top-1 are of |x|: a logit of -60 is no max logit.",
    ),
    Definition(
        term="abs_max",
        meaning="The largest magnitude of all sequences; equals top-1.",
        formula="max |x|",
        unlike="inf_norm_mean averages one maximum a sequence, so it is never larger.",
    ),
    Definition(
        term="inf_norm_mean",
        meaning="The mean over sequences of each sequence's largest magnitude.",
        formula="mean_s max_i |x_si|",
        source=f"{_OFT} (its max inf-norm)",
        unlike="abs_max is the one largest magnitude; it grows with the number of sequences, this "
        "does not.",
    ),
    Definition(
        term="kurtosis",
        meaning="Pearson's, non-excess, pooled over all elements: a Gaussian has 3.",
        formula="E[(x - mean)^4] / E[(x - mean)^2]^2, central moments in float64",
        unlike="kurtosis_oft takes it of each sequence by itself and averages; pooling mixes the "
        "scales of sequences and layers, which adds to it. Excess kurtosis is 3 less.",
    ),
    Definition(
        term="kurtosis_oft",
        meaning="The mean over sequences of each sequence's kurtosis, for comparison with "
        "published tables; by layer (of logits: by head), shown from the lowest to the highest.",
        formula="mean_s kurtosis(x_s)",
        source=_OFT,
        unlike="kurtosis pools all elements first.",
    ),
    Definition(
        term="99.9 % span (span_999_frac)",
        meaning="How much of the range the middle 99.9 % of the values take: a small share means "
        "that a few values stretch the range, and that min-max quantization wastes it.",
        formula="(Q(0.9995) - Q(0.0005)) / (max - min)",
        source="quantkit",
        unlike="The inverse's log2 is the bits that a min-max range gives to one value in a "
        "thousand. kurtosis weighs all values, this only the ends.",
    ),
    Definition(
        term="channel ratio",
        meaning="How far the largest channel stands out, by the largest magnitude of each channel.",
        formula="max_c m_c / median_c m_c, m_c = max |x_c|",
        source="channel maxima as in SmoothQuant, arXiv 2211.10438",
        unlike="An outlier token stands out among tokens, this among channels.",
    ),
    Definition(
        term="massive activation",
        meaning="A single huge element. Counted with the median of each sequence and layer; "
        "pooled: with the median of each layer over all sequences.",
        formula="|x| > 100 and |x| >= 1000 median |x|",
        source="Massive Activations in Large Language Models, arXiv 2402.17762",
        unlike="An outlier feature is a channel that is large at many positions and layers; an "
        "outlier token is a position; this is one element and may be the only one.",
    ),
    Definition(
        term="outlier feature",
        meaning="A channel of the hidden state that is large again and again.",
        formula="|x| >= 6 in the same feature in >= 25 % of the layers and >= 6 % of the positions",
        source="LLM.int8(), arXiv 2208.07339",
        unlike="A massive activation may stand at one token alone, and then makes no outlier "
        "feature.",
    ),
    Definition(
        term="outlier token",
        meaning="A token whose largest magnitude is far above the other tokens' of its sequence "
        "and layer; pooled: above those of all sequences.",
        formula="max_c |x_tc| > 64 median_t max_c |x_tc|",
        source="PrefixQuant, arXiv 2410.05265",
        unlike="Compares tokens with tokens; a channel that is large at every token makes none.",
    ),
    Definition(
        term="sink rate",
        meaning="Share of (sequence, layer, head) whose mean attention to the first token exceeds "
        "0.3, over queries 1 to 63 (query 0 sees only itself). Of a differential head the "
        "effective map's.",
        formula="mean_i a_i0 > 0.3; for signed maps |a| / sum |a|",
        source="When Attention Sink Emerges in Language Models, arXiv 2410.10781",
        unlike="Says how often the first token draws attention, not how large its hidden state is "
        "(the class first token says that).",
    ),
    Definition(
        term="entropy",
        meaning="How widely a query row spreads its attention: 0 is one key, log n is n keys "
        "alike. Mean over query rows; of what the softmax gets.",
        formula="-sum_j p_j log p_j, nats; for the effective map p = |a| / sum |a|",
        source="Attention entropy collapse, arXiv 2303.06296",
        unlike="A high sink rate lowers it, but so does attention to any one key.",
    ),
    Definition(
        term="token class",
        meaning="first = the first token of a sequence; others = the rest. A logit's class is its "
        "key's; the one entry of row 0 is left out of the split.",
    ),
    Definition(
        term="bits",
        meaning="Of the attention logits; 16 means not quantized. The grid is symmetric and "
        "narrow where no word says asymmetric, rounding half to even.",
    ),
    Definition(
        term="granularity",
        meaning="What shares one scale: tensor = a sequence, layer and map; head = also the head; "
        "row = also the query. Never a batch. Static ranges come from calibration.",
    ),
    Definition(
        term="perplexity",
        meaning="Of every predicted token (seq_len - 1 a block).",
        formula="exp of the mean negative log-likelihood",
    ),
    Definition(
        term="interval",
        meaning="95 %, from resampling blocks (perplexity) or items (accuracies); widened for "
        "shares to score intervals.",
    ),
    Definition(
        term="integer grid",
        meaning="What a quantized value can be, as in ONNX. Symmetric grids of b bits are narrow: "
        "q from -(2^(b-1) - 1) to 2^(b-1) - 1, scale = absmax / (2^(b-1) - 1).",
        formula="q = saturate(round_half_even(x / scale) + zero_point)",
        source="ONNX QuantizeLinear",
    ),
    Definition(
        term="range",
        meaning="What a scale is computed from: dynamic = the absmax of the valid entries of this "
        "call; static = fixed beforehand by calibration, for a tensor or a head.",
    ),
    Definition(
        term="speed",
        meaning="How many times as fast as the float graph: medians of alternating calls in ONNX "
        "Runtime, on the machine that provenance names. prefill = a prompt, decode = one token "
        "behind a filled cache.",
        formula="float milliseconds / quantized milliseconds",
    ),
    Definition(
        term="budget (--max-drop)",
        meaning="What an export may lose: relative for a perplexity, absolute points for an "
        "accuracy. Where nobody set one, 2 % or 2 points.",
        unlike="The margin of level with is of one change of bits, and is fixed.",
    ),
    Definition(
        term="recommended export",
        meaning="What --quantize auto chose; else the fastest export that passed its gates and "
        "whose loss stays within the budget at the bad end of its paired 95 % interval. One "
        "without an interval is not recommended.",
        unlike="The export with the best figure: chance may have made it.",
    ),
    Definition(
        term="Pareto front",
        meaning="The graphs that nothing else matches in both, accuracy and cost (time or size), "
        "and beats in one. By measured values, without their intervals; float counts, a graph "
        "that failed its gates does not.",
    ),
    Definition(
        term="gates",
        meaning="Float graph: cosine >= 0.9999 and top-1 agreement >= 99.9 %. Quantized graph "
        "against its simulation: cosine >= 0.999 and top-1 agreement >= 97 %.",
    ),
)
