"""A command's help: what its page says, as plain text, and in colour on a terminal.

The plain page is 100 columns wide wherever it is printed: `docs/cli.md` is made of it.
"""

from __future__ import annotations

import inspect
import io
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from typer.core import TyperArgument, TyperCommand, TyperGroup

WIDTH: Final = 100
_NAMES: Final = 28
"""Columns of the names of options; a longer name has its text on the next line."""
_EXAMPLES: Final = "Examples:"
COMPUTED: Final = "Computing"
OUTPUT: Final = "Output"
_LAST: Final = (COMPUTED, OUTPUT)
"""Panels that come last, in this order: what every command has."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a panel: `default` is `default: 8`, `required`, or nothing."""

    name: str
    unit: str = ""
    text: str
    default: str = ""


@dataclass(frozen=True, kw_only=True)
class HelpPage:
    """What a help page says, in its order; a panel is a title and its rows."""

    usage: str
    paragraphs: tuple[str, ...]
    examples: tuple[str, ...]
    panels: tuple[tuple[str, tuple[Row, ...]], ...]


class OneCommand(TyperCommand):
    """A command with our help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help_text(self, ctx))


def help_text(command: Any, ctx: Any) -> str:
    """Returns the help: as rich draws it where a terminal reads it, else the plain page."""
    page = help_page(command, ctx)
    is_seen = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return _drawn(page) if is_seen else plain_page(page)


def help_page(command: Any, ctx: Any) -> HelpPage:
    """Returns what the help of a command, or of a group of them, says."""
    paragraphs = [part for part in inspect.cleandoc(command.help or "").split("\n\n") if part]
    examples: list[str] = []
    for part in [part for part in paragraphs if part.startswith(_EXAMPLES)]:
        paragraphs.remove(part)
        examples += [line.strip() for line in part.splitlines()[1:]]
    panels: dict[str, list[Row]] = {}
    if isinstance(command, TyperGroup):
        for name in command.list_commands(ctx):
            found: Any = command.get_command(ctx, name)
            summary = " ".join((found.help or "").split("\n\n")[0].split())
            title = found.rich_help_panel or "Commands"
            panels.setdefault(title, []).append(Row(name=name, text=summary))
    shown = [param for param in command.get_params(ctx) if not getattr(param, "hidden", False)]
    for param in shown:
        kind = "Arguments" if isinstance(param, TyperArgument) else "Options"
        title = getattr(param, "rich_help_panel", None) or kind
        panels.setdefault(title, []).append(_row(param))
    for title in _LAST:
        if title in panels:
            panels[title] = panels.pop(title)
    if OUTPUT in panels:  # one option alone needs no panel of its own
        panels[OUTPUT] += panels.pop("Options", [])
    return HelpPage(
        usage=f"{ctx.command_path} {_usage(command)}",
        paragraphs=tuple(" ".join(part.split()) for part in paragraphs),
        examples=tuple(examples),
        panels=tuple((title, tuple(rows)) for title, rows in panels.items()),
    )


def _usage(command: Any) -> str:
    words = ["[OPTIONS]"]
    for param in command.params:
        if isinstance(param, TyperArgument):
            name = (param.metavar or "").strip("[]")
            words.append((name if param.required else f"[{name}]") + "..." * (param.nargs == -1))
    return " ".join([*words, *["COMMAND [ARGS]..."] * isinstance(command, TyperGroup)])


def _row(param: Any) -> Row:
    text = " ".join((param.help or "").split())
    if isinstance(param, TyperArgument):
        name = (param.metavar or param.name or "").strip("[]")
        unit = "..." if param.nargs == -1 else ""
        return Row(name=name + unit, text=text, default="required" if param.required else "")
    flag = param.is_flag
    # short ones first; the others are told apart from them by their dashes
    names = sorted(param.opts, key=lambda option: option.startswith("--"))
    unit = "" if flag else param.metavar or "VALUE"
    return Row(name=", ".join(names), unit=unit, text=text, default=_default(param))


def _default(param: Any) -> str:
    if param.required:
        return "required"
    if isinstance(param.show_default, str):
        return f"default: {param.show_default}"
    if param.name in ("help", "version"):
        return ""
    if param.is_flag:
        return "default: off"
    return "" if param.default in (None, "") else f"default: {param.default}"


def plain_page(page: HelpPage) -> str:
    """Returns the page as text of `WIDTH` columns that ends in a newline."""
    lines = textwrap.wrap(f"Usage: {page.usage}", WIDTH, subsequent_indent=" " * 7)
    for part in page.paragraphs:
        indent = "  "
        lines += ["", *textwrap.wrap(part, WIDTH, initial_indent=indent, subsequent_indent=indent)]
    if page.examples:
        lines += ["", _EXAMPLES, *(f"  {example}" for example in page.examples)]
    for title, rows in page.panels:
        lines += ["", f"{title}:", *(line for row in rows for line in _plain_row(row))]
    return "\n".join(lines) + "\n"


def _plain_row(row: Row) -> Iterator[str]:
    name = f"  {row.name} {row.unit}".rstrip()
    # what must stay on one line has spaces that are not broken at
    default = row.default.replace(" ", "\xa0") if len(row.default) < _NAMES else row.default
    words = f"{row.text} [{default}]" if row.default else row.text
    texts = textwrap.wrap(words, WIDTH - _NAMES, break_on_hyphens=False, break_long_words=False)
    if len(name) + 2 > _NAMES:
        yield name
        name = ""
    for index, text in enumerate(texts or [""]):
        yield f"{name if index == 0 else '':<{_NAMES}}{text}".rstrip().replace("\xa0", " ")


def _drawn(page: HelpPage) -> str:
    """Returns the page with colours and panels, as wide as the terminal."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    width = min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH + 20)
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, highlight=False)
    console.print(Text.assemble(("Usage: ", "bold"), (page.usage, "bold cyan")))
    for part in page.paragraphs:
        console.print(Padding(Text(part), (1, 1, 0, 2), expand=False))
    console.print()

    def panel(title: str, body: Any) -> None:
        shown = Panel(body, title=title, title_align="left", border_style="dim")
        console.print(shown)

    if page.examples:
        panel(_EXAMPLES.rstrip(":"), Text("\n".join(page.examples), style="green"))
    wide = max((_length(row) for _, rows in page.panels for row in rows), default=0)
    for title, rows in page.panels:
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(width=min(wide, width // 3))
        table.add_column(ratio=1)
        for row in rows:
            name = Text.assemble((row.name, "bold cyan"), " ", (row.unit, "yellow"))
            note = (f" [{row.default}]", "red" if row.default == "required" else "dim")
            table.add_row(name, Text.assemble(row.text, note if row.default else ""))
        panel(title, table)
    return file.getvalue()


def _length(row: Row) -> int:
    return len(row.name) + 1 + len(row.unit)
