"""Tasks: each scores a callable and does not know whether it is quantized."""

from quantkit.tasks.icl import Icl
from quantkit.tasks.image_classification import ImageClassification
from quantkit.tasks.lm_eval_harness import LmEval
from quantkit.tasks.multiple_choice import MultipleChoice
from quantkit.tasks.needles import Needles
from quantkit.tasks.perplexity import BlockScores, Perplexity, Scorer, score_blocks
from quantkit.tasks.task import (
    ImageForward,
    Metric,
    Rows,
    Scores,
    Task,
    TextForward,
)

__all__ = [
    "BlockScores",
    "Icl",
    "ImageClassification",
    "ImageForward",
    "LmEval",
    "Metric",
    "MultipleChoice",
    "Needles",
    "Perplexity",
    "Rows",
    "Scorer",
    "Scores",
    "Task",
    "TextForward",
    "score_blocks",
]
