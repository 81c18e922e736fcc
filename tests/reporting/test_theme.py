"""The colours: seen on both pages, and told apart without seeing red or green."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from quantkit.reporting.theme import COLOURS, DARK, LIGHT, dark_rules, hue, recoloured

SEEN = {
    "all colours": np.eye(3),
    # Machado, Oliveira, Fernandes 2009, severity 1, on linear RGB
    "no green (deuteranopia)": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
         [-0.011820, 0.042940, 0.968881]]
    ),
    "no red (protanopia)": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
         [-0.003882, -0.048116, 1.051998]]
    ),
}  # fmt: skip
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
     [0.0193339, 0.1191920, 0.9503041]]
)  # fmt: skip
WHITE = np.array([0.95047, 1.0, 1.08883])


def linear(shade: str) -> np.ndarray:
    values = np.array([int(shade[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2."""
    low, high = sorted(float(linear(shade) @ [0.2126, 0.7152, 0.0722]) for shade in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIELAB of linear RGB."""
    x, y, z = np.cbrt(np.maximum(TO_XYZ @ np.clip(rgb, 0, 1), 1e-6) / WHITE)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("shades", [LIGHT, DARK], ids=["light", "dark"])
def test_everything_can_be_seen_on_its_page(shades: dict[str, str]) -> None:
    for name in ("ink", "soft", "warn", "c0"):  # what is written in words
        assert contrast(shades[name], shades["page"]) >= 4.5, name
        assert contrast(shades[name], shades["panel"]) >= 4.5 or name == "c0", name
    for i in range(COLOURS):
        assert contrast(shades[f"c{i}"], shades["page"]) >= 3, f"c{i}"


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("shades", [LIGHT, DARK], ids=["light", "dark"])
def test_hues_are_told_apart(shades: dict[str, str], seen: str) -> None:
    places = [lab(SEEN[seen] @ linear(shades[f"c{i}"])) for i in range(COLOURS)]
    for i, j in combinations(range(COLOURS), 2):
        far = float(np.linalg.norm(places[i] - places[j]))  # 2.3 is just noticeable
        assert far >= (30 if max(i, j) < 4 else 20), (i, j)


def test_every_light_colour_has_a_dark_one_and_a_rule() -> None:
    assert LIGHT.keys() == DARK.keys()
    assert len(set(LIGHT.values())) == len(LIGHT)
    for name, shade in LIGHT.items():
        for what in ("fill", "stroke"):
            assert f'[{what}="{shade}"] {{ {what}: var(--{name}); }}' in recoloured()
            assert f'[{what}="{shade}"] {{ {what}: {DARK[name]}; }}' in dark_rules()
    assert hue(0) == hue(COLOURS) == LIGHT["c0"]
