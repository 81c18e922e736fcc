"""Pure tensor arithmetic: number types, the affine grid, observers, definitions of outliers.

Nothing here knows a module, a file or a global. The names below load on first use, because
`qtypes` and `granularity` serve parts of the package that must not load torch.

    qtypes.py        integer types: bits, sign, narrow range           (torch-free)
    granularity.py   what shares one scale                              (torch-free)
    methods.py       how a range is chosen: parameters and names       (torch-free)
    affine.py        the integer grid, bit for bit as ONNX
    observers/       what a stream of tensors looked like (monoids)
    choose.py        observations -> a range, by any method
    cells.py         what observers know of a group's elements
    distortion.py    the error that a range causes, from bins
    divergence.py    the information that a range loses, from bins
    weight_ranges.py the range of each channel or group of a weight
    smoothing.py     SmoothQuant's migration scales
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
    from quantkit.numerics.choose import choose_range
    from quantkit.numerics.distortion import Distortion
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
    from quantkit.numerics.methods import METHODS, Method, MethodChoice, parse_method, parse_methods
    from quantkit.numerics.qtypes import QType
    from quantkit.numerics.smoothing import SmoothingChoice, search_alpha, smoothing_scales

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
    "choose": ("choose_range",),
    "distortion": ("Distortion",),
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
    "methods": ("METHODS", "Method", "MethodChoice", "parse_method", "parse_methods"),
    "qtypes": ("QType",),
    "smoothing": ("SmoothingChoice", "search_alpha", "smoothing_scales"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "METHODS",
    "Distortion",
    "Granularity",
    "Method",
    "MethodChoice",
    "PerAxis",
    "PerGroup",
    "PerHead",
    "PerRow",
    "PerSequence",
    "PerTensor",
    "QParams",
    "QType",
    "RangeError",
    "SmoothingChoice",
    "affine_params",
    "check_range",
    "choose_range",
    "dequantize",
    "expand_groups",
    "fake_quantize",
    "logit_granularity",
    "parse_method",
    "parse_methods",
    "quantize",
    "reduce_absmax",
    "search_alpha",
    "smoothing_scales",
    "symmetric_scale",
]


def __getattr__(name: str) -> Any:
    """Returns a re-exported name, loading the file it lives in."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
