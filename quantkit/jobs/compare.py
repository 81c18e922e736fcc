"""`quantkit compare` as data."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.jobs.checks import (
    check_choice,
    check_common,
    check_cpu,
    check_grid,
    check_models,
    check_positive,
)
from quantkit.jobs.choices import ATTENTION_BITS, DEFAULT_TEXT, OPSETS
from quantkit.jobs.export import check_export, with_attention_bits
from quantkit.recipe import UNQUANTIZED_BITS, Recipe


@dataclass(frozen=True, kw_only=True)
class CompareJob:
    """Every stage for every model, on one text: first calibration's blocks, then evaluation's."""

    models: tuple[str, ...]
    text: str = DEFAULT_TEXT
    seq_len: int = 512
    calib_samples: int = 128
    eval_samples: int = 64
    batch_size: int = 4
    dtype: str = "float32"
    device: str = "cpu"
    bos: str = "auto"
    bits: tuple[int, ...] = (16, 8, 6, 4)
    granularity: tuple[str, ...] = ("tensor", "head", "row")
    recipe: str = "w8a8"
    attention_bits: int = UNQUANTIZED_BITS
    opset: int = 21
    seed: int = 0
    out: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        check_models(self.models)
        check_common(self.seq_len, self.batch_size, self.dtype, self.bos)
        check_cpu(self.device)
        check_positive("calib-samples", self.calib_samples)
        check_positive("eval-samples", self.eval_samples)
        check_grid(self.bits, self.granularity)
        check_choice("opset", self.opset, OPSETS)
        check_choice("attention-bits", self.attention_bits, ATTENTION_BITS)
        check_export(self.full_recipe, self.dtype, self.seq_len)

    @property
    def full_recipe(self) -> Recipe:
        """The export's recipe with `attention_bits` in it."""
        return with_attention_bits(self.recipe, self.attention_bits)
