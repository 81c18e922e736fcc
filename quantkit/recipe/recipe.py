"""All parts together; the grammar stands in `quantkit.recipe`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from quantkit.errors import InputError, suggest
from quantkit.recipe.attention import CacheQuant, ProbabilityQuant, QueryKeyQuant
from quantkit.recipe.linear import (
    FORMATS,
    ActivationQuant,
    BitsAndBytes,
    WeightQuant,
    linear_parts,
)
from quantkit.recipe.logits import LogitQuant
from quantkit.recipe.options import number

_LINEAR: Final = re.compile(r"(?:w(?P<weights>[0-9]+))?(?:a(?P<activations>[0-9]+))?")
_ATTENTION: Final = re.compile(r"(?P<kind>logits|qk|probs|kv)(?P<bits>[0-9]+)")
_EXAMPLES: Final = (
    "none", "w8", "w8a8", "w4a16:group64", "w8a8:token", "w8a8+logits4", "logits6", "logits4:head",
    "logits4:row", "qk8", "probs8", "kv8", "nf4", "llm-int8",
)  # fmt: skip
_Of = Callable[[int, Sequence[str], str], Any]
_PARTS: Final[dict[str, tuple[str, _Of]]] = {
    "logits": ("logits", LogitQuant.of),
    "qk": ("queries_keys", QueryKeyQuant.of),
    "probs": ("probabilities", ProbabilityQuant.of),
    "kv": ("cache", CacheQuant.of),
}
"""Word of a part -> (field of the recipe, what makes it)."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is quantized; `None` leaves that kind of tensor in floating point.

    Attributes:
        weights: Weights of linear layers.
        activations: Inputs of linear layers.
        logits: Attention logits.
        queries_keys: Queries and keys, whose product the logits are.
        probabilities: Softmax outputs.
        cache: Keys and values as a cache holds them.

    Raises:
        InputError: LLM.int8 beside activations, which it quantizes itself.
    """

    weights: WeightQuant | BitsAndBytes | None = None
    activations: ActivationQuant | None = None
    logits: LogitQuant | None = None
    queries_keys: QueryKeyQuant | None = None
    probabilities: ProbabilityQuant | None = None
    cache: CacheQuant | None = None

    def __post_init__(self) -> None:
        has_own_inputs = isinstance(self.weights, BitsAndBytes) and self.weights.bits == 8
        if has_own_inputs and self.activations is not None:
            raise InputError(
                "LLM.int8 quantizes the inputs of its linear layers itself: leave "
                f"a{self.activations.bits} out."
            )

    @property
    def is_float(self) -> bool:
        """True where nothing is quantized."""
        return all(getattr(self, field.name) is None for field in fields(self))

    @property
    def weight_bits(self) -> int | None:
        """Bits of a weight, in whichever format."""
        return None if self.weights is None else self.weights.bits

    @property
    def activation_bits(self) -> int | None:
        """Bits of an input of a linear layer; LLM.int8's own are not among them."""
        return None if self.activations is None else self.activations.bits

    @property
    def needs_ranges(self) -> bool:
        """True where a calibrated range is read."""
        parts = (self.activations, self.logits, self.probabilities, self.cache)
        return any(part is not None and part.range == "static" for part in parts)

    def require_exportable(self) -> None:
        """Raises InputError for what an exported graph cannot hold in this version."""
        why = self._why_not_exported()
        if why:
            raise InputError(f"recipe {self}: {why}. `quantkit sweep` measures it.")

    def _why_not_exported(self) -> str:
        if isinstance(self.weights, BitsAndBytes):
            return f"{self.weights.format} is a format of bitsandbytes, which no graph holds"
        inputs = self.activations
        if inputs is not None and inputs.range == "static" and inputs.symmetric:
            return f"static inputs are exported on the asymmetric grid: write a{inputs.bits}"
        if inputs is not None and inputs.range == "dynamic":
            if inputs.granularity == "tensor":
                return (
                    "a range of a whole call would depend on its padding and batch: write "
                    f"a{inputs.bits}:token:symmetric"
                )
            if not inputs.symmetric:
                return f"a graph has symmetric ranges a token: write a{inputs.bits}:token:symmetric"
        logits = self.logits
        if logits is not None and logits.range == "dynamic" and not logits.symmetric:
            return (
                "a graph has dynamic ranges of logits on symmetric grids only: write "
                f"logits{logits.bits}:head:static:asymmetric, or leave asymmetric out"
            )
        if self.cache is not None and (self.cache.range == "dynamic" or self.cache.bits != 8):
            return "a graph takes a cache of 8 bits with static ranges: write kv8:static"
        parts = ("queries_keys", "probabilities")
        named = next((part for part in parts if getattr(self, part) is not None), "")
        return f"{named.replace('_', ' and ')} are not quantized in a graph" if named else ""

    def __str__(self) -> str:
        parts: list[str] = []
        linear, options = "", list[str]()
        if isinstance(self.weights, BitsAndBytes):
            parts.append(str(self.weights))
        elif self.weights is not None:
            linear = f"w{self.weights.bits}"
            size = self.weights.group_size
            options += [] if size is None else [f"group{size}"]
        if self.activations is not None:
            linear += f"a{self.activations.bits}"
            options += self.activations.options
        parts += [":".join([linear, *options])] if linear else []
        rest = (self.logits, self.queries_keys, self.probabilities, self.cache)
        return "+".join([*parts, *(str(part) for part in rest if part is not None)]) or "none"

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """Returns the recipe with this name, e.g. `w8a8+logits4:head`.

        Raises:
            InputError: not in the grammar; the message shows the part that is not, and examples.
        """
        name = text.strip().lower()
        if name == "none":
            return cls()
        found: dict[str, Any] = {}
        for part in name.split("+"):
            for kind, quant in _parsed(part, text).items():
                if kind in found:
                    raise InputError(f"recipe {text!r} names {kind.replace('_', ' and ')} twice.")
                found[kind] = quant
        return cls(**found)


def _parsed(part: str, recipe: str) -> dict[str, Any]:
    """Returns the fields that one part sets.

    Raises:
        InputError: it is no part.
    """
    head, *options = part.split(":")
    attention = _ATTENTION.fullmatch(head)
    if attention is not None:
        field, of = _PARTS[attention["kind"]]
        return {field: of(number(attention["bits"]), options, recipe)}
    if head in FORMATS:
        return {"weights": BitsAndBytes.of(head, options, recipe)}
    linear = _LINEAR.fullmatch(head) if head else None
    if linear is None:
        raise InputError(
            f"recipe {recipe!r}: {part!r} is not `none`, wN, aN, wNaM, logitsN, qkN, probsN, kvN, "
            "llm-int8, nf4 or fp4."
            + suggest(recipe.strip().lower(), _EXAMPLES).replace("Available:", "Examples:")
        )
    weights, activations = (
        None if linear[kind] is None else number(linear[kind]) for kind in _LINEAR.groupindex
    )
    quants = zip(
        _LINEAR.groupindex, linear_parts(weights, activations, options, recipe), strict=True
    )
    return {kind: quant for kind, quant in quants if quant is not None}
