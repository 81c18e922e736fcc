"""The colours of pages and pictures, light and dark, by the names of the style sheet.

A picture is drawn in the light colours. A page, and a file for dark pages, then puts others in
their place by CSS: a rule for each colour outranks the attribute that Vega wrote. So a renderer
that knows no style sheets shows the light ones.

The hues stay apart for people with red-green blindness, and each has a contrast of 3:1 or more
with its page (`tests/reporting/test_theme.py`).
"""

from __future__ import annotations

from typing import Final

LIGHT: Final[dict[str, str]] = {
    "page": "#fcfcfb", "ink": "#1c1c1a", "soft": "#5d5c57", "rule": "#dddbd3", "panel": "#f3f2ee",
    "warn": "#8a4b00",
    "c0": "#2a6fdb", "c1": "#c2410c", "c2": "#0f8a5f", "c3": "#9333b8",
    "c4": "#a16207", "c5": "#be185d", "c6": "#0e7490", "c7": "#57534e",
}  # fmt: skip
DARK: Final[dict[str, str]] = {
    "page": "#191918", "ink": "#ecebe6", "soft": "#a9a79f", "rule": "#3a3935", "panel": "#232321",
    "warn": "#f0b35e",
    "c0": "#6ea8ff", "c1": "#fb8a55", "c2": "#45c795", "c3": "#cf8bee",
    "c4": "#dcae3f", "c5": "#f47bb0", "c6": "#4fc3dc", "c7": "#b5b1aa",
}  # fmt: skip
COLOURS: Final = 8
"""Number of hues, `c0` to `c7`; further models start over."""


def hue(colour: int) -> str:
    """Returns the light hue of a model's number."""
    return LIGHT[f"c{colour % COLOURS}"]


def variables(shades: dict[str, str]) -> str:
    """Returns the shades as CSS custom properties: `--page: #fcfcfb; ...`."""
    return " ".join(f"--{name}: {shade};" for name, shade in shades.items())


def recoloured(scope: str = "") -> str:
    """Returns CSS rules that put `var(--NAME)` in the place of each light colour of a picture."""
    return "\n".join(
        f'{scope}[{what}="{shade}"] {{ {what}: var(--{name}); }}'
        for name, shade in LIGHT.items()
        for what in ("fill", "stroke")
    )


def dark_rules() -> str:
    """Returns the CSS of a file that follows the reader's choice of light or dark."""
    rules = " ".join(
        f'[{what}="{shade}"] {{ {what}: {DARK[name]}; }}'
        for name, shade in LIGHT.items()
        for what in ("fill", "stroke")
    )
    return f"@media (prefers-color-scheme: dark) {{ {rules} }}"
