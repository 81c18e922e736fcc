"""The errors a caller can act on: each message says what was expected, what came, and what to do.

The library raises them; only the command line turns them into one line and an exit code.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 1500
_TAIL = 400


class QuantkitError(Exception):
    """Base of every error that quantkit raises on purpose: one line, whatever it quotes.

    What a file or a user says may be of any length and hold line ends: the middle of a message
    that is longer than two thousand characters is left out.
    """

    def __init__(self, message: str = "") -> None:
        line = " ".join(message.splitlines())
        if len(line) > _LONGEST + _TAIL:
            line = f"{line[:_LONGEST]} [...] {line[-_TAIL:]}"
        super().__init__(line)


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
