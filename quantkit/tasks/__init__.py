"""Tasks: each scores a callable and does not know whether it is quantized."""

from quantkit.tasks.perplexity import BlockScores, Scorer, score_blocks
from quantkit.tasks.task import (
    ImageForward,
    MeasuresAttention,
    Metric,
    Rows,
    Scores,
    Task,
    TextForward,
)

__all__ = [
    "BlockScores",
    "ImageForward",
    "MeasuresAttention",
    "Metric",
    "Rows",
    "Scorer",
    "Scores",
    "Task",
    "TextForward",
    "score_blocks",
]
