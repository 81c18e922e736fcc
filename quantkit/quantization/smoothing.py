"""`smoothed`: a model with its channel scales moved as SmoothQuant moves them.

Xiao et al. 2023, arXiv 2211.10438, equation 3: Y = (X diag(s)^-1) (diag(s) W). The division goes
into the weight of what makes X, so the model runs the same operations as before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from quantkit.errors import InputError
from quantkit.models.folding import Fold, folded
from quantkit.results import Smoothing

ROUNDING: Final = 1e-4
"""How far a smoothed float32 model's output may move, relative in the Euclidean norm."""


@contextmanager
def smoothed(
    model: nn.Module,
    smoothing: Mapping[str, Smoothing],
    *,
    check_inputs: Mapping[str, Tensor] | None = None,
    tolerance: float = ROUNDING,
) -> Iterator[None]:
    """Moves the scales of every group while inside; afterwards each weight is the tensor it was.

    Args:
        smoothing: `Ranges.smoothing`, by group.
        check_inputs: Arguments of the model's forward; with them it runs once before and once
            after, and its first output must be the same but for rounding.
        tolerance: Of that check; a bfloat16 model needs a larger one.

    Raises:
        InputError: scales that do not fit the model, or an output that they change, which means
            that something else reads what a producer makes.
    """
    folds = [
        Fold(
            producer=group.producer,
            readers=tuple(group.linears),
            scales=torch.tensor(group.scales, dtype=torch.float32),
        )
        for group in smoothing.values()
    ]
    before = None if check_inputs is None else _output(model, check_inputs)
    with folded(model, folds):
        if before is not None and check_inputs is not None:
            moved = float((_output(model, check_inputs) - before).norm() / before.norm())
            if not moved <= tolerance:
                raise InputError(
                    f"smoothing moved the float model's output by {moved:.1e} (relative), expected "
                    f"at most {tolerance:.0e}: something else reads what one of "
                    f"{', '.join(sorted({fold.producer for fold in folds}))} makes."
                )
        yield


def smoothing_digest(smoothing: Mapping[str, Smoothing]) -> str:
    """Returns the sha256 of what is moved where, hexadecimal; empty for no smoothing."""
    if not smoothing:
        return ""
    plain = {name: [g.producer, g.linears, g.scales] for name, g in smoothing.items()}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _output(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    with torch.inference_mode():
        output: Any = model(**inputs)
        first: Tensor = output if isinstance(output, Tensor) else output[0]
        return first.double()
