"""Pictures as files of their own: title, panels, legend and note, for light and dark pages."""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Sequence
from typing import Any, Final

import altair as alt

from quantkit.reporting.drawing import HEAT, WIDTH, Chart, Key, Panel, Ramp, data_of
from quantkit.reporting.svg import Spec, drawn, named, plain
from quantkit.reporting.text import printable
from quantkit.reporting.theme import LIGHT, dark_rules, hue

_KEY_WIDTH: Final = 220
"""Pixels of a legend's entry, at least."""
_ROW: Final = 18
_MARK: Final = re.compile(rb"<!-- quantkit report ([0-9a-f]{64}) -->\n\Z")
"""The last line of a file: the hash of all before it."""


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
        parts.append(plain(_ramp_spec(chart.ramp)))
    keys = [key for key in chart.keys if key.name]
    if keys:
        parts.append(plain(_legend_spec(keys, room)))
    body: dict[str, Any] = {"vconcat": parts, "spacing": 16}
    body["title"] = {
        "text": _wrapped(chart.title, room / 7),
        "subtitle": _wrapped(chart.note, room / 6) if chart.note else [],
        "anchor": "start",
        "frame": "bounds",
    }
    body |= {"padding": 14, "background": LIGHT["page"]}
    words = " ".join(f"{panel.title}: {panel.words}".lstrip(": ") for panel in chart.panels)
    text = named(drawn(body), chart.title, words)
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


def _titled(panel: Panel) -> dict[str, Any]:
    """Returns the panel's specification with its title and caption."""
    if not panel.title:
        return panel.view
    caption = _wrapped(panel.caption, 44) if panel.caption else []
    title = {"text": printable(panel.title), "subtitle": caption}
    return panel.view | {"title": title}


def _width_of(view: dict[str, Any]) -> float:
    """Returns a view's own width in pixels, without its axis."""
    width = view.get("width", view.get("vconcat", [{}])[0].get("width", WIDTH))
    return float(width) if isinstance(width, (int, float)) else float(WIDTH)


def _wrapped(text: str, characters: float) -> list[str]:
    return textwrap.wrap(printable(text), max(20, int(characters))) or [""]
