"""The picture of exports: what each costs in accuracy against its speed and its size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import altair as alt

from quantkit.reporting.charts import TICK_FORMAT, padded
from quantkit.reporting.collect import Run
from quantkit.reporting.drawing import WIDTH, Chart, Key, Panel, data_of, together
from quantkit.reporting.export_tables import recipe_of
from quantkit.reporting.recommendation import BUDGET_FRAC
from quantkit.reporting.text import number, printable, size
from quantkit.reporting.theme import LIGHT, hue

_FRONT, _REST, _BEYOND = (
    Key(name="on the front: nothing is better in both", colour=0, style=3, has_line=False),
    Key(name="within the budget", colour=0, style=0, hollow=True, has_line=False),
    Key(name="beyond the budget", colour=1, style=2, hollow=True, has_line=False),
)
_FLOAT: Final = Key(name="float", colour=7, style=1, has_line=False)
_HEIGHT: Final = 260


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One graph: its loss (as a change) with its interval, milliseconds a prompt, bytes."""

    name: str
    change: float
    low: float
    high: float
    latency_ms: float
    bytes: int
    is_within: bool
    is_float: bool = False


def front(points: list[tuple[float, float]]) -> set[int]:
    """Returns the indices of the points that no other one matches in both and beats in one.

    Args:
        points: (cost, loss) of each; less of both is better. NaN is never on the front.
    """
    known = [(x, y, i) for i, (x, y) in enumerate(points) if not math.isnan(x + y)]
    best = math.inf
    found: set[int] = set()
    for x, y, i in sorted(known):
        equal = any(points[other] == (x, y) for other in found)
        if y < best or equal:
            found.add(i)
            best = min(best, y)
    return found


def pareto_charts(run: Run) -> tuple[Chart, ...]:
    """Returns accuracy against milliseconds and against bytes, a chart a model that has graphs."""
    charts = []
    for name, metric, budget, candidates in _found(run):
        is_ratio = metric == "perplexity"
        known = [c for c in candidates if math.isfinite(c.change)]
        if len(known) < 2:
            continue
        unit = "quantized / float" if is_ratio else "quantized - float"
        panels = [
            _panel(
                title=title,
                x_label=x_label,
                y_label=f"{metric}, {unit}",
                points=[(scale * cost(c), c) for c in known],
                budget=(1.0 + budget if is_ratio else -budget),
                is_lower_better=is_ratio,
            )
            for title, x_label, scale, cost in (
                ("speed", "ms a prompt (log)", 1.0, lambda c: c.latency_ms),
                ("size", "MB (log)", 1e-6, lambda c: float(c.bytes)),
            )
        ]
        shown = [panel for panel in panels if panel is not None]
        if shown:
            charts.append(
                together(
                    "export-pareto",
                    f"Exports of {name}: what speed and size cost",
                    shown,
                    note="Bars are paired 95 % intervals; the dashed line is the budget.",
                )
            )
    return tuple(charts)


