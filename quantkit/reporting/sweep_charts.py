"""The pictures of a sweep: what each bit of the attention logits costs."""

from __future__ import annotations

from quantkit.recipe import LOGIT_GRANULARITIES
from quantkit.reporting.charts import COLOURS, Line, LineChart, Value, hues, line_chart
from quantkit.reporting.collect import Run
from quantkit.reporting.tables import sweep_rows
from quantkit.reporting.text import number


def sweep_charts(run: Run) -> tuple[LineChart, ...]:
    """Returns a picture of the metric against the bits for every task."""
    rows = sweep_rows(cell for found in run.sweeps for cell in found.result.cells)
    models = hues(run)
    charts = []
    for task, linear in dict.fromkeys((key[1], key[2]) for key in rows):
        mine = {key: row for key, row in rows.items() if key[1:3] == (task, linear)}
        bits = sorted({width for row in mine.values() for width in row}, reverse=True)
        if len(bits) < 2:
            continue
        lines = []
        for (model, _, _, granularity), row in mine.items():
            word = granularity.split(" ")[0]
            style = LOGIT_GRANULARITIES.index(word) if word in LOGIT_GRANULARITIES else 3
            values = tuple(
                Value(
                    x=bits.index(width),
                    y=cell.value,
                    low=cell.ci_low,
                    high=cell.ci_high,
                    title=f"{model}, {granularity}, {width} bits: {number(cell.value)} "
                    f"[{number(cell.ci_low)}, {number(cell.ci_high)}]",
                )
                for width, cell in sorted(row.items(), reverse=True)
            )
            colour = models.index(model) % COLOURS
            name = f"{model}, {granularity}"
            lines.append(Line(name=name, colour=colour, style=style, values=values))
        perplexity = "perplexity" in task
        layers = "" if linear == "float" else f" ({linear} linear layers)"
        charts.append(
            line_chart(
                title=f"{task} against bits of the attention logits{layers}",
                x_label="bits (16 = not quantized)",
                y_label=f"{task}{' (log)' if perplexity else ''}",
                x_names=tuple(str(width) for width in bits),
                lines=lines,
                log=perplexity,
            )
        )
    return tuple(charts)
