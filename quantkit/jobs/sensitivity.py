"""`quantkit sensitivity` as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quantkit.errors import InputError
from quantkit.jobs.checks import check_choice, check_common, check_cpu, check_positive
from quantkit.jobs.choices import DEFAULT_TEXT
from quantkit.recipe import Recipe

MODES: Final = ("enable-one", "disable-one")
GROUPS: Final = ("tensor", "module", "layer")
TARGET_FRAC: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class SensitivityJob:
    """Which quantizers of a recipe cost one model most, on text that calibration has not seen.

    Attributes:
        ranges: A run folder with `ranges.json`, of this model.
        weights: Switch weights one by one too; with another `group` they are switched in any case.
        target_frac: What of the whole error may remain after keeping the worst.
        allow_overlap: Run although calibration has seen the text, or nobody can tell.
    """

    model: str
    ranges: str
    recipe: str = "w8a8"
    eval: str = DEFAULT_TEXT
    seq_len: int = 256
    samples: int = 8
    batch_size: int = 4
    dtype: str = "float32"
    device: str = "cpu"
    modes: tuple[str, ...] = MODES
    group: str = GROUPS[0]
    weights: bool = False
    target_frac: float = TARGET_FRAC
    allow_overlap: bool = False
    out: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        check_common(self.seq_len, self.batch_size, self.dtype, "auto")
        check_cpu(self.device)
        check_positive("samples", self.samples)
        check_choice("group", self.group, GROUPS)
        if not self.modes:
            raise InputError(f"--modes is empty; expected {' or '.join(MODES)}, or both.")
        for mode in self.modes:
            check_choice("modes", mode, MODES)
        if not 0.0 < self.target_frac < 1.0:
            raise InputError(
                f"--remaining takes a fraction between 0 and 1, got {self.target_frac:g}."
            )
        recipe = Recipe.parse(self.recipe)
        only_weights = recipe.activations is None and recipe.logits is None
        if recipe.is_float or (only_weights and self.group == "tensor" and not self.weights):
            tail = "" if recipe.is_float else ", or --weights to switch weights"
            raise InputError(
                f"recipe {self.recipe!r} leaves nothing to switch: expected e.g. w8a8{tail}."
            )
