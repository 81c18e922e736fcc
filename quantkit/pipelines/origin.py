"""Where observations come from, and whether a folder already holds those that are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.calibration import RangePlan, Recording
from quantkit.calibration import load as load_observations
from quantkit.errors import InputError
from quantkit.results import DataInfo, ModelInfo, Smoothing, decode, to_plain


@dataclass(frozen=True, kw_only=True)
class PlanWords:
    """What the ranges at a checkpoint depend on; fields as of `RangePlan`."""

    method: str
    bits: int
    symmetric: list[str]
    granularity: str
    excludes_first: bool

    @classmethod
    def of(cls, plan: RangePlan) -> PlanWords:
        """Returns the words of a plan."""
        return cls(
            method=str(plan.methods),
            bits=plan.bits[0],
            symmetric=sorted(plan.symmetric),
            granularity=plan.granularity,
            excludes_first=plan.excludes_first,
        )


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where observations come from: what `observations.safetensors` says beside the tensors.

    Attributes:
        points, averaging_constant: What was observed.
        plan: What the checkpoints were chosen by.
        smoothing: The migration under which they were made.
        allow_unseen: Patterns on modules that need not run.
        warnings: One sentence each, e.g. that there were few samples.
    """

    model: ModelInfo
    data: DataInfo
    points: list[str]
    averaging_constant: float
    plan: PlanWords
    smoothing: dict[str, Smoothing]
    until_stable: float | None
    allow_unseen: list[str]
    warnings: list[str]

    @property
    def identity(self) -> dict[str, Any]:
        """The same as plain data."""
        plain: dict[str, Any] = to_plain(self)
        return plain

    def fits(self, other: Origin) -> bool:
        """Whether the other's observations are of the same model, data and options."""
        return (
            (self.model.sha256, self.model.dtype) == (other.model.sha256, other.model.dtype)
            and self.data.block_hashes[: other.data.sequences] == other.data.block_hashes
            and (self.data.sequences == other.data.sequences or self.until_stable is not None)
            and (self.points, self.averaging_constant) == (other.points, other.averaging_constant)
            and (self.plan, self.smoothing) == (other.plan, other.smoothing)
            and self.until_stable == other.until_stable
        )


def origin_of(path: Path, identity: Mapping[str, Any]) -> Origin:
    """Returns what the file says about itself; see `Origin.identity`."""
    found: Origin = decode(dict(identity), Origin, f"{path}: ", "", older=False)
    return found


def finished(path: Path, origin: Origin) -> Recording | None:
    """Returns what the folder holds already, if it is of the same model, data and options."""
    if not path.is_file():
        return None
    recording, identity = load_observations(path)
    found = origin_of(path, identity)
    for what, then, now in (
        ("model", found.model.sha256, origin.model.sha256),
        ("data", found.data.block_hashes[:1], origin.data.block_hashes[:1]),
    ):
        if then != now:
            raise InputError(
                f"{path} was made from another {what}: the {what} changed since. Name another "
                "--out, or --force."
            )
    return recording if origin.fits(found) else None
