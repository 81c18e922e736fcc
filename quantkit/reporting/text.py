"""How numbers, sizes and foreign names are written, in HTML, Markdown and on a terminal alike."""

from __future__ import annotations

import math
import re
import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

NOT_AVAILABLE = "n/a"
CHARACTER: Final = 7.0
"""SVG units of 12 px in a wide sans serif; wide characters take two."""
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


def share(value: float | None) -> str:
    """Returns a share (0 to 1) in percent."""
    return NOT_AVAILABLE if value is None or math.isnan(value) else f"{100 * value:.1f} %"


def small_share(value: float) -> str:
    """Returns a share (0 to 1) in percent with three significant digits: clipping is rare."""
    return NOT_AVAILABLE if math.isnan(value) else f"{number(100 * value, 3)} %"


def decibels(value: float) -> str:
    """Returns a level to a tenth of a decibel, without the unit."""
    return f"{value:.1f}" if math.isfinite(value) else number(value)


def interval(lo: float, hi: float) -> str:
    """Returns both ends of a real interval."""
    return NOT_AVAILABLE if math.isnan(lo) or math.isnan(hi) else f"{number(lo)} .. {number(hi)}"


def duration(seconds: float) -> str:
    """Returns a time in the two largest units that it has: `2 h 05 min`, `3 min 20 s`, `12 s`.

    Less than a second, but something, is `1 s`.
    """
    if not math.isfinite(seconds):
        return NOT_AVAILABLE
    whole = round(seconds)
    if whole < 60:
        return f"{max(whole, 1 if seconds > 0 else 0)} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if minutes else f"{hours} h"


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


def quoted(token: str | None, width: int = 24) -> str:
    """Returns the text of a token in quotes, where spaces and control characters show.

    At most `width` characters: what is longer is cut. "" where there is no text.
    """
    if token is None:
        return ""
    text = repr(token)
    return text if len(text) <= width else f"{text[: width - 4]}...{text[-1]}"


def clipped(text: str, width: int) -> str:
    """Returns text of at most `width` characters; its middle goes first, since names end apart."""
    if len(text) <= width:
        return text
    kept = max(2, width - 3)
    return f"{text[: kept - kept // 2]}...{text[len(text) - kept // 2 :]}"


def text_width(text: str) -> float:
    """Returns about how many SVG units a text of 12 px takes, and rather more than less."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return CHARACTER * (len(text) + wide)


def first_of(names: Sequence[str], most: int = 3) -> str:
    """Returns the first names in a list, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def markdown(text: object) -> str:
    """Returns text in which nothing is Markdown or HTML, on one line."""
    return _MARKDOWN.sub(r"\\\1", printable(str(text)))


def without(table: Table, column: str) -> Table:
    """Returns the table without a column."""
    at = table.columns.index(column)
    return replace(
        table,
        columns=table.columns[:at] + table.columns[at + 1 :],
        rows=tuple(row[:at] + row[at + 1 :] for row in table.rows),
        text_columns=table.text_columns - (at < table.text_columns),
    )


def plain_table(table: Table, width: int | None = None) -> str:
    """Returns the table in aligned columns for a terminal.

    With `width` the widest column of words is clipped until lines fit, to 8 characters at the
    least, title and note are wrapped; columns of numbers are never cut.
    """
    rows = _printable_rows(table)
    widths = _widths(rows)
    words = widths[: table.text_columns]
    while width is not None and words and max(words) > 8 and _line_width(widths) > width:
        widths[words.index(max(words))] -= 1
        words = widths[: table.text_columns]
    lines = []
    for row in rows:
        cells = [
            clipped(cell, width).ljust(width) if i < table.text_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    title, note = printable(table.title), printable(table.note)
    notes = [note] if width is None else textwrap.wrap(note, width)
    titles = [title] if width is None else textwrap.wrap(title, width)
    return "\n".join([*titles, *lines, *(line for line in notes if line)]) + "\n"


def table_width(table: Table) -> int:
    """Returns the characters a line of the plain table takes, unclipped."""
    return _line_width(_widths(_printable_rows(table)))


def _printable_rows(table: Table) -> list[tuple[str, ...]]:
    return [tuple(printable(cell) for cell in row) for row in (table.columns, *table.rows)]


def _widths(rows: list[tuple[str, ...]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _line_width(widths: list[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)
