"""Models x recipes x tasks -> cells of accuracy, each written when it ends."""

from quantkit.sweeps.run import RESAMPLES, digest_of, logit_recipes, run_cells

__all__ = ["RESAMPLES", "digest_of", "logit_recipes", "run_cells"]
