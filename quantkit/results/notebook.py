"""Small HTML tables for notebooks: no style sheet, no script, every name escaped.

Colours are the notebook's own, so that dark ones work.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MOST_ROWS: Final = 12
_CELL: Final = "padding:2px 10px;border-bottom:1px solid rgba(128,128,128,.35);text-align:"
_NUMBERS: Final = "border-collapse:collapse;font-variant-numeric:tabular-nums;margin:4px 0"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table of finished strings; the first `text_columns` are words, the others numbers."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    text_columns: int = 1


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What stands for a result: a line, tables, and sentences below them."""

    title: str
    grids: tuple[Grid, ...]
    notes: tuple[str, ...] = ()


def html_of(*parts: Shown) -> str:
    """Returns the parts below each other; of a long table the first `MOST_ROWS` rows."""
    texts: list[str] = []
    for part in parts:
        texts.append(f"<p><strong>{html.escape(part.title)}</strong></p>")
        for grid in part.grids:
            texts.append(_table(grid))
            if len(grid.rows) > MOST_ROWS:
                texts.append(f"<p>The first {MOST_ROWS} of {len(grid.rows):,} rows.</p>")
        texts += [f"<p>{html.escape(note)}</p>" for note in part.notes if note]
    return f"<div>{''.join(texts)}</div>"


def _table(grid: Grid) -> str:
    head = "".join(_cell("th", text, at, grid) for at, text in enumerate(grid.columns))
    body = "".join(
        f"<tr>{''.join(_cell('td', text, at, grid) for at, text in enumerate(row))}</tr>"
        for row in grid.rows[:MOST_ROWS]
    )
    return f'<table style="{_NUMBERS}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cell(tag: str, text: str, at: int, grid: Grid) -> str:
    side = "left" if at < grid.text_columns else "right"
    return f'<{tag} style="{_CELL}{side}">{html.escape(text)}</{tag}>'


def number(value: float | None) -> str:
    """Returns four significant digits, `n/a` for what was not measured."""
    if value is None or math.isnan(value):
        return "n/a"
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0 or 1e-4 <= abs(value) < 1e7:
        whole = max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0
        return f"{value:,.{whole}f}"
    return f"{value:.3g}"
