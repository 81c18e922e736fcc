"""What a chart asks Vega-Lite to draw, and what Vega drew: for tests to read."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from quantkit.reporting.drawing import Panel

SVG = "{http://www.w3.org/2000/svg}"
SYMBOL = "graphics-symbol"


@dataclass(frozen=True)
class Series:
    """One line of a panel: the rows of its marks, whiskers and band, and its look."""

    colour: str
    shape: str
    hollow: bool
    marks: list[dict[str, Any]]
    spans: list[dict[str, Any]]
    band: list[dict[str, Any]]


def rows(layer: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of a layer."""
    return list(layer["data"]["values"])


def layers(panel: Panel) -> list[dict[str, Any]]:
    """The layers of a view, or of the views that stand one above another."""
    view = panel.view
    views = view.get("vconcat", [view])
    return [layer for one in views for layer in one.get("layer", [one])]


def marks(panel: Panel) -> list[dict[str, Any]]:
    """Every row with words of its own."""
    return [
        row for layer in layers(panel) if "description" in layer["encoding"] for row in rows(layer)
    ]


def tips(panel: Panel) -> list[str]:
    """The words of the marks."""
    return [row["tip"] for row in marks(panel)]


def series(panel: Panel) -> list[Series]:
    """The lines of a panel, in order."""
    found: list[Series] = []
    spans: list[dict[str, Any]] = []
    band: list[dict[str, Any]] = []
    for layer in layers(panel):
        mark = layer["mark"]
        if mark["type"] == "area":
            band = rows(layer)
        elif mark["type"] == "rule" and ("y2" in layer["encoding"] or "x2" in layer["encoding"]):
            spans = rows(layer)
        elif mark["type"] == "point":
            hollow = mark["fill"] != mark["stroke"]
            found.append(Series(mark["stroke"], mark["shape"], hollow, rows(layer), spans, band))
            spans, band = [], []
    return found


def axis(panel: Panel, which: str) -> dict[str, Any]:
    """The encoding of an axis, of the first layer that has it with a scale."""
    return next(
        layer["encoding"][which]
        for layer in layers(panel)
        if "scale" in layer["encoding"].get(which, {})
    )


def names_of(panel: Panel, which: str = "x") -> list[str]:
    """The words below an axis of slots."""
    found = axis(panel, which)["axis"]["labelExpr"]
    words = re.match(r"(\[.*\])\[", found)
    assert words is not None
    return list(json.loads(words[1]))


def without_names(page: str) -> str:
    """The page without the spans that give headings and tables their names."""
    return re.sub(r'<span id="[^"]*_name">(.*?)</span>', r"\1", page)


def symbols(svg: str) -> list[tuple[str, ElementTree.Element]]:
    """Every mark of a picture that has words, with them; titles of a file are none."""
    root = ElementTree.fromstring(svg)
    found = [(e.get("aria-label", ""), e) for e in root.iter() if e.get("role") == SYMBOL]
    return [pair for pair in found if not pair[0].startswith(("Title text", "Subtitle text"))]


def place(element: ElementTree.Element) -> tuple[float, float]:
    """Where a point mark stands."""
    found = re.match(r"translate\((-?[\d.]+),(-?[\d.]+)\)", element.get("transform", ""))
    assert found is not None
    return float(found[1]), float(found[2])
