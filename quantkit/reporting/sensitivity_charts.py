"""The picture of what remains of the error when the worst units stay in float."""

from __future__ import annotations

import math
from typing import Final

from quantkit.reporting.charts import COLOURS, Line, LineChart, Value, line_chart
from quantkit.reporting.collect import Run
from quantkit.reporting.sensitivity_tables import points, sensitivities
from quantkit.reporting.text import number, share

_FINE: Final = 60  # slots of the axis, which is logarithmic but for 0
_STYLES: Final = 3  # the fourth marks the targets


def kept_charts(run: Run) -> tuple[LineChart, ...]:
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
        lines.append(Line(name=name, colour=i % COLOURS, style=i % _STYLES, values=values))
    targets = dict.fromkeys(found.target_frac for _, found in rankings)
    for i, target in enumerate(targets, start=len(rankings)):
        ends = tuple(
            Value(x=slot(units), y=100 * target, title=f"target: {share(target)}")
            for units in (0, counts[-1])
        )
        name = f"target: {share(target)}"
        lines.append(Line(name=name, colour=i % COLOURS, style=_STYLES, values=ends))
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
