"""The words of a sweep: what its metrics are, and what was tested."""

from __future__ import annotations

from typing import Final

from quantkit.reporting.collect import Run
from quantkit.reporting.definitions import Definition
from quantkit.reporting.sweep_groups import measured, sweeps

_METRICS: Final = {
    "bits_per_byte": Definition(
        term="bits per byte (bits_per_byte)",
        meaning="What the model needs to say the text, divided by the text's length in UTF-8: "
        "models with different tokenizers compare.",
        formula="sum of negative log-likelihoods / (ln 2 * bytes of the predicted text)",
        source="The Pile, arXiv 2101.00027, section 3.1",
        unlike="Perplexity is per token, so that it depends on how the tokenizer cuts.",
    ),
    "acc": Definition(
        term="acc",
        meaning="Share of items whose right ending has the highest log-likelihood.",
        unlike="acc_norm divides it by the length of the ending first.",
    ),
    "acc_norm": Definition(
        term="acc_norm",
        meaning="Share of items whose right ending has the highest log-likelihood divided by its "
        "length in bytes (tasks of lm-eval: as the harness counts it): long endings are not "
        "punished.",
        formula="argmax_e log p(e | context) / bytes(e)",
        source="EleutherAI's lm-evaluation-harness",
        unlike="acc takes the log-likelihood as it is.",
    ),
    "exact_match": Definition(
        term="exact match (exact_match)",
        meaning="Share of samples whose answers are all right, token by token, when the most "
        "likely token is taken each time.",
        unlike="query_accuracy counts each question by itself.",
    ),
    "query_accuracy": Definition(
        term="query_accuracy",
        meaning="Share of questions answered right, the true answers of earlier ones given.",
    ),
    "accuracy": Definition(
        term="accuracy", meaning="Share of questions whose right label has the highest likelihood."
    ),
    "top1": Definition(
        term="top1", meaning="Share of images whose class has the highest logit."
    ),
    "top5": Definition(
        term="top5", meaning="Share of images whose class is among the five highest logits."
    ),
}  # fmt: skip
_ORDERS: Final = Definition(
    term="order_min, order_max, order_sd, order_range",
    meaning="Accuracy over the orders in which the same examples were shown: the lowest, the "
    "highest, their standard deviation and distance.",
    source="Differential Transformer, arXiv 2410.05258v2, section 3.5",
)
_LEVEL: Final = Definition(
    term="level with",
    meaning="Not worse by more than a margin fixed beforehand (1 point of accuracy, 1 % of "
    "perplexity, and of bits per byte what that amounts to), at 95 %, on the same items, at least "
    "6 units; perplexities and bits per byte also pass Student's t. Better = level, and all of the "
    "interval is a gain. A row that is not level has not been shown to lose: there may be too few "
    "items.",
    formula="the end of the paired 95 % interval on the side of a loss lies within the margin",
    unlike="An interval that contains zero proves nothing: few items make it wide.",
)
_CHANCE: Final = Definition(
    term="chance",
    meaning="What guessing reaches. A figure is not shown to be above chance (chance?) where "
    "guessing reaches it, or more, with a probability of more than 5 %; it is at chance where, in "
    "addition, its 95 % interval ends less than 10 points above chance. What quantization costs is "
    "not visible there.",
    formula="one-sided binomial test: P(successes >= observed | chance); at the mean chance of "
    "items with different numbers of endings; of icl, over each question's first order",
    unlike="A test that rejects nothing proves no equality: of few items it never does.",
)
_SPREAD: Final = Definition(
    term="spread of seeds",
    meaning="How far models trained from different seeds are apart: standard deviation with n - 1, "
    "lowest and highest. A band in pictures.",
    unlike='The sampling error is of one model on other items; whiskers and "sampling" of seeds '
    "are 1.96 times its root mean square about their mean.",
)
_FLOAT_FEATURES: Final = Definition(
    term="float_features_frac",
    meaning="Of LLM.int8: the share of a linear layer's input features that reach its threshold "
    "somewhere in the sequence, and so stay in float. Mean over layers and sequences.",
    formula="mean of |{c: max_t |x_tc| >= threshold}| / features",
    source="LLM.int8, arXiv 2208.07339, section 3.2",
)
_MASS: Final = Definition(
    term="attention mass",
    meaning="What the token before an answer gives to each part of the context: the asked needle "
    "(answer), the other needles, the first token, the question, and the rest (noise). Mean over "
    "questions, layers and heads. signed = the weights themselves, which add up to 1, or to "
    "1 - lambda for a differential head; share = magnitudes over their sum.",
    formula="sum_j a_ij over the part; share: sum_j |a_ij| / sum |a_i|",
    source="Differential Transformer, arXiv 2410.05258v2, Table 3",
)


def sweep_definitions(run: Run) -> tuple[Definition, ...]:
    """Returns the definitions of what the sweeps show, and of nothing else."""
    parts = measured(run)
    shown = dict.fromkeys(one.metric for one in parts)
    found = [_METRICS[metric] for metric in shown if metric in _METRICS]
    details = {name for one in parts for c in one.cells for name in c.details}
    found += [_ORDERS] if any(name.startswith("order_") for name in details) else []
    found += [_FLOAT_FEATURES] if "float_features_frac" in details else []
    levels = [delta.is_level for sweep in sweeps(run) for delta in sweep.deltas]
    found += [_LEVEL] if any(level is not None for level in levels) else []
    found += [_CHANCE] if any(c.chance is not None for one in parts for c in one.cells) else []
    found += [_SPREAD] if any(one.spreads for one in parts) else []
    found += [_MASS] if any(sweep.attention_mass for sweep in sweeps(run)) else []
    return tuple(found)