def _found(run: Run) -> list[tuple[str, str, float, list[Candidate]]]:
    """Returns (model, metric, budget, graphs): of searches, and of exports that have no search."""
    found = []
    for one in run.searches:
        result = one.result
        whole = [e.result for e in run.exports if e.result.model.name == result.model.name]
        float_bytes = [
            sum(f.bytes for f in export.files if f.name.startswith("float/")) for export in whole
        ]
        float_ms = [trial.float_ms for trial in result.trials]
        is_ratio = result.metric == "perplexity"
        candidates = [
            Candidate(
                name=trial.name,
                change=trial.change,
                low=trial.change_low,
                high=trial.change_high,
                latency_ms=trial.latency_ms,
                bytes=trial.bytes,
                is_within=trial.is_within,
            )
            for trial in result.trials
        ]
        if float_ms and any(float_bytes):
            candidates.append(
                _float(is_ratio, sorted(float_ms)[len(float_ms) // 2], float_bytes[0])
            )
        found.append((result.model.name, result.metric, result.max_drop, candidates))
    searched = {one.result.model.name for one in run.searches}
    rest = [e.result for e in run.exports if e.result.model.name not in searched]
    for name in dict.fromkeys(export.model.name for export in rest):
        mine = [e for e in rest if e.model.name == name and e.accuracy is not None]
        metrics = [e.accuracy.metric for e in mine if e.accuracy is not None]
        candidates = []
        for export in mine:
            accuracy = export.accuracy
            if accuracy is None or accuracy.metric != metrics[0]:
                continue
            is_ratio = accuracy.metric == "perplexity"
            change = accuracy.change
            if change is None:
                change = (
                    accuracy.quantized / accuracy.float
                    if is_ratio
                    else accuracy.quantized - accuracy.float
                )
            low = math.nan if accuracy.change_low is None else accuracy.change_low
            high = math.nan if accuracy.change_high is None else accuracy.change_high
            bad = high - 1.0 if is_ratio else -low
            candidates.append(
                Candidate(
                    name=recipe_of(export),
                    change=change,
                    low=low,
                    high=high,
                    latency_ms=export.latency_ms.get("quantized", math.nan),
                    bytes=sum(f.bytes for f in export.files if "/" not in f.name),
                    is_within=bad <= BUDGET_FRAC,
                )
            )
        if candidates:
            whole_bytes = sum(f.bytes for f in mine[0].files if f.name.startswith("float/"))
            float_latency = mine[0].latency_ms.get("float", math.nan)
            if whole_bytes:
                candidates.append(_float(metrics[0] == "perplexity", float_latency, whole_bytes))
            found.append((name, metrics[0], BUDGET_FRAC, candidates))
    return found


def _float(is_ratio: bool, latency_ms: float, bytes_: int) -> Candidate:
    start = 1.0 if is_ratio else 0.0
    return Candidate(
        name="float",
        change=start,
        low=math.nan,
        high=math.nan,
        latency_ms=latency_ms,
        bytes=bytes_,
        is_within=True,
        is_float=True,
    )


def _panel(
    *,
    title: str,
    x_label: str,
    y_label: str,
    points: list[tuple[float, Candidate]],
    budget: float,
    is_lower_better: bool,
) -> Panel | None:
    shown = [(x, c) for x, c in points if math.isfinite(x) and x > 0]
    if len(shown) < 2:
        return None
    sign = 1.0 if is_lower_better else -1.0
    best = front([(x, sign * c.change) for x, c in shown])
    # a ruined graph would press all others into one line: the axis is logarithmic then
    log = is_lower_better and max(c.change for _, c in shown) > 1.5
    held = [y for _, c in shown for y in (c.change, c.low, c.high) if math.isfinite(y)]
    low, high = padded([*held, budget], log)
    x_low, x_high = padded([x for x, _ in shown], True)
    x = alt.X(
        "x:Q",
        scale=alt.Scale(type="log", domain=[x_low, x_high], nice=False),
        axis=alt.Axis(title=x_label, format=TICK_FORMAT, grid=True, tickCount=5),
    )
    y = alt.Y(
        "y:Q",
        scale=alt.Scale(
            type="log" if log else "linear", domain=[low, high], nice=False, zero=False
        ),
        axis=alt.Axis(title=f"{y_label}{' (log)' if log else ''}", format=".4~g", tickCount=6),
    )
    layers = [
        alt.Chart(data_of([{"y": budget}]))
        .mark_rule(stroke=LIGHT["ink"], strokeDash=[5, 4], aria=False)
        .encode(y=y)
    ]
    used: list[Key] = []
    for i, (at, c) in enumerate(shown):
        key = _FLOAT if c.is_float else _FRONT if i in best else _REST if c.is_within else _BEYOND
        used.append(key)
        ink = hue(key.colour)
        span = "" if math.isnan(c.low + c.high) else f" [{number(c.low, 5)}, {number(c.high, 5)}]"
        row = {
            "x": at,
            "y": c.change,
            "tip": printable(
                f"{c.name}: {number(c.change, 5)}{span}, {number(c.latency_ms, 4)} ms, "
                f"{size(c.bytes)}{', on the front' if i in best else ''}"
            ),
        }
        if span:
            layers.append(
                alt.Chart(data_of([{"x": at, "y": c.low, "y2": c.high}]))
                .mark_rule(stroke=ink, strokeWidth=1.4, strokeOpacity=0.7, aria=False)
                .encode(x=x, y=y, y2="y2:Q")
            )
        layers.append(
            alt.Chart(data_of([row]))
            .mark_point(
                shape=key.shape,
                size=64,
                fill=LIGHT["page"] if key.hollow else ink,
                stroke=ink,
                opacity=1,
            )
            .encode(x=x, y=y, description="tip:N")
        )
    names = "; ".join(c.name for i, (_, c) in enumerate(shown) if i in best)
    return Panel(
        title=title,
        spec=alt.layer(*layers).properties(width=WIDTH, height=_HEIGHT),
        words=f"{y_label} against {x_label}, a mark a graph; on the front: {names}.",
        rows=len(shown),
        keys=tuple(key for key in (_FRONT, _REST, _BEYOND, _FLOAT) if key in used),
    )
