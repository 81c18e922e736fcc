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


_SHOWN = 24


def suggest(word: str, available: Iterable[str]) -> str:
    """Returns the tail of an error on an unknown name: the nearest known one, and all of them.

    Of very many, such as a model's modules, the nearest few.
    """
    names = sorted(name for name in available if name)
    near = difflib.get_close_matches(word, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    more = ""
    if len(names) > _SHOWN:
        shown = difflib.get_close_matches(word, names, n=_SHOWN // 4, cutoff=0.0)
        more, names = f" and {len(names) - len(shown)} more", shown
    return f"{hint} Available: {', '.join(names)}{more}."
