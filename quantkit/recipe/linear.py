"""Weights and inputs of linear layers: `w8a8`, `w4a16:group64`, `w8a8:token`, `nf4`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast

from quantkit.errors import InputError
from quantkit.recipe.logits import LOGIT_GRIDS, RANGE_KINDS, RangeKind
from quantkit.recipe.options import GROUP, check_bits, check_word, number, sorted_out

ActivationGranularity = Literal["tensor", "token"]
Format = Literal["llm-int8", "nf4", "fp4"]

ACTIVATION_GRANULARITIES: Final[tuple[ActivationGranularity, ...]] = ("tensor", "token")
FORMATS: Final[tuple[Format, ...]] = ("llm-int8", "nf4", "fp4")
MOST_BITS: Final = 16
THRESHOLD: Final = 6.0
"""From which |x| on LLM.int8 keeps a feature in float (Dettmers et al. 2022, section 3.2)."""
BLOCK: Final = 64
"""Consecutive weights that share a scale in bitsandbytes' 4-bit formats, its default."""
BLOCKS: Final = (64, 128, 256, 512, 1024, 2048, 4096)
"""The sizes that bitsandbytes takes on every device."""
_THRESHOLD: Final = re.compile(r"[0-9]{1,4}(\.[0-9]{1,4})?")


@dataclass(frozen=True, kw_only=True)
class WeightQuant:
    """Round to nearest on a symmetric narrow grid.

    Attributes:
        bits: 2 to 16.
        group_size: Consecutive inputs of an output channel that share a scale; None: all of them,
            or as the ranges of a calibration say.

    Raises:
        InputError: bits outside 2 to 16, or a group of less than two.
    """

    bits: int
    group_size: int | None = None

    def __post_init__(self) -> None:
        check_bits(self.bits, MOST_BITS, "weights")
        if self.group_size is not None and self.group_size < 2:
            raise InputError(f"a group of weights has 2 or more, got {self.group_size}.")


@dataclass(frozen=True, kw_only=True)
class BitsAndBytes:
    """Weights in a format of bitsandbytes, which computes with them.

    Attributes:
        format: `llm-int8` (Dettmers et al. 2022: int8 rows of weights and inputs, outlier features
            in float), `nf4` or `fp4` (Dettmers et al. 2023, "QLoRA": blocks of 4 bits).
        threshold: Of LLM.int8: features that reach it stay in float; 0 switches that off.
        block: Weights that share a scale, of the 4-bit formats.

    Raises:
        InputError: an unknown format, a negative threshold, or a block that bitsandbytes lacks.
    """

    format: Format
    threshold: float = THRESHOLD
    block: int = BLOCK

    def __post_init__(self) -> None:
        check_word(self.format, FORMATS, "format", "weights")
        threshold = self.threshold  # such a number is what its name says
        if not (0 <= threshold < 10_000 and threshold == round(threshold, 4)):
            raise InputError(
                "LLM.int8 takes a threshold from 0 to 9999 with at most four decimals, got "
                f"{threshold!r}."
            )
        if self.block not in BLOCKS:
            sizes = ", ".join(map(str, BLOCKS))
            raise InputError(f"{self.format} takes groups of {sizes}; got {self.block}.")

    @property
    def bits(self) -> int:
        """Of a weight."""
        return 8 if self.format == "llm-int8" else 4

    def __str__(self) -> str:
        if self.format == "llm-int8":
            threshold = repr(float(self.threshold)).removesuffix(".0")
            return self.format + (f":{threshold}" if self.threshold != THRESHOLD else "")
        return self.format + (f":group{self.block}" if self.block != BLOCK else "")

    @classmethod
    def of(cls, format_: str, options: Sequence[str], recipe: str) -> BitsAndBytes:
        """Returns the part with these options."""
        name = cast(Format, format_)
        if name == "llm-int8" and len(options) == 1 and _THRESHOLD.fullmatch(options[0]):
            return cls(format=name, threshold=float(options[0]))
        kinds: dict[str, tuple[str, ...]] = {} if name == "llm-int8" else {GROUP: ()}
        found = sorted_out(options, kinds, what=name, recipe=recipe)
        return cls(format=name, block=number(found.get(GROUP, str(BLOCK))))


@dataclass(frozen=True, kw_only=True)
class ActivationQuant:
    """How inputs of linear layers are quantized.

    Attributes:
        bits: 2 to 16; 16 is a real 16-bit grid.
        granularity: `tensor` is one range a layer (and sequence, where it is dynamic), `token` one
            a token.
        range: `static` reads it from `ranges.json`, `dynamic` takes the extremes of the call.
        symmetric: The narrow grid about 0 instead of the full one over lo, hi and 0.

    Raises:
        InputError: bits outside 2 to 16, an unknown word, or a static range per token.
    """

    bits: int
    granularity: ActivationGranularity = "tensor"
    range: RangeKind = "static"
    symmetric: bool = False

    def __post_init__(self) -> None:
        check_bits(self.bits, MOST_BITS, "activations")
        check_word(self.granularity, ACTIVATION_GRANULARITIES, "granularity", "activations")
        check_word(self.range, RANGE_KINDS, "range", "activations")
        if self.range == "static" and self.granularity == "token":
            raise InputError(
                "activations cannot have a static range per token: the tokens of a later text are "
                "not those of the calibration text. Use token with dynamic, or tensor with static."
            )

    @property
    def options(self) -> list[str]:
        """The words that are not the default's."""
        words = ["token"] if self.granularity == "token" else []
        words += ["dynamic"] if self.granularity == "tensor" and self.range == "dynamic" else []
        return [*words, "symmetric"] if self.symmetric else words


def linear_parts(
    weights: int | None, activations: int | None, options: Sequence[str], recipe: str
) -> tuple[WeightQuant | None, ActivationQuant | None]:
    """Returns both halves of a linear part, each with its own options.

    Raises:
        InputError: an option of a half that is not there.
    """
    kinds: dict[str, tuple[str, ...]] = {}
    if weights is not None:
        kinds[GROUP] = ()
    if activations is not None:
        kinds |= {"granularity": ACTIVATION_GRANULARITIES, "range": RANGE_KINDS}
        kinds["grid"] = LOGIT_GRIDS
    halves = [name for name, bits in (("weights", weights), ("inputs", activations)) if bits]
    found = sorted_out(options, kinds, what=" and ".join(halves), recipe=recipe)
    granularity = found.get("granularity", "tensor")
    usual = "dynamic" if granularity == "token" else "static"
    return (
        None
        if weights is None
        else WeightQuant(bits=weights, group_size=number(found[GROUP]) if GROUP in found else None),
        None
        if activations is None
        else ActivationQuant(
            bits=activations,
            granularity=cast(ActivationGranularity, granularity),
            range=cast(RangeKind, found.get("range", usual)),
            symmetric=found.get("grid", "asymmetric") == "symmetric",
        ),
    )
