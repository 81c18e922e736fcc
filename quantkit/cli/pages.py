"""`python -m quantkit.cli.pages docs/cli.md` writes the help of every command as one page."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from quantkit.cli.commands import app
from quantkit.cli.help import HelpPage, help_page, plain_page

_HEAD = """# The command line

What `quantkit COMMAND --help` says. Written by `python -m quantkit.cli.pages docs/cli.md`, and
compared with the commands by a test: change the help, then run that.
"""


def all_pages() -> Iterator[tuple[str, HelpPage]]:
    """Yields `(quantkit stats, its page)` of every command, and of every group before its own."""
    yield from _pages(typer.main.get_command(app), "quantkit", None)


def _pages(command: Any, name: str, parent: Any) -> Iterator[tuple[str, HelpPage]]:
    own = command.context_class(command, info_name=name, parent=parent, **command.context_settings)
    yield own.command_path, help_page(command, own)
    for part in getattr(command, "commands", {}).values():
        yield from _pages(part, part.name, own)


def markdown() -> str:
    """Returns the pages as Markdown: a heading and a block of text each."""
    pages = [f"## {name}\n\n```text\n{plain_page(page)}```\n" for name, page in all_pages()]
    return "\n".join([_HEAD, *pages])


def main(arguments: list[str]) -> None:
    """Writes the page to the path that is named."""
    if len(arguments) != 1:
        sys.exit("usage: python -m quantkit.cli.pages docs/cli.md")
    path = Path(arguments[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(markdown(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
