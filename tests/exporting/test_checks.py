"""`check_graph` on good graphs, and on graphs with one planted fault each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from quantkit.errors import GateError, InputError
from quantkit.exporting.checks import check_graph
from quantkit.exporting.graphs import save_graph
from quantkit.exporting.quantize import quantize_graph
from quantkit.jobs.formats import ExportFormat
from tests.exporting.conftest import Exported

STANDARD = ("ai.onnx",)
FORMATS = ["w8a8", "w8a8-dynamic", "w8a16", "w4a16", "w8a16-block", "w8a8+logits4:head:static"]


def graph(**changes: Any) -> onnx.ModelProto:
    """`x` -> QuantizeLinear -> Clip -> DequantizeLinear -> MatMul with a weight of 4 x 4."""
    options = {
        "scale": np.float32(0.5),
        "zero": np.int8(0),
        "opset": 21,
        "nodes": (),
        "inputs": (),
        "outputs": (),
        "weights": (),
        "domains": (),
        "last": "MatMul",
    } | changes
    values = [
        numpy_helper.from_array(np.asarray(options["scale"]), "scale"),
        numpy_helper.from_array(np.eye(4, dtype=np.float32), "weight"),
        *options["weights"],
    ]
    if isinstance(options["zero"], onnx.TensorProto):
        values.append(options["zero"])
    else:
        values.append(numpy_helper.from_array(np.asarray(options["zero"]), "zero"))
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], name="quantize"),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"], name="dequantize"),
        helper.make_node(options["last"], ["d", "weight"], ["y"], name="product"),
        *options["nodes"],
    ]
    return helper.make_model(
        helper.make_graph(
            nodes,
            "g",
            [real("x", ["n", 4]), *options["inputs"]],
            [real("y", ["n", 4]), *options["outputs"]],
            values,
        ),
        opset_imports=[
            helper.make_opsetid("", options["opset"]),
            *(helper.make_opsetid(name, 1) for name in options["domains"]),
        ],
        ir_version=10,
    )


def real(name: str, shape: list[Any]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def narrow(kind: int) -> onnx.TensorProto:
    return helper.make_tensor("zero", kind, [], [0])


def branch(scale: float) -> tuple[onnx.NodeProto, ...]:
    """An If whose one branch quantizes with this scale."""
    body = helper.make_graph(
        [
            helper.make_node(
                "Constant", [], ["s"], value=numpy_helper.from_array(np.float32(scale))
            ),
            helper.make_node("QuantizeLinear", ["d", "s"], ["bq"], name="inner quantize"),
            helper.make_node("DequantizeLinear", ["bq", "s"], ["bd"], name="inner dequantize"),
        ],
        "then",
        [],
        [real("bd", ["n", 4])],
    )
    other = helper.make_graph(
        [helper.make_node("Identity", ["d"], ["same"])], "else", [], [real("same", ["n", 4])]
    )
    yes = numpy_helper.from_array(np.asarray(True))
    return (
        helper.make_node("Constant", [], ["yes"], value=yes),
        helper.make_node("If", ["yes"], ["z"], name="choice", then_branch=body, else_branch=other),
    )


@pytest.mark.parametrize("text", FORMATS)
def test_what_we_write_passes(
    exported: Callable[[str], Exported], tmp_path: Path, text: str
) -> None:
    case, form = exported("llama"), ExportFormat.parse(text)
    model, _ = quantize_graph(
        case.path,
        module_linears=case.linears,
        recipe=form.recipe,
        ranges=case.ranges,
        storage=form.storage,
    )
    path = save_graph(model, tmp_path)
    check_graph(path, form.domains)
    if len(form.domains) > 1:
        with pytest.raises(
            GateError, match=r"'weight/.*' is of the operator domain com\.microsoft"
        ):
            check_graph(path, STANDARD)


def test_the_small_graph_passes(tmp_path: Path) -> None:
    check_graph(saved(graph(), tmp_path), STANDARD)


def test_a_graph_without_external_data_or_opset_21_passes(tmp_path: Path) -> None:
    check_graph(saved(graph(opset=13), tmp_path), STANDARD)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "scale of 0": ({"scale": np.float32(0)}, "'quantize' has the scale 0"),
    "negative scale": ({"scale": np.float32(-0.5)}, "'quantize' has the scale -0.5"),
    "infinite scale": ({"scale": np.float32(np.inf)}, "'quantize' has the scale inf"),
    "scale that is no number": ({"scale": np.float32(np.nan)}, "'quantize' has the scale nan"),
    "scale of 0 in a branch": (
        {"nodes": branch(0.0), "outputs": (real("z", ["n", 4]),)},
        "'inner quantize' has the scale 0",
    ),
    "4 bits before opset 21": (
        {"zero": narrow(TensorProto.INT4), "opset": 20},
        "'quantize' takes INT4, which is from opset 21 on; the graph has opset 20",
    ),
    "16 bits before opset 21": (
        {"zero": narrow(TensorProto.UINT16), "opset": 19},
        "'quantize' takes UINT16, which is from opset 21 on",
    ),
    "blocks before opset 21": (
        {
            "opset": 20,
            "nodes": (
                helper.make_node(
                    "DequantizeLinear",
                    ["q", "scale"],
                    ["z"],
                    name="blocked",
                    axis=0,
                    block_size=2,
                ),
            ),
            "outputs": (real("z", ["n", 4]),),
        },
        "'blocked' takes blocks, which is from opset 21 on",
    ),
    "an operator of another domain": (
        {
            "nodes": (helper.make_node("Gelu", ["d"], ["z"], name="fast", domain="com.microsoft"),),
            "outputs": (real("z", ["n", 4]),),
            "domains": ("com.microsoft",),
        },
        "the Gelu 'fast' is of the operator domain com.microsoft; expected ai.onnx",
    ),
    "an unread quantizer": (
        {
            "nodes": (
                helper.make_node("QuantizeLinear", ["d", "scale"], ["lost"], name="lost quantize"),
                helper.make_node("Shape", ["lost"], ["z"]),
            ),
            "outputs": (helper.make_tensor_value_info("z", TensorProto.INT64, [2]),),
        },
        "no DequantizeLinear reads what the QuantizeLinear 'lost quantize' writes",
    ),
    "an unread input": ({"inputs": (real("extra", [1]),)}, "nothing reads the graph input 'extra'"),
    "an unread initializer": (
        {"weights": (numpy_helper.from_array(np.ones(3, np.float32), "left over"),)},
        "nothing reads the initializer 'left over'",
    ),
    "an unknown operator": ({"last": "MatMull"}, "ONNX's checker says: .*MatMull"),
    "shapes that do not fit": (
        {
            "nodes": (helper.make_node("MatMul", ["d", "tall"], ["z"], name="tall product"),),
            "weights": (numpy_helper.from_array(np.ones((5, 4), np.float32), "tall"),),
            "outputs": (real("z", ["n", 4]),),
        },
        "ONNX's checker says: .*tall product",
    ),
    "types that do not fit": (
        {
            "nodes": (helper.make_node("Add", ["q", "d"], ["z"], name="mixed"),),
            "outputs": (real("z", ["n", 4]),),
        },
        "ONNX's checker says: .*mixed",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(tmp_path: Path, fault: str) -> None:
    changes, said = FAULTS[fault]
    with pytest.raises(GateError, match=said) as error:
        check_graph(saved(graph(**changes), tmp_path), STANDARD)
    assert "\n" not in str(error.value)
    assert str(tmp_path / "model.onnx") in str(error.value)


@pytest.mark.kind(6, "export")
def test_faults_beside_a_foreign_operator_are_found(tmp_path: Path) -> None:
    """ONNX's checker passes com.microsoft over, and only that."""
    foreign = helper.make_node("Gelu", ["d"], ["g"], name="fast", domain="com.microsoft")
    wrong = helper.make_node("Add", ["q", "d"], ["z"], name="mixed")
    ends = (real("g", ["n", 4]), real("z", ["n", 4]))
    right = graph(nodes=(foreign,), outputs=ends[:1], domains=("com.microsoft",))
    check_graph(saved(right, tmp_path), ("ai.onnx", "com.microsoft"))
    model = graph(nodes=(foreign, wrong), outputs=ends, domains=("com.microsoft",))
    with pytest.raises(GateError, match=r"ONNX's checker says: .*mixed"):
        check_graph(saved(model, tmp_path), ("ai.onnx", "com.microsoft"))


