"""The words of a pair's page and of trainings."""

from __future__ import annotations

from quantkit.reporting.collect import Run
from quantkit.reporting.definitions import Definition
from quantkit.reporting.pair_groups import pair_of
from quantkit.reporting.pair_seeds import seeded
from quantkit.reporting.training_groups import trainings


def pair_definitions(run: Run) -> tuple[Definition, ...]:
    """Returns the definitions that the pair's and the trainings' sections need."""
    found = []
    if pair_of(run) is not None or trainings(run):
        found.append(
            Definition(
                term="matched pair",
                meaning="Models that differ in their attention alone. Of models that are compared, "
                "what is checked is that they have as many layers and, within 0.1 %, as many "
                "parameters; that they share rows, order and seed is said where a training.json "
                "names them. The differential one makes pairs of the baseline's heads, so that "
                "the lambdas alone come on top.",
                source="Differential Transformer, arXiv 2410.05258v2",
            )
        )
    if trainings(run):
        found.append(
            Definition(
                term="loss added by quantized logits",
                meaning="Held-out loss with fake-quantized attention logits minus the loss without,"
                " of the same model on the same rows; nats a token.",
                unlike="A perplexity, which is exp of a loss: a loss of 0.01 more is 1 % more.",
            )
        )
    if seeded(run):
        found.append(
            Definition(
                term="shown over seeds",
                meaning="The 95 % interval of the mean paired difference excludes 0, and the "
                "differences are not all equal. The arms of one seed share rows and order, and are "
                "compared with each other. All seeds answer the same items, so a gap in accuracy "
                "is shown for these items alone.",
                formula="mean +- t(0.975, n - 1) * sd / sqrt(n)",
                unlike="A paired interval of a sweep is over items for two fixed models; it says "
                "nothing on how two other seeds would differ.",
            )
        )
    return tuple(found)
