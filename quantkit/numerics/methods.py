"""How a range is chosen from what was observed: one frozen parameter object a method. Torch-free.

`str(method)` is its name in files and on the command line, `parse_method` its inverse; a parameter
that has its default is left out (`mse`, but `upper-percentile:99.9`). `choose.py` does the work.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final

from quantkit.errors import InputError, suggest


@dataclass(frozen=True, kw_only=True)
class _Method:
    """What all methods have; every subclass is final and has at most one parameter."""

    name: ClassVar[str]
    depends_on_bits: ClassVar[bool] = False
    """Whether the range differs from one width of the grid to another."""
    is_order_dependent: ClassVar[bool] = False
    """Whether the order of the samples changes the range."""

    def __str__(self) -> str:
        changed = [
            f"{getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default
        ]
        return ":".join([self.name, *changed])


@dataclass(frozen=True, kw_only=True)
class MinMaxRange(_Method):
    """The smallest and the largest element (Krishnamoorthi 2018, arXiv 1806.08342)."""

    name: ClassVar[str] = "minmax"


@dataclass(frozen=True, kw_only=True)
class MovingAverageRange(_Method):
    """Exponential moving average of each sample's min and max, r = (1 - c) r + c x.

    Jacob et al. 2018 (arXiv 1712.05877, section 3.1); the default constant is that of
    `torch.ao.quantization.MovingAverageMinMaxObserver`. It depends on the order of the samples,
    and most on the first: of 128 it keeps 0.99^127 = 28 % of the weight.

    Attributes:
        averaging_constant: The weight c of a new sample, in (0, 1].

    Raises:
        InputError: a constant outside (0, 1].
    """

    name: ClassVar[str] = "moving-average"
    is_order_dependent: ClassVar[bool] = True
    averaging_constant: float = 0.01

    def __post_init__(self) -> None:
        if not 0.0 < self.averaging_constant <= 1.0:
            raise InputError(
                f"Expected an averaging constant in (0, 1], got {self.averaging_constant}."
            )


def _check_percent(method: str, upper_pct: float) -> None:
    if not 50.0 < upper_pct <= 100.0:
        raise InputError(
            f"Expected the upper percentile of {method} in percent, above 50 and up to 100, got "
            f"{upper_pct:g}."
        )


@dataclass(frozen=True, kw_only=True)
class UpperPercentile(_Method):
    """Clips magnitudes at the percentile q of |x|: lo = max(min, -q), hi = min(max, q).

    Wu et al. 2020 (arXiv 2004.09602), who compare percentiles from 99.9 to 99.9999.

    Attributes:
        upper_pct: Percent of the magnitudes that stay inside, above 50 and up to 100.

    Raises:
        InputError: a percentage outside of that.
    """

    name: ClassVar[str] = "upper-percentile"
    upper_pct: float = 99.99

    def __post_init__(self) -> None:
        _check_percent(self.name, self.upper_pct)


@dataclass(frozen=True, kw_only=True)
class TwoSidedPercentile(_Method):
    """Clips each end of the signed values: at the percentiles 100 - upper_pct and upper_pct.

    McKinstry et al. 2018 (arXiv 1809.04191) take such percentiles per layer. With 99.99, 0.02 % of
    all elements lie outside: twice what `UpperPercentile` leaves.

    Attributes:
        upper_pct: The upper percentile, above 50 and up to 100; the lower one is its mirror image.

    Raises:
        InputError: a percentage outside of that.
    """

    name: ClassVar[str] = "two-sided-percentile"
    upper_pct: float = 99.99

    def __post_init__(self) -> None:
        _check_percent(self.name, self.upper_pct)


def _check_candidates(method: str, candidates: int) -> None:
    if not 4 <= candidates <= 1024:
        raise InputError(f"Expected 4 to 1024 candidates for {method}, got {candidates}.")


@dataclass(frozen=True, kw_only=True)
class EntropyRange(_Method):
    """The range of least Kullback-Leibler divergence between the histogram and its quantized self.

    Migacz 2017, "8-bit inference with TensorRT" (GTC S7310), over bins far finer than the grid,
    signed, and for the asymmetric grid as well (`divergence.py`).

    Attributes:
        candidates: Thresholds tried in the first round.

    Raises:
        InputError: not 4 to 1024 candidates.
    """

    name: ClassVar[str] = "entropy"
    depends_on_bits: ClassVar[bool] = True
    candidates: int = 32

    def __post_init__(self) -> None:
        _check_candidates(self.name, self.candidates)


@dataclass(frozen=True, kw_only=True)
class MseRange(_Method):
    """The range of least mean squared quantization error, found by a search that starts at min-max.

    Banner et al. 2019 (arXiv 1810.05723) solve it for given distributions; here the
    error is that of the observed bins on the exact grid (`distortion.py`). A range replaces
    min-max only where the bins show that it is better.

    Attributes:
        candidates: Thresholds tried in the first round.

    Raises:
        InputError: not 4 to 1024 candidates.
    """

    name: ClassVar[str] = "mse"
    depends_on_bits: ClassVar[bool] = True
    candidates: int = 32

    def __post_init__(self) -> None:
        _check_candidates(self.name, self.candidates)


Method = (
    MinMaxRange
    | MovingAverageRange
    | UpperPercentile
    | TwoSidedPercentile
    | EntropyRange
    | MseRange
)

_METHODS: Final[dict[str, type[Method]]] = {
    kind.name: kind
    for kind in (
        MinMaxRange,
        MovingAverageRange,
        UpperPercentile,
        TwoSidedPercentile,
        EntropyRange,
        MseRange,
    )
}
METHODS: Final[tuple[str, ...]] = tuple(_METHODS)
"""The names of all methods, in the order in which they are explained."""


def parse_method(text: str) -> Method:
    """Returns the method called `text`, such as `mse` or `upper-percentile:99.9`.

    Raises:
        InputError: an unknown name, or a parameter that it does not take.
    """
    name, colon, parameter = text.strip().partition(":")
    if name not in _METHODS:
        raise InputError(f"unknown range method {name!r}.{suggest(name, METHODS)}")
    kind: Any = _METHODS[name]
    if not colon:
        method: Method = kind()
        return method
    known = fields(kind)
    if not known:
        raise InputError(f"{name} takes no parameter, got {parameter!r}: write {name}.")
    whole = isinstance(known[0].default, int)
    try:
        value = int(parameter) if whole else float(parameter)
    except ValueError as error:
        raise InputError(
            f"Expected {name}:{'WHOLE NUMBER' if whole else 'NUMBER'} ({known[0].name}), "
            f"got {text!r}; its default is {known[0].default}."
        ) from error
    if not math.isfinite(value):
        raise InputError(f"Expected a finite {known[0].name} of {name}, got {parameter}.")
    method = kind(**{known[0].name: value})
    return method


_WEIGHT_METHODS: Final = (MinMaxRange, UpperPercentile, MseRange)
WEIGHT_METHODS: Final[tuple[str, ...]] = tuple(kind.name for kind in _WEIGHT_METHODS)
"""The names of those that weights take."""


def check_weight_method(method: Method) -> None:
    """Returns if weights can be given ranges by this method.

    Raises:
        InputError: one of those that look at more than magnitudes, or at an order of samples.
    """
    if not isinstance(method, _WEIGHT_METHODS):
        raise InputError(
            f"Weights take {', '.join(WEIGHT_METHODS[:-1])} or {WEIGHT_METHODS[-1]}, got {method}: "
            "their grid is symmetric, and they have no samples."
        )


@dataclass(frozen=True, kw_only=True)
class MethodChoice:
    """Which method each probe point takes: its own, else the default. `str` is what was asked."""

    default: Method
    by_point: Mapping[str, Method] = field(default_factory=dict)

    def of(self, point: str) -> Method:
        """Returns the method for a probe point."""
        return self.by_point.get(point, self.default)

    @property
    def methods(self) -> tuple[Method, ...]:
        """Every method in it, the default first, each once."""
        return tuple(dict.fromkeys([self.default, *self.by_point.values()]))

    def __str__(self) -> str:
        return ",".join([str(self.default), *(f"{p}={m}" for p, m in self.by_point.items())])


def parse_methods(words: str, points: Collection[str]) -> MethodChoice:
    """Returns the choice that `words` names, such as `mse,attention_logit=minmax`.

    Args:
        words: Comma-separated; a word without `=` is the default (min-max where there is none), one
            with it overrides that point.
        points: The points that exist.

    Raises:
        InputError: an unknown method or point, or the same thing said twice.
    """
    default: Method | None = None
    by_point: dict[str, Method] = {}
    for word in (part.strip() for part in words.split(",")):
        point, equals, text = word.partition("=")
        if not equals:
            if default is not None:
                raise InputError(
                    f"Expected one default range method, got {default} and {word!r}; "
                    f"write POINT={word} to set it for one point."
                )
            default = parse_method(word)
            continue
        if point not in points:
            raise InputError(f"unknown point {point!r} in {word!r}.{suggest(point, points)}")
        if point in by_point:
            raise InputError(f"Expected one range method for {point}, got {word!r} as well.")
        by_point[point] = parse_method(text)
    return MethodChoice(default=default or MinMaxRange(), by_point=by_point)
