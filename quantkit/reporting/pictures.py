"""A sweep's pictures as files of their own, e.g. for a README: SVG that fetches and runs nothing.

Each brings its colours, for light and dark pages, as plain properties: a renderer that knows no
`prefers-color-scheme` shows the light ones.
"""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import jinja2

from quantkit.errors import InputError
from quantkit.reporting.charts import Label, LineChart, Series, rounded
from quantkit.reporting.collect import Run
from quantkit.reporting.dot_charts import DotChart, DotSeries
from quantkit.reporting.sweep_charts import named_charts, named_recipe_charts
from quantkit.reporting.text import CHARACTER, clipped, printable, text_width

SHOWN_WIDTH: Final = 640
"""Pixels, of an image that a page does not scale."""
LIGHT: Final = {
    "page": "#fcfcfb", "ink": "#1c1c1a", "soft": "#5d5c57", "rule": "#dddbd3", "panel": "#f3f2ee",
    "hues": (
        "#2a6fdb", "#c2410c", "#0f8a5f", "#9333b8", "#a16207", "#be185d", "#0e7490", "#57534e",
    ),
}  # fmt: skip
DARK: Final = {
    "page": "#191918", "ink": "#ecebe6", "soft": "#a9a79f", "rule": "#3a3935", "panel": "#232321",
    "hues": (
        "#6ea8ff", "#fb8a55", "#45c795", "#cf8bee", "#dcae3f", "#f47bb0", "#4fc3dc", "#b5b1aa",
    ),
}  # fmt: skip
"""The report's own colours, by their names in its style sheet."""

_MARK: Final = re.compile(rb"<!-- quantkit report ([0-9a-f]{64}) -->\n\Z")
"""The last line of a picture: the hash of all before it."""
_NAMES: Final = ("sweep-*.svg", "pair-*.svg", "training-*.svg")
MARGIN: Final = 14.0
_LINE: Final = 18.0
_SAMPLE: Final = 40.0


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A chart with its heading, legend and notes, all inside of one rectangle.

    Attributes:
        name: Of the file.
        keys: (series, place and name of its entry in the legend).
        chart_top: How far the chart itself is moved down.
    """

    name: str
    title: str
    chart: LineChart | DotChart
    heading: tuple[Label, ...]
    keys: tuple[tuple[Series | DotSeries, Label], ...]
    notes: tuple[Label, ...]
    chart_top: float
    width: float
    height: float

    @property
    def is_line(self) -> bool:
        """True for a line chart."""
        return isinstance(self.chart, LineChart)

    @property
    def shown_width(self) -> int:
        """Pixels."""
        return SHOWN_WIDTH

    @property
    def shown_height(self) -> int:
        """Pixels."""
        return round(SHOWN_WIDTH * self.height / self.width)


def pictures(run: Run, *, with_bits: bool = True) -> tuple[Picture, ...]:
    """Returns a picture for each chart of the sweeps; their names differ.

    Without `with_bits` none of the logits' bits alone: they are shown otherwise.
    """
    charts: list[tuple[str, LineChart | DotChart]] = []
    charts += [
        (f"{slug(task)}{_beside(rest)}", chart)
        for (task, rest), chart in named_charts(run)
        if with_bits or rest
    ]
    charts += [(f"{slug(task)}-recipes", chart) for task, chart in named_recipe_charts(run)]
    taken: set[str] = set()
    found = []
    for name, chart in charts:
        unique, again = name, 2
        while unique in taken:
            unique, again = f"{name}-{again}", again + 1
        taken.add(unique)
        found.append(_picture(f"sweep-{unique}.svg", chart))
    return tuple(found)


def slug(name: str) -> str:
    """Returns a name for a file: lower case, digits and dashes; of a path its last part."""
    head, _, source = name.partition("=")
    if "/" in source or "\\" in source:
        last = re.split(r"[/\\]", source.rstrip("/\\"))[-1]
        name = f"{head}-{last.rsplit('.', 1)[0]}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60].strip("-") or "task"


def _beside(rest: str) -> str:
    return f"-{slug(rest)}" if rest else ""


def svg(picture: Picture, environment: jinja2.Environment) -> str:
    """Returns the file's text, see `remove_stale`; `environment` is one that escapes."""
    return marked(
        environment.get_template("picture.svg.j2").render(
            picture=picture, chart=picture.chart, light=LIGHT, dark=DARK
        )
    )


def marked(body: str) -> str:
    """Returns a picture's text with the mark by which `remove_stale` knows it."""
    # as the file will hold it
    body = body.encode("utf-8", errors="replace").decode("utf-8")
    return f"{body}<!-- quantkit report {hashlib.sha256(body.encode()).hexdigest()} -->\n"


def remove_stale(folder: Path, current: Collection[str]) -> None:
    """Removes the pictures of earlier reports from a folder, but for those called as in `current`.

    One is known by its last line, which holds the hash of the rest: what somebody else made, or
    changed since, stays.

    Raises:
        InputError: one of them cannot be removed.
    """
    for path in sorted(path for name in _NAMES for path in folder.glob(name)):
        if path.name not in current and _is_untouched(path):
            try:
                path.unlink()
            except OSError as error:
                raise InputError(f"cannot remove {path}: {error.strerror or error}.") from error


def _is_untouched(path: Path) -> bool:
    """Returns whether a file is, byte for byte, one that `svg` made; a link is none."""
    if path.is_symlink() or not path.is_file():
        return False
    try:
        content = path.read_bytes()
    except OSError:  # one that cannot be read cannot be known
        return False
    mark = _MARK.search(content)
    if mark is None:
        return False
    return hashlib.sha256(content[: mark.start()]).hexdigest() == mark[1].decode()


def _picture(name: str, chart: LineChart | DotChart) -> Picture:
    room = chart.width - 2 * MARGIN
    heading = lines_of(chart.title, room * 12 / 14, first=MARGIN + 12)
    chart_top = heading[-1].y + 6
    keys, below = legend_of(chart.series, room, chart_top + chart.height + 8)
    notes = lines_of(chart.note, room, first=below + 20) if chart.note else ()
    below = notes[-1].y + 6 if notes else below
    return Picture(
        name=name,
        title=chart.title,
        chart=chart,
        heading=heading,
        keys=keys,
        notes=notes,
        chart_top=rounded(chart_top),
        width=chart.width,
        height=rounded(below + MARGIN),
    )


def lines_of(text: str, room: float, *, first: float) -> tuple[Label, ...]:
    """Returns the text in as many lines as it takes."""
    wide = text_width(text) / max(1, len(text))
    wrapped = textwrap.wrap(printable(text), max(8, int(room / max(wide, 1.0)))) or [""]
    return tuple(
        Label(x=MARGIN, y=rounded(first + i * _LINE), text=line)
        for i, line in enumerate(wrapped)
    )  # fmt: skip


def legend_of(
    series: Sequence[Series | DotSeries], room: float, top: float
) -> tuple[tuple[tuple[Series | DotSeries, Label], ...], float]:
    """Returns where each entry stands, row by row, and where the last row ends."""
    keys: list[tuple[Series | DotSeries, Label]] = []
    x, y = 0.0, top
    for one in series:
        name = printable(one.name)
        while text_width(name) > room - _SAMPLE:
            name = clipped(name, min(len(name) - 1, int((room - _SAMPLE) / CHARACTER)))
        wide = _SAMPLE + text_width(name)
        if x > 0 and x + wide > room:
            x, y = 0.0, y + _LINE
        keys.append((one, Label(x=rounded(MARGIN + x), y=rounded(y), text=name)))
        x += wide + 18.0
    return tuple(keys), y + 12.0
