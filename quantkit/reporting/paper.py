"""What the Differential Transformer paper reports, kept as data to stand beside one's own rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from quantkit.reporting.groups import HIDDEN, LOGIT

K = TypeVar("K")

SOURCE: Final = "arXiv 2410.05258v2, Table 5"
SCALE: Final = "2.8B parameters, 0.4M tokens"
ALL_READING, VALID_READING = "all of QK^T", "valid positions"
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

    @property
    def figures(self) -> tuple[float, ...]:
        """In the order of Table 5's columns."""
        return (*self.abs_top, self.abs_median)


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
    return ALL_READING if ALL_READING in definition else VALID_READING


@dataclass(frozen=True, kw_only=True)
class PaperLine(Generic[K]):
    """Figures of one model of the paper; of a `part` of the context, where that is what varies."""

    model: str
    values: dict[K, float]
    part: str = ""

    @property
    def label(self) -> str:
        """As `PaperRow.label`."""
        return f"{self.model} (paper)"


BASELINE, DIFF = "Transformer", "DIFF"
FIGURE_8: Final[tuple[PaperLine[int], ...]] = (
    PaperLine(model=BASELINE, values={16: 63.4, 8: 62.7, 6: 58.9, 4: 33.9}),
    PaperLine(model=DIFF, values={16: 66.2, 8: 66.3, 6: 66.0, 4: 58.8}),
)
"""Zero-shot accuracy in percent on HellaSwag, by bits of the attention logits, dynamic absmax; read
off the figure's coordinates, good to 0.1."""
FIGURE_8_NOTE: Final = (
    "(paper): the paper's own figures at its scale (arXiv 2410.05258v2, Figure 8: HellaSwag, "
    "zero-shot; what shares a scale is not said there); they were not measured here."
)

NEEDLES: Final[tuple[PaperLine[tuple[int, int]], ...]] = (
    PaperLine(model=BASELINE, values={(1, 1): 1.00, (2, 2): 0.85, (4, 2): 0.62, (6, 2): 0.55}),
    PaperLine(model=DIFF, values={(1, 1): 1.00, (2, 2): 0.92, (4, 2): 0.84, (6, 2): 0.85}),
)
"""Accuracy of retrieval by (needles, queries), 4K tokens of context, mean over five depths."""


def _by_depth(*values: float) -> dict[int, float]:
    return dict(zip((0, 25, 50, 75, 100), values, strict=True))


MASSES: Final[tuple[PaperLine[int], ...]] = (
    PaperLine(model=BASELINE, part="answer", values=_by_depth(0.03, 0.03, 0.03, 0.07, 0.09)),
    PaperLine(model=DIFF, part="answer", values=_by_depth(0.27, 0.30, 0.31, 0.32, 0.40)),
    PaperLine(model=BASELINE, part="noise", values=_by_depth(0.51, 0.54, 0.52, 0.49, 0.49)),
    PaperLine(model=DIFF, part="noise", values=_by_depth(0.01, 0.02, 0.02, 0.02, 0.01)),
)
"""Attention to a part of the context by depth of the asked needle in percent: Table 3."""
RETRIEVAL_NOTE: Final = (
    "(paper): the paper's own figures at its scale (arXiv 2410.05258v2, 4K tokens of context); "
    "they were not measured here."
)
