"""Panels as files of their own: the small charts of a figure in rows, with one legend."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import jinja2

from quantkit.reporting.blocks import Figure, Panels, Section
from quantkit.reporting.charts import Label, LineChart, Series, rounded
from quantkit.reporting.dot_charts import DotSeries
from quantkit.reporting.pictures import DARK, LIGHT, MARGIN, legend_of, lines_of, marked

_ROOM: Final = 990.0
"""SVG units of a row: three small panels."""
_TITLE: Final = 22.0
SHOWN_WIDTH: Final = 880
"""Pixels, of an image that a page does not scale."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A panel and where it stands."""

    x: float
    y: float
    chart: LineChart


@dataclass(frozen=True, kw_only=True)
class PanelPicture:
    """A figure with heading, panels, legend and notes, inside of one rectangle."""

    name: str
    title: str
    heading: tuple[Label, ...]
    placed: tuple[Placed, ...]
    keys: tuple[tuple[Series | DotSeries, Label], ...]
    notes: tuple[Label, ...]
    width: float
    height: float

    @property
    def shown_width(self) -> int:
        """Pixels."""
        return SHOWN_WIDTH

    @property
    def shown_height(self) -> int:
        """Pixels."""
        return round(SHOWN_WIDTH * self.height / self.width)


def figures_of(sections: Iterable[Section]) -> tuple[Figure, ...]:
    """Returns the figures of all blocks, in the order of the page."""
    return tuple(f for section in sections for block in section.blocks for f in block.figures)


def panel_picture(figure: Figure) -> PanelPicture:
    """Returns the figure's picture, a file called `NAME.svg`."""
    panels: Panels = figure.panels
    width = _ROOM + 2 * MARGIN
    heading = lines_of(panels.title, _ROOM * 12 / 14, first=MARGIN + 12)
    placed: list[Placed] = []
    x, y, tall = MARGIN, heading[-1].y + 10, 0.0
    for chart in panels.charts:
        if x > MARGIN and x + chart.width > width - MARGIN + 1:
            x, y, tall = MARGIN, y + tall, 0.0
        placed.append(Placed(x=rounded(x), y=rounded(y), chart=chart))
        x += chart.width + MARGIN / 2
        tall = max(tall, chart.height + _TITLE)
    keys, below = legend_of(panels.series, _ROOM, y + tall + 8)
    notes = lines_of(panels.note, _ROOM, first=below + 20) if panels.note else ()
    below = notes[-1].y + 6 if notes else below
    return PanelPicture(
        name=f"{figure.name}.svg",
        title=panels.title,
        heading=heading,
        placed=tuple(placed),
        keys=keys,
        notes=notes,
        width=width,
        height=rounded(below + MARGIN),
    )


def panel_svg(picture: PanelPicture, environment: jinja2.Environment) -> str:
    """Returns the file's text; `environment` is one that escapes."""
    return marked(
        environment.get_template("panels.svg.j2").render(picture=picture, light=LIGHT, dark=DARK)
    )
