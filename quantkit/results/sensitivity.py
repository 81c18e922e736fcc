"""`sensitivity.json`: which quantizers cost most, and which to keep in higher precision."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

from quantkit.results.info import DataInfo, ModelInfo
from quantkit.results.result import Result

SENSITIVITY_SCHEMA: Final = "quantkit.sensitivity/1"


@dataclass(frozen=True, kw_only=True)
class UnitSensitivity:
    """One unit that was switched: a quantizer, or those of a module or of a layer together.

    Every KL is KL(float || quantized) over the vocabulary, in nats, the mean over predicted tokens.
    What was not measured is NaN, a standard error of one block too.

    Attributes:
        name: The quantizer, the module, or `layer <n>`.
        point: `linear_input`, `weight` or `attention_logit`; `mixed` where a unit has more.
        quantizers: The names of what was switched.
        rank: 1 is the worst, by `enable_one_kl`, else by `disable_one_kl`: alone, a unit's error is
            not drowned by what its absence does to the rounding of all others.
        enable_one_kl: Everything in float but this unit; `enable_one_stderr`: over blocks.
        disable_one_kl: Everything quantized but this unit.
        removed_frac: Share of `total_kl` that goes when this unit stays in float; negative where
            its error hides another's. `removed_stderr_frac`: paired by block, `total_kl` as given.
        tokens: Predicted tokens in the means.
    """

    name: str
    point: str
    quantizers: list[str]
    rank: int
    enable_one_kl: float
    enable_one_stderr: float
    disable_one_kl: float
    removed_frac: float
    removed_stderr_frac: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class KeptPoint:
    """What is left when the `units` worst stay in float: measured, not added up."""

    units: int
    kl: float
    remaining_frac: float


@dataclass(frozen=True, kw_only=True, repr=False)
class Sensitivity(Result):
    """The whole of `sensitivity.json`; `rows` has the worst first.

    Attributes:
        ranges: The run that holds them, as given to --ranges.
        calibration: The data of the ranges; `method`: how these were chosen.
        recipe: Canonical name, see `quantkit.recipe`.
        group: What a unit is: `tensor`, `module` or `layer`.
        total_kl: Everything quantized that the recipe names.
        target_frac: What of `total_kl` may remain.
        kept: Points of the search, by `units`; the last one that was tried may be all units.
        keep: The fewest worst units, as quantizers, after which less than `target_frac` remains;
            empty where no number of them reaches that, and `reached` is false.
    """

    schema: str = SENSITIVITY_SCHEMA
    model: ModelInfo
    data: DataInfo
    ranges: str
    calibration: DataInfo
    method: str
    environment: dict[str, str]
    recipe: str
    group: str
    modes: list[str]
    total_kl: float
    total_stderr: float
    rows: list[UnitSensitivity]
    target_frac: float
    reached: bool
    keep: list[str]
    kept: list[KeptPoint] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    OLDER: ClassVar[tuple[str, ...]] = ()
