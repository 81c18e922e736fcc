"""What `quantkit train` prints: the models, then how their outliers grew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from quantkit.reporting.collect import collect
from quantkit.reporting.text import Table, number, plain_table, without
from quantkit.reporting.training_groups import by_arm, figures
from quantkit.reporting.training_tables import models_table
from quantkit.results import Measurement, TrainedModel, TrainingResult

WIDTH: Final = 100
_MODELS: Final = 6
"""Models whose growth is printed; the report has all of them."""


def training_text(folder: Path) -> str:
    """Returns what a training came to, or "" where the folder has no `training.json`.

    A table of the models (arm, seed, parameters, tokens, loss, tokens/s, max |logit|), then a line
    a figure on its growth: at the first, the middle and the last measurement of each model.
    """
    found = [one.result for one in collect([folder]).trainings if one.result.models]
    return "\n".join(text for result in found for text in _texts(result))


def _texts(result: TrainingResult) -> list[str]:
    models = without(models_table(result), "against baseline")
    table = growth_table(result)
    return [plain_table(models, WIDTH), *([plain_table(table, WIDTH)] if table.rows else [])]


def growth_table(result: TrainingResult) -> Table:
    """Returns a row a figure and model: first, middle and last measurement."""
    shown = [model for models in by_arm(result).values() for model in models if model.measurements]
    rows = [
        (figure.words, model.arm, str(model.seed), *_values(model, figure.of))
        for figure in figures(result)
        for model in shown[:_MODELS]
    ]
    steps = sorted({_at(model, i).step for model in shown for i in range(3)}) if shown else []
    table = Table(
        title="Growth, on the same held-out rows",
        columns=("figure", "arm", "seed", "first", "middle", "last"),
        rows=tuple(rows),
        text_columns=3,
        note=f"Steps {', '.join(f'{step:,}' for step in steps)}." if len(steps) == 3 else "",
    )
    seeds = {model.seed for model in shown}
    more = len(shown) - _MODELS
    if more > 0:
        table = replace(table, note=f"{table.note} The report has {more} more models.".strip())
    return without(table, "seed") if len(seeds) < 2 else table


def _values(model: TrainedModel, of: Callable[[Measurement], float]) -> tuple[str, ...]:
    return tuple(number(of(_at(model, third))) for third in range(3))


def _at(model: TrainedModel, third: int) -> Measurement:
    """Returns the first (0), the middle (1) or the last (2) measurement."""
    found = sorted(model.measurements, key=lambda measured: measured.step)
    return found[third * (len(found) - 1) // 2]
