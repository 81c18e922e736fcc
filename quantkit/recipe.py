"""What to quantize and how, and its one-line name: `Recipe.parse` and `str` are inverses.

The grammar, which options only append to:

    recipe      = "none" | part { "+" part }            each kind of part at most once
    part        = linear | logits
    linear      = "w" BITS [ "a" BITS ] | "a" BITS      weights and inputs of linear layers, 2 to 16
    logits      = "logits" BITS { ":" option }          attention logits, 2 to 15
    option      = "tensor" | "head" | "row"             granularity (default tensor)
                | "dynamic" | "static"                  range (default dynamic)
                | "symmetric" | "asymmetric"            grid (default symmetric)

Examples: `none`, `w8a8`, `logits6`, `w8a8+logits4:head`, `logits4:tensor:static`,
`logits8:head:static:asymmetric`.

The grids behind the names are fixed, so that a name says everything:

* weights: one symmetric narrow scale per output channel, `q` in `[-(2^(b-1)-1), 2^(b-1)-1]`;
* activations (inputs of linear layers): one static asymmetric range per tensor, signed, full grid;
* logits: symmetric narrow absmax, before the mask and after the model's own scale; `tensor` is one
  scale per sequence, layer and map, `head` adds the head, `row` the query. Never over a batch.
  `asymmetric` spans lo, hi and 0 instead, signed, full grid, as for activations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, cast

from quantkit.errors import InputError, suggest

LogitGranularity = Literal["tensor", "head", "row"]
RangeKind = Literal["dynamic", "static"]
LogitGrid = Literal["symmetric", "asymmetric"]

LOGIT_GRANULARITIES: Final[tuple[LogitGranularity, ...]] = ("tensor", "head", "row")
RANGE_KINDS: Final[tuple[RangeKind, ...]] = ("dynamic", "static")
LOGIT_GRIDS: Final[tuple[LogitGrid, ...]] = ("symmetric", "asymmetric")
UNQUANTIZED_BITS: Final = 16
"""The label of logits that are not quantized: the paper's first column."""

_LINEAR = re.compile(r"(?:w(?P<weights>[0-9]+))?(?:a(?P<activations>[0-9]+))?")
_LOGITS = re.compile(r"logits(?P<bits>[0-9]+)(?P<options>(?::[^:+]*)*)")
_EXAMPLES = ("none", "w8", "w8a8", "w8a8+logits4", "logits6", "logits4:head", "logits4:row")


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
        if not 2 <= self.bits <= 15:
            tail = " Leave the part out: 16 means logits that are not quantized."
            raise InputError(
                f"logits take 2 to 15 bits, got {self.bits}."
                + (tail if self.bits == UNQUANTIZED_BITS else "")
            )
        if self.granularity not in LOGIT_GRANULARITIES:
            hint = suggest(self.granularity, LOGIT_GRANULARITIES)
            raise InputError(f"unknown granularity {self.granularity!r} of logits.{hint}")
        if self.range not in RANGE_KINDS:
            hint = suggest(self.range, RANGE_KINDS)
            raise InputError(f"unknown range {self.range!r} of logits.{hint}")
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


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is quantized; `None` leaves that kind of tensor in floating point.

    Attributes:
        weights: Bits of the weights of linear layers, 2 to 16.
        activations: Bits of the inputs of linear layers, 2 to 16; 16 is a real 16-bit grid.
        logits: Quantization of attention logits.

    Raises:
        InputError: bits outside 2 to 16.
    """

    weights: int | None = None
    activations: int | None = None
    logits: LogitQuant | None = None

    def __post_init__(self) -> None:
        for kind, bits in (("weights", self.weights), ("activations", self.activations)):
            if bits is not None and not 2 <= bits <= 16:
                raise InputError(f"{kind} take 2 to 16 bits, got {bits}.")

    @property
    def is_float(self) -> bool:
        """True where nothing is quantized."""
        return self.weights is None and self.activations is None and self.logits is None

    @property
    def needs_ranges(self) -> bool:
        """True where a calibrated range is read: activations, or logits with a static range."""
        static_logits = self.logits is not None and self.logits.range == "static"
        return self.activations is not None or static_logits

    def require_static_logits(self) -> None:
        """Raises InputError if the logits have a dynamic range, which a graph cannot hold."""
        if self.logits is not None and self.logits.range == "dynamic":
            grid = "" if self.logits.symmetric else ":asymmetric"
            raise InputError(
                f"recipe {self}: a graph takes static ranges of logits; write "
                f"logits{self.logits.bits}:head:static{grid}, or use --attention-bits."
            )

    def __str__(self) -> str:
        linear = "" if self.weights is None else f"w{self.weights}"
        linear += "" if self.activations is None else f"a{self.activations}"
        parts = [linear] if linear else []
        if self.logits is not None:
            parts.append(str(self.logits))
        return "+".join(parts) or "none"

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """Returns the recipe with this name, e.g. `w8a8+logits4:head`.

        Raises:
            InputError: not in the grammar; the message shows the part that is not, and examples.
        """
        name = text.strip().lower()
        if name == "none":
            return cls()
        weights: int | None = None
        activations: int | None = None
        logits: LogitQuant | None = None
        for part in name.split("+"):
            linear = _LINEAR.fullmatch(part) if part else None
            quantized_logits = _LOGITS.fullmatch(part)
            if quantized_logits is not None:
                if logits is not None:
                    raise InputError(f"recipe {text!r} names logits twice.")
                logits = _parse_logits(quantized_logits, text)
            elif linear is not None:
                if weights is not None or activations is not None:
                    raise InputError(f"recipe {text!r} names weights or activations twice.")
                weights = _bits(linear["weights"])
                activations = _bits(linear["activations"])
            else:
                raise InputError(
                    f"recipe {text!r}: {part!r} is not `none`, wN, aN, wNaM or logitsN."
                    + suggest(name, _EXAMPLES).replace("Available:", "Examples:")
                )
        return cls(weights=weights, activations=activations, logits=logits)


def _bits(digits: str | None) -> int | None:
    """Returns the number; digits are cut so that an absurd length stays a short error."""
    return None if digits is None else int(digits[:6])


def _parse_logits(match: re.Match[str], text: str) -> LogitQuant:
    """Returns the logit part; options come in any order, each kind at most once."""
    kinds = (LOGIT_GRANULARITIES, RANGE_KINDS, LOGIT_GRIDS)
    found: dict[tuple[str, ...], str] = {}
    for option in match["options"].split(":")[1:]:
        kind = next((kind for kind in kinds if option in kind), None)
        if kind is None:
            hint = suggest(option, [word for kind in kinds for word in kind])
            raise InputError(f"recipe {text!r}: unknown option {option!r} of logits.{hint}")
        if kind in found:
            raise InputError(f"recipe {text!r}: option {option!r} says the same thing twice.")
        found[kind] = option
    return LogitQuant(
        bits=int(match["bits"][:6]),
        granularity=cast(LogitGranularity, found.get(LOGIT_GRANULARITIES, "tensor")),
        range=cast(RangeKind, found.get(RANGE_KINDS, "dynamic")),
        symmetric=found.get(LOGIT_GRIDS, "symmetric") == "symmetric",
    )
