"""What a picture is, and how it becomes SVG: Vega-Lite, drawn by vl-convert without a network.

altair writes the specifications and vl-convert, which carries Vega itself, draws them when a report
is made. So a page holds finished pictures, 10 to 100 kB each, and none of a library's JavaScript.
Every mark with a value has its words in `aria-label`; the page's script shows them as a tooltip.
"""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from typing import Any, Final

import altair as alt
import vl_convert

from quantkit.reporting.text import printable
from quantkit.reporting.theme import LIGHT, dark_rules, hue

Spec = alt.Chart | alt.LayerChart | alt.FacetChart | alt.VConcatChart
"""One view (or one above another), with its width and height, without title and legend."""

SHAPES: Final = ("circle", "square", "triangle-up", "diamond", "cross")
DASHES: Final = ((1, 0), (7, 4), (2, 3), (9, 3, 2, 3))
"""Marker and dash of a style: what tells lines apart without colour."""
WIDTH, HEIGHT = 400, 230
"""Pixels of an ordinary view, without its axes."""
SMALL_WIDTH, SMALL_HEIGHT = 250, 160
_FONT: Final = "system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif"
_DIGITS: Final = re.compile(r"-?\d+\.\d{3,}(?:e-?\d+)?")
_ROLE_WORDS: Final = re.compile(r' aria-roledescription="[^"]*"')
_ROOT: Final = re.compile(r"<svg [^>]*?width=\"([0-9.]+)\" height=\"([0-9.]+)\"[^>]*>")
_PATHS: Final = re.compile(r' (?:d|transform)="[^"]*"')
_KEY_WIDTH: Final = 220
"""Pixels of a legend's entry, at least."""
_ROW: Final = 18
_MARK: Final = re.compile(rb"<!-- quantkit report ([0-9a-f]{64}) -->\n\Z")
"""The last line of a file: the hash of all before it."""


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
    """Marks with a value in it."""
    keys: tuple[Key, ...] = ()
    note: str = ""
    """What could not be drawn."""

    @cached_property
    def view(self) -> dict[str, Any]:
        """`spec` as Vega-Lite reads it."""
        return _plain(self.spec)


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


def unique(charts: Iterable[Chart]) -> tuple[Chart, ...]:
    """Returns the charts with names that differ: a second `bits` is `bits-2`."""
    taken: set[str] = set()
    found = []
    for chart in charts:
        name, again = chart.name, 2
        while name in taken:
            name, again = f"{chart.name}-{again}", again + 1
        taken.add(name)
        found.append(chart if name == chart.name else replace(chart, name=name))
    return tuple(found)


def page_svg(panel: Panel, label: str) -> str:
    """Returns a panel as it stands in a page: its legend and title are the page's.

    `label` names the picture for screen readers.
    """
    words = f"{label}: {panel.title}" if panel.title else label
    return _named(_drawn(panel.view), words, panel.words)


def file_svg(chart: Chart) -> str:
    """Returns a file: title, panels, legend and note, for light and dark pages.

    Its last line has the hash of the rest, by which a later report knows it as its own.
    """
    columns = min(3 if len(chart.panels) != 4 else 2, len(chart.panels))
    views = [_titled(panel) for panel in chart.panels]
    widths = [_width_of(view) for view in views[:columns]]
    room = sum(widths) + 70 * (columns - 1)
    parts = views if len(views) == 1 else [{"concat": views, "columns": columns, "spacing": 24}]
    if chart.ramp is not None:
        parts.append(_plain(_ramp_spec(chart.ramp)))
    keys = [key for key in chart.keys if key.name]
    if keys:
        parts.append(_plain(_legend_spec(keys, room)))
    body: dict[str, Any] = {"vconcat": parts, "spacing": 16}
    body["title"] = {
        "text": _wrapped(chart.title, room / 7),
        "subtitle": _wrapped(chart.note, room / 6) if chart.note else [],
        "anchor": "start",
        "frame": "bounds",
    }
    body |= {"padding": 14, "background": LIGHT["page"]}
    words = " ".join(f"{panel.title}: {panel.words}".lstrip(": ") for panel in chart.panels)
    text = _named(_drawn(body), chart.title, words)
    head, rest = text.split(">", 1)
    return marked(f"{head}><style>{dark_rules()}</style>{rest}\n")


