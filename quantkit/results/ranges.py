"""`ranges.json`: the ranges that calibration fixed, one per named tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

from quantkit.errors import InputError
from quantkit.results.info import DataInfo, ModelInfo
from quantkit.results.result import Result
from quantkit.results.weights import WeightsInfo

RANGES_SCHEMA: Final = "quantkit.ranges/3"
_LOOK_AT_SYMMETRY: Final = ("upper-percentile", "two-sided-percentile", "entropy", "mse")
"""Methods that clip about 0 where the grid is symmetric; the others give what was observed."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A real interval; `lo` and `hi` are one number, or one per group."""

    lo: float | list[float]
    hi: float | list[float]


@dataclass(frozen=True, kw_only=True)
class Range:
    """The real interval of one tensor.

    Attributes:
        lo, hi: A number, or one per group (e.g. per head) in the order of the groups.
        method: How it was chosen, e.g. `minmax`, `upper-percentile:99.99`.
        granularity: `tensor`, `head`, ...
        count: Elements seen.
        point: The probe point, e.g. `linear_input`, `attention_logit`.
        bits: Width of the grid it was chosen for; None where the method does not look at it.
        symmetric: Chosen for the symmetric narrow grid (else for the asymmetric one).
        other_bits: The interval at further widths, by width, of a method that looks at it.
        waived: Guards that it failed and that were waived: `constant`, `zero`, ...
    """

    lo: float | list[float]
    hi: float | list[float]
    method: str
    granularity: str
    count: int
    point: str
    bits: int | None = None
    symmetric: bool = False
    other_bits: dict[str, Interval] = field(default_factory=dict)
    waived: list[str] = field(default_factory=list)

    def at(
        self, bits: int, name: str = "this tensor", *, symmetric: bool | None = None
    ) -> Interval:
        """Returns the interval for a grid of that many bits.

        Args:
            symmetric: Whether the grid is the symmetric one; None: nobody cares.

        Raises:
            InputError: the method looks at the grid, and the range was chosen for another width, or
                for the other symmetry.
        """
        looks = self.method.partition(":")[0] in _LOOK_AT_SYMMETRY
        if symmetric is not None and looks and symmetric != self.symmetric:
            kinds = {True: "symmetric", False: "asymmetric"}
            point = self.point if symmetric else "none"
            raise InputError(
                f"the range of {name!r} was chosen by {self.method} for the "
                f"{kinds[self.symmetric]} grid, and is asked for the {kinds[symmetric]} one: "
                "choose again, without a forward pass, by calibrate --from RUN --method "
                f"{self.method} --symmetric {point} (and what else the run was given)."
            )
        if self.bits is None or self.bits == bits:
            return Interval(lo=self.lo, hi=self.hi)
        if str(bits) in self.other_bits:
            return self.other_bits[str(bits)]
        known = ",".join([str(self.bits), *self.other_bits])
        raise InputError(
            f"the range of {name!r} was chosen by {self.method} for {known} bits, and is asked for "
            f"{bits}: choose again, without a forward pass, by calibrate --from RUN --method "
            f"{self.method} --bits {known},{bits} (and what else the run was given)."
        )


@dataclass(frozen=True, kw_only=True)
class Smoothing:
    """SmoothQuant migration of one group of linear layers that read the same input.

    The input's channel c is divided by `scales[c]`, and column c of every weight in the group
    multiplied by it (Xiao et al. 2023, arXiv 2211.10438, equation 4).

    Attributes:
        producer: The module into whose weight the division is folded: a norm, or the linear layer
            whose output, after an elementwise product, is the group's input.
        linears: The linear layers of the group.
        alpha: Migration strength, 0 to 1; 0: nothing moves.
        scales: One a channel of the input.
        expected_error, expected_error_without: Mean squared error of the group's outputs that the
            grids are expected to cause with and without it, relative to the outputs' power.
    """

    producer: str
    linears: list[str]
    alpha: float
    scales: list[float]
    expected_error: float
    expected_error_without: float


@dataclass(frozen=True, kw_only=True)
class StabilityPoint:
    """How far ranges moved between two sample counts, the earlier being 3/4 of the later.

    A range has moved by `max(|d lo|, |d hi|) / (hi - lo)`.

    Attributes:
        samples: Samples seen at the later one; `before`: at the earlier one.
        moved_max_frac, moved_median_frac: Over all tensors (a tensor's worst group counts).
        worst: Name of the tensor that moved most.
    """

    samples: int
    before: int
    moved_max_frac: float
    moved_median_frac: float
    worst: str


@dataclass(frozen=True, kw_only=True, repr=False)
class Ranges(Result):
    """The whole of `ranges.json`.

    `tensors` is keyed by `<point>/<module name>` for activations and by
    `<point>/<layer>/map <n>` for what attention holds map by map.

    Attributes:
        method: As asked for; each tensor says its own.
        smoothing: By group, the first linear layer's name; the ranges of the layers' inputs are
            those after the division.
        excludes_first: The first token of each sequence is in no range.
        stability: At growing sample counts.
        allowed: Guards and unseen tensors that were waived, as given.
        until_stable_frac: The target of --until-stable; None where it was not asked for.
        weights: What `weights.safetensors`, beside the file, holds; None: no ranges of weights were
            asked for, and they take the absmax of each output channel.
    """

    schema: str = RANGES_SCHEMA
    model: ModelInfo
    data: DataInfo
    method: str
    environment: dict[str, str]
    tensors: dict[str, Range]
    smoothing: dict[str, Smoothing] = field(default_factory=dict)
    excludes_first: bool = False
    stability: list[StabilityPoint] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    until_stable_frac: float | None = None
    weights: WeightsInfo | None = None

    OLDER: ClassVar[tuple[str, ...]] = ("quantkit.ranges/1", "quantkit.ranges/2")
    """Schemas that are read too; what they lack has its default."""
