"""What the Differential Transformer paper reports, kept as data to stand beside one's own rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quantkit.reporting.groups import HIDDEN, LOGIT

SOURCE: Final = "arXiv 2410.05258v2, Table 5"
SCALE: Final = "2.8B parameters, 0.4M tokens"
ALL_READING, VALID_READING = "all QK^T", "unmasked"
"""Which logits a row counts: every entry of QK^T, or those that the mask lets through."""


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """One row of Table 5: |x| at rank 1, 2, 3, 10 and 100, and the median."""

    point: str
    model: str
    abs_top: tuple[float, float, float, float, float]
    abs_median: float

    @property
    def label(self) -> str:
        """The model as a table names it: never to be taken for one that was measured here."""
        return f"{self.model} 2.8B (paper)"

    @property
    def reading(self) -> str:
        """Which logits were counted; "" for hidden states."""
        return ALL_READING if self.point == LOGIT else ""


TABLE_5: Final = (
    PaperRow(
        point=LOGIT,
        model="Transformer",
        abs_top=(318.0, 308.2, 304.9, 284.7, 251.5),
        abs_median=5.4,
    ),
    PaperRow(point=LOGIT, model="DIFF", abs_top=(38.8, 38.8, 37.3, 32.0, 27.4), abs_median=3.3),
    PaperRow(
        point=HIDDEN,
        model="Transformer",
        abs_top=(3608.6, 3607.4, 3603.6, 3552.1, 2448.2),
        abs_median=0.6,
    ),
    PaperRow(
        point=HIDDEN,
        model="DIFF",
        abs_top=(1688.2, 1672.5, 1672.1, 1624.3, 740.9),
        abs_median=1.2,
    ),
)
"""Its author (microsoft/unilm issue 1666): logits are |.| of all q1 k1^T / sqrt(d) and
q2 k2^T / sqrt(d) before the softmax, so masked positions are counted; hidden states are each
layer's output."""

NOTE: Final = (
    f"(paper): the paper's own figures at its scale ({SOURCE}; {SCALE}), all of QK^T, so masked "
    "positions are counted; they were not measured here."
)


def reading_of(definition: str) -> str:
    """Returns which logits a summary counts, from the definition it carries."""
    return ALL_READING if "all of QK^T" in definition else VALID_READING
