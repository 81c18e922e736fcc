"""What a sweep would do: what `--dry-run --json` prints. It is written to no file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PLAN_SCHEMA: Final = "quantkit.plan/1"


@dataclass(frozen=True, kw_only=True)
class PlannedCell:
    """One cell of a sweep that has not run.

    Attributes:
        model, recipe, task: As they will stand in `sweep.json`.
        tokens: Positions that it computes, padding included; images, for an image model.
        finished: It is kept from an earlier start of the same sweep.
        seconds: About; 0 where it is finished.
    """

    model: str
    recipe: str
    task: str
    items: int
    batches: int
    tokens: int
    finished: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All cells, in the order in which they will run; `folder`: where to."""

    schema: str = PLAN_SCHEMA
    folder: str
    cells: list[PlannedCell]

    @property
    def seconds(self) -> float:
        """About how long it takes in all, models loaded."""
        return sum(cell.seconds for cell in self.cells)
