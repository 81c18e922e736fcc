"""`quantized_weights`: linear layers whose weights lie on a grid or in a format, inside a `with`.

A weight is seen as `[out, in]`; the transposed one of transformers' `Conv1D` (GPT-2) is turned for
it and back. Each module gets a parameter of its own in place of the one it had, so that whatever
else holds that one (an embedding, a layer that stays in float) keeps its numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quantkit.calibration import WeightRanges
from quantkit.errors import InputError, suggest
from quantkit.models import as_matrix, projection_modules
from quantkit.numerics.affine import (
    expand_groups,
    fake_quantize,
    reduce_absmax,
    symmetric_scale,
)
from quantkit.numerics.granularity import PerGroup
from quantkit.numerics.qtypes import QType
from quantkit.quantization.bitsandbytes_formats import FloatFeatures, four_bit, llm_int8
from quantkit.quantization.fired import Counter
from quantkit.quantization.grids import weight_scale
from quantkit.recipe import BitsAndBytes, WeightQuant

_PREFIX: Final = "weight/"


@contextmanager
def quantized_weights(
    model: nn.Module,
    quant: WeightQuant | BitsAndBytes,
    *,
    on: Collection[str],
    ranges: WeightRanges | None,
    fired: Counter,
) -> Iterator[Mapping[str, FloatFeatures]]:
    """Quantizes the weights named in `on`; yields what LLM.int8 keeps in float, by module.

    Weights fire once, on entry, with all their elements. LLM.int8 also quantizes inputs, and fires
    at each call of a layer, with the elements of real tokens that it put on int8.

    Args:
        on: Names of quantizers; those of weights, `weight/<module>`, are taken.
        ranges: Calibrated ones, which take the place of the absmax of integer grids. The formats
            of bitsandbytes have scales of their own and do not look at them.

    Raises:
        InputError: a name of no linear layer; a weight that is no floating-point matrix of this
            device; ranges of another granularity or width than the recipe's, or without the module;
            a format without bitsandbytes.
        RangeError: NaN or inf in a weight, by name.
        ProbeError: LLM.int8: an input, or what comes of it, that is not finite; on leaving without
            an exception, a layer that never ran.
    """
    modules = _chosen(model, on)
    if isinstance(quant, BitsAndBytes) and quant.format == "llm-int8":
        matrices = {name: as_matrix(name, module) for name, module in modules.items()}
        with llm_int8(model, modules, matrices, quant, fired) as kept:
            yield kept
        return
    if isinstance(quant, WeightQuant):
        _require_same_groups(quant, ranges)
    originals: dict[str, nn.Parameter] = {}
    made: dict[int, nn.Parameter] = {}
    try:
        for name, module in modules.items():
            matrix = as_matrix(name, module)
            original = module.get_parameter("weight")
            if id(original) not in made:  # modules may share a weight, and go on sharing it
                if isinstance(quant, BitsAndBytes):
                    new = four_bit(matrix, quant)
                else:
                    new = _on_grid(matrix, quant, name, ranges)
                new = new.t().contiguous() if isinstance(module, Conv1D) else new
                made[id(original)] = nn.Parameter(new, requires_grad=original.requires_grad)
            originals[name] = original
            module.weight = made[id(original)]
            fired.add(f"{_PREFIX}{name}", original.numel())
        yield {}
    finally:
        for name, original in originals.items():
            modules[name].weight = original


def _chosen(model: nn.Module, on: Collection[str]) -> dict[str, nn.Linear | Conv1D]:
    """Returns the modules named in `on`, in the model's order."""
    modules = dict(projection_modules(model))
    wanted = {name.removeprefix(_PREFIX) for name in on if name.startswith(_PREFIX)}
    for name in sorted(wanted):
        if name not in modules:
            raise InputError(f"no linear layer is called {name!r}.{suggest(name, modules)}")
    return {
        name: module
        for name, module in modules.items()
        if name in wanted and isinstance(module, (nn.Linear, Conv1D))
    }


def _require_same_groups(quant: WeightQuant, ranges: WeightRanges | None) -> None:
    """Raises InputError for a recipe by group and ranges by something else."""
    if ranges is None or quant.group_size in (None, ranges.group_size):
        return
    size = ranges.group_size
    found = "output channel" if size is None else f"group of {size}"
    raise InputError(
        f"the recipe has weights by groups of {quant.group_size}, and their ranges were chosen for "
        f"each {found}: leave :group{quant.group_size} out, or calibrate with --weights "
        f"group:{quant.group_size}."
    )


def _on_grid(matrix: Tensor, quant: WeightQuant, name: str, ranges: WeightRanges | None) -> Tensor:
    """Returns the weight on its symmetric narrow grid; the last group of a row may be short."""
    qtype = QType(bits=quant.bits, narrow=True)
    if ranges is None and quant.group_size is not None:
        groups = PerGroup(axis=1, group_size=quant.group_size)
        by_group = symmetric_scale(reduce_absmax(matrix, groups), qtype)
        scale = expand_groups(by_group, groups, matrix.shape)
    else:
        scale = weight_scale(matrix, quant.bits, module=name, ranges=ranges)
    return fake_quantize(matrix, scale, 0, qtype)
