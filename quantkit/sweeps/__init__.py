"""Models x recipes x tasks -> cells of accuracy, each written when it ends."""

from quantkit.sweeps.estimate import planned
from quantkit.sweeps.recipes import logit_recipes, unique
from quantkit.sweeps.run import Measured, run_cells
from quantkit.sweeps.subject import Subject, digest_of, ranges_digest

__all__ = [
    "Measured",
    "Subject",
    "digest_of",
    "logit_recipes",
    "planned",
    "ranges_digest",
    "run_cells",
    "unique",
]
