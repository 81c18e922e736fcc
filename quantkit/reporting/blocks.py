"""The parts that a page is made of: the first screen, sections, and in them charts and tables."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.reporting.drawing import Chart
from quantkit.reporting.text import Table


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The export to ship and what it costs, or the command that would find one."""

    title: str
    sentences: tuple[str, ...]
    table: Table | None = None
    commands: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FirstScreen:
    """What a person sees before scrolling: three sentences, a table, charts, what to ship.

    `more` are the sentences that did not fit; they stand below.
    """

    sentences: tuple[str, ...]
    table: Table | None = None
    charts: tuple[Chart, ...] = ()
    export: Recommendation | None = None
    more: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Block:
    """Charts, then their tables."""

    title: str
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section; with nothing in it, it shows `missing`."""

    name: str
    title: str
    tables: tuple[Table, ...] = ()
    missing: str = ""
    blocks: tuple[Block, ...] = ()
    """What stands first."""
    charts: tuple[Chart, ...] = ()
    """Beside or below the first table."""
    notes: tuple[str, ...] = ()
    folded: tuple[Table, ...] = ()
    """Long tables, which open when asked for."""

    @property
    def is_empty(self) -> bool:
        """True where there is nothing but `missing`."""
        return not (self.blocks or self.tables or self.folded or self.charts)
