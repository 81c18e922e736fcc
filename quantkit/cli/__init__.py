"""The command line: one file a command; it parses, calls one function and shows one result.

Talk goes to stderr and results to stdout. Exit codes: 0 done, 1 a gate failed, 2 bad input,
130 interrupted. Nothing here loads torch before a command has parsed its options.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.cli.commands import app


def main() -> None:
    """The entry point; Ctrl-C ends it with 130 from its first moment on."""
    try:
        from quantkit.cli.commands import app

        app()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


def __getattr__(name: str) -> Any:
    """Returns `app`, importing the commands now: `main` is there before they are."""
    if name != "app":
        raise AttributeError(f"module 'quantkit.cli' has no attribute {name!r}")
    from quantkit.cli.commands import app

    return app


__all__ = ["app", "main"]
