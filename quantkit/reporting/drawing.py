"""What a picture is, and how it becomes SVG: Vega-Lite, drawn by vl-convert without a network.

altair writes the specifications and vl-convert, which carries Vega itself, draws them when a report
is made. So a page holds finished pictures, 10 to 100 kB each, and none of a library's JavaScript.
Every mark with a value has its words in `aria-label`; the page's script shows them as a tooltip.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import altair as alt

from quantkit.reporting.svg import Spec, drawn, named, plain, root_of
from quantkit.reporting.theme import LIGHT, hue

SHAPES: Final = ("circle", "square", "triangle-up", "diamond", "cross")
DASHES: Final = ((1, 0), (7, 4), (2, 3), (9, 3, 2, 3))
"""Marker and dash of a style: what tells lines apart without colour."""
WIDTH, HEIGHT = 400, 230
"""Pixels of an ordinary view, without its axes."""
SMALL_WIDTH, SMALL_HEIGHT = 250, 160


@dataclass(frozen=True, kw_only=True)
class Key:
    """An entry of a legend: hue, dash and marker of a line, or of dots that have none."""

    name: str
    colour: int
    style: int
    hollow: bool = False
    has_line: bool = True

    @property
    def shape(self) -> str:
        """The marker, as Vega names it."""
        return SHAPES[self.style % len(SHAPES)]

    @property
    def dash(self) -> list[int]:
        """Drawn and left out, in pixels."""
        return list(DASHES[self.style % len(DASHES)])


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One view of a chart; `words` say to those who cannot see it what is drawn."""

    spec: Spec
    words: str
    title: str = ""
    caption: str = ""
    """Below its title."""
    rows: int = 0
    """Values that are drawn; each is a mark with words, but in a surface a block of cells is."""
    keys: tuple[Key, ...] = ()
    note: str = ""
    """What could not be drawn."""

    @cached_property
    def view(self) -> dict[str, Any]:
        """`spec` as Vega-Lite reads it."""
        return plain(self.spec)


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """The ends of a heat map's scale, in words."""

    low: str
    high: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A picture of one or more panels with one legend.

    Attributes:
        name: Of its file and its anchor, without an ending.
        note: Below the picture.
    """

    name: str
    title: str
    panels: tuple[Panel, ...]
    keys: tuple[Key, ...] = ()
    note: str = ""
    ramp: Ramp | None = None


def data_of(rows: Sequence[Mapping[str, Any]]) -> alt.InlineData:
    """Returns the rows of a view; as a tuple, which altair does not copy at every step."""
    return alt.InlineData(values=tuple(rows))


def together(
    name: str, title: str, panels: Sequence[Panel], *, note: str = "", ramp: Ramp | None = None
) -> Chart:
    """Returns the panels as one chart: one legend of all their series, and each note once."""
    keys = dict.fromkeys(key for panel in panels for key in panel.keys if key.name)
    notes = dict.fromkeys(text for text in (note, *(panel.note for panel in panels)) if text)
    return Chart(
        name=name or slug(title),
        title=title,
        panels=tuple(panels),
        keys=tuple(keys),
        note=" ".join(notes),
        ramp=ramp,
    )


def slug(name: str) -> str:
    """Returns a name for a file: lower case, digits and dashes; of a path its last part."""
    head, _, source = name.partition("=")
    if "/" in source or "\\" in source:
        last = re.split(r"[/\\]", source.rstrip("/\\"))[-1]
        name = f"{head}-{last.rsplit('.', 1)[0]}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60].strip("-") or "task"


def page_svg(panel: Panel, label: str) -> str:
    """Returns a panel as it stands in a page: its legend and title are the page's.

    `label` names the picture for screen readers.
    """
    words = f"{label}: {panel.title}" if panel.title else label
    return named(drawn(panel.view), words, panel.words)


def key_svg(key: Key) -> str:
    """Returns the sample of a legend's entry, 34 by 12."""
    if key not in _DRAWN_KEYS:
        svg = drawn(plain(_sample(key).properties(width=34, height=12, padding=0)))
        root = root_of(svg)
        start = f'<svg viewBox="0 0 {root[1]} {root[2]}" aria-hidden="true">'
        _DRAWN_KEYS[key] = start + svg[root.end() :]
    return _DRAWN_KEYS[key]


_DRAWN_KEYS: Final[dict[Key, str]] = {}
"""Legends repeat themselves, and drawing is what takes time."""


def _sample(key: Key) -> Spec:
    """Returns a piece of the line with one marker."""
    ink = hue(key.colour)
    across = alt.X("x:Q", axis=None, scale=alt.Scale(domain=[0, 1]))
    line = (
        alt.Chart(data_of([{"x": 0, "x2": 1}]))
        .mark_rule(stroke=ink, strokeWidth=2, strokeDash=key.dash, aria=False)
        .encode(x=across, x2="x2:Q")
    )
    fill = LIGHT["page"] if key.hollow else ink
    point = (
        alt.Chart(data_of([{"x": 0.5}]))
        .mark_point(shape=key.shape, size=46, fill=fill, stroke=ink, opacity=1, aria=False)
        .encode(x=across)
    )
    return alt.layer(line, point) if key.has_line else alt.layer(point)


HEAT: Final = LIGHT["c1"]
"""The hue of heat maps, whose opacity is the value: it works on light and dark pages."""
