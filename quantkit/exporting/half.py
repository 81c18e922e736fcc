"""Half precision: a graph whose weights are float16, at half the size, and whose sums are float32.

Before: matrices in float32. After: the same numbers rounded to float16, each behind a Cast that
ONNX Runtime folds away as it loads the graph. Inputs, outputs, cache and arithmetic stay float32.

How this differs from converting all nodes, as `onnxruntime.transformers.float16` does: ONNX
Runtime's CPU provider has no float16 products on x86 and puts a Cast around each instead, which
gains nothing (SmolLM2: 4 % slower at a prompt, 15 % at a token; here neither). And where float16 is
computed with, activations overflow: SmolLM2's hidden states reach 2e4, and their squares inside a
norm 4e8, where float16 ends at 65504. Here no activation is rounded.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from quantkit.errors import InputError

LARGEST: Final = float(np.finfo(np.float16).max)
KEPT_KEY: Final = "quantkit.float32"
"""Of the graph's metadata: weights beyond `LARGEST`, which stay in float32, one a line."""
_READERS: Final = (
    *("MatMul", "Gemm", "Conv", "ConvTranspose", "Gather", "Transpose"),
    *("LSTM", "GRU", "RNN"),
)
"""Whose constants are weights; others hold masks, bounds and rotations, which are small."""
_LEAST: Final = 1024
"""Elements below which a constant is not worth a node."""


def to_half(model: ir.Model) -> ir.Model:
    """Returns the graph with its weights in float16; `model` is not changed.

    Weights are constants of rank 2 or more that a product, convolution, recurrence or lookup
    reads; biases and the gains of norms are left. One that holds a finite number beyond 65504, and
    would become inf, stays as it is and is named in the metadata (`KEPT_KEY`).

    Raises:
        InputError: no weight of the graph is float32 and large enough, or one holds NaN or inf.
    """
    half = model.clone()
    kept, count = list[str](), 0
    first = next(iter(half.graph), None)
    for name, value in list(half.graph.initializers.items()):
        if first is None or not _is_weight(value):
            continue
        assert value.const_value is not None  # _is_weight looked at it
        array = value.const_value.numpy()
        largest = float(np.abs(array).max())
        if not np.isfinite(largest):
            raise InputError(f"weight {name!r} holds NaN or inf: mend the model and export again.")
        if largest > LARGEST:
            kept.append(f"{name} (|x| up to {largest:.4g})")
            continue
        _store(half, value, array.astype(np.float16), first)
        count += 1
    if not count:
        raise InputError(
            "half precision found no float32 weight to make smaller: expected a float32 graph with "
            f"constants of {_LEAST} numbers or more within {LARGEST:.0f}"
            + (f"; {kept[0]} is beyond it." if kept else ".")
        )
    if kept:
        half.metadata_props[KEPT_KEY] = "\n".join(kept)
    return half


def _store(model: ir.Model, value: ir.Value, array: NDArray[np.float16], first: ir.Node) -> None:
    """Puts a Cast from the float16 `array` in the place of a float32 constant."""
    name = str(value.name)
    stored = ir.Value(
        name=f"{name}_float16",
        shape=value.shape,
        type=ir.TensorType(ir.DataType.FLOAT16),
        const_value=ir.tensor(array, name=f"{name}_float16"),
    )
    node = ir.node("Cast", [stored], {"to": ir.DataType.FLOAT}, name=f"{name}/float32")
    output = node.outputs[0]
    output.name, output.shape, output.type = f"{name}_float32", value.shape, value.type
    ir.convenience.replace_all_uses_with(value, output)
    del model.graph.initializers[name]
    model.graph.register_initializer(stored)
    model.graph.insert_before(first, node)


def _is_weight(value: ir.Value) -> bool:
    tensor = value.const_value
    if tensor is None or tensor.dtype != ir.DataType.FLOAT or value.is_graph_output():
        return False
    is_large = len(tensor.shape) >= 2 and tensor.size >= _LEAST
    return is_large and any(user.op_type in _READERS for user, _ in value.uses())
