"""Ranges of a model's weights, and `weights.safetensors`, which keeps them.

They need no data: a range is judged on the weight itself (`numerics/weight_ranges.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from quantkit.calibration.tensor_file import read_tensors, write_tensors
from quantkit.errors import InputError
from quantkit.models import as_matrix, projection_modules, sha256_of
from quantkit.numerics.affine import check_range
from quantkit.numerics.granularity import PerAxis, PerGroup
from quantkit.numerics.methods import Method, MinMaxRange, parse_method
from quantkit.numerics.weight_ranges import (
    WeightGranularity,
    absmax_scale,
    channel_errors,
    weight_absmax,
)
from quantkit.progress import Progress, silent
from quantkit.results import WeightFigures, WeightsInfo

WEIGHTS_FILE: Final = "weights.safetensors"
WEIGHTS_SCHEMA: Final = "quantkit.weights/1"


@dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """How the ranges of weights are chosen; `granularity` as `weight_granularity` returns it."""

    method: Method
    bits: int
    granularity: WeightGranularity


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightRanges:
    """The ranges of a model's weights.

    Attributes:
        plan: What they were chosen by.
        absmax: By module, float32 `[out, 1]` or `[out, groups]`.
    """

    plan: WeightPlan
    absmax: Mapping[str, Tensor]

    @property
    def group_size(self) -> int | None:
        """Inputs a group; None where a range is an output channel's."""
        found = self.plan.granularity
        return found.group_size if isinstance(found, PerGroup) else None

    def require_width(self, bits: int) -> None:
        """Returns if the ranges serve a grid of that many bits.

        Raises:
            InputError: the method looks at the width, and they were chosen for another.
        """
        if self.plan.method.depends_on_bits and self.plan.bits != bits:
            raise InputError(
                f"the ranges of weights were chosen by {self.plan.method} for {self.plan.bits} "
                f"bits, and are asked for {bits}: choose again, without a forward pass, by "
                f"calibrate --from RUN --weights {_words(self.plan.granularity)} --weight-method "
                f"{self.plan.method} --weight-bits {bits} (and what else the run was given)."
            )

    def scale(self, module: str, shape: torch.Size, bits: int) -> Tensor:
        """Returns the scale of a module's weight, `[out, 1]`, or `[out, in]` for groups.

        Raises:
            InputError: no ranges of this module, of another shape, or for another width.
            RangeError: NaN or inf.
        """
        self.require_width(bits)
        if module not in self.absmax:
            raise InputError(
                f"no range for the weight of {module!r} ({len(self.absmax)} ranges are known): "
                "calibrate this model with --weights first."
            )
        found = self.absmax[module]
        groups = 1 if self.group_size is None else math.ceil(shape[1] / self.group_size)
        if list(found.shape) != [shape[0], groups]:
            raise InputError(
                f"Expected ranges {[shape[0], groups]} for the weight of {module!r}, got "
                f"{list(found.shape)}: calibrate this model first."
            )
        check_range(-found, found, f"{module}.weight")
        return absmax_scale(found, self.plan.granularity, bits, shape)


def choose_weight_ranges(
    model: nn.Module, plan: WeightPlan, *, progress: Progress = silent
) -> tuple[WeightRanges, dict[str, WeightFigures]]:
    """Returns the ranges of every linear layer's weight as it is now, and what they cost.

    Raises:
        InputError: a method that weights do not take, or a weight that is no floating-point matrix
            on a device.
        RangeError: NaN or inf in a weight, by name.
    """
    absmax: dict[str, Tensor] = {}
    figures: dict[str, WeightFigures] = {}
    modules = projection_modules(model)
    for done, (name, module) in enumerate(modules):
        progress("choosing ranges of weights", done, len(modules))
        weight, label = as_matrix(name, module), f"{name}.weight"
        found, plain = (
            weight_absmax(weight, method, plan.bits, plan.granularity, name=label)
            for method in (plan.method, MinMaxRange())
        )
        sqnr, worst = _sqnr_db(*channel_errors(weight, found, plan.granularity, plan.bits))
        before, worst_before = _sqnr_db(*channel_errors(weight, plain, plan.granularity, plan.bits))
        absmax[name] = found.cpu()
        figures[name] = WeightFigures(
            sqnr_db=sqnr,
            absmax_sqnr_db=before,
            worst_channel_sqnr_db=worst,
            worst_channel_absmax_sqnr_db=worst_before,
        )
    progress("choosing ranges of weights", len(modules), len(modules))
    return WeightRanges(plan=plan, absmax=absmax), figures


def _sqnr_db(power: Tensor, error: Tensor) -> tuple[float, float]:
    """Returns that of all channels together, and the least of one, in dB; no error is inf."""

    def db(above: Tensor, below: Tensor) -> Tensor:
        return torch.where(below == 0, torch.inf, 10.0 * (above / below).log10())

    return float(db(power.sum(), error.sum())), float(db(power, error).min())


def weights_info(
    found: WeightRanges, figures: Mapping[str, WeightFigures], sha256: str
) -> WeightsInfo:
    """Returns what `ranges.json` says of a file of ranges."""
    return WeightsInfo(
        method=str(found.plan.method),
        bits=found.plan.bits,
        granularity="channel" if found.group_size is None else "group",
        group_size=found.group_size,
        sha256=sha256,
        modules=dict(figures),
    )


def save_weight_ranges(path: Path, found: WeightRanges) -> str:
    """Writes the file whole or not at all; returns its sha256.

    Raises:
        InputError: the folder cannot be written to.
    """
    plain = {
        "schema": WEIGHTS_SCHEMA,
        "method": str(found.plan.method),
        "bits": found.plan.bits,
        "granularity": "channel" if found.group_size is None else "group",
        "group_size": found.group_size,
    }
    write_tensors(path, found.absmax, plain)
    return sha256_of(path)


def load_weight_ranges(path: Path, sha256: str) -> WeightRanges:
    """Returns what `save_weight_ranges` wrote.

    Args:
        sha256: Of the file, as `ranges.json` has it.

    Raises:
        InputError: no such file, another one than that, or one that cannot be read.
    """
    again = "calibrate again with --weights"
    if not path.is_file():
        raise InputError(f"no such file: {path}; its ranges.json names ranges of weights: {again}.")
    found = sha256_of(path)
    if found != sha256:
        raise InputError(
            f"{path} is not the file that its ranges.json names (sha256 {found[:10]}, expected "
            f"{sha256[:10]}): put it back, or {again}."
        )
    tensors, plain = read_tensors(path, WEIGHTS_SCHEMA, again)
    return WeightRanges(plan=_plan(plain), absmax=tensors)


def _plan(plain: Mapping[str, Any]) -> WeightPlan:
    size = plain["group_size"]
    return WeightPlan(
        method=parse_method(plain["method"]),
        bits=plain["bits"],
        granularity=PerAxis(axis=0) if size is None else PerGroup(axis=1, group_size=size),
    )


def _words(granularity: WeightGranularity) -> str:
    if isinstance(granularity, PerGroup):
        return f"group:{granularity.group_size}"
    return "channel"
