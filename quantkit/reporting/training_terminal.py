"""What `quantkit train` prints: the models, then how their outliers grew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from quantkit.reporting.collect import collect
from quantkit.reporting.text import Table, number, plain_table, without
from quantkit.reporting.training_groups import Grown, by_arm, figures, spaced
from quantkit.reporting.training_tables import models_table
from quantkit.results import TrainedModel, TrainingResult

WIDTH: Final = 100
_MODELS: Final = 6
"""Models whose growth is printed; the report has all of them."""
_THIRDS: Final = 3
"""Measurements a line: the first, the middle and the last."""


def training_text(folder: Path) -> str:
    """Returns what a training came to, or "" where the folder has no `training.json`.

    A table of the models (arm, seed, parameters, tokens, loss, tokens/s, max |logit|), then a line
    a figure on its growth: at the first, the middle and the last measurement of each model.
    """
    found = [one.result for one in collect([folder]).trainings if one.result.models]
    return "\n".join(text for result in found for text in _texts(result))


def _texts(result: TrainingResult) -> list[str]:
    models = without(models_table(result), "against baseline")
    table = ends_table(result)
    return [plain_table(models, WIDTH), *([plain_table(table, WIDTH)] if table.rows else [])]


def ends_table(result: TrainingResult) -> Table:
    """Returns a row a figure and model: first, middle and last measurement."""
    shown = [model for models in by_arm(result).values() for model in models if model.measurements]
    rows = [
        (figure.words, model.arm, str(model.seed), *_values(model, figure))
        for figure in figures(result)
        for model in shown[:_MODELS]
    ]
    steps = sorted({found.step for model in shown for found in spaced(model, _THIRDS)})
    table = Table(
        title="Growth, on the same held-out rows",
        columns=("figure", "arm", "seed", "first", "middle", "last"),
        rows=tuple(rows),
        text_columns=3,
        note=f"Steps {', '.join(f'{step:,}' for step in steps)}." if len(steps) == _THIRDS else "",
    )
    seeds = {model.seed for model in shown}
    more = len(shown) - _MODELS
    if more > 0:
        table = replace(table, note=f"{table.note} The report has {more} more models.".strip())
    return without(table, "seed") if len(seeds) < 2 else table


def _values(model: TrainedModel, figure: Grown) -> tuple[str, ...]:
    return tuple(number(figure.of(found)) for found in spaced(model, _THIRDS))
