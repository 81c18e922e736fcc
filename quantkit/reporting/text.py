"""How numbers, sizes and foreign names are written, in HTML, Markdown and on a terminal alike."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

NOT_AVAILABLE = "n/a"
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#~$&])")


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of finished strings; the first `text_columns` are words, the others numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: int = 1
    note: str = ""


def number(value: float | int | None, digits: int = 4) -> str:
    """Returns `digits` significant digits without an exponent where 1e-4 <= |value| < 1e7."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NOT_AVAILABLE
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if not -4 <= magnitude < 7:
        return f"{value:.{digits - 1}e}"
    text = f"{value:,.{max(0, digits - 1 - magnitude)}f}"
    return text


def share(value: float) -> str:
    """Returns a share (0 to 1) in percent."""
    return NOT_AVAILABLE if math.isnan(value) else f"{100 * value:.1f} %"


def relative(value: float, base: float) -> str:
    """Returns the signed change in percent, or as a factor where it is more than tenfold."""
    if not (math.isfinite(value) and math.isfinite(base)) or base <= 0:
        return NOT_AVAILABLE
    if value / base >= 10:
        return f"x{number(value / base, 3)}"
    return f"{100 * (value / base - 1):+.2f} %"


def size(count: int) -> str:
    """Returns bytes in MB (10^6), or in kB below one MB."""
    return f"{count / 1e6:,.1f} MB" if count >= 1_000_000 else f"{count / 1e3:,.1f} kB"


def printable(text: str) -> str:
    """Returns text on one line without control characters, so without terminal escapes."""
    return "".join(c if c.isprintable() else " " for c in text)


def markdown(text: object) -> str:
    """Returns text in which nothing is Markdown or HTML, on one line."""
    return _MARKDOWN.sub(r"\\\1", printable(str(text)))


def plain_table(table: Table) -> str:
    """Returns the table in aligned columns for a terminal."""
    rows = [tuple(printable(cell) for cell in row) for row in (table.columns, *table.rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < table.text_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    note = [printable(table.note)] if table.note else []
    return "\n".join([table.title, *lines, *note]) + "\n"
