"""The picture of |x| by token and channel: which few elements the massive activations are.

A surface has up to 6,000 bins, and a mark for each would take a megabyte. So the bins of one shade
are one shape, and above them lie invisible blocks of bins: each tells its largest element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median_low
from typing import Any, Final, Self

import altair as alt

from quantkit.reporting.charts import quoted as array
from quantkit.reporting.collect import Run
from quantkit.reporting.drawing import HEAT, WIDTH, Chart, Panel, Ramp, data_of, slug, together
from quantkit.reporting.groups import HIDDEN
from quantkit.reporting.outlier_tables import summaries
from quantkit.reporting.text import number, printable, quoted, text_width
from quantkit.reporting.theme import LIGHT
from quantkit.results import MagnitudeSurface, Stats

_POINTS: Final = ((HIDDEN, "hidden state"), ("mlp_down_input", "MLP down-projection input"))
_NAMED: Final = 3
"""Tokens and channels that have a bin each in any file, and so a name."""
_SHADES: Final = 16
_FAINTEST: Final = 0.06
_ACROSS, _DOWN = 24, 16
"""Blocks that tell what is in them."""
_RING: Final = 12
"""Pixels across."""
_TALL: Final = 256
_LARGEST_CELL: Final = 28
_TICKS: Final = 6


def surface_charts(run: Run) -> tuple[Chart, ...]:
    """Returns a picture for each point and model; those of one point have one scale."""
    found = []
    models = summaries(run)
    for point, words in _POINTS:
        drawn = [(name, surface) for name, stats in models for surface in _surfaces(stats, point)]
        sizes = [value for _, surface in drawn for value in surface.positive]
        if drawn:
            shades = Shades.of(sizes)
            found += [
                _chart(
                    f"surface {point} {name}",
                    f"{name}, layer {surface.of.layer}",
                    words,
                    surface,
                    shades,
                )
                for name, surface in drawn
            ]
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Shades:
    """The scale: log |x| in `_SHADES` steps of opacity, from the median bin to the largest.

    Half of the bins are as faint as can be, so that the few large ones are what is seen.
    """

    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Returns the scale of some positive values."""
        return cls(low=median_low(values), high=max(values))

    def step(self, value: float) -> int:
        """Returns the step of a positive value, the last for the largest."""
        if value >= self.high:
            return _SHADES - 1
        if value <= self.low:
            return 0
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return min(_SHADES - 1, int(share * _SHADES))

    def opacity(self, step: int) -> float:
        """Returns the opacity of a step."""
        return round(_FAINTEST + (1 - _FAINTEST) * step / (_SHADES - 1), 3)

    def ramp(self) -> Ramp:
        """Returns the ends in words."""
        return Ramp(low=f"median bin {number(self.low)} or less", high=f"{number(self.high)} (log)")


@dataclass(frozen=True, kw_only=True)
class _Surface:
    """A surface that can be drawn, by row (token bin) and column (channel bin)."""

    of: MagnitudeSurface

    @cached_property
    def values(self) -> list[list[float]]:
        """Of each bin; zero, which is not drawn, where it is not finite."""
        return [[v if math.isfinite(v) else 0.0 for v in row] for row in self.of.abs_max]

    @property
    def rows(self) -> int:
        return len(self.of.positions)

    @property
    def columns(self) -> int:
        return len(self.of.channels)

    @cached_property
    def positive(self) -> list[float]:
        """What is drawn; a log scale has no zero."""
        return [v for row in self.values for v in row if v > 0]

    @cached_property
    def top_rows(self) -> list[int]:
        """The rows of the largest tokens."""
        return _largest([max(row) for row in self.values])

    @cached_property
    def top_columns(self) -> list[int]:
        """The columns of the largest channels."""
        return _largest([max(column) for column in zip(*self.values, strict=True)])

    @property
    def cell(self) -> tuple[int, int]:
        """Width and height of a bin, whole pixels: no seams between them."""
        wide, tall = WIDTH // self.columns, _TALL // self.rows
        return max(1, min(_LARGEST_CELL, wide)), max(1, min(_LARGEST_CELL, tall))

    def position(self, row: int) -> str:
        """Returns a row's tokens in words: its positions, and the text of its largest."""
        ends = [*self.of.positions[1:], self.of.last_position + 1]
        text = quoted(self.of.tokens[row])
        first, last = self.of.positions[row], ends[row] - 1
        if first >= last:
            return f"position {first}{text and ' '}{text}"
        at = self.of.largest_positions[row]
        return f"positions {first} to {last} (largest {at}{text and ' '}{text})"

    def channel(self, column: int) -> str:
        """Returns a column's channels in words."""
        ends = [*self.of.channels[1:], self.of.channel_count]
        first, last = self.of.channels[column], ends[column] - 1
        return f"channel {first}" if first >= last else f"channels {first} to {last}"

    def tip(self, row: int, column: int) -> str:
        """Returns a bin in words."""
        value = number(self.values[row][column])
        return printable(f"{value} at {self.position(row)}, {self.channel(column)}")


