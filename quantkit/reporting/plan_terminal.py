"""What `quantkit sweep --dry-run` prints: a row a model and task, and the time in all."""

from __future__ import annotations

import textwrap

from quantkit.reporting.text import Table, duration, plain_table
from quantkit.results import Plan, PlannedCell

WIDTH = 100
"""Characters a line."""


def plan_text(plan: Plan) -> str:
    """Returns the plan as a table; each row is a model and task with all its recipes."""
    rows = []
    for model, task in dict.fromkeys((cell.model, cell.task) for cell in plan.cells):
        mine = [cell for cell in plan.cells if (cell.model, cell.task) == (model, task)]
        rows.append(
            (
                model,
                task,
                f"{mine[0].items:,}",
                f"{mine[0].tokens:,}",
                str(len(mine)),
                str(sum(cell.finished for cell in mine)),
                duration(sum(cell.seconds for cell in mine)),
            )
        )
    columns = ("model", "task", "items", "tokens", "recipes", "finished", "time, about")
    table = Table(title="", columns=columns, rows=tuple(rows), text_columns=2)
    listed = ", ".join(dict.fromkeys(cell.recipe for cell in plan.cells))
    recipes = textwrap.fill(f"recipes: {listed}", WIDTH, break_on_hyphens=False)
    left = [cell for cell in plan.cells if not cell.finished]
    return (
        f"{plain_table(table, WIDTH)}\n{recipes}\n{len(left)} of {len(plan.cells)} cells to run, "
        f"about {duration(plan.seconds)}, models loaded; into {plan.folder}\n{_slowest(left)}"
    )


def _slowest(cells: list[PlannedCell]) -> str:
    if len(cells) < 2:
        return ""
    worst = max(cells, key=lambda cell: cell.seconds)
    return f"slowest: {worst.recipe} on {worst.task}, {worst.model}: {duration(worst.seconds)}\n"
