"""The colours of pages and pictures, light and dark, by the names of the style sheet.

A picture is drawn in the light colours. A page, and a file for dark pages, then puts others in
their place by CSS: a rule for each colour outranks the attribute that Vega wrote. So a renderer
that knows no style sheets shows the light ones.

The hues stay apart in lightness for people with red-green blindness, and each has a contrast of
3:1 or more with its page (`tests/reporting/test_theme.py`).
"""

from __future__ import annotations

from typing import Final

LIGHT: Final[dict[str, str]] = {
    "page": "#fcfcfb", "ink": "#1c1c1a", "soft": "#5d5c57", "rule": "#dddbd3", "panel": "#f3f2ee",
    "warn": "#8a4b00",
    "c0": "#2a6fdb", "c1": "#c2410c", "c2": "#26998b", "c3": "#7000ff",
    "c4": "#473d12", "c5": "#91157d", "c6": "#0a93c2", "c7": "#4a4743",
}  # fmt: skip
DARK: Final[dict[str, str]] = {
    "page": "#191918", "ink": "#ecebe6", "soft": "#a9a79f", "rule": "#3a3935", "panel": "#232321",
    "warn": "#f0b35e",
    "c0": "#6ea8ff", "c1": "#fb8a55", "c2": "#318178", "c3": "#8d33ff",
    "c4": "#f2c400", "c5": "#da0bb9", "c6": "#92d4f9", "c7": "#c2c0bc",
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
