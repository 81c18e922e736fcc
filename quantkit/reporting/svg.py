"""From a Vega-Lite specification to SVG: drawn by vl-convert, made small, safe and named."""

from __future__ import annotations

import re
from html import escape
from typing import Any, Final

import altair as alt
import vl_convert

from quantkit.reporting.text import printable
from quantkit.reporting.theme import LIGHT

Spec = alt.Chart | alt.LayerChart | alt.FacetChart | alt.VConcatChart
"""One view (or one above another), with its width and height, without title and legend."""

_FONT: Final = "system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif"
_DIGITS: Final = re.compile(r"-?\d+\.\d{3,}(?:e-?\d+)?")
_ROLE_WORDS: Final = re.compile(r' aria-roledescription="[^"]*"')
_ROOT: Final = re.compile(r"<svg [^>]*?width=\"([0-9.]+)\" height=\"([0-9.]+)\"[^>]*>")
_PATHS: Final = re.compile(r' (?:d|transform)="[^"]*"')


def plain(spec: Spec) -> dict[str, Any]:
    """Returns the specification as Vega-Lite reads it.

    Views are put together as such: altair copies all data of a view for each step of composing.
    """
    # else each view's data would stand where only a whole specification may have them
    with alt.data_transformers.enable(consolidate_datasets=False):
        found: dict[str, Any] = spec.to_dict(validate=False)
    return {key: value for key, value in found.items() if key not in ("config", "$schema")}


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


def drawn(view: dict[str, Any]) -> str:
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


def named(svg: str, label: str, words: str) -> str:
    """Returns the SVG with its name and what it shows for screen readers, scalable."""
    root = root_of(svg)
    name = escape(printable(label))
    start = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {root[1]} {root[2]}" '
        f'width="{root[1]}" height="{root[2]}" role="group" aria-label="{name}">'
        f"<desc>{escape(printable(words))}</desc>"
    )
    return svg[: root.start()] + start + svg[root.end() :]


def root_of(svg: str) -> re.Match[str]:
    root = _ROOT.search(svg)
    if root is None:
        raise AssertionError("Vega drew no <svg> with a width and a height")
    return root
