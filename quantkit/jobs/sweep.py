"""`quantkit sweep` as data."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.errors import InputError
from quantkit.jobs.checks import (
    check_common,
    check_cpu,
    check_grid,
    check_models,
    check_positive,
    check_unread,
)
from quantkit.jobs.choices import DEFAULT_TEXT
from quantkit.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class SweepJob:
    """Accuracy of models x bits x granularity, and of other recipes.

    Where `calib` names the same source as `eval`, evaluation skips the first `calib_samples`
    blocks: those that calibration takes. With `ranges` it skips those that they were made from.

    Attributes:
        recipes: Measured beside the bits of the logits, e.g. `w8a8` or `logits4:head:static`.
        ranges: A run with `ranges.json`, of the one model, for the `recipes`; its smoothing and its
            ranges of weights are applied too. The bits of the logits stay dynamic.
        keep: Quantizers that stay in float in every row: their names, or a run with
            `sensitivity.json` for those that it suggests.
        allow_overlap: Run although calibration has seen the text, or nobody can tell.
    """

    models: tuple[str, ...]
    eval: str = DEFAULT_TEXT
    calib: str | None = DEFAULT_TEXT
    recipes: tuple[str, ...] = ()
    ranges: str | None = None
    keep: tuple[str, ...] = ()
    allow_overlap: bool = False
    bits: tuple[int, ...] = (16, 8, 6, 4)
    granularity: tuple[str, ...] = ("tensor", "head", "row")
    seq_len: int = 512
    samples: int = 64
    calib_samples: int = 128
    batch_size: int = 4
    dtype: str = "float32"
    device: str = "cpu"
    bos: str = "auto"
    seed: int = 0
    out: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        check_models(self.models)
        check_common(self.seq_len, self.batch_size, self.dtype, self.bos)
        check_cpu(self.device)
        check_positive("samples", self.samples)
        check_positive("calib-samples", self.calib_samples, least=0)
        check_grid(self.bits, self.granularity)
        for recipe in map(Recipe.parse, self.recipes):
            if recipe.needs_ranges and self.ranges is None:
                raise InputError(
                    f"recipe {recipe} reads calibrated ranges: give --ranges RUN, the folder of a "
                    "`quantkit calibrate`."
                )
        if self.ranges is not None and not self.recipes:
            raise InputError(
                "--ranges are read by the recipes of --quantize, and none is given: add e.g. "
                "--quantize w8a8 or --quantize logits8:head:static."
            )
        if self.ranges is not None:
            check_unread(self, ("calib", "calib_samples", "bos"), "--ranges RUN")
        if self.ranges is not None and len(self.models) > 1:
            raise InputError("--ranges are of one model: sweep the models one by one.")