def test_shapes_are_followed_through_what_computes_them(tmp_path: Path) -> None:
    """A Reshape to a shape that the graph computes: wrong, which data propagation alone sees."""
    nodes = (
        helper.make_node("Shape", ["weight"], ["shape"], name="shape"),
        helper.make_node("Reshape", ["row", "shape"], ["z"], name="reshape"),
    )
    model = graph(
        nodes=nodes,
        weights=(numpy_helper.from_array(np.ones(16, np.float32), "row"),),
        outputs=(real("z", [2, 8]),),
    )
    path = saved(model, tmp_path)
    onnx.checker.check_model(str(path), full_check=True)
    with pytest.raises(GateError, match="ONNX's checker says"):
        check_graph(path, STANDARD)


@pytest.mark.parametrize("way", ["clipped", "joined to a cache", "an output", "multiplied"])
def test_integers_may_be_read_in_other_ways(tmp_path: Path, way: str) -> None:
    low, high = (numpy_helper.from_array(np.int8(v), n) for v, n in ((-7, "low"), (7, "high")))
    quantize = helper.make_node("QuantizeLinear", ["d", "scale"], ["a"], name="second")
    whole = helper.make_tensor_value_info("a", TensorProto.UINT8, ["n", 4])
    past = helper.make_tensor_value_info("past", TensorProto.UINT8, ["m", 4])
    nodes, others = {
        "clipped": (
            [
                helper.make_node("QuantizeLinear", ["d", "scale", "zero"], ["a"]),
                helper.make_node("Clip", ["a", "low", "high"], ["b"]),
                helper.make_node("DequantizeLinear", ["b", "scale", "zero"], ["z"]),
            ],
            {"weights": (low, high), "outputs": (real("z", ["n", 4]),)},
        ),
        "joined to a cache": (
            [
                quantize,
                helper.make_node("Concat", ["past", "a"], ["b"], axis=0),
                helper.make_node("DequantizeLinear", ["b", "scale"], ["z"]),
            ],
            {"inputs": (past,), "outputs": (real("z", ["k", 4]),)},
        ),
        "an output": ([quantize], {"outputs": (whole,)}),
        "multiplied": (
            [quantize, helper.make_node("MatMulInteger", ["a", "whole"], ["z"])],
            {
                "weights": (numpy_helper.from_array(np.ones((4, 4), np.int8), "whole"),),
                "outputs": (helper.make_tensor_value_info("z", TensorProto.INT32, ["n", 4]),),
            },
        ),
    }[way]
    check_graph(saved(graph(nodes=nodes, **others), tmp_path), STANDARD)


