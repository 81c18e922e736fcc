"""Tasks: each scores a callable and does not know whether it is quantized."""

from quantkit.tasks.perplexity import BlockScores, Scorer, score_blocks

__all__ = ["BlockScores", "Scorer", "score_blocks"]
