"""The parts that a page is made of: sections, and in them pictures beside their table."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.reporting.calibration_charts import HistogramGroup
from quantkit.reporting.charts import ChannelChart, HeatMap, LineChart, Series
from quantkit.reporting.dot_charts import DotChart
from quantkit.reporting.text import Table

PANEL_WIDTH, PANEL_HEIGHT = 320.0, 220.0
"""SVG units of a panel, which a page shows about as large."""


@dataclass(frozen=True, kw_only=True)
class Panels:
    """Small charts with one legend, that of all their series; each has its own title."""

    title: str
    charts: tuple[LineChart, ...]
    note: str = ""

    @property
    def series(self) -> tuple[Series, ...]:
        """One series a name, for the legend."""
        named = {s.name: s for chart in self.charts for s in chart.series if s.name}
        return tuple(named.values())


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A picture; `name` is its file's, without the ending."""

    name: str
    panels: Panels


@dataclass(frozen=True, kw_only=True)
class Block:
    """Pictures, then their tables."""

    title: str
    figures: tuple[Figure, ...] = ()
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
    lines: tuple[LineChart, ...] = ()
    dots: tuple[DotChart, ...] = ()
    heats: tuple[HeatMap, ...] = ()
    across: str = "head"
    """What the columns of `heats` are."""
    channels: tuple[ChannelChart, ...] = ()
    histograms: tuple[HistogramGroup, ...] = ()
    notes: tuple[str, ...] = ()
    folded: tuple[Table, ...] = ()
    """Long tables, which open when asked for."""

    @property
    def is_empty(self) -> bool:
        """True where there is nothing but `missing`."""
        return not (self.blocks or self.tables or self.folded)
