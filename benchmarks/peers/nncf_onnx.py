"""NNCF's post-training quantization of an ONNX graph: `nncf.quantize` for a transformer.

Its own defaults: int8 static ranges from the samples, SmoothQuant and a fast bias correction. A
transposed constant (the vocabulary head of a tied embedding) becomes a constant beforehand: NNCF
3.4 stops at a product whose weight another operator makes.
"""

from __future__ import annotations

import nncf
import numpy as np
import onnx
from calibration import Order, run_maker
from onnx import numpy_helper


def fold_transposes(graph: onnx.GraphProto) -> None:
    """Replaces each Transpose of an initializer by an initializer, in place."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in list(graph.node):
        if node.op_type == "Transpose" and node.input[0] in constants:
            order = next((list(a.ints) for a in node.attribute if a.name == "perm"), None)
            turned = np.transpose(numpy_helper.to_array(constants[node.input[0]]), order)
            folded = numpy_helper.from_array(np.ascontiguousarray(turned), node.output[0])
            graph.initializer.append(folded)
            graph.node.remove(node)


def quantize(order: Order) -> None:
    feeds = order.feeds()
    model = onnx.load(str(order.float_path))
    fold_transposes(model.graph)
    quantized = nncf.quantize(
        model,
        nncf.Dataset(feeds),
        subset_size=len(feeds),
        model_type=nncf.ModelType.TRANSFORMER,
    )
    onnx.save(quantized, str(order.path), save_as_external_data=True, location="model.onnx.data")


if __name__ == "__main__":
    run_maker({"default": quantize}, "nncf", "onnx", "onnxruntime")
