"""The words of a calibration report, each defined once, and every method of choosing a range."""

from __future__ import annotations

from typing import Final

from quantkit.reporting.definitions import Definition

CALIBRATION_DEFINITIONS: Final = (
    Definition(
        term="SQNR",
        meaning="Signal to quantization noise of all elements of a tensor under a range, on the "
        "grid that the row names. 6 dB are about one bit.",
        formula="10 log10(sum x^2 / sum (x - fq(x))^2), dB",
        unlike="An outlier adds to the signal as well as to the noise, so it can raise this number "
        "while everything else is rounded away: read the inliers' beside it.",
    ),
    Definition(
        term="inlier SQNR",
        meaning="The same over the elements inside the 99.9 % span of the whole tensor alone, "
        "under the same range: what ordinary values keep. Tensors are ranked by it.",
        formula="10 log10(sum x^2 / sum (x - fq(x))^2) over Q(0.0005) <= x <= Q(0.9995), dB",
        source="quantkit",
        unlike="SQNR counts the outliers too, which dominate both of its sums.",
    ),
    Definition(
        term="bits wasted",
        meaning="Bits of the grid that only one value in a thousand uses. Negative: the range is "
        "narrower than the span, and clips inliers.",
        formula="log2(width / (Q(0.9995) - Q(0.0005))); width: max(hi, 0) - min(lo, 0), on a "
        "symmetric grid 2 max(|lo|, |hi|)",
        source="quantkit",
        unlike="99.9 % span (span_999_frac) is of min to max; this is of the range in force.",
    ),
    Definition(
        term="clipped",
        meaning="Share of the elements outside of the range; they become its ends.",
        formula="count(x < lo or x > hi) / count",
    ),
    Definition(
        term="moved",
        meaning="How far a range moved between two sample counts, the earlier being 3/4 of the "
        "later; of a tensor its worst group.",
        formula="max(|d lo|, |d hi|) / (hi - lo)",
        source="quantkit",
        unlike="Says whether more samples would change the range, not whether the range is good.",
    ),
    Definition(
        term="minmax",
        meaning="From the smallest to the largest element: clips nothing, follows every outlier.",
        formula="[min x, max x]",
        source="Quantizing Deep Convolutional Networks, arXiv 1806.08342, section 2",
    ),
    Definition(
        term="moving-average",
        meaning="Exponential average of each sample's extremes. It depends on the order of the "
        "samples: of 128 the first keeps 0.99^127 = 28 % of the weight, and no other has more "
        "than 1 %. Outliers in it stay in the range, those of one later sample are clipped. The "
        "number is c.",
        formula="r <- (1 - c) r + c x, for min and for max; c = 0.01",
        source="Integer-Arithmetic-Only Inference, arXiv 1712.05877, section 3.1",
    ),
    Definition(
        term="upper-percentile",
        meaning="Clips magnitudes at q, the P-th percentile of |x|. The number is P.",
        formula="[max(min x, -q), min(max x, q)]; P = 99.99",
        source="Integer Quantization for Deep Learning Inference, arXiv 2004.09602, section 5.2",
        unlike="two-sided-percentile clips each end of the signed values by itself.",
    ),
    Definition(
        term="two-sided-percentile",
        meaning="Clips each end of the signed values at its own percentile. The number is P.",
        formula="[Q(1 - P / 100), Q(P / 100)]; P = 99.99",
        source="Discovering Low-Precision Networks, arXiv 1809.04191, section 3",
        unlike="With one P it leaves twice as many elements outside as upper-percentile.",
    ),
    Definition(
        term="entropy",
        meaning="The range whose quantized histogram loses least information about the histogram.",
        formula="argmin KL(p || q)",
        source="Migacz, 8-bit Inference with TensorRT, GTC 2017",
        unlike="With no more bins than levels there is one candidate, minmax. The entropy of "
        "attention has nothing to do with it.",
    ),
    Definition(
        term="mse",
        meaning="The range of a grid search whose squared rounding and clipping error is smallest; "
        "minmax is among the candidates. Another is taken only where it is not worse on what was "
        "seen, proven from the bins or beyond six sigma.",
        formula="argmin sum (x - fq(x))^2",
        source="Post-training 4-bit Quantization, arXiv 1810.05723, section 2",
        unlike="Large values weigh most: to keep an outlier it may round all inliers to zero.",
    ),
    Definition(
        term="smoothing group",
        meaning="Linear layers that read the same input: channel c of it is divided by s_c, and "
        "column c of their weights multiplied, so that outliers move into the weights. alpha says "
        "how far.",
        formula="s_c = max|x_c|^alpha / max|w_c|^(1 - alpha)",
        source="SmoothQuant, arXiv 2211.10438, equation 4",
    ),
    Definition(
        term="guard",
        meaning="What makes a range untrustworthy and stops a calibration, unless waived by name: "
        "nonfinite (NaN or infinite values), unseen, mask (|x| >= 1e30, a stand-in for -inf), zero "
        "(nothing but zeros), constant (one value alone).",
    ),
)
