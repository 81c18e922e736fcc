"""`sweep.json`: what each bit width costs, and paired differences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

from quantkit.results.info import DataInfo, ModelInfo

SWEEP_SCHEMA: Final = "quantkit.sweep/3"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model, recipe and task.

    Attributes:
        model: `ModelInfo.name`.
        recipe: Canonical name, see `quantkit.recipe`.
        bits: Of the logits; 16 where they are not quantized.
        granularity, range: Of the logits; None where they are not quantized.
        weights, activations: Bits, None where floating point.
        metric: e.g. `perplexity`.
        stderr, ci_low, ci_high: Of `value`; the interval is at 95 %.
        n: Resampled units: blocks for perplexity, items for accuracies.
        hits: How often the cell's quantizers fired, 0 for the float row.
    """

    model: str
    recipe: str
    bits: int
    granularity: str | None
    range: str | None
    weights: int | None
    activations: int | None
    task: str
    metric: str
    value: float
    stderr: float
    ci_low: float
    ci_high: float
    n: int
    seed: int
    hits: int


@dataclass(frozen=True, kw_only=True)
class Delta:
    """A paired difference of `recipe` minus `against`, with its 95 % interval."""

    model: str
    recipe: str
    against: str
    task: str
    metric: str
    value: float
    ci_low: float
    ci_high: float
    n: int


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The whole of `sweep.json`; `headline` says the result in one sentence.

    Attributes:
        ranges_sha256: Hash of the ranges, smoothing and kept quantizers that quantized cells read;
            empty where they read none.
        kept: Quantizers that stay in float in every row.
    """

    schema: str = SWEEP_SCHEMA
    models: list[ModelInfo]
    data: DataInfo
    environment: dict[str, str]
    cells: list[Cell]
    deltas: list[Delta] = field(default_factory=list)
    headline: str = ""
    ranges_sha256: str = ""
    kept: list[str] = field(default_factory=list)

    OLDER: ClassVar[tuple[str, ...]] = ("quantkit.sweep/1", "quantkit.sweep/2")
    """Schemas that are read too; what they lack has its default."""