def _surfaces(stats: Stats, point: str) -> Iterator[_Surface]:
    """Yields the point's surface, if there is one whose lists fit and anything is above zero."""
    of = stats.surfaces.get(point)
    if of is None or not of.channels:
        return
    shape = (len(of.positions), len(of.channels))
    lengths = {len(of.tokens), len(of.largest_positions), len(of.abs_max)}
    surface = _Surface(of=of)
    if lengths == {shape[0]} and {len(r) for r in of.abs_max} == {shape[1]} and surface.positive:
        yield surface


def _largest(tops: Sequence[float]) -> list[int]:
    return sorted(range(len(tops)), key=lambda i: -tops[i])[:_NAMED]


def _chart(name: str, label: str, words: str, surface: _Surface, shades: Shades) -> Chart:
    of, (wide, tall) = surface.of, surface.cell
    width, height = wide * surface.columns, tall * surface.rows
    x = _axis(alt.X, "x", "channel", of.channels, wide)
    y = _axis(alt.Y, "y", "token position", of.positions, tall)
    spec = alt.layer(
        _shades_layer(surface, shades),
        _blocks_layer(surface, x, y),
        _rings_layer(surface, x, y),
        *_names_layers(surface, x, y),
    ).properties(width=width, height=height, view=alt.ViewConfig(stroke=LIGHT["rule"]))
    tokens = "; ".join(
        f"{surface.position(row)} ({number(max(surface.values[row]))})" for row in surface.top_rows
    )
    channels = ", ".join(
        f"{of.channels[column]} ({number(max(row[column] for row in surface.values))})"
        for column in surface.top_columns
    )
    note = (
        f"Sequence {of.sequence}, the one with the largest |{words}|. Largest tokens: {tokens}. "
        f"Largest channels: {channels}. Each of them has a bin of its own; any bin shows the "
        "largest |x| in it."
    )
    title = f"Largest |{words}| by token and channel: {label}"
    panel = Panel(
        spec=spec,
        words=f"Token position down, channel across, log |x| as shade. {printable(note)}",
        rows=len(surface.positive),
    )
    return together(slug(name), title, [panel], note=note, ramp=shades.ramp())


def _axis(kind: Any, field: str, title: str, firsts: Sequence[int], cell: int) -> Any:
    """Returns an axis of bins; about `_TICKS` of them are numbered by their first element."""
    count = len(firsts)
    step = max(1, math.ceil(count / _TICKS))
    return kind(
        f"{field}:Q",
        scale=alt.Scale(domain=[0, count], nice=False, zero=False, reverse=kind is alt.Y),
        axis=alt.Axis(
            title=title,
            grid=False,
            values=[i + 0.5 for i in range(0, count, step)],
            labelExpr=f"{array([str(i) for i in firsts])}[floor(datum.value)]",
        ),
    )


