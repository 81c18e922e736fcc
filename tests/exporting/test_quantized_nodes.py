"""Whether a graph is quantized already: told by its operators, wherever they stand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from transformers.exporters.configs import ExportFormat

from quantkit.errors import InputError
from quantkit.exporting import QuantkitQuantizer
from quantkit.exporting.diagnosis import check_files
from quantkit.exporting.graphs import quantized_nodes
from quantkit.exporting.prepare import prepare_graph

QUANTIZED = (
    *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "DynamicQuantizeLSTM"),
    *("DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat", "ConvInteger", "QGemm"),
    *("QLinearMatMul", "QLinearConv", "QAttention", "QEmbedLayerNormalization", "MatMulNBits"),
    *("MatMulBnb4", "GatherBlockQuantized", "QMoE"),
)
FLOAT = ("MatMul", "Equal", "QuickGelu", "SequenceAt", "Unique", "BiasGelu", "FusedMatMul")


def graph_of(operator: str, name: str = "g") -> onnx.GraphProto:
    node = helper.make_node(operator, ["x"], ["y"], name="it", domain="any.domain")
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4]) for n in ("x", "y")]
    return helper.make_graph([node], name, values[:1], values[1:])


def model_of(graph: onnx.GraphProto, functions: list[onnx.FunctionProto]) -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("any.domain", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)


def plain(operator: str) -> onnx.ModelProto:
    return model_of(graph_of(operator), [])


def inside_if(operator: str) -> onnx.ModelProto:
    branches = {}
    for branch in ("then", "else"):
        node = helper.make_node(operator, ["x"], [branch], domain="any.domain")
        output = helper.make_tensor_value_info(branch, TensorProto.FLOAT, [4])
        branches[f"{branch}_branch"] = helper.make_graph([node], branch, [], [output])
    node = helper.make_node("If", ["is_on"], ["y"], **branches)
    kinds = {"x": TensorProto.FLOAT, "y": TensorProto.FLOAT, "is_on": TensorProto.BOOL}
    values = {n: helper.make_tensor_value_info(n, kind, [4]) for n, kind in kinds.items()}
    inputs = [values["x"], values["is_on"]]
    return model_of(helper.make_graph([node], "g", inputs, [values["y"]]), [])


def inside_function(operator: str) -> onnx.ModelProto:
    node = helper.make_node(operator, ["x"], ["y"], domain="any.domain")
    opsets = [helper.make_opsetid("any.domain", 1)]
    function = helper.make_function("any.domain", "Block", ["x"], ["y"], [node], opsets)
    return model_of(graph_of("Block"), [function])


@pytest.mark.parametrize("operator", QUANTIZED)
def test_quantized_operators_are_seen_wherever_they_stand(operator: str) -> None:
    assert quantized_nodes(ir.from_proto(plain(operator))) == {operator: 1}
    assert quantized_nodes(ir.from_proto(inside_if(operator))) == {operator: 2}
    assert quantized_nodes(ir.from_proto(inside_function(operator))) == {operator: 1}


@pytest.mark.parametrize("operator", FLOAT)
def test_float_operators_are_not(operator: str) -> None:
    assert not quantized_nodes(ir.from_proto(plain(operator)))


@pytest.mark.parametrize("make", [plain, inside_if, inside_function])
@pytest.mark.parametrize(
    "operator", ["DequantizeLinear", "GatherBlockQuantized", "DynamicQuantizeLSTM", "QAttention"]
)
def test_what_takes_a_float_graph_refuses_them(
    tmp_path: Path, operator: str, make: type[onnx.ModelProto]
) -> None:
    path, other = tmp_path / "q.onnx", tmp_path / "float.onnx"
    onnx.save(make(operator), path)
    onnx.save(make("Relu"), other)
    with pytest.raises(InputError, match=rf"quantized already \(\d {operator}\)"):
        prepare_graph(path)
    with pytest.raises(InputError, match=f"quantized already: node .* is a {operator}"):
        QuantkitQuantizer().quantize(ir.load(path), {"x": np.zeros(4)}, ExportFormat.ONNX)
    with pytest.raises(InputError, match="Swap them"):
        check_files(path, other)
    check_files(other, path)  # in this order they can be compared
