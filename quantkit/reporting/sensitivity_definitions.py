"""The words of a sensitivity ranking, each defined once."""

from __future__ import annotations

from typing import Final

from quantkit.reporting.definitions import Definition

SENSITIVITY_DEFINITIONS: Final = (
    Definition(
        term="KL",
        meaning="What quantizing costs: how far the quantized model's predictions are from the "
        "float model's, over the whole vocabulary, the mean over predicted tokens. 0: the same.",
        formula="sum_v p_v log(p_v / q_v), nats a token; p: float model, q: quantized one",
        unlike="The KL of the method entropy is of histograms of one tensor; this is of the "
        "model's output.",
    ),
    Definition(
        term="unit",
        meaning="What is switched together: one quantizer (tensor), or all of a module or of a "
        "layer.",
    ),
    Definition(
        term="enable-one (alone)",
        meaning="Everything in float but this unit: what it costs by itself. Units are ranked by "
        "it where it was measured.",
        formula="KL(float || one quantized)",
        unlike="Costs of units do not add up to the whole: what an earlier layer has spoilt, a "
        "later one cannot spoil again.",
    ),
    Definition(
        term="disable-one (all but it)",
        meaning="Everything quantized but this unit; it removes the share of the whole error that "
        "goes. Negative: its error hides another's.",
        formula="removes = 1 - KL(float || all but one quantized) / KL(float || all quantized)",
        unlike="enable-one switches a unit in the float model. In the quantized one every change "
        "tips other values to their next level, so that small effects drown.",
    ),
    Definition(
        term="kept in float",
        meaning="The worst units stay unquantized together, and what remains of the error is "
        "measured again; the target is a share of the whole error.",
        formula="remains = KL(float || quantized but the n worst) / KL(float || all quantized)",
    ),
)
