"""Search: what to keep in higher precision.

ranking.py      every quantizer alone, and all but it: the entry point
units.py        what is switched together
bench.py        forwards under each setting, from the layer where they begin to differ
cells.py        what was measured, kept one by one
divergence.py   KL between two predictions
rows.py         cells -> figures with standard errors
keep.py         the fewest to keep in float
"""

from quantkit.search.ranking import sensitivity

__all__ = ["sensitivity"]
