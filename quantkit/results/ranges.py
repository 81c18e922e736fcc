"""`ranges.json`: the ranges that calibration fixed, one per named tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from quantkit.results.info import DataInfo, ModelInfo

RANGES_SCHEMA: Final = "quantkit.ranges/2"


@dataclass(frozen=True, kw_only=True)
class Range:
    """The real interval of one tensor.

    Attributes:
        lo, hi: A number, or one per group (e.g. per head) in the order of the groups.
        method: How it was chosen, e.g. `minmax`.
        granularity: `tensor`, `head`, ...
        count: Elements seen.
        point: The probe point, e.g. `linear_input`, `attention_logit`.
    """

    lo: float | list[float]
    hi: float | list[float]
    method: str
    granularity: str
    count: int
    point: str


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """The whole of `ranges.json`.

    `tensors` is keyed by `linear_input/<module name>` or `attention_logit/<layer>/map <n>`.
    """

    schema: str = RANGES_SCHEMA
    model: ModelInfo
    data: DataInfo
    method: str
    environment: dict[str, str]
    tensors: dict[str, Range]

    OLDER: ClassVar[tuple[str, ...]] = ("quantkit.ranges/1",)
    """Schemas that are read too; what they lack has its default."""
