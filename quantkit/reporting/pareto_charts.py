"""The picture of exports: what each costs in accuracy against its speed and its size."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import altair as alt

from quantkit.reporting.charts import TICK_FORMAT, padded
from quantkit.reporting.collect import Run
from quantkit.reporting.drawing import WIDTH, Chart, Key, Panel, data_of, together
from quantkit.reporting.export_tables import recipe_of
from quantkit.reporting.recommendation import BUDGET_FRAC, best_of
from quantkit.reporting.text import NOT_AVAILABLE, number, printable, size
from quantkit.reporting.theme import LIGHT, hue
from quantkit.results import AutoResult, Export

_FRONT, _REST, _BEYOND = (
    Key(
        name="on the front: nothing is better in both",
        colour=0,
        style=3,
        has_line=False,
    ),
    Key(name="within the budget", colour=0, style=0, hollow=True, has_line=False),
    Key(name="beyond the budget", colour=1, style=2, hollow=True, has_line=False),
)
_FAILED: Final = Key(name="FAILED its gates", colour=1, style=4, hollow=True, has_line=False)
_FLOAT: Final = Key(name="float", colour=7, style=1, has_line=False)
_RECOMMENDED: Final = Key(
    name="ringed: recommended", colour=7, hollow=True, style=0, has_line=False
)
_KEYS: Final = (_FRONT, _REST, _BEYOND, _FAILED, _RECOMMENDED, _FLOAT)
_HEIGHT: Final = 260


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One graph: its loss (as a change) with its interval, milliseconds a prompt, bytes.

    One that FAILED its gates is no choice: it is drawn, and never on the front.
    """

    name: str
    change: float
    low: float
    high: float
    latency_ms: float
    bytes: int
    is_within: bool
    is_float: bool = False
    has_failed: bool = False
    is_recommended: bool = False


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
                    note="Bars are paired 95 % intervals; their far end is held against the "
                    "budget, which is dashed. Float counts for the front.",
                )
            )
    return tuple(charts)


def _found(run: Run) -> list[tuple[str, str, float, list[Candidate]]]:
    """Returns (model, metric, budget, graphs), a model after the other.

    The graphs of its search, and its other exports of the same metric.
    """
    exports = [one.result for one in run.exports]
    searches = {one.result.model.name: one.result for one in run.searches}
    found = []
    for name in dict.fromkeys([*searches, *(export.model.name for export in exports)]):
        search = searches.get(name)
        mine = [export for export in exports if export.model.name == name]
        metrics = [e.accuracy.metric for e in mine if e.accuracy is not None]
        if search is None and not metrics:
            continue
        metric = metrics[0] if search is None else search.metric
        budget = BUDGET_FRAC if search is None else search.max_drop
        # a choice whose export failed its gates is none
        failed = any(export.searched and not export.passed for export in mine)
        candidates = [] if search is None else _trials(search, "" if failed else search.chosen)
        # what the search exported is one of its trials
        rest = [export for export in mine if search is None or not export.searched]
        best = best_of(mine) if search is None else None
        candidates += [
            replace(c, is_recommended=export is best)
            for export in rest
            for c in _exported(export, metric, budget)
        ]
        is_ratio = metric == "perplexity"
        found.append((name, metric, budget, [*candidates, *_float(is_ratio, search, mine)]))
    return found


def _trials(search: AutoResult, chosen: str) -> list[Candidate]:
    return [
        Candidate(
            name=trial.name,
            change=trial.change,
            low=trial.change_low,
            high=trial.change_high,
            latency_ms=trial.latency_ms,
            bytes=trial.bytes,
            is_within=trial.is_within,
            is_recommended=trial.name == chosen,
        )
        for trial in search.trials
    ]


