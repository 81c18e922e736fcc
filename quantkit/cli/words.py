"""What options hold, read: lists between commas, numbers, shares."""

from __future__ import annotations

from quantkit.errors import InputError
from quantkit.jobs.config_file import NOTHING


def words(name: str, text: str | None, *, may_be_none: bool = False) -> tuple[str, ...]:
    """Returns the parts of a comma-separated list, each once; none where there is no text.

    A list of a config file comes with a part a line, so that a part may hold a comma.

    Args:
        may_be_none: Whether the word `none` stands for an empty list.

    Raises:
        InputError: an empty part, or one that stands twice.
    """
    if text is None or (may_be_none and text == NOTHING):
        return ()
    between = "\n" if text.endswith("\n") else ","
    parts = tuple(part.strip() for part in text.removesuffix("\n").split(between))
    if not all(parts):
        raise InputError(f"--{name} takes a comma-separated list, got {text!r}.")
    twice = [part for part in parts if parts.count(part) > 1]
    if twice:
        raise InputError(f"--{name} has {twice[0]!r} twice.")
    return parts


def fractions(name: str, text: str) -> tuple[float, ...]:
    """Returns a comma-separated list of numbers, or none for `none`.

    Raises:
        InputError: a part is no number.
    """
    try:
        return tuple(float(part) for part in words(name, text, may_be_none=True))
    except ValueError:
        raise InputError(f"--{name} takes numbers such as 0.99,0.999; got {text!r}.") from None


def share(name: str, text: str) -> float:
    """Returns a fraction that is written as such, or in percent.

    Raises:
        InputError: neither.
    """
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        return float(number) / (100.0 if percent else 1.0)
    except ValueError:
        raise InputError(f"--{name} takes a share such as 1% or 0.01; got {text!r}.") from None


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    """Returns a comma-separated list of whole numbers.

    Raises:
        InputError: a part is no whole number.
    """
    parts = words(name, text)
    for part in parts:
        if not (part.isascii() and part.isdigit() and len(part) <= 6):
            raise InputError(f"--{name} takes whole numbers such as 16,8,6,4; got {part!r}.")
    return tuple(int(part) for part in parts)
