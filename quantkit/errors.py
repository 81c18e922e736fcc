"""The errors a caller can act on: each message says what was expected, what came, and what to do.

The library raises them; only the command line turns them into one line and an exit code.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class QuantkitError(Exception):
    """Base of every error that quantkit raises on purpose."""


class InputError(QuantkitError):
    """Something the caller gave cannot be used (exit code 2)."""


class GateError(QuantkitError):
    """The work was done and its result is outside a gate: parity or accuracy (exit code 1)."""


class ProbeError(QuantkitError):
    """A probe or quantizer could not see, or did not see, what it was attached to (exit code 2)."""


def suggest(word: str, available: Iterable[str]) -> str:
    """Returns the tail of an error on an unknown name: the nearest known one, and all of them."""
    names = sorted(available)
    near = difflib.get_close_matches(word, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{hint} Available: {', '.join(names)}."
