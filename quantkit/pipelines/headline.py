"""The sentence that a sweep says, derived from its numbers and never typed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from quantkit.results import Cell, Delta

MARGIN_FRAC: Final = 0.01
"""Non-inferiority margin for perplexity, fixed beforehand: 1 % of the float row's."""
LEAST_BLOCKS: Final = 4
"""Below this many blocks a bootstrap interval says nothing, and no row is called level."""


def headline(cells: Sequence[Cell], deltas: Sequence[Delta]) -> str:
    """Returns a sentence a model: other recipes, and the fewest logit bits level with 16.

    A row is level if the upper end of its paired 95 % interval is within 1 % of the float
    perplexity; for each width the best granularity speaks.
    """
    said = []
    for model in dict.fromkeys(cell.model for cell in cells):
        floats = [c for c in cells if c.model == model and c.recipe == "none"]
        if not floats:
            continue
        base = floats[0].value
        quantized = {c.recipe: c for c in cells if c.model == model and c.granularity is not None}
        level = [
            quantized[delta.recipe]
            for delta in deltas
            if delta.model == model
            and delta.recipe in quantized
            and delta.ci_high <= MARGIN_FRAC * base
            and delta.n >= LEAST_BLOCKS
        ]
        others = [
            f"{c.recipe} {c.value:.2f} ({100 * (c.value / base - 1):+.1f} %)"
            for c in cells
            if c.model == model and c.granularity is None and c.recipe != "none"
        ]
        if others:
            said.append(f"{model}: perplexity {base:.2f} in float, {', '.join(others)}.")
        if not quantized and others:
            continue
        if not quantized:
            said.append(f"{model}: float perplexity {base:.2f}; no quantized logits were tried.")
        elif not level:
            said.append(
                f"{model}: no tried width of the attention logits stays within 1 % of the float "
                f"perplexity {base:.2f} at 95 %."
            )
        else:
            best = min(level, key=lambda cell: (cell.bits, cell.value))
            said.append(
                f"{model}: attention logits at {best.bits} bits per {best.granularity} keep the "
                f"perplexity within 1 % of float ({best.value:.2f} against {base:.2f}, n = "
                f"{best.n} blocks)."
            )
    return " ".join(said)