def _shades_layer(surface: _Surface, shades: Shades) -> alt.Chart:
    """Returns one shape a shade, all its bins in it; neighbours in a row are one rectangle."""
    wide, tall = surface.cell
    paths: dict[int, list[str]] = {}
    for row, values in enumerate(surface.values):
        start = 0
        steps = [shades.step(v) if v > 0 else -1 for v in values]
        for column in range(1, len(steps) + 1):
            if column < len(steps) and steps[column] == steps[start]:
                continue
            if steps[start] >= 0:
                length = (column - start) * wide
                paths.setdefault(steps[start], []).append(
                    f"M{start * wide},{row * tall}h{length}v{tall}h-{length}z"
                )
            start = column
    rows = [
        {"path": "".join(parts), "o": shades.opacity(step)} for step, parts in sorted(paths.items())
    ]
    layer: alt.Chart = (
        alt.Chart(data_of(rows))
        .mark_point(fill=HEAT, stroke=None, strokeWidth=0, opacity=1, aria=False)
        .encode(
            x=alt.value(0),
            y=alt.value(0),
            size=alt.value(4),  # at which Vega takes a path's numbers for pixels
            shape=alt.Shape("path:N", scale=None),
            fillOpacity=alt.FillOpacity("o:Q", scale=None, legend=None),
        )
    )
    return layer


def _blocks_layer(surface: _Surface, x: Any, y: Any) -> alt.Chart:
    """Returns invisible blocks that tell the largest of their bins."""
    down, across = math.ceil(surface.rows / _DOWN), math.ceil(surface.columns / _ACROSS)
    rows = []
    for top in range(0, surface.rows, down):
        for left in range(0, surface.columns, across):
            bottom, right = min(top + down, surface.rows), min(left + across, surface.columns)
            bins = [(r, c) for r in range(top, bottom) for c in range(left, right)]
            largest = max(bins, key=lambda at: surface.values[at[0]][at[1]])
            tip = f"{'up to ' if len(bins) > 1 else ''}{surface.tip(*largest)}"
            rows.append({"x": left, "x2": right, "y": top, "y2": bottom, "tip": tip})
    layer: alt.Chart = (
        alt.Chart(data_of(rows))
        .mark_rect(fill=HEAT, fillOpacity=0, stroke=None)
        .encode(x=x, x2="x2:Q", y=y, y2="y2:Q", description="tip:N")
    )
    return layer


def _rings_layer(surface: _Surface, x: Any, y: Any) -> alt.Chart:
    """Returns a ring around the largest bin of each of the largest tokens; none meet."""
    wide, tall = surface.cell
    rows: list[dict[str, Any]] = []
    for row in surface.top_rows:
        values = surface.values[row]
        column = max(range(len(values)), key=lambda c: values[c])
        ring = {"x": column + 0.5, "y": row + 0.5, "tip": surface.tip(row, column)}
        if all(
            abs(ring["x"] - other["x"]) * wide > _RING or abs(ring["y"] - other["y"]) * tall > _RING
            for other in rows
        ):
            rows.append(ring)
    layer: alt.Chart = (
        alt.Chart(data_of(rows))
        .mark_point(
            shape="circle",
            size=0.7 * _RING**2,
            fill=None,
            stroke=LIGHT["ink"],
            strokeWidth=1.4,
            opacity=1,
        )
        .encode(x=x, y=y, description="tip:N")
    )
    return layer


def _names_layers(surface: _Surface, x: Any, y: Any) -> Iterator[alt.Chart]:
    """Yields the names of the largest channels above the view, and of the largest tokens beside.

    A name that would meet a larger one's is left out; the note has them all.
    """
    wide, tall = surface.cell
    above: list[dict[str, Any]] = []
    for column in surface.top_columns:
        words = str(surface.of.channels[column])
        room = text_width(words) + 4
        if all(abs(column + 0.5 - other["x"]) * wide > room for other in above):
            above.append({"x": column + 0.5, "y": 0, "words": words})
    beside: list[dict[str, Any]] = []
    for row in surface.top_rows:
        text = quoted(surface.of.tokens[row], 14)
        words = printable(f"{surface.of.positions[row]}{text and ' '}{text}")
        if all(abs(row + 0.5 - other["y"]) * tall > 14 for other in beside):
            beside.append({"x": surface.columns, "y": row + 0.5, "words": words})
    text = alt.Chart(data_of(above)).mark_text(dy=-8, fontWeight=600, aria=False)
    yield text.encode(x=x, y=y, text="words:N")
    text = alt.Chart(data_of(beside)).mark_text(align="left", dx=6, fontWeight=600, aria=False)
    yield text.encode(x=x, y=y, text="words:N")