@pytest.mark.kind(8, "export")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data.unlink(), "which is not there"),
        (lambda data: data.write_bytes(data.read_bytes()[:-1]), r"end at byte \d+ of .*\.data"),
    ],
    ids=["gone", "cut short"],
)
def test_weights_must_lie_whole_beside_the_graph(
    exported: Callable[[str], Exported],
    tmp_path: Path,
    change: Callable[[Path], object],
    said: str,
) -> None:
    path = save_graph(quantized := _llama(exported), tmp_path)
    assert quantized.graph.initializers
    check_graph(path, STANDARD)
    change(path.with_name("model.onnx.data"))
    with pytest.raises(GateError, match=said):
        check_graph(path, STANDARD)


def test_a_scale_in_the_weights_file_is_read(
    exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    model = _llama(exported)
    scales = [name for name in model.graph.initializers if name.endswith(".weight_scale")]
    broken = np.array(model.graph.initializers[scales[-1]].const_value.numpy())
    broken[3] = 0
    model.graph.initializers[scales[-1]].const_value = ir.tensor(broken, name=scales[-1])
    path = save_graph(model, tmp_path)
    with pytest.raises(GateError, match=rf"has the scale 0 \(1 of {broken.size} "):
        check_graph(path, STANDARD)


def _llama(exported: Callable[[str], Exported]) -> Any:
    case = exported("llama")
    model, _ = quantize_graph(
        case.path,
        module_linears=case.linears,
        recipe=ExportFormat.parse("w8a8").recipe,
        ranges=case.ranges,
    )
    return model


@pytest.mark.kind(8, "export")
@pytest.mark.parametrize("content", [None, b"no protobuf"], ids=["missing", "not ONNX"])
def test_no_graph_is_the_callers_fault(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "model.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match="ONNX file"):
        check_graph(path, STANDARD)