def marked(body: str) -> str:
    """Returns a file's text with the mark by which `is_ours` knows it."""
    body = body.encode("utf-8", errors="replace").decode("utf-8")  # as the file will hold it
    return f"{body}<!-- quantkit report {hashlib.sha256(body.encode()).hexdigest()} -->\n"


def is_ours(content: bytes) -> bool:
    """Returns whether a file is, byte for byte, one that `file_svg` made."""
    mark = _MARK.search(content)
    return (
        mark is not None
        and hashlib.sha256(content[: mark.start()]).hexdigest() == mark[1].decode()
    )  # fmt: skip


def key_svg(key: Key) -> str:
    """Returns the sample of a legend's entry, 34 by 12."""
    if key not in _DRAWN_KEYS:
        svg = _drawn(_plain(_sample(key).properties(width=34, height=12, padding=0)))
        root = _root(svg)
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


def _legend_spec(keys: Sequence[Key], room: float) -> Any:
    """Returns the legend of a file, as many entries a row as there is room for."""
    columns = max(1, int(room / _KEY_WIDTH))
    wide = room / columns
    rows = [
        {
            "column": i % columns,
            "end": i % columns + 26 / wide,
            "middle": i % columns + 13 / wide,
            "row": i // columns,
            "name": printable(key.name),
            "key": str(i),
            "o": int(key.has_line),
        }
        for i, key in enumerate(keys)
    ]
    data = data_of(rows)
    names = [str(i) for i in range(len(keys))]
    hues = alt.Scale(domain=names, range=[hue(key.colour) for key in keys])
    fills = alt.Scale(
        domain=names, range=[LIGHT["page"] if k.hollow else hue(k.colour) for k in keys]
    )
    dashes = alt.Scale(domain=names, range=[key.dash for key in keys])
    shapes = alt.Scale(domain=names, range=[key.shape for key in keys])
    across = alt.Scale(domain=[0, columns], nice=False)
    y = alt.Y("row:O", axis=None)
    base = alt.Chart(data)
    line = base.mark_rule(strokeWidth=2, aria=False).encode(
        x=alt.X("column:Q", axis=None, scale=across),
        x2="end:Q",
        y=y,
        stroke=alt.Stroke("key:N", scale=hues, legend=None),
        strokeDash=alt.StrokeDash("key:N", scale=dashes, legend=None),
        strokeOpacity=alt.StrokeOpacity("o:Q", scale=None, legend=None),
    )
    point = base.mark_point(size=46, opacity=1, aria=False).encode(
        x=alt.X("middle:Q", axis=None, scale=across),
        y=y,
        stroke=alt.Stroke("key:N", scale=hues, legend=None),
        fill=alt.Fill("key:N", scale=fills, legend=None),
        shape=alt.Shape("key:N", scale=shapes, legend=None),
    )
    text = base.mark_text(align="left", dx=6, fontSize=12, limit=wide - 36).encode(
        x=alt.X("end:Q", axis=None, scale=across), y=y, text="name:N"
    )
    tall = _ROW * (1 + (len(keys) - 1) // columns)
    return (
        alt.layer(line, point, text)
        .resolve_scale(stroke="independent", fill="independent")
        .properties(width=room, height=tall, view=alt.ViewConfig(stroke=None))
    )


def _ramp_spec(ramp: Ramp) -> Spec:
    """Returns the scale of a heat map: faint to full."""
    steps = 24
    data = alt.InlineData(
        values=[{"x": i, "x2": i + 1, "o": (i + 1) / steps} for i in range(steps)]
    )
    across = alt.X("x:Q", axis=None, scale=alt.Scale(domain=[-12, 36], nice=False))
    bar = (
        alt.Chart(data)
        .mark_rect(fill=HEAT, aria=False, stroke=None)
        .encode(x=across, x2="x2:Q", fillOpacity=alt.FillOpacity("o:Q", scale=None))
    )
    words = [{"x": 0, "t": printable(ramp.low)}, {"x": steps, "t": printable(ramp.high)}]
    low = (
        alt.Chart(data_of(words[:1]))
        .mark_text(align="right", dx=-5, fontSize=12)
        .encode(x=across, text="t:N")
    )
    high = (
        alt.Chart(data_of(words[1:]))
        .mark_text(align="left", dx=5, fontSize=12)
        .encode(x=across, text="t:N")
    )
    return alt.layer(bar, low, high).properties(
        width=300, height=12, view=alt.ViewConfig(stroke=None)
    )


HEAT: Final = LIGHT["c1"]
"""The hue of heat maps, whose opacity is the value: it works on light and dark pages."""


def _titled(panel: Panel) -> dict[str, Any]:
    """Returns the panel's specification with its title and caption."""
    if not panel.title:
        return panel.view
    caption = _wrapped(panel.caption, 44) if panel.caption else []
    title = {"text": printable(panel.title), "subtitle": caption}
    return panel.view | {"title": title}


def _plain(spec: Spec) -> dict[str, Any]:
    """Returns the specification as Vega-Lite reads it.

    Views are put together as such: altair copies all data of a view for each step of composing.
    """
    # else each view's data would stand where only a whole specification may have them
    with alt.data_transformers.enable(consolidate_datasets=False):
        found: dict[str, Any] = spec.to_dict(validate=False)
    return {key: value for key, value in found.items() if key not in ("config", "$schema")}


def _width_of(view: dict[str, Any]) -> float:
    """Returns a view's own width in pixels, without its axis."""
    width = view.get("width", view.get("vconcat", [{}])[0].get("width", WIDTH))
    return float(width) if isinstance(width, (int, float)) else float(WIDTH)


def _wrapped(text: str, characters: float) -> list[str]:
    return textwrap.wrap(printable(text), max(20, int(characters))) or [""]


_CONFIG: Final = {
    "font": _FONT,
    "background": None,
    "view": {"stroke": None},
    "axis": {
        "labelColor": LIGHT["soft"], "titleColor": LIGHT["soft"], "labelFontSize": 12,
        "titleFontSize": 12, "titleFontWeight": "normal", "gridColor": LIGHT["rule"],
        "domainColor": LIGHT["soft"], "tickColor": LIGHT["soft"], "labelOverlap": "greedy",
        "labelLimit": 220, "titlePadding": 8, "aria": False,
    },
    "axisX": {"grid": False},
    "axisY": {"domain": False, "ticks": False},
    "text": {"color": LIGHT["ink"], "fontSize": 12, "aria": False},
    "title": {
        "color": LIGHT["ink"], "fontSize": 13, "subtitleColor": LIGHT["soft"],
        "subtitleFontSize": 12, "fontWeight": 600, "subtitlePadding": 4, "offset": 12,
    },
    "concat": {"spacing": 24},
}  # fmt: skip


def _drawn(view: dict[str, Any]) -> str:
    """Returns the SVG that Vega draws, numbers cut to a hundredth of a pixel.

    A character that XML does not have would end the process (vl-convert 1.9), so none may pass.
    """
    text = vl_convert.vegalite_to_svg(_safe(view) | {"config": _CONFIG})
    text = _ROLE_WORDS.sub("", text)
    return _PATHS.sub(lambda match: _DIGITS.sub(_rounded, match[0]), text)


def _safe(value: Any) -> Any:
    """Returns the value with every text in it printable and whole."""
    if isinstance(value, str):
        return printable(value).encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_safe(key): _safe(item) for key, item in value.items()}
    return [_safe(item) for item in value] if isinstance(value, (list, tuple)) else value


def _rounded(match: re.Match[str]) -> str:
    return f"{float(match[0]):.2f}".rstrip("0").rstrip(".")


def _named(svg: str, label: str, words: str) -> str:
    """Returns the SVG with its name and what it shows for screen readers, scalable."""
    root = _root(svg)
    named = escape(printable(label))
    start = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {root[1]} {root[2]}" '
        f'width="{root[1]}" height="{root[2]}" role="group" aria-label="{named}">'
        f"<desc>{escape(printable(words))}</desc>"
    )
    return svg[: root.start()] + start + svg[root.end() :]


def _root(svg: str) -> re.Match[str]:
    root = _ROOT.search(svg)
    if root is None:
        raise AssertionError("Vega drew no <svg> with a width and a height")
    return root
