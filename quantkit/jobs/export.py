"""`quantkit export` as data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from quantkit.errors import InputError
from quantkit.jobs.checks import (
    check_choice,
    check_common,
    check_cpu,
    check_positive,
    check_unread,
)
from quantkit.jobs.choices import ATTENTION_BITS, DEFAULT_TEXT, OPSETS
from quantkit.recipe import UNQUANTIZED_BITS, LogitQuant, Recipe


@dataclass(frozen=True, kw_only=True)
class ExportJob:
    """A quantized ONNX graph of one model, and the proof that it does what the model does.

    `samples` blocks of `calib` fix the ranges, `eval_samples` blocks of `eval` measure accuracy.
    `attention_bits` below 16 adds logits to the recipe.

    Attributes:
        ranges: A run with `ranges.json`, to take ranges and smoothing from instead of calibrating.
        keep: Quantizers that stay in float: their names, or a run with `sensitivity.json` for those
            that it suggests.
        allow_overlap: Run although calibration has seen the evaluation text, or nobody can tell.
    """

    model: str
    recipe: str = "w8a8"
    calib: str = DEFAULT_TEXT
    eval: str = DEFAULT_TEXT
    seq_len: int = 512
    samples: int = 128
    eval_samples: int = 64
    batch_size: int = 4
    dtype: str = "float32"
    device: str = "cpu"
    bos: str = "auto"
    opset: int = 21
    attention_bits: int = UNQUANTIZED_BITS
    ranges: str | None = None
    keep: tuple[str, ...] = ()
    allow_overlap: bool = False
    seed: int = 0
    out: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        check_common(self.seq_len, self.batch_size, self.dtype, self.bos)
        check_cpu(self.device)
        check_positive("samples", self.samples)
        check_positive("eval-samples", self.eval_samples)
        check_choice("opset", self.opset, OPSETS)
        check_choice("attention-bits", self.attention_bits, ATTENTION_BITS)
        if self.ranges is not None:
            check_unread(self, ("calib", "samples", "bos"), "--ranges RUN")
        check_export(self.full_recipe, self.dtype, self.seq_len)

    @property
    def full_recipe(self) -> Recipe:
        """The recipe with `attention_bits` in it.

        Raises:
            InputError: both name a quantization of the logits.
        """
        return with_attention_bits(self.recipe, self.attention_bits)


def with_attention_bits(recipe: str, attention_bits: int) -> Recipe:
    """Returns the parsed recipe, with logits of that many bits where there are fewer than 16.

    In a graph, logits have static ranges per head: a dynamic absmax would cost two more passes.

    Raises:
        InputError: not a recipe, or the recipe already quantizes the logits.
    """
    parsed = Recipe.parse(recipe)
    if attention_bits == UNQUANTIZED_BITS:
        return parsed
    if parsed.logits is not None:
        raise InputError(
            f"recipe {recipe!r} already quantizes the logits: leave --attention-bits "
            f"{attention_bits} out, or the logits part of the recipe."
        )
    logits = LogitQuant(bits=attention_bits, granularity="head", range="static")
    return dataclasses.replace(parsed, logits=logits)


def check_export(recipe: Recipe, dtype: str, seq_len: int) -> None:
    """Raises InputError for what an export would refuse after minutes of other work."""
    recipe.require_exportable()
    if dtype != "float32":
        raise InputError(f"export takes float32 models, got --dtype {dtype}.")
    if seq_len < 4:
        raise InputError(f"export takes --seq-len 4 or more, got {seq_len}.")
