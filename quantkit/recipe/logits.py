"""Attention logits: `logits4:head:static:asymmetric`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast

from quantkit.errors import InputError
from quantkit.recipe.options import check_bits, check_word, sorted_out

LogitGranularity = Literal["tensor", "head", "row"]
RangeKind = Literal["dynamic", "static"]
Grid = Literal["symmetric", "asymmetric"]

LOGIT_GRANULARITIES: Final[tuple[LogitGranularity, ...]] = ("tensor", "head", "row")
RANGE_KINDS: Final[tuple[RangeKind, ...]] = ("dynamic", "static")
LOGIT_GRIDS: Final[tuple[Grid, ...]] = ("symmetric", "asymmetric")
UNQUANTIZED_BITS: Final = 16
"""The label of logits that are not quantized: the paper's first column."""
MOST_ATTENTION_BITS: Final = UNQUANTIZED_BITS - 1
"""The widest grid inside attention: 16 says "not quantized" there."""


@dataclass(frozen=True, kw_only=True)
class LogitQuant:
    """How attention logits are quantized.

    Attributes:
        bits: Width of the grid, 2 to 15 (16 is the label of "not quantized").
        granularity: What shares one scale within one sequence, layer and map.
        range: `dynamic` takes the extremes of the valid entries of the call; `static` reads them
            from `ranges.json`.
        symmetric: The narrow grid about 0, of the absmax; else the full one over lo, hi and 0, for
            logits that are far from balanced.

    Raises:
        InputError: bits outside 2 to 15, an unknown word, or a static range per row, which cannot
            exist: the rows of a later text are not those of the calibration text.
    """

    bits: int
    granularity: LogitGranularity = "tensor"
    range: RangeKind = "dynamic"
    symmetric: bool = True

    def __post_init__(self) -> None:
        tail = " Leave the part out: 16 means logits that are not quantized."
        is_label = self.bits == UNQUANTIZED_BITS
        check_bits(self.bits, MOST_ATTENTION_BITS, "logits", tail if is_label else "")
        check_word(self.granularity, LOGIT_GRANULARITIES, "granularity", "logits")
        check_word(self.range, RANGE_KINDS, "range", "logits")
        if self.range == "static" and self.granularity == "row":
            raise InputError(
                "logits cannot have a static range per row: the rows of a later text are not those "
                "of the calibration text. Use static with tensor or head, or row with dynamic."
            )

    def __str__(self) -> str:
        is_static = self.range == "static"
        options: list[str] = []
        options += [self.granularity] if is_static or self.granularity != "tensor" else []
        options += ["static"] if is_static else []
        options += [] if self.symmetric else ["asymmetric"]
        return ":".join([f"logits{self.bits}", *options])

    @classmethod
    def of(cls, bits: int, options: Sequence[str], recipe: str) -> LogitQuant:
        """Returns the part with these options, in any order, each kind at most once."""
        kinds = {"granularity": LOGIT_GRANULARITIES, "range": RANGE_KINDS, "grid": LOGIT_GRIDS}
        found = sorted_out(options, kinds, what="logits", recipe=recipe)
        return cls(
            bits=bits,
            granularity=cast(LogitGranularity, found.get("granularity", "tensor")),
            range=cast(RangeKind, found.get("range", "dynamic")),
            symmetric=found.get("grid", "symmetric") == "symmetric",
        )