def _exported(export: Export, metric: str, budget: float) -> list[Candidate]:
    """Returns the export as one graph; [] where its accuracy is of another metric, or unknown."""
    accuracy = export.accuracy
    if accuracy is None or accuracy.metric != metric:
        return []
    is_ratio = metric == "perplexity"
    change = accuracy.change
    if change is None:
        before, after = accuracy.float, accuracy.quantized
        change = (after / before if before else math.nan) if is_ratio else after - before
    low = math.nan if accuracy.change_low is None else accuracy.change_low
    high = math.nan if accuracy.change_high is None else accuracy.change_high
    return [
        Candidate(
            name=recipe_of(export),
            change=change,
            low=low,
            high=high,
            latency_ms=export.latency_ms.get("quantized", math.nan),
            bytes=sum(f.bytes for f in export.files if "/" not in f.name),
            is_within=(high - 1.0 if is_ratio else -low) <= budget,
            has_failed=not export.passed,
        )
    ]


def _float(is_ratio: bool, search: AutoResult | None, exports: list[Export]) -> list[Candidate]:
    """Returns the float graph, with what is known of it; [] where nothing is."""
    times = [trial.float_ms for trial in search.trials] if search else []
    times = times or [e.latency_ms["float"] for e in exports if "float" in e.latency_ms]
    sizes = [
        total
        for export in exports
        if (total := sum(f.bytes for f in export.files if f.name.startswith("float/")))
    ]
    if not times and not sizes:
        return []
    return [
        Candidate(
            name="float",
            change=1.0 if is_ratio else 0.0,
            low=math.nan,
            high=math.nan,
            latency_ms=sorted(times)[len(times) // 2] if times else math.nan,
            bytes=sizes[0] if sizes else 0,
            is_within=True,
            is_float=True,
        )
    ]


def _key(candidate: Candidate, is_best: bool) -> Key:
    if candidate.is_float:
        return _FLOAT
    if candidate.has_failed:
        return _FAILED
    return _FRONT if is_best else _REST if candidate.is_within else _BEYOND


def _standing(candidate: Candidate) -> str:
    """Returns what a mark says of itself behind its figures, that its shape may not."""
    if candidate.is_float:
        return ""
    if candidate.has_failed:
        return ", FAILED its gates"
    place = ", within the budget" if candidate.is_within else ", beyond the budget"
    return place + (", recommended" if candidate.is_recommended else "")


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
    # what failed its gates is no choice, and must keep no other off the front
    best = front([(math.nan if c.has_failed else x, sign * c.change) for x, c in shown])
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
        key = _key(c, i in best)
        used.append(key)
        ink = hue(key.colour)
        span = "" if math.isnan(c.low + c.high) else f" [{number(c.low, 5)}, {number(c.high, 5)}]"
        row = {
            "x": at,
            "y": c.change,
            "tip": printable(
                f"{c.name}: {number(c.change, 5)}{span}, {number(c.latency_ms, 4)} ms, "
                f"{size(c.bytes) if c.bytes else NOT_AVAILABLE}{_standing(c)}"
                f"{', on the front' if i in best else ''}"
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
    # a ring tells the one to ship, whose shape says already how it stands
    for at, c in (pair for pair in shown if pair[1].is_recommended):
        used.append(_RECOMMENDED)
        layers.append(
            alt.Chart(data_of([{"x": at, "y": c.change}]))
            .mark_point(
                shape=_RECOMMENDED.shape,
                size=260,
                fill="transparent",
                stroke=hue(_RECOMMENDED.colour),
                strokeWidth=1.6,
                opacity=1,
                aria=False,
            )
            .encode(x=x, y=y)
        )
    names = "; ".join(c.name for i, (_, c) in enumerate(shown) if i in best)
    return Panel(
        title=title,
        spec=alt.layer(*layers).properties(width=WIDTH, height=_HEIGHT),
        words=f"{y_label} against {x_label}, a mark a graph; on the front: {names}.",
        rows=len(shown),
        keys=tuple(key for key in _KEYS if key in used),
    )
