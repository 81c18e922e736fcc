"""The pictures of a ranking: what each of the worst units costs, and what remains without them."""

from __future__ import annotations

import math
from typing import Final

from quantkit.reporting.charts import Line, Value, line_chart
from quantkit.reporting.collect import Run
from quantkit.reporting.dot_charts import Dot, dot_chart
from quantkit.reporting.drawing import Chart
from quantkit.reporting.sensitivity_tables import points, sensitivities, worst_first
from quantkit.reporting.text import number, share

_FINE: Final = 60  # slots of the axis, which is logarithmic but for 0
_UNITS: Final = 20
_STYLES: Final = 3  # the fourth marks the targets


def ranking_charts(run: Run) -> tuple[Chart, ...]:
    """Returns the KL of the worst units of each ranking, alone in low precision, with 95 % bars."""
    found = []
    for name, ranking in sensitivities(run):
        rows = worst_first(ranking)[:_UNITS]
        points = list(dict.fromkeys(row.point for row in worst_first(ranking)))
        dots = []
        for row in rows:
            is_alone = not math.isnan(row.enable_one_kl)
            kl = row.enable_one_kl if is_alone else row.removed_frac * ranking.total_kl
            spread = (
                row.enable_one_stderr if is_alone else row.removed_stderr_frac * ranking.total_kl
            )
            dots.append(
                Dot(
                    row=row.name,
                    name=row.point,
                    colour=points.index(row.point),
                    style=points.index(row.point),
                    x=kl,
                    low=kl - 1.96 * spread,
                    high=kl + 1.96 * spread,
                    title=f"{row.name} ({row.point}), rank {row.rank}: KL {number(kl)} "
                    f"+- {number(spread, 2)} nats a token",
                )
            )
        how = "alone" if all(not math.isnan(row.enable_one_kl) for row in rows) else "removed"
        if len(dots) > 1:
            found.append(
                dot_chart(
                    name="sensitivity-ranking",
                    title=f"What the {len(dots)} worst units cost: {name}",
                    x_label=f"KL, nats a token ({how})",
                    dots=dots,
                    log=False,
                    note="Bars are 1.96 standard errors over blocks.",
                )
            )
    return tuple(found)


def kept_charts(run: Run) -> tuple[Chart, ...]:
    """Returns the picture, one line a ranking and one a target; none where nothing was tried."""
    rankings = [(name, found) for name, found in sensitivities(run) if found.kept]
    counts = sorted({point.units for _, found in rankings for point in points(found)})
    if not counts:
        return ()
    reach = math.log1p(counts[-1])

    def slot(units: int) -> float:
        return math.log1p(units) / reach * (_FINE - 1)

    lines = []
    for i, (name, found) in enumerate(rankings):
        values = tuple(
            Value(
                x=slot(point.units),
                y=100 * point.remaining_frac,
                title=f"{name}, {point.units:,} kept in float: {share(point.remaining_frac)} "
                f"remains, KL {number(point.kl)}",
            )
            for point in points(found)
        )
        lines.append(Line(name=name, colour=i, style=i % _STYLES, values=values))
    targets = dict.fromkeys(found.target_frac for _, found in rankings)
    for i, target in enumerate(targets, start=len(rankings)):
        ends = tuple(
            Value(x=slot(units), y=100 * target, title=f"target: {share(target)}")
            for units in (0, counts[-1])
        )
        name = f"target: {share(target)}"
        lines.append(Line(name=name, colour=i, style=_STYLES, values=ends))
    names = [""] * _FINE
    for units in counts:
        at = round(slot(units))
        if not any(names[max(0, at - 4) : at]):
            names[at] = f"{units:,}"
    chart = line_chart(
        title="Error that remains against units kept in float",
        x_label="worst units kept in float (log)",
        y_label="error that remains, %",
        x_names=names,
        lines=lines,
        log=False,
    )
    return (chart,)
