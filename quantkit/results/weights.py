"""What `ranges.json` says of the ranges of weights; the ranges are in `weights.safetensors`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WeightFigures:
    """What the ranges of one module's weight cost on their grid.

    Attributes:
        sqnr_db: Power of the weight over that of its quantization error, by the chosen ranges; inf
            where nothing is lost.
        absmax_sqnr_db: The same by the absmax of each channel or group.
        worst_channel_sqnr_db, worst_channel_absmax_sqnr_db: Of the output channel with the least.
    """

    sqnr_db: float
    absmax_sqnr_db: float
    worst_channel_sqnr_db: float
    worst_channel_absmax_sqnr_db: float


@dataclass(frozen=True, kw_only=True)
class WeightsInfo:
    """The ranges of all weights of linear layers: symmetric and narrow, as recipes have them.

    Attributes:
        method: `minmax`, `upper-percentile:99.9`, `mse`.
        bits: Width of the grid that they were chosen for, and that the figures are of.
        granularity: `channel`: one an output channel; `group`: one a run of inputs.
        group_size: Inputs a group, the last group may have fewer; None for channels.
        sha256: Of `weights.safetensors`, hex.
        modules: By module name.
    """

    method: str
    bits: int
    granularity: str
    group_size: int | None
    sha256: str
    modules: dict[str, WeightFigures]
