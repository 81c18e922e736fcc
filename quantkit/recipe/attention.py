"""What attention works with beside its logits: `qk8:smooth`, `probs8:row`, `kv4:head:static`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast

from quantkit.errors import InputError
from quantkit.recipe.logits import (
    LOGIT_GRANULARITIES,
    LOGIT_GRIDS,
    MOST_ATTENTION_BITS,
    RANGE_KINDS,
    LogitGranularity,
    RangeKind,
)
from quantkit.recipe.options import check_bits, check_word, sorted_out

TokenGranularity = Literal["token", "head", "tensor"]
ProbabilityRange = Literal["unit", "dynamic", "static"]

QUERY_KEY_GRANULARITIES: Final[tuple[TokenGranularity, ...]] = ("token", "head", "tensor")
CACHE_GRANULARITIES: Final[tuple[TokenGranularity, ...]] = ("token", "head", "tensor")
PROBABILITY_GRANULARITIES: Final[tuple[LogitGranularity, ...]] = LOGIT_GRANULARITIES
PROBABILITY_RANGES: Final[tuple[ProbabilityRange, ...]] = ("unit", "dynamic", "static")


@dataclass(frozen=True, kw_only=True)
class QueryKeyQuant:
    """Queries and keys on integer grids, so that their product is one of integers.

    The experiment of SageAttention (Zhang et al. 2024, arXiv 2410.02367): after RoPE, symmetric
    absmax of each call. Another one than quantizing their product, the logits.

    Attributes:
        bits: 2 to 15.
        granularity: `token` is a scale for each token and head, `head` one for each head, `tensor`
            one for all heads of the map; queries and keys have their own.
        smooth: Keys lose their mean over the sequence's tokens before, a channel at a time (that
            paper's equation 4); softmax does not see it, since it moves all logits of a row alike.

    Raises:
        InputError: bits outside 2 to 15, or an unknown word.
    """

    bits: int
    granularity: TokenGranularity = "token"
    smooth: bool = False

    def __post_init__(self) -> None:
        check_bits(self.bits, MOST_ATTENTION_BITS, "queries and keys")
        check_word(self.granularity, QUERY_KEY_GRANULARITIES, "granularity", "queries and keys")

    def __str__(self) -> str:
        options = [] if self.granularity == "token" else [self.granularity]
        return ":".join([f"qk{self.bits}", *options, *(["smooth"] if self.smooth else [])])

    @classmethod
    def of(cls, bits: int, options: Sequence[str], recipe: str) -> QueryKeyQuant:
        """Returns the part with these options."""
        kinds = {"granularity": QUERY_KEY_GRANULARITIES, "smooth": ("smooth",)}
        found = sorted_out(options, kinds, what="queries and keys", recipe=recipe)
        granularity = cast(TokenGranularity, found.get("granularity", "token"))
        return cls(bits=bits, granularity=granularity, smooth="smooth" in found)


@dataclass(frozen=True, kw_only=True)
class ProbabilityQuant:
    """Softmax outputs, of each map on its own: q in [0, 2^bits - 1].

    Attributes:
        bits: 2 to 15.
        range: `unit` reaches to 1, `dynamic` to the largest of the call, `static` to that of
            `ranges.json`.
        granularity: What shares one scale within one sequence, layer and map; `unit` has `tensor`.

    Raises:
        InputError: bits outside 2 to 15, an unknown word, a granularity of `unit` or a static range
            per row.
    """

    bits: int
    range: ProbabilityRange = "unit"
    granularity: LogitGranularity = "tensor"

    def __post_init__(self) -> None:
        check_bits(self.bits, MOST_ATTENTION_BITS, "softmax outputs")
        check_word(self.range, PROBABILITY_RANGES, "range", "softmax outputs")
        check_word(self.granularity, PROBABILITY_GRANULARITIES, "granularity", "softmax outputs")
        if self.range == "unit" and self.granularity != "tensor":
            raise InputError(
                f"softmax outputs over [0, 1] have one scale, not one per {self.granularity}: "
                "leave it out, or add dynamic."
            )
        if self.range == "static" and self.granularity == "row":
            raise InputError(
                "softmax outputs cannot have a static range per row: the rows of a later text are "
                "not those of the calibration text. Use tensor or head."
            )

    def __str__(self) -> str:
        usual = {"unit": "tensor", "dynamic": "row", "static": "head"}[self.range]
        options: list[str] = [] if self.range == "unit" else [self.range]
        options += [] if self.granularity == usual else [self.granularity]
        return ":".join([f"probs{self.bits}", *options])

    @classmethod
    def of(cls, bits: int, options: Sequence[str], recipe: str) -> ProbabilityQuant:
        """Returns the part with these options; a granularity alone says `dynamic`."""
        kinds = {"granularity": PROBABILITY_GRANULARITIES, "range": PROBABILITY_RANGES}
        found = sorted_out(options, kinds, what="softmax outputs", recipe=recipe)
        range_ = found.get("range", "dynamic" if "granularity" in found else "unit")
        usual = {"unit": "tensor", "dynamic": "row", "static": "head"}[range_]
        return cls(
            bits=bits,
            range=cast(ProbabilityRange, range_),
            granularity=cast(LogitGranularity, found.get("granularity", usual)),
        )


@dataclass(frozen=True, kw_only=True)
class CacheQuant:
    """Keys and values as a quantized cache gives them back.

    Attributes:
        bits: 2 to 15.
        granularity: `token` is a range for each token and key head (over its channels), `head` one
            for each key head, `tensor` one for all; keys and values have their own.
        range: `dynamic` takes the extremes of the call, `static` those of `ranges.json`.
        symmetric: The narrow grid about 0 instead of the full one over lo, hi and 0.

    Raises:
        InputError: bits outside 2 to 15, an unknown word, or a static range per token.
    """

    bits: int
    granularity: TokenGranularity = "token"
    range: RangeKind = "dynamic"
    symmetric: bool = False

    def __post_init__(self) -> None:
        check_bits(self.bits, MOST_ATTENTION_BITS, "keys and values of the cache")
        check_word(self.granularity, CACHE_GRANULARITIES, "granularity", "the cache")
        check_word(self.range, RANGE_KINDS, "range", "the cache")
        if self.range == "static" and self.granularity == "token":
            raise InputError(
                "the cache cannot have a static range per token: the tokens of a later text are "
                "not those of the calibration text. Use head or tensor."
            )

    def __str__(self) -> str:
        is_static = self.range == "static"
        usual = "head" if is_static else "token"
        options: list[str] = [] if self.granularity == usual else [self.granularity]
        options += ["static"] if is_static else []
        return ":".join([f"kv{self.bits}", *options, *(["symmetric"] if self.symmetric else [])])

    @classmethod
    def of(cls, bits: int, options: Sequence[str], recipe: str) -> CacheQuant:
        """Returns the part with these options."""
        kinds = {"granularity": CACHE_GRANULARITIES, "range": RANGE_KINDS, "grid": LOGIT_GRIDS}
        found = sorted_out(options, kinds, what="the cache", recipe=recipe)
        range_ = found.get("range", "dynamic")
        usual = "head" if range_ == "static" else "token"
        return cls(
            bits=bits,
            granularity=cast(TokenGranularity, found.get("granularity", usual)),
            range=cast(RangeKind, range_),
            symmetric=found.get("grid", "asymmetric") == "symmetric",
        )
