"""What `--quantize` takes: a recipe, a name that stands for one, half precision, or a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from quantkit.errors import InputError
from quantkit.recipe import Recipe

Storage = Literal["qdq", "matmulnbits"]
"""How a graph holds weights by group: DequantizeLinear by blocks, or ONNX Runtime's MatMulNBits."""

STORAGES: Final[tuple[Storage, ...]] = ("qdq", "matmulnbits")
DOMAINS: Final[dict[Storage, tuple[str, ...]]] = {
    "qdq": ("ai.onnx",),
    "matmulnbits": ("ai.onnx", "com.microsoft"),
}
"""The operator domains that a graph may use; another one is an error, never a silent fallback."""
AUTO: Final = "auto"
HALF: Final = "16"
EXPORT_NAMES: Final[dict[str, tuple[str, Storage]]] = {
    "8": ("w8a8", "qdq"),
    "w8a8-dynamic": ("w8a8:token:symmetric", "qdq"),
    "w4a16": ("w4a16:group32", "qdq"),
    "w8a16-block": ("w8:group32", "matmulnbits"),
}
"""Names that people know -> the recipe that they stand for, and how it is stored.

`w8a8-dynamic` has a range a token: one over a whole call, as ONNX's DynamicQuantizeLinear takes it,
would let the padding and the other sequences of a batch change a result.
"""


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """What a graph is to become.

    Attributes:
        storage: Read where weights are by group.
        is_half: Floats of 16 bits, nothing on an integer grid.
        is_auto: The recipe is to be searched for.
    """

    recipe: Recipe
    storage: Storage = "qdq"
    is_half: bool = False
    is_auto: bool = False

    @classmethod
    def parse(cls, text: str, storage: Storage | None = None) -> ExportFormat:
        """Returns what a word of `--quantize` means.

        Args:
            storage: Overrules that of the name.

        Raises:
            InputError: neither a name nor a recipe, or a storage that has nothing to store.
        """
        word = text.strip().lower()
        if word == AUTO:
            return cls(recipe=Recipe(), is_auto=True, storage=storage or "qdq")
        if word == HALF:
            return cls(recipe=Recipe(), is_half=True)
        head, *rest = word.split("+")
        name, own = EXPORT_NAMES.get(head, (head, "qdq"))
        recipe = Recipe.parse("+".join([name, *rest]))
        found = cls(recipe=recipe, storage=storage or own)
        if found.storage == "matmulnbits" and not found.has_groups:
            raise InputError(
                f"--storage matmulnbits is for weights by group, and {text!r} has none: expected "
                "e.g. w4:group32, w8:group32 or w8a16-block."
            )
        return found

    @property
    def has_groups(self) -> bool:
        """Whether weights share a scale by groups of inputs."""
        return getattr(self.recipe.weights, "group_size", None) is not None

    @property
    def domains(self) -> tuple[str, ...]:
        """The operator domains that its graph may use."""
        return DOMAINS[self.storage] if self.has_groups else DOMAINS["qdq"]
