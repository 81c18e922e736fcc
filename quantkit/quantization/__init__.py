"""`with fake_quantized(model, recipe, ranges):` runs the model as if it were quantized.

The grids are those of `quantkit.recipe`; `grids` makes them, for the simulation and for a graph.
"""

from quantkit.quantization.attention import logit_quantizer
from quantkit.quantization.bitsandbytes_formats import FloatFeatures
from quantkit.quantization.fired import Counter
from quantkit.quantization.grids import (
    linear_input_grid,
    static_logit_grid,
    static_logit_scale,
    weight_scale,
)
from quantkit.quantization.inputs import input_quantizer
from quantkit.quantization.names import (
    every_quantizer,
    quantizer_names,
    require_known,
    require_ranges,
    require_smoothable,
)
from quantkit.quantization.simulation import Quantizers, fake_quantized
from quantkit.quantization.smoothing import smoothed, smoothing_digest

__all__ = [
    "Counter",
    "FloatFeatures",
    "Quantizers",
    "every_quantizer",
    "fake_quantized",
    "input_quantizer",
    "linear_input_grid",
    "logit_quantizer",
    "quantizer_names",
    "require_known",
    "require_ranges",
    "require_smoothable",
    "smoothed",
    "smoothing_digest",
    "static_logit_grid",
    "static_logit_scale",
    "weight_scale",
]
