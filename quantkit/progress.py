"""How long work tells that it moves on; the library calls, the command line draws."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps in all)."""


def silent(_what: str, _done: int, _total: int) -> None:
    """The default: nobody watches."""
