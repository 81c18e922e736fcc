"""Pure tensor arithmetic: number types, the affine grid, observers, definitions of outliers.

Nothing here knows a module, a file or a global. The names below load on first use, because
`qtypes` and `granularity` serve parts of the package that must not load torch.

    qtypes.py        integer types: bits, sign, narrow range           (torch-free)
    granularity.py   what shares one scale                              (torch-free)
    affine.py        the integer grid, bit for bit as ONNX
    observers/       what a stream of tensors looked like (monoids)
    outliers.py      the published definitions of outliers
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.numerics.affine import (
        QParams,
        RangeError,
        affine_params,
        check_range,
        dequantize,
        expand_groups,
        fake_quantize,
        quantize,
        reduce_absmax,
        symmetric_scale,
    )
    from quantkit.numerics.granularity import (
        Granularity,
        PerAxis,
        PerGroup,
        PerHead,
        PerRow,
        PerSequence,
        PerTensor,
        logit_granularity,
    )
    from quantkit.numerics.qtypes import QType

_HOMES = {
    "affine": (
        "QParams",
        "RangeError",
        "affine_params",
        "check_range",
        "dequantize",
        "expand_groups",
        "fake_quantize",
        "quantize",
        "reduce_absmax",
        "symmetric_scale",
    ),
    "granularity": (
        "Granularity",
        "PerAxis",
        "PerGroup",
        "PerHead",
        "PerRow",
        "PerSequence",
        "PerTensor",
        "logit_granularity",
    ),
    "qtypes": ("QType",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Granularity",
    "PerAxis",
    "PerGroup",
    "PerHead",
    "PerRow",
    "PerSequence",
    "PerTensor",
    "QParams",
    "QType",
    "RangeError",
    "affine_params",
    "check_range",
    "dequantize",
    "expand_groups",
    "fake_quantize",
    "logit_granularity",
    "quantize",
    "reduce_absmax",
    "symmetric_scale",
]


def __getattr__(name: str) -> Any:
    """Returns a re-exported name, loading the file it lives in."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
