"""Static logits in a graph: which type holds them, how a narrow grid is kept, one scale or many."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from quantkit.exporting import load_graph
from tests.exporting.conftest import Exported
from tests.exporting.test_quantize import build

Array = NDArray[Any]
NAME = "attention_logit/1"
TYPES = {8: ir.DataType.INT8, 6: ir.DataType.INT8, 4: ir.DataType.INT4, 12: ir.DataType.INT16}


@pytest.mark.parametrize("granularity", ["tensor", "head"])
@pytest.mark.parametrize("bits", TYPES)
def test_type_clip_and_axis(
    exported: Callable[[str], Exported], bits: int, granularity: str, tmp_path: Path
) -> None:
    case = exported("llama")
    graph = load_graph(build(case, f"logits{bits}:{granularity}:static", tmp_path)).graph
    quantize, back = graph.node(f"{NAME}/quantize"), graph.node(f"{NAME}/dequantize")
    assert quantize.inputs[2].dtype == TYPES[bits]
    for node in (quantize, back):
        scale = node.inputs[1].const_value
        assert scale is not None and scale.shape == ([4] if granularity == "head" else [])
        assert node.attributes.get_int("axis", None) == (1 if granularity == "head" else None)
    top = 2 ** (bits - 1) - 1
    if TYPES[bits] == ir.DataType.INT8:  # on the integers
        clip = back.inputs[0].producer()
        assert clip.op_type == "Clip" and clip.inputs[0] is quantize.outputs[0]
        assert [int(v.const_value.numpy()) for v in clip.inputs[1:]] == [-top, top]
    else:  # on whole steps, in front: ONNX Runtime clips no such integers
        assert back.inputs[0] is quantize.outputs[0]
        high = quantize.inputs[0].producer()
        low = high.inputs[0].producer()
        assert (low.op_type, high.op_type) == ("Max", "Min")
        scale = quantize.inputs[1].const_value.numpy()
        for node, bound in ((low, -top), (high, top)):
            limit = node.inputs[1].const_value.numpy().reshape(scale.shape)
            np.testing.assert_array_equal(limit, np.float32(bound) * scale)


@pytest.mark.parametrize("granularity", ["tensor", "head"])
@pytest.mark.parametrize("bits", TYPES)
def test_onnx_and_onnx_runtime_put_the_same_numbers_on_the_grid(
    exported: Callable[[str], Exported], bits: int, granularity: str, tmp_path: Path
) -> None:
    """The nodes of one quantizer alone, on numbers past its range, at it and at ties."""
    path = build(exported("llama"), f"logits{bits}:{granularity}:static", tmp_path)
    whole = onnx.load(path)
    nodes = [n for n in whole.graph.node if n.name.startswith(f"{NAME}/")]
    source, used = nodes[0].input[0], {name for node in nodes for name in node.input}
    info = onnx.helper.make_tensor_value_info
    constants = [tensor for tensor in whole.graph.initializer if tensor.name in used]
    graph = onnx.helper.make_graph(
        nodes,
        "quantizer",
        [info(source, onnx.TensorProto.FLOAT, [1, 4, 1, "n"])],
        [info(nodes[-1].output[0], onnx.TensorProto.FLOAT, [1, 4, 1, "n"])],
        constants,
    )
    model = onnx.helper.make_model(
        graph, opset_imports=whole.opset_import, ir_version=whole.ir_version
    )
    (scale,) = (onnx.numpy_helper.to_array(t) for t in constants if t.name == f"{NAME}/scale")
    scale = np.broadcast_to(scale.reshape(1, -1, 1, 1), (1, 4, 1, 1))
    top = 2 ** (bits - 1) - 1
    halves = np.concatenate(
        [np.arange(-4, 4.5, 0.5), [-top, top, -top - 0.4, top + 0.6, -3e4, 3e4]]
    )
    x = (halves * scale).astype(np.float32)
    expected = np.clip(np.rint(x / scale), -top, top).astype(np.float32) * scale
    (reference,) = ReferenceEvaluator(model).run(None, {source: x})
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    (found,) = session.run(None, {source: x})
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(reference, expected)
