"""Which model has which colour: the same in all pictures of a page."""

from __future__ import annotations

from quantkit.reporting.collect import Run, labels
from quantkit.reporting.sweep_groups import hue_names


def hues(run: Run) -> list[str]:
    """Returns the models in one order for all pictures: a model keeps its hue.

    Several seeds of one model have one, under the name of their group.
    """
    names = labels([found.result.model for found in run.stats])
    return list(dict.fromkeys([*names, *hue_names(run).values()]))
