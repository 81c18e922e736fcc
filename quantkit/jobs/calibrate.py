"""`quantkit calibrate` as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quantkit.errors import InputError
from quantkit.jobs.checks import (
    check_choice,
    check_common,
    check_cpu,
    check_positive,
    check_unread,
)
from quantkit.jobs.choices import (
    CALIBRATION_POINTS,
    DEFAULT_CALIBRATION_POINTS,
    DEFAULT_SAMPLES,
    DEFAULT_SYMMETRIC,
    DEFAULT_WEIGHT_BITS,
    DEFAULT_WEIGHT_METHOD,
    GUARDS,
    RANGE_GRANULARITIES,
    UNTIL_STABLE_SAMPLES,
)
from quantkit.numerics.granularity import weight_granularity
from quantkit.numerics.methods import check_weight_method, parse_method, parse_methods

_OF_A_PASS: Final = (
    "calib",
    "seq_len",
    "samples",
    "batch_size",
    "dtype",
    "device",
    "bos",
    "points",
    "smooth",
    "until_stable",
    "allow_unseen",
)


@dataclass(frozen=True, kw_only=True)
class CalibrateJob:
    """Ranges of one model from `samples` samples of `calib`, or from what an earlier job observed.

    Attributes:
        model: None with `from_run`, which knows it.
        from_run: A folder with `observations.safetensors`: choose ranges again, without a pass.
        calib: None: `pydoc` for text models, `shapes` for image models.
        samples: None: 128, or up to 1,024 with `until_stable`.
        points: None: inputs of linear layers, and attention logits where the model attends.
        method: E.g. `mse` or `mse,attention_logit=minmax`; see `numerics.methods`.
        bits: Widths that the ranges are chosen for; the report's figures are for the first.
        symmetric: Points on the symmetric narrow grid; all others are on the asymmetric one.
        granularity: Of what attention holds: a range a `head`, or one a `tensor`.
        exclude_first: Leave the first token of each sequence out of every range.
        smooth: `auto` or an alpha from 0 to 1: migrate scales from inputs to weights (SmoothQuant).
        until_stable: Stop where no range moved by more than this share of itself over the last
            quarter of the samples.
        weights: `channel` or `group:N`: give weights ranges too, by `weight_method` for a grid of
            `weight_bits`. None: recipes take the absmax of each output channel.
        allow: Guards that may fail; `allow_unseen`: glob patterns on modules that need not run.
    """

    model: str | None = None
    from_run: str | None = None
    calib: str | None = None
    seq_len: int = 512
    samples: int | None = None
    batch_size: int = 4
    dtype: str = "float32"
    device: str = "cpu"
    bos: str = "auto"
    method: str = "minmax"
    points: tuple[str, ...] | None = None
    bits: tuple[int, ...] = (8,)
    symmetric: tuple[str, ...] = DEFAULT_SYMMETRIC
    granularity: str = "head"
    exclude_first: bool = False
    smooth: str | None = None
    until_stable: float | None = None
    weights: str | None = None
    weight_method: str = DEFAULT_WEIGHT_METHOD
    weight_bits: int = DEFAULT_WEIGHT_BITS
    allow: tuple[str, ...] = ()
    allow_unseen: tuple[str, ...] = ()
    out: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        if (self.model is None) == (self.from_run is None):
            raise InputError(
                "calibrate takes a MODEL, or --from RUN to choose ranges again from what RUN "
                "observed: expected one of the two."
            )
        check_common(self.seq_len, self.batch_size, self.dtype, self.bos)
        check_cpu(self.device)
        check_positive("samples", self.most_samples)
        for point in self.points or ():
            check_choice("points", point, CALIBRATION_POINTS)
        for point in self.symmetric:
            check_choice("symmetric", point, CALIBRATION_POINTS)
        parse_methods(self.method, CALIBRATION_POINTS)
        for width in self.bits:
            if not 2 <= width <= 16:
                raise InputError(f"--bits takes 2 to 16, got {width}.")
        if not self.bits:
            raise InputError("--bits is empty; expected e.g. 8 or 8,6,4.")
        check_choice("granularity", self.granularity, RANGE_GRANULARITIES)
        for guard in self.allow:
            check_choice("allow", guard, GUARDS)
        if self.until_stable is not None and not 0.0 < self.until_stable < 1.0:
            raise InputError(
                f"--until-stable takes a share such as 1%, above 0 and below 100%, got "
                f"{100 * self.until_stable:g}%."
            )
        self._check_points_are_used()
        if self.from_run is not None:
            check_unread(self, _OF_A_PASS, "--from RUN, which observes nothing")
        check_weights(self.weights, self.weight_method, self.weight_bits)
        if self.smooth is not None:
            check_smooth(self.smooth, self.points)

    def _check_points_are_used(self) -> None:
        """Raises InputError for a method or grid of a point that gets no range."""
        if self.from_run is not None:
            return  # the run knows its points
        ranged = self.points or DEFAULT_CALIBRATION_POINTS
        methods = parse_methods(self.method, CALIBRATION_POINTS)
        asked = {"method": tuple(methods.by_point)}
        if self.symmetric != DEFAULT_SYMMETRIC:
            asked["symmetric"] = self.symmetric
        for option, points in asked.items():
            for point in points:
                if point not in ranged:
                    raise InputError(
                        f"--{option} names {point}, which is not among the points: add it to "
                        "--points, or leave it out."
                    )

    @property
    def most_samples(self) -> int:
        """Samples, at most."""
        if self.samples is not None:
            return self.samples
        return DEFAULT_SAMPLES if self.until_stable is None else UNTIL_STABLE_SAMPLES

    @property
    def alpha(self) -> float | None:
        """The migration strength that was given; None: it is searched, or nothing migrates."""
        return None if self.smooth in (None, "auto") else float(str(self.smooth))


def check_weights(weights: str | None, method: str, bits: int) -> None:
    if weights is None:
        if (method, bits) != (DEFAULT_WEIGHT_METHOD, DEFAULT_WEIGHT_BITS):
            raise InputError(
                "--weight-method and --weight-bits say how ranges of weights are chosen: add "
                "--weights channel."
            )
        return
    weight_granularity(weights)
    check_weight_method(parse_method(method))
    if not 2 <= bits <= 16:
        raise InputError(f"--weight-bits takes 2 to 16, got {bits}.")


def check_smooth(smooth: str, points: tuple[str, ...] | None) -> None:
    if points is not None and "linear_input" not in points:
        raise InputError(
            "--smooth moves the ranges of linear inputs: add linear_input to --points."
        )
    try:
        fits = smooth == "auto" or 0.0 <= float(smooth) <= 1.0
    except ValueError:
        fits = False
    if not fits:
        raise InputError(f"--smooth takes auto, or alpha from 0 to 1, got {smooth!r}.")
