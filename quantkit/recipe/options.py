"""The words behind the colons of a part, each of one kind, in any order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from quantkit.errors import InputError, suggest

_GROUP: Final = re.compile(r"group([0-9]{1,6})")
GROUP: Final = "group"
"""The kind of a word `groupN`; its value is N."""


def sorted_out(
    words: Sequence[str], kinds: Mapping[str, Sequence[str]], *, what: str, recipe: str
) -> dict[str, str]:
    """Returns the word of each kind that was given.

    Args:
        kinds: Kind -> its words; of the kind `group` the word is `groupN`, of any N.
        what: What the options are of, for messages.

    Raises:
        InputError: a word of no kind, or two of one.
    """
    found: dict[str, str] = {}
    for word in words:
        group = _GROUP.fullmatch(word) if GROUP in kinds else None
        kind = GROUP if group else next((k for k, known in kinds.items() if word in known), None)
        if kind is None:
            known = [name for names in kinds.values() for name in names]
            hint = suggest(word, known) if known else ""
            raise InputError(f"recipe {recipe!r}: unknown option {word!r} of {what}.{hint}")
        if kind in found:
            raise InputError(f"recipe {recipe!r}: option {word!r} says the same thing twice.")
        found[kind] = group[1] if group else word
    return found


def check_word(word: str, known: Sequence[str], kind: str, what: str) -> None:
    """Raises InputError for a word that is none of the known ones."""
    if word not in known:
        raise InputError(f"unknown {kind} {word!r} of {what}.{suggest(word, known)}")


def check_bits(bits: int, most: int, what: str, tail: str = "") -> None:
    """Raises InputError for a width outside 2 to `most`."""
    if not 2 <= bits <= most:
        raise InputError(f"{what} take 2 to {most} bits, got {bits}.{tail}")


def number(digits: str) -> int:
    """Returns the number; of an absurd length one that no width or size can be."""
    return int(digits) if len(digits) <= 6 else 999_999
